"""What the bound excludes: strategies and pairs that no better assignment than the best can use."""

from __future__ import annotations

import numpy as np

from autopar.passes.solver.budget import Stop, never
from autopar.passes.solver.dual import Dual, Excluder
from autopar.passes.solver.model import INFINITE, Model
from autopar.passes.solver.reduce import reduce


def excluded(model: Model, dual: Dual, upper: float, stop: Stop = never) -> Model:
    """A reduced copy of a model without what cannot be part of a choice cheaper than `upper`.

    Two passes at the present prices, one in each direction, find what to drop. A margin covers the
    rounding of floating-point sums. When `stop` says so, less is dropped and reduced.

    Raises:
        Contradiction: if nothing is left, that is, nothing is cheaper than `upper`.
    """
    arrays = dual.arrays
    magnitude = float(np.abs(dual.nodes).sum()) + abs(upper)
    smaller = model.copy()
    for forward in (True, False):
        bound = dual.sweep(not forward)
        excluder = Excluder(dual, upper - bound + 1e-9 * magnitude)
        dual.sweep(forward, excluder)
        if stop():
            break
        for strategy in np.flatnonzero(excluder.strategies).tolist():
            i = int(arrays.owner[strategy])
            costs = smaller.cost_of(int(arrays.names[i])).copy()
            costs[strategy - arrays.first[i]] = INFINITE
            smaller.replace_costs(int(arrays.names[i]), costs)
        side = arrays.high if forward else arrays.low
        if not len(side.cells):
            continue
        slots = np.flatnonzero(np.diff(side.slot_edge, prepend=-1))
        starts = np.append(side.slot_start[slots], len(side.cells))
        touched = np.flatnonzero(np.logical_or.reduceat(excluder.pairs, starts[:-1]))
        for e in touched.tolist():
            near = int(arrays.names[arrays.owner[side.slot_node[slots[e]]]])
            far = int(arrays.names[side.slot_far[slots[e]]])
            matrix = smaller.edges[near][far]
            drop = excluder.pairs[starts[e] : starts[e + 1]].reshape(matrix.shape)
            smaller.replace_edge(near, far, np.where(drop, INFINITE, matrix))
    reduce(smaller, stop=stop)
    return smaller
