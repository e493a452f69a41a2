"""Problems for the tests, and the slow, obvious way to solve them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from benchmark_modules import evaluate, is_allowed, peak_usage
from hypothesis import strategies as st

from autopar.passes.solver import FORBIDDEN, Problem


def brute_force(problem: Problem) -> tuple[int | None, int | None]:
    """The least cost of all assignments that fit, and the least peak of all allowed ones."""
    costs: list[int] = []
    peaks: list[int] = []
    for assignment in assignments(problem):
        if is_allowed(problem, assignment):
            peak, _ = peak_usage(problem, assignment)
            peaks.append(peak)
            if problem.usage_limit is None or peak <= problem.usage_limit:
                costs.append(evaluate(problem, assignment))
    return min(costs, default=None), min(peaks, default=None)


def assignments(problem: Problem) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(costs)) for costs in problem.node_costs))


def make(
    node_costs: list[list[int]],
    edges: dict[tuple[int, int], list[list[int]]] | None = None,
    usages: list[list[int]] | None = None,
    intervals: list[tuple[int, int]] | None = None,
    limit: int | None = None,
) -> Problem:
    """A problem from plain lists; without usages all are zero, without intervals all are [0, 1)."""
    edges = edges or {}
    usages = usages or [[0] * len(costs) for costs in node_costs]
    return Problem(
        tuple(intervals or [(0, 1)] * len(node_costs)),
        tuple(np.array(costs, np.int64) for costs in node_costs),
        tuple(np.array(usage, np.int64) for usage in usages),
        tuple(edges),
        tuple(np.array(matrix, np.int64) for matrix in edges.values()),
        limit,
    )


@st.composite
def problems(draw: st.DrawFn, max_nodes: int = 6, max_strategies: int = 3) -> Problem:
    """Small problems: isolated nodes, single strategies, parallel edges, loops, forbidden pairs."""
    cost = st.integers(-5, 30) | st.just(FORBIDDEN)
    count = draw(st.integers(0, max_nodes))
    sizes = [draw(st.integers(1, max_strategies)) for _ in range(count)]
    node_costs = [draw(st.lists(cost, min_size=s, max_size=s)) for s in sizes]
    usages = [draw(st.lists(st.integers(0, 9), min_size=s, max_size=s)) for s in sizes]
    times = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda t: (min(t), max(t)))
    intervals = [draw(times) for _ in sizes]
    ends = st.integers(0, max(0, count - 1))
    edges = draw(st.lists(st.tuples(ends, ends), max_size=9)) if count else []
    matrices = [
        draw(
            st.lists(
                st.lists(cost, min_size=sizes[v], max_size=sizes[v]),
                min_size=sizes[u],
                max_size=sizes[u],
            )
        )
        for u, v in edges
    ]
    limit = draw(st.none() | st.integers(0, 5 * count))
    return Problem(
        tuple(intervals),
        tuple(np.array(c, np.int64) for c in node_costs),
        tuple(np.array(u, np.int64) for u in usages),
        tuple(edges),
        tuple(np.array(m, np.int64) for m in matrices),
        limit,
    )


def grid(rows: int, columns: int, strategies: int, seed: int, tightness: float) -> Problem:
    """A grid with random costs whose memory limit lies between the least and the greediest peak.

    Cheap strategies use much. `tightness` 1 allows just the least usage everywhere, 0 anything.
    """
    random = np.random.default_rng(seed)
    nodes = [(i, j) for i in range(rows) for j in range(columns)]
    place = {node: k for k, node in enumerate(nodes)}
    intervals = [(j, j + int(random.integers(1, 4))) for _, j in nodes]
    node_costs, usages = [], []
    for _ in nodes:
        usage = random.integers(1, 50, strategies)
        usages.append(usage.astype(np.int64))
        node_costs.append((200 - 3 * usage + random.integers(0, 40, strategies)).astype(np.int64))
    edges = [(place[i, j], place[i, j + 1]) for i, j in nodes if j + 1 < columns]
    edges += [(place[i, j], place[i + 1, j]) for i, j in nodes if i + 1 < rows]
    matrices = [random.integers(0, 100, (strategies, strategies)).astype(np.int64) for _ in edges]
    problem = Problem(
        tuple(intervals), tuple(node_costs), tuple(usages), tuple(edges), tuple(matrices)
    )
    low, _ = peak_usage(problem, [int(usage.argmin()) for usage in usages])
    high, _ = peak_usage(problem, [int(usage.argmax()) for usage in usages])
    limit = int(low + (1 - tightness) * (high - low))
    return Problem(
        problem.intervals,
        problem.node_costs,
        problem.usages,
        problem.edges,
        problem.edge_costs,
        limit,
    )


def transformer(layers: int, strategies: int, seed: int = 0) -> Problem:
    """The kind of problem that a stage poses: a chain with skips, parameters tied to their moments.

    Per layer a dozen operations in a chain, a residual stream around them, three parameters used by
    the forward and backward operation, each with an optimizer moment that must be placed alike.
    """
    random = np.random.default_rng(seed)
    layouts = 6
    move = random.integers(1, 100, (layouts, layouts)) * 1000
    np.fill_diagonal(move, 0)
    node_costs: list[np.ndarray] = []
    usages: list[np.ndarray] = []
    intervals: list[tuple[int, int]] = []
    layout: list[np.ndarray] = []
    edges: dict[tuple[int, int], np.ndarray] = {}
    length = 2 * layers * 12 + 2

    def node(places: np.ndarray, costs: np.ndarray, usage: np.ndarray, start: int, end: int) -> int:
        layout.append(places)
        node_costs.append(costs.astype(np.int64))
        usages.append(usage.astype(np.int64))
        intervals.append((start, end))
        return len(node_costs) - 1

    def join(u: int, v: int) -> None:
        edges[u, v] = move[np.ix_(layout[u], layout[v])].astype(np.int64)

    stream: int | None = None
    for layer in range(layers):
        previous = stream
        for step in range(12):
            time = layer * 12 + step
            places = random.integers(0, layouts, strategies)
            size = random.integers(1, 64, strategies)
            operation = node(
                places, random.integers(0, 5000, strategies), size, time, length - time
            )
            if previous is not None:
                join(previous, operation)
            if step in (2, 6, 10):
                everywhere = np.arange(layouts)
                weight = node(
                    everywhere, np.zeros(layouts), random.integers(8, 64, layouts), 0, length
                )
                moment = node(
                    everywhere, np.zeros(layouts), random.integers(8, 64, layouts), 0, length
                )
                tie = np.full((layouts, layouts), FORBIDDEN, np.int64)
                np.fill_diagonal(tie, 0)
                edges[moment, weight] = tie
                gradient = node(
                    places, random.integers(0, 5000, strategies), size, length - time - 1, length
                )
                join(weight, operation)
                join(operation, gradient)
                join(gradient, weight)
            previous = operation
        if stream is not None and previous is not None:
            join(stream, previous)
        stream = previous
    return Problem(
        tuple(intervals), tuple(node_costs), tuple(usages), tuple(edges), tuple(edges.values())
    )
