"""A reduced model as flat arrays, so that NumPy can work on all nodes of a level at once.

Nodes are numbered level by level: a node's level is one more than the highest among its earlier
neighbours, so no edge joins nodes of a level, and a pass over the levels is a pass over the nodes
in order. For an edge from the earlier node i to the later node j there are two copies of its costs:

- `low`: row-major over the strategies of i, edges sorted by the level of i;
- `high`: row-major over the strategies of j, edges sorted by the level of j.

A *slot* of `low` is a pair (edge, strategy of i), one of `high` a pair (edge, strategy of j).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.passes.solver.flat import Tables
from autopar.passes.solver.model import Model
from autopar.passes.solver.problem import Integers

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Side:
    """One of the two copies of all edges; see the module's text.

    `near` is the end whose strategies are the slots, `far` the other one.
    """

    cells: Floats  # [cells], row-major: slot, then the far node's strategies
    exact: Integers  # the same costs as integers
    slot_start: Integers  # [slots] where the cells of a slot start
    slot_size: Integers  # [slots] how many it has
    slot_node: Integers  # [slots] index of the near node's strategy among all strategies
    slot_far: Integers  # [slots] the far node
    slot_edge: Integers  # [slots] the edge, in the order of this side
    cell_far_slot: Integers  # [cells] the slot of the other side that the cell belongs to
    node_degree: Integers  # [nodes] edges of which the node is the near end
    level_slots: Integers  # [levels + 1]
    level_cells: Integers  # [levels + 1]
    level_starts: tuple[Integers, ...]  # per level: `slot_start` relative to the level's cells


@dataclass(frozen=True)
class Arrays:
    """All that the search needs of a reduced model; strategies are numbered throughout."""

    names: Integers  # [nodes] the model's own node numbers
    first: Integers  # [nodes + 1] a node's first strategy among all
    owner: Integers  # [strategies] the node of a strategy
    costs: Floats  # [strategies]
    exact: Integers  # [strategies]
    level_nodes: Integers  # [levels + 1]
    low: Side
    high: Side
    around: Integers  # the neighbours of all nodes, one node after the other
    around_first: Integers  # [nodes + 1] where those of a node start
    node_rows: Integers  # [nodes + 1] where the memory rows of a node start
    row_node: Integers  # [rows] memory rows: the node, and the points where they hold
    row_start: Integers
    row_end: Integers
    row_first: Integers  # [rows] where a row's usages start
    usage: Floats  # [usages]
    usage_row: Integers  # [usages] the row, and the strategy among all, of a usage
    usage_strategy: Integers
    room: Floats  # [points]
    limit: int

    @property
    def num_nodes(self) -> int:
        return len(self.names)

    @property
    def num_levels(self) -> int:
        return len(self.level_nodes) - 1

    def costs_of(self, choice: Integers) -> float:
        """The cost of a choice of strategies (numbered among all), without the model's offset."""
        _, _, cells = self.pairs(choice)
        return float(self.costs[choice].sum() + self.high.cells[cells].sum())

    def pairs(self, choice: Integers) -> tuple[Integers, Integers, Integers]:
        """The slots of `high` that a choice takes, the far nodes and the cells, edge by edge."""
        side = self.high
        slots = np.flatnonzero(choice[self.owner[side.slot_node]] == side.slot_node)
        far = side.slot_far[slots]
        return slots, far, side.slot_start[slots] + choice[far] - self.first[far]

    def used(self, choice: Integers) -> Floats:
        """What a choice uses in each memory row."""
        return self.usage[self.row_first + choice[self.row_node] - self.first[self.row_node]]

    def profile(self, choice: Integers) -> Floats:
        """What a choice uses at each point."""
        used, points = self.used(choice), len(self.room)
        change = np.bincount(self.row_start, used, points + 1)
        change -= np.bincount(self.row_end, used, points + 1)
        return np.cumsum(change[:-1])

    def in_rows(self, values: NDArray[Any]) -> NDArray[Any]:
        """The sums of what there is at each point, over the points of each memory row."""
        total = np.concatenate([[0], np.cumsum(values)])
        return total[self.row_end] - total[self.row_start]

    def chosen(self, choice: Integers) -> dict[int, int]:
        """The model's own form of a choice."""
        return dict(zip(self.names.tolist(), (choice - self.first[:-1]).tolist(), strict=True))

    def choice(self, chosen: dict[int, int]) -> Integers:
        """The inverse of `chosen`."""
        return self.first[:-1] + np.array([chosen[u] for u in self.names.tolist()], np.int64)


