"""Exact reductions: they leave at least one optimal assignment and make the model smaller.

- arc consistency: a strategy without an allowed pair on some edge goes;
- ties: if each strategy of a node leaves a neighbour only one strategy, the neighbour is merged;
- an edge whose costs are a sum `a[s] + b[t]` becomes node costs;
- a node of one strategy becomes part of its neighbours' costs and of the base usage;
- memory-free nodes of at most two neighbours are eliminated;
- a strategy goes if another one costs no more in every surrounding and uses no more at any time;
- a strategy that cannot fit even if all others use their least goes.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.passes.solver.budget import Stop, never
from autopar.passes.solver.model import INFINITE, Model
from autopar.passes.solver.problem import Integers
from autopar.passes.solver.time_axis import compress_time
from autopar.passes.solver.usage_rows import disjoint

MERGE_CELLS = 200_000
"""By how many cells the edges of a model may grow when a tie merges two nodes."""

ELIMINATION_CELLS = 60_000_000
"""The most cells that the elimination of one node of two neighbours may look at."""

BLOCK_CELLS = 200_000
"""How many cells the search for dominated strategies compares at once."""

DOMINANCE_CELLS = 20_000_000
"""The most cells that the search for dominated strategies of one node may look at."""

FEW_CELLS = 12_000
"""Up to so many cells of all pairs of strategies, all pairs are compared at once."""

MOST_KEPT = 200_000
"""Of how many nodes the process remembers which strategies dominance left.

That follows from their numbers alone, so it is the same whatever was planned before.
"""

_KEPT: dict[bytes, tuple[Integers | None]] = {}  # by digests of nodes' numbers


def reduce(model: Model, *, dominance: bool = True, stop: Stop = never) -> bool:
    """Applies all reductions, in place, until none applies; says whether it came to that.

    When `stop` says so it ends earlier. The model is then equivalent too, and can be reduced on.

    Raises:
        Contradiction: if no assignment is left.
    """
    compress_time(model)
    while True:
        if not _settle(model, dominance, stop):
            for u in model.checked(model.nodes):
                _drop_forbidden(model, u)
            return False
        before = len(model.base), sum(len(model.cost_of(u)) for u in model.nodes)
        compress_time(model)
        _drop_oversized(model)
        after = len(model.base), sum(len(model.cost_of(u)) for u in model.nodes)
        if not model.dirty_nodes and before == after:
            return True


def _drop_forbidden(model: Model, u: int) -> bool:
    """Drops strategies of infinite cost, as `reduce` may leave some when it ends early."""
    finite = np.flatnonzero(model.cost_of(u) < INFINITE)
    dropped = len(finite) < len(model.cost_of(u))
    if dropped:
        model.keep(u, finite)
    return dropped


def _settle(model: Model, dominance: bool, stop: Stop) -> bool:
    """Everything that needs no new look at the time axis; False if it had to stop."""
    candidates: set[int] = set()
    while model.dirty_edges or model.dirty_nodes or candidates:
        if model.dirty_edges:
            edges, model.dirty_edges = sorted(model.dirty_edges), set()
            for i, (u, v) in enumerate(edges):
                if stop():
                    model.dirty_edges.update(edges[i:])
                    return False
                if v in model.edges[u]:
                    _look_at_edge(model, u, v)
        elif model.dirty_nodes:
            nodes, model.dirty_nodes = sorted(model.dirty_nodes), set()
            for i, u in enumerate(nodes):
                if stop():
                    model.dirty_nodes.update(nodes[i:])
                    return False
                if model.costs[u] is not None and not _look_at_node(model, u) and dominance:
                    candidates.add(u)
        else:
            nodes, candidates = sorted(candidates), set()
            for u in nodes:
                if stop():
                    return False
                if model.costs[u] is not None:
                    drop_dominated(model, u)
    return True


def _look_at_edge(model: Model, u: int, v: int) -> None:
    matrix = model.edges[u][v]
    if matrix.max() < INFINITE:
        first, row = matrix[:, :1], matrix[0] - matrix[0, 0]
        if matrix[-1, -1] - first[-1, 0] == row[-1] and (matrix - first == row).all():
            model.remove_edge(u, v)
            model.add_costs(u, first[:, 0])
            model.add_costs(v, row - int(row.min()))
            model.offset += int(row.min())
        return
    finite = matrix < INFINITE
    per_row, per_column = finite.sum(axis=1), finite.sum(axis=0)
    empty = [(end, kept) for end, kept in ((u, per_row), (v, per_column)) if not kept.all()]
    for end, kept in empty:
        model.keep(end, np.flatnonzero(kept))
    if empty:
        return
    to_v, to_u = int(per_row.max()) == 1, int(per_column.max()) == 1
    if to_v and to_u:
        to_v = len(model.edges[u]) >= len(model.edges[v])
    if to_v and _merge_pays(model, v, u):
        model.merge(v, u, finite.argmax(axis=1))
    elif to_u and _merge_pays(model, u, v):
        model.merge(u, v, finite.argmax(axis=0))


def _merge_pays(model: Model, v: int, u: int) -> bool:
    """Whether the edges of `v` may be rewritten to the strategies of `u`."""
    growth = len(model.cost_of(u)) - len(model.cost_of(v))
    if growth <= 0:
        return True
    others = sum(matrix.shape[1] for matrix in model.edges[v].values())
    return bool(growth * others <= MERGE_CELLS)


def _look_at_node(model: Model, u: int) -> bool:
    """Whether the node went or changed, so that there is no more to do with it now."""
    costs = model.cost_of(u)
    if _drop_forbidden(model, u):
        return True
    if len(costs) == 1:
        model.fix(u)
        return True
    around = [matrix.shape[1] for matrix in model.edges[u].values()]
    if model.memory[u] or len(around) > 2:
        return False
    if len(around) == 2 and len(costs) * math.prod(around) > ELIMINATION_CELLS:
        return False
    model.eliminate(u)
    return True


def drop_dominated(model: Model, u: int) -> None:
    """Drops each strategy that another one replaces at no cost, whatever the neighbours choose."""
    costs = model.cost_of(u)
    usage = disjoint(model.memory[u]).usage if model.memory[u] else None
    matrices = list(model.edges[u].values())
    # Layers look alike, and so do problems of one program: what was found for one node holds for
    # all that have the same numbers.
    key = _digest(costs, usage, matrices)
    known = _KEPT.get(key)
    if known is None:
        if len(_KEPT) >= MOST_KEPT:
            _KEPT.clear()
        known = _KEPT[key] = (_not_dominated(costs, usage, matrices),)
    (kept,) = known
    if kept is not None:
        model.keep(u, kept)


def _digest(costs: Integers, usage: Integers | None, matrices: list[Integers]) -> bytes:
    """What tells a node's numbers from all others."""
    parts = [costs, *matrices] if usage is None else [costs, usage, *matrices]
    shapes = usage is None, *(part.shape for part in parts)
    digest = hashlib.sha256(repr(shapes).encode())
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    return digest.digest()


