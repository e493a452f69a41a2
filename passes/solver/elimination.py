"""Exact minimisation without memory, by eliminating one node after the other (bucket elimination).

The table of an eliminated node has one axis per neighbour at that time; the order is greedy, the
smallest table first. This is exact dynamic programming over a tree decomposition, and practical
when its tables stay small, which the caller bounds. A hub is one more axis of many tables, that is,
the elimination conditions on it.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from autopar.passes.solver.budget import Stop, never
from autopar.passes.solver.model import INFINITE, Contradiction, Model, saturated
from autopar.passes.solver.problem import Integers


@dataclass(frozen=True)
class EliminationStep:
    """Eliminate `node` when `neighbours` are what is left around it."""

    node: int
    neighbours: tuple[int, ...]


@dataclass(frozen=True)
class EliminationOrder:
    """An elimination order, the cells of its largest table and of all tables together."""

    steps: tuple[EliminationStep, ...]
    largest_cells: int
    total_cells: int


def elimination_order(model: Model, max_cells: int, max_total: int) -> EliminationOrder | None:
    """A greedy order, None if a table would have more than `max_cells` (`max_total` in all)."""
    domains = {u: len(model.cost_of(u)) for u in model.nodes}
    around = {u: set(model.edges[u]) for u in domains}

    def cells(u: int) -> int:
        return domains[u] * math.prod(domains[v] for v in around[u])

    heap = [(cells(u), u) for u in domains]
    heapq.heapify(heap)
    steps: list[EliminationStep] = []
    largest = total = 0
    while heap:
        size, u = heapq.heappop(heap)
        if u not in around or size != cells(u):
            continue  # gone, or its neighbours changed and a newer entry is in the heap
        largest, total = max(largest, size), total + size
        if largest > max_cells or total > max_total:
            return None
        neighbours = tuple(sorted(around.pop(u)))
        for v in neighbours:
            around[v].discard(u)
            around[v].update(w for w in neighbours if w != v)
        for v in neighbours:
            heapq.heappush(heap, (cells(v), v))
        steps.append(EliminationStep(u, neighbours))
    return EliminationOrder(tuple(steps), largest, total)


Table = tuple[tuple[int, ...], Integers]  # its nodes, one axis each


def eliminate(model: Model, order: EliminationOrder, stop: Stop = never) -> dict[int, int] | None:
    """The optimal choice for the nodes that are left, ignoring memory; None if it had to stop.

    Raises:
        Contradiction: if every choice is forbidden.
    """
    tables: dict[int, list[Table]] = {u: [((u,), model.cost_of(u))] for u in model.nodes}
    position = {step.node: i for i, step in enumerate(order.steps)}
    for u in model.nodes:
        for v, matrix in model.edges[u].items():
            if position[u] < position[v]:
                tables[u].append(((u, v), matrix))
    for step in order.steps:
        if stop():
            return None
        least = _joint(tables[step.node], (step.node, *step.neighbours)).min(axis=0)
        if least.min() >= INFINITE:
            raise Contradiction
        if step.neighbours:
            first = min(step.neighbours, key=position.__getitem__)
            tables[first].append((step.neighbours, least))
    chosen: dict[int, int] = {}
    for step in reversed(order.steps):
        total = np.zeros(len(model.cost_of(step.node)), np.int64)
        for nodes, table in tables[step.node]:
            index = tuple(slice(None) if v == step.node else chosen[v] for v in nodes)
            total = saturated(total + table[index])
        chosen[step.node] = int(total.argmin())
    return chosen


def _joint(tables: list[Table], axes: tuple[int, ...]) -> Integers:
    """The sum of tables, over the given axes."""
    total: Integers | None = None
    is_own = False  # whether `total` is a new array
    for place, (nodes, table) in enumerate(sorted(tables, key=lambda entry: entry[1].size)):
        kept = [node for node in axes if node in nodes]
        moved = table.transpose([nodes.index(node) for node in kept])
        sizes = dict(zip(kept, moved.shape, strict=True))
        view = moved.reshape([sizes.get(node, 1) for node in axes])
        if total is None:
            total = view
            continue
        fits = is_own and np.broadcast_shapes(total.shape, view.shape) == total.shape
        total, is_own = np.add(total, view, out=total if fits else None), True
        # Twice `INFINITE` and another one are still an integer of 64 bits.
        if place % 2 == 0 or place == len(tables) - 1:
            np.minimum(total, INFINITE, out=total)
    assert total is not None
    return total
