"""Feasible choices: repairing one that uses too much memory, improving one that fits.

Both change one node at a time, but look at all nodes at once: a round computes what every strategy
of every node would cost and use given the others' present choice, and then applies the best changes
that don't touch each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.passes.solver.arrays import Arrays, Floats
from autopar.passes.solver.budget import Stop
from autopar.passes.solver.dual import first_least
from autopar.passes.solver.model import INFINITE
from autopar.passes.solver.problem import Integers

ALLOWED = float(INFINITE >> 1)
"""Costs from here up contain a forbidden pair."""


def conditional_costs(arrays: Arrays, choice: Integers) -> Floats:
    """What each strategy costs, with its edges, given the other nodes' choice."""
    total = arrays.costs.copy()
    for side in (arrays.low, arrays.high):
        cells = side.cells[side.slot_start + choice[side.slot_far] - arrays.first[side.slot_far]]
        total += np.bincount(side.slot_node, cells, minlength=len(total))
    return total


def usage_changes(arrays: Arrays, choice: Integers) -> Floats:
    """By how much each usage differs from that of its node's present strategy."""
    return arrays.usage - arrays.used(choice)[arrays.usage_row]


def fitting(arrays: Arrays, changes: Floats, slack: Floats) -> NDArray[np.bool_]:
    """Whether each strategy, with these changes of usage, would find room for what it adds."""
    too_much = changes > np.maximum(least_in_rows(arrays, slack), 0)[arrays.usage_row]
    return np.bincount(arrays.usage_strategy, too_much, len(arrays.costs)) == 0


def least_in_rows(arrays: Arrays, slack: Floats) -> Floats:
    """The least of `slack` over the points of each memory row."""
    size = arrays.row_end - arrays.row_start
    least = np.empty(len(size))
    table, width = slack, 1
    while len(size) and width <= int(size.max()):
        here = (size >= width) & (size < 2 * width)
        start, end = arrays.row_start[here], arrays.row_end[here]
        least[here] = np.minimum(table[start], table[end - width])
        table = np.minimum(table[:-width], table[width:]) if len(table) > width else table
        width *= 2
    return least


def improve(arrays: Arrays, choice: Integers, stop: Stop) -> Integers:
    """Changes one node after the other while that lowers the cost and still fits."""
    choice = choice.copy()
    slack = arrays.room - arrays.profile(choice)
    while not stop():
        conditional = conditional_costs(arrays, choice)
        fits = fitting(arrays, usage_changes(arrays, choice), slack)
        best = first_least(np.where(fits, conditional, np.inf), arrays.first[:-1])
        gain = conditional[choice] - conditional[best]
        order = np.flatnonzero(gain > 0)
        if not _apply(arrays, choice, slack, best, order[np.argsort(-gain[order], kind="stable")]):
            break
    return choice


def repair(arrays: Arrays, choice: Integers, stop: Stop) -> tuple[Integers, bool]:
    """Changes nodes until memory fits, those first that cost least per unit of excess removed.

    A change may not make any excess larger. Returns what was reached and whether it fits.
    """
    choice = choice.copy()
    slack = arrays.room - arrays.profile(choice)
    while not stop():
        excess = np.maximum(-slack, 0)
        if not excess.any():
            return choice, True
        changes = usage_changes(arrays, choice)
        fits = fitting(arrays, changes, slack)
        weighted = changes * arrays.in_rows(excess / excess.max())[arrays.usage_row]
        saved = -np.bincount(arrays.usage_strategy, weighted, len(arrays.costs))
        conditional = conditional_costs(arrays, choice)
        extra = conditional - conditional[choice][arrays.owner]
        useful = fits & (saved > 0) & (conditional < ALLOWED)
        if not useful.any():
            break
        # A change that even lowers the cost comes first; otherwise the price per unit counts.
        rate = np.where(
            useful, np.where(extra < 0, -saved, extra / np.maximum(saved, 1e-9)), np.inf
        )
        best = first_least(rate, arrays.first[:-1])
        order = np.flatnonzero(np.isfinite(rate[best]))
        order = order[np.argsort(rate[best][order], kind="stable")]
        order = order[: max(1, len(order) // 10)]
        if not _apply(arrays, choice, slack, best, order, only_excess=True):
            break
    return choice, not (slack < 0).any()


def _apply(
    arrays: Arrays,
    choice: Integers,
    slack: Floats,
    best: Integers,
    order: Integers,
    only_excess: bool = False,
) -> int:
    """Applies changes in order, skipping neighbours of changed nodes and what no longer fits."""
    touched = np.zeros(arrays.num_nodes, bool)
    applied = 0
    for i in order.tolist():
        if touched[i]:
            continue
        new, old = int(best[i] - arrays.first[i]), int(choice[i] - arrays.first[i])
        moves = []
        useful = not only_excess
        for row in range(arrays.node_rows[i], arrays.node_rows[i + 1]):
            first = arrays.row_first[row]
            change = arrays.usage[first + new] - arrays.usage[first + old]
            if change:
                span = slack[arrays.row_start[row] : arrays.row_end[row]]
                least = span.min()
                if change > max(0.0, least):
                    break
                useful = useful or (change < 0 and least < 0)
                moves.append((span, change))
        else:
            if useful:
                for span, change in moves:
                    span -= change
                choice[i] = best[i]
                touched[arrays.around[arrays.around_first[i] : arrays.around_first[i + 1]]] = True
                touched[i] = True
                applied += 1
    return applied