def flatten(model: Model) -> Arrays:
    """The arrays of a model, its nodes numbered in the order `interleaved`."""
    order = interleaved(model.nodes)
    rank = {u: i for i, u in enumerate(order)}
    level = np.zeros(len(order), np.int64)
    for i, u in enumerate(model.checked(order)):
        before = [level[rank[v]] for v in model.edges[u] if rank[v] < i]
        level[i] = 1 + max(before) if before else 0
    by_level = np.argsort(level, kind="stable")
    names = np.array(order, np.int64)[by_level]
    level = level[by_level]
    place = {u: i for i, u in enumerate(names.tolist())}
    levels = int(level.max(initial=-1)) + 1
    costs = Tables.of([model.cost_of(u) for u in names.tolist()])
    first, sizes = costs.first, np.diff(costs.first)
    pairs: list[tuple[int, int]] = []
    for u in model.checked(order):
        pairs += [(place[u], place[v]) for v in model.edges[u] if place[u] < place[v]]
    ends = np.array(pairs, np.int64).reshape(-1, 2)
    slots = [_slots_by_edge(ends[:, k], sizes) for k in (0, 1)]

    def side(k: int) -> Side:
        """The side on which the end `k` of each edge is near."""
        model.check()
        edges = np.argsort(ends[:, k], kind="stable")
        near, far = ends[edges, k], ends[edges, 1 - k]
        matrices = [
            model.edges[i][j]
            for i, j in zip(names[near].tolist(), names[far].tolist(), strict=True)
        ]
        model.check()
        cells = Tables.of(matrices).cells
        model.check()
        slot_edge = np.repeat(np.arange(len(edges)), sizes[near])
        slot_size = sizes[far][slot_edge]
        slot_start = np.concatenate([[0], np.cumsum(slot_size)]).astype(np.int64)
        within = np.arange(len(slot_edge)) - slots[k][edges][slot_edge]
        slot_bounds = np.searchsorted(level[near][slot_edge], np.arange(levels + 1))
        cell_bounds = slot_start[slot_bounds]
        # In place: there may be ten million cells, and new pages take longer than sums.
        far_slot = np.repeat(slots[1 - k][edges][slot_edge] - slot_start[:-1], slot_size)
        far_slot += np.arange(len(cells))
        return Side(
            cells=cells.astype(np.float64),
            exact=cells,
            slot_start=slot_start[:-1],
            slot_size=slot_size,
            slot_node=first[near][slot_edge] + within,
            slot_far=far[slot_edge],
            slot_edge=slot_edge,
            cell_far_slot=far_slot,
            node_degree=np.bincount(near, minlength=len(names)),
            level_slots=slot_bounds,
            level_cells=cell_bounds,
            level_starts=tuple(
                slot_start[slot_bounds[i] : slot_bounds[i + 1]] - cell_bounds[i]
                for i in range(levels)
            ),
        )

    low, high = side(0), side(1)
    model.check()
    both = np.concatenate([ends, ends[:, ::-1]])
    rows = [(place[u], rows) for u in names.tolist() for rows in model.memory[u]]
    counts = [len(r.starts) for _, r in rows]
    row_node = np.repeat(np.array([i for i, _ in rows], np.int64), counts)
    row_size = sizes[row_node]
    row_first = np.concatenate([[0], np.cumsum(row_size)]).astype(np.int64)
    usage_row = np.repeat(np.arange(len(row_node)), row_size)
    within = np.arange(len(usage_row)) - row_first[usage_row]
    room = np.zeros(0) if model.limit is None else (model.limit - model.base).astype(np.float64)
    return Arrays(
        names=names,
        first=first,
        owner=np.repeat(np.arange(len(names)), sizes),
        costs=costs.cells.astype(np.float64),
        exact=costs.cells,
        level_nodes=np.searchsorted(level, np.arange(levels + 1)),
        around=both[np.argsort(both[:, 0], kind="stable"), 1],
        around_first=np.searchsorted(np.sort(both[:, 0]), np.arange(len(names) + 1)),
        node_rows=np.searchsorted(row_node, np.arange(len(names) + 1)),
        low=low,
        high=high,
        row_node=row_node,
        row_start=Tables.of([r.starts for _, r in rows]).cells,
        row_end=Tables.of([r.ends for _, r in rows]).cells,
        row_first=row_first[:-1],
        usage=Tables.of([r.usage for _, r in rows]).cells.astype(np.float64),
        usage_row=usage_row,
        usage_strategy=first[row_node][usage_row] + within,
        room=room,
        limit=max(1, model.limit or 0),
    )


def interleaved(nodes: list[int], most: int = 64, block: int = 32) -> list[int]:
    """The order in which levels are few: the first nodes of all blocks, then all second ones, ...

    In the order of a program nearly every node has its predecessor as a neighbour, so there are
    about as many levels as nodes. Message passing converges about as fast in this order, as long
    as the blocks are not too small.
    """
    blocks = min(most, len(nodes) // block)
    if blocks < 2:
        return nodes
    size = -(-len(nodes) // blocks)
    return [u for i in range(size) for u in nodes[i::size]]


def _slots_by_edge(near: Integers, sizes: Integers) -> Integers:
    """Where the slots of each edge start when edges are sorted by their near end."""
    edges = np.argsort(near, kind="stable")
    starts = np.zeros(len(near), np.int64)
    starts[edges[1:]] = np.cumsum(sizes[near[edges]])[:-1]
    return starts
