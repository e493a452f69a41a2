"""What the bound excludes: strategies and pairs that no better assignment than the best can use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.passes.solver.arrays import Arrays
from autopar.passes.solver.budget import Stop, never
from autopar.passes.solver.dual import Dual, Excesses
from autopar.passes.solver.model import INFINITE, Model
from autopar.passes.solver.reduce import reduce


def excluded(model: Model, dual: Dual, upper: float, stop: Stop = never) -> Model:
    """A reduced copy of a model without what cannot be part of a choice cheaper than `upper`.

    Two passes at the present prices, one in each direction, find what to drop. A margin covers the
    rounding of floating-point sums. When `stop` says so, less is dropped and reduced.

    Raises:
        Contradiction: if nothing is left, that is, nothing is cheaper than `upper`.
    """
    magnitude = float(np.abs(dual.nodes).sum()) + abs(upper)
    smaller = model.copy()
    for forward in (True, False):
        bound = dual.sweep(not forward)
        excesses = Excesses(dual)
        dual.sweep(forward, excesses)
        if stop():
            break
        allowed = upper - bound + 1e-9 * magnitude
        _drop(
            smaller, dual.arrays, excesses.strategies > allowed, excesses.pairs > allowed, forward
        )
    reduce(smaller, stop=stop)
    return smaller


def _drop(
    model: Model,
    arrays: Arrays,
    strategies: NDArray[np.bool_],
    pairs: NDArray[np.bool_],
    forward: bool,
) -> None:
    """Makes strategies and pairs (in the order of `high` if `forward`) infinite, in place."""
    for strategy in model.checked(np.flatnonzero(strategies).tolist()):
        i = int(arrays.owner[strategy])
        costs = model.cost_of(int(arrays.names[i])).copy()
        costs[strategy - arrays.first[i]] = INFINITE
        model.replace_costs(int(arrays.names[i]), costs)
    side = arrays.high if forward else arrays.low
    if not len(side.cells):
        return
    slots = np.flatnonzero(np.diff(side.slot_edge, prepend=-1))
    starts = np.append(side.slot_start[slots], len(side.cells))
    touched = np.flatnonzero(np.logical_or.reduceat(pairs, starts[:-1]))
    for e in model.checked(touched.tolist()):
        near = int(arrays.names[arrays.owner[side.slot_node[slots[e]]]])
        far = int(arrays.names[side.slot_far[slots[e]]])
        matrix = model.edges[near][far]
        drop = pairs[starts[e] : starts[e + 1]].reshape(matrix.shape)
        model.replace_edge(near, far, np.where(drop, INFINITE, matrix))