def _not_dominated(
    costs: Integers, usage: Integers | None, matrices: list[Integers]
) -> Integers | None:
    """The strategies of a node that no other one replaces; None: all of them."""
    count = len(costs)
    # pairs[a, b]: a may dominate b
    pairs: NDArray[np.bool_] = ~np.eye(count, dtype=bool)
    if usage is not None:
        if count * count * len(usage) <= DOMINANCE_CELLS:
            pairs &= (usage[:, :, None] <= usage[:, None, :]).all(axis=0)
        else:
            for a in range(count):
                pairs[a] &= (usage[:, a : a + 1] <= usage).all(axis=0)
    if not matrices:
        return _without_dominated(pairs & (costs[:, None] <= costs[None, :]))
    table = np.concatenate(matrices, axis=1) if len(matrices) > 1 else matrices[0]
    if table.max() >= INFINITE:
        finite = (table < INFINITE).astype(np.float32)
        pairs &= (1 - finite) @ finite.T == 0  # nowhere does `a` forbid what `b` allows
    bounds = np.array([0, *itertools.accumulate(matrix.shape[1] for matrix in matrices)])
    if count * table.size <= FEW_CELLS:
        return _without_dominated(_proven_of_few(costs, table, bounds[:-1], pairs))
    # Necessary: `a` costs no more in a few surroundings.
    for columns in (bounds[:-1], bounds[1:] - 1, (bounds[:-1] + bounds[1:]) // 2):
        there = table[:, columns]
        blocked = there.max(axis=1) >= INFINITE
        sums = np.where(blocked, INFINITE, costs + np.where(blocked[:, None], 0, there).sum(axis=1))
        pairs = pairs & ((sums[:, None] <= sums[None, :]) | blocked[None, :])
    count_pairs = np.count_nonzero(pairs)
    if not count_pairs or count_pairs * table.shape[1] > DOMINANCE_CELLS * 5:
        return None
    return _without_dominated(_proven(costs, table, bounds[:-1], pairs))


def _proven(costs: Integers, table: Integers, bounds: Integers, pairs: np.ndarray) -> np.ndarray:
    """Which of the candidate pairs hold: the worst difference on every edge, summed."""
    proven = np.zeros_like(pairs)
    above, below = np.nonzero(pairs)
    block = max(1, BLOCK_CELLS // table.shape[1])
    for start in range(0, len(above), block):
        a, b = above[start : start + block], below[start : start + block]
        theirs = table[b]
        difference = table[a] - theirs
        difference[theirs >= INFINITE] = -INFINITE
        worst = np.maximum.reduceat(difference, bounds, axis=1)
        blocked = worst.max(axis=1) >= INFINITE >> 1
        total = np.where(blocked[:, None], 0, worst).sum(axis=1) + costs[a] - costs[b]
        proven[a, b] = ~blocked & (total <= 0)
    return proven


def _proven_of_few(
    costs: Integers, table: Integers, bounds: Integers, pairs: np.ndarray
) -> np.ndarray:
    """The same where strategies and neighbours are few, in fewer operations on all pairs."""
    difference = table[:, None] - table
    difference[:, table >= INFINITE] = -INFINITE
    worst = np.maximum.reduceat(difference, bounds, axis=2)
    total = worst.sum(axis=2) + costs[:, None] - costs
    proven: np.ndarray = pairs & (total <= 0) & (worst.max(axis=2) < INFINITE >> 1)
    return proven


def _without_dominated(pairs: np.ndarray) -> Integers | None:
    """What is left without the dominated strategies, of equal ones without all but the first."""
    dominated = (pairs & ~(pairs.T & _not_after(len(pairs)))).any(axis=0)
    return np.flatnonzero(~dominated) if dominated.any() else None


@lru_cache(maxsize=64)
def _not_after(count: int) -> NDArray[np.bool_]:
    """`[a, b]`: whether `b` is no later than `a`."""
    return np.tri(count, dtype=bool)


def _drop_oversized(model: Model) -> None:
    """Drops each strategy that does not fit even if everything else uses its least."""
    if model.limit is None:
        return
    room = model.limit - model.base
    for u in model.checked(model.nodes):
        for rows in model.memory[u]:
            # `compress_time` has just made the rows disjoint, of least usage zero.
            left = np.array(
                [room[s:e].min() for s, e in zip(rows.starts, rows.ends, strict=True)], np.int64
            )
            fits = (rows.usage <= left[:, None]).all(axis=0)
            if not fits.all():
                model.keep(u, np.flatnonzero(fits))
