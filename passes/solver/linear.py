"""The linear relaxation of the part of a model near its optimum, for the best memory prices.

Message passing finds good messages at given prices, but moving prices step by step converges
slowly where few points of time matter and many choices cost nearly the same. Over the local
polytope with the memory limit as rows, a simplex method gives the best prices at once; the bound
is the same as that of message passing with these prices. Few pairs are part of any good choice, so
the program needs only these: the *core*.

The program is written in terms of the costs that the messages leave, all of them at least zero, so
the dual simplex method starts from the bound there is. A point's price `p` may rise or fall: with a
variable for unused room, `usage @ x + unused = room`, whose cost is `p`, the rest of the objective
contains `p * usage`. A point's row holds only what changes there, which keeps the matrix sparse.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from autopar.passes.solver.arrays import Floats
from autopar.passes.solver.dual import Dual, Excesses, first_least
from autopar.passes.solver.interrupted import interruptible_call
from autopar.passes.solver.model import INFINITE
from autopar.passes.solver.problem import Integers

if TYPE_CHECKING:
    from ortools.math_opt import model_pb2, result_pb2, solution_pb2
    from ortools.math_opt.python import mathopt

SCALE = 1e5
"""The objective is scaled so that the bound is about this."""

ITERATION_WORK = 4.5e-9
"""The work of a simplex iteration per row and per entry of the matrix."""

BUILD_WORK = 3e-6
"""The work of building the program, per row and entry."""

ROOT_SECONDS = 3.5e-8
BRANCH_SECONDS = 6e-5
"""About what branch and bound takes per square of the pairs before it branches, and per pair and
branch."""

SCIP_PARAMETERS = {"separating/maxroundsroot": 5, "branching/relpscost/initcand": 8}
"""A good choice soon matters more than a small tree."""

SECONDS_PER_CELL = 4e-5
"""About what a program takes on the whole, per pair."""


class Core:
    """The pairs and strategies of a model that add least to the dual's bound.

    `look` takes the present messages and prices into account; what was cheap in an earlier look
    stays cheap, so that a core contains what made earlier prices wrong.
    """

    def __init__(self, dual: Dual) -> None:
        self.dual = dual
        self.strategies = np.full(len(dual.arrays.costs), np.inf)
        self.pairs = np.full(len(dual.arrays.high.cells), np.inf)

    def look(self) -> None:
        """Two passes at the present prices."""
        self.dual.sweep(False)
        excesses = Excesses(self.dual)
        self.dual.sweep(True, excesses)
        np.minimum(self.strategies, excesses.strategies, out=self.strategies)
        np.minimum(self.pairs, excesses.pairs, out=self.pairs)

    def cheapest(self, cells: int, keep: Integers | None) -> tuple[Integers, Integers]:
        """Strategies and pairs (places in `high`), about so many; the choice `keep` is possible."""
        arrays = self.dual.arrays
        side = arrays.high
        allowed = np.inf
        finite = np.flatnonzero(side.exact < INFINITE)
        if cells < len(finite):
            allowed = float(np.partition(self.pairs[finite], cells)[cells])
        strategies = (self.strategies <= allowed) & (arrays.exact < INFINITE)
        pairs = (self.pairs <= allowed) & (side.exact < INFINITE)
        if keep is not None:
            strategies[keep] = True
            pairs[arrays.pairs(keep)[2]] = True
        return np.flatnonzero(strategies), np.flatnonzero(pairs)


@dataclass(frozen=True)
class Relaxed:
    """The relaxation's optimum, or where it had to stop.

    Args:
        value: the relaxation's value, without the model's offset; None if it stopped before.
        prices: per point of the model; None if it stopped too early.
        low: per slot, what to add to the messages; likewise `high`.
        choice: per node the strategy (numbered among all) that has most of it; None if it stopped.
        work: what it took.
    """

    value: float | None
    prices: Floats | None
    low: Floats
    high: Floats
    choice: Integers | None
    work: float


def relaxation(
    dual: Dual,
    strategies: Integers,
    pairs: Integers,
    *,
    work_limit: float = math.inf,
    time_limit: float = math.inf,
) -> Relaxed:
    """Solves the linear relaxation over some strategies and pairs (places in `high`)."""
    from ortools.math_opt.python import mathopt

    start = time.monotonic()
    arrays = dual.arrays
    program, constant, scale, slots_low, slots_high = _program(dual, strategies, pairs)
    size = len(program.linear_constraints.ids) + len(program.linear_constraint_matrix.row_ids)
    each = ITERATION_WORK * size
    parameters = mathopt.SolveParameters(lp_algorithm=mathopt.LPAlgorithm.DUAL_SIMPLEX)
    if work_limit < math.inf:
        parameters.iteration_limit = max(1, int(work_limit / each))
    result = _solved(program, mathopt.SolverType.GLOP, parameters, start + time_limit)
    work = each * result.solve_stats.simplex_iterations + BUILD_WORK * size
    value, prices, choice = None, None, None
    low, high = np.zeros(len(dual.low)), np.zeros(len(dual.high))
    points = len(arrays.room)
    if result.solutions:
        found = result.solutions[0]
        rows = np.array(found.dual_solution.dual_values.values)
        if len(rows) == len(program.linear_constraints.ids):
            steps = np.append(rows[len(rows) - points :], 0.0) / (scale * arrays.limit)
            prices = np.maximum(dual.prices + np.diff(steps), 0.0)
            messages = rows[arrays.num_nodes :] / scale
            high[slots_high] = messages[: len(slots_high)]
            low[slots_low] = messages[len(slots_high) :][: len(slots_low)]
        solved = result.termination.reason == mathopt.TerminationReason.OPTIMAL.value
        if solved and found.HasField("primal_solution"):
            value = found.primal_solution.objective_value / scale + constant
            choice = _largest(dual, strategies, found)
    return Relaxed(value, prices, low, high, choice, work)


def best_in_core(
    dual: Dual,
    strategies: Integers,
    pairs: Integers,
    keep: Integers,
    *,
    branches: int,
    time_limit: float = math.inf,
) -> tuple[Integers | None, bool, float]:
    """The best choice found over some strategies and pairs, whether it is proven best, the work.

    `keep` is a choice that fits. Memory is looked at where that uses most within a while of time,
    and where there is a price: the choice found may have to be repaired. SCIP works in floating
    point, so what it proves is no more than a reason not to look further.
    """
    from ortools.math_opt.python import mathopt

    start = time.monotonic()
    profile = dual.arrays.profile(keep)
    reach = max(1, len(profile) // 40)
    peaks = [
        point
        for point in range(len(profile))
        if dual.prices[point] > 0
        or profile[point] == profile[max(0, point - reach) : point + reach + 1].max()
    ]
    program, *_ = _program(dual, strategies, pairs, np.array(peaks, np.int64))
    parameters = mathopt.SolveParameters(
        threads=1,
        random_seed=0,
        relative_gap_tolerance=1e-6,
        node_limit=branches,
    )
    parameters.gscip.int_params.update(SCIP_PARAMETERS)
    result = _solved(program, mathopt.SolverType.GSCIP, parameters, start + time_limit)
    branched = BRANCH_SECONDS * result.solve_stats.node_count
    work = len(pairs) * (branched + ROOT_SECONDS * len(pairs))
    solved = result.termination.reason == mathopt.TerminationReason.OPTIMAL.value
    if not result.solutions or not result.solutions[0].HasField("primal_solution"):
        return None, solved, work
    return _largest(dual, strategies, result.solutions[0]), solved, work


def _largest(dual: Dual, strategies: Integers, solution: solution_pb2.SolutionProto) -> Integers:
    """Per node the strategy of which a solution has most."""
    parts = np.full(len(dual.arrays.costs), -1.0)
    parts[strategies] = solution.primal_solution.variable_values.values[: len(strategies)]
    return first_least(-parts, dual.arrays.first[:-1])


def _program(
    dual: Dual, strategies: Integers, pairs: Integers, peaks: Integers | None = None
) -> tuple[model_pb2.ModelProto, float, float, Integers, Integers]:
    """The program, what to add to its objective, by what that is scaled, the slots of its rows.

    Columns: strategies, pairs, unused room. Rows: one strategy per node, the pairs of a strategy on
    an edge are as much as the strategy (from both ends), memory.
    """
    from ortools.math_opt import model_pb2

    arrays, low, high = dual.arrays, dual.arrays.low, dual.arrays.high
    nodes, points = arrays.num_nodes, len(arrays.room)
    column_of = np.full(len(arrays.costs), -1)
    column_of[strategies] = np.arange(len(strategies))
    near = np.repeat(np.arange(len(high.slot_start)), high.slot_size)[pairs]
    far = high.cell_far_slot[pairs]
    both = (column_of[high.slot_node[near]] >= 0) & (column_of[low.slot_node[far]] >= 0)
    pairs, near, far = pairs[both], near[both], far[both]
    least = np.minimum.reduceat(dual.nodes, arrays.first[:-1])
    kept = high.cells[pairs] - dual.high[near] - dual.low[far]
    node_costs = dual.nodes - least[arrays.owner]
    if peaks is None:
        room_costs = dual.prices * arrays.limit
    else:
        node_costs, room_costs = node_costs - dual.price_costs(dual.prices), np.zeros(0)
    costs = np.concatenate([node_costs[strategies], np.maximum(kept, 0.0), room_costs])
    constant = float(least.sum() - (dual.prices * arrays.room).sum())
    # Slots of strategies in the program; one without pairs rules its strategy out.
    slots_high = np.flatnonzero(column_of[high.slot_node] >= 0)
    slots_low = np.flatnonzero(column_of[low.slot_node] >= 0)
    row_high, row_low = np.zeros(len(high.slot_node), np.int64), np.zeros(len(low.slot_node), int)
    row_high[slots_high] = nodes + np.arange(len(slots_high))
    row_low[slots_low] = nodes + len(slots_high) + np.arange(len(slots_low))
    first_point = nodes + len(slots_high) + len(slots_low)
    used = np.flatnonzero((column_of[arrays.usage_strategy] >= 0) & (arrays.usage > 0))
    user, usage = column_of[arrays.usage_strategy[used]], arrays.usage[used] / arrays.limit
    start, end = arrays.row_start[arrays.usage_row[used]], arrays.row_end[arrays.usage_row[used]]
    pair = len(strategies) + np.arange(len(pairs))
    columns = len(costs)
    blocks: list[tuple[Integers, Integers, float | Floats]] = [
        (arrays.owner[strategies], column_of[strategies], 1.0),
        (row_high[near], pair, 1.0),
        (row_high[slots_high], column_of[high.slot_node[slots_high]], -1.0),
        (row_low[far], pair, 1.0),
        (row_low[slots_low], column_of[low.slot_node[slots_low]], -1.0),
    ]
    if peaks is None:
        ended = np.flatnonzero(end < points)
        unused = columns - points + np.arange(points)
        blocks += [
            (first_point + start, user, usage),
            (first_point + end[ended], user[ended], -usage[ended]),
            (first_point + np.arange(points), unused, 1.0),
            (first_point + np.arange(1, points), unused[:-1], -1.0),
        ]
        room = np.diff(arrays.room, prepend=0.0) / arrays.limit
    else:
        for row, point in enumerate(peaks.tolist()):
            here = np.flatnonzero((start <= point) & (point < end))
            blocks.append((np.full(len(here), first_point + row), user[here], usage[here]))
        room = arrays.room[peaks] / arrays.limit
    rows = first_point + len(room)
    key = np.concatenate([row * columns + column for row, column, _ in blocks])
    value = np.concatenate([np.broadcast_to(entries, len(row)) for row, _, entries in blocks])
    key, inverse = np.unique(key, return_inverse=True)
    value = np.bincount(inverse, value, len(key))
    key, value = key[value != 0], value[value != 0]
    right = np.zeros(rows)
    right[:nodes] = 1.0
    right[first_point:] = room
    left = right.copy()
    if peaks is not None:
        left[first_point:] = -np.inf
    scale = SCALE / max(1.0, abs(constant))

    program = model_pb2.ModelProto()
    program.variables.ids.extend(range(columns))
    program.variables.lower_bounds.extend(np.zeros(columns))
    program.variables.upper_bounds.extend(np.full(columns, np.inf))
    program.variables.integers.extend(
        (np.arange(columns) < (0 if peaks is None else len(strategies))).tolist()
    )
    program.linear_constraints.ids.extend(range(rows))
    program.linear_constraints.lower_bounds.extend(left)
    program.linear_constraints.upper_bounds.extend(right)
    priced = np.flatnonzero(costs)
    program.objective.linear_coefficients.ids.extend(priced)
    program.objective.linear_coefficients.values.extend(costs[priced] * scale)
    program.linear_constraint_matrix.row_ids.extend(key // columns)
    program.linear_constraint_matrix.column_ids.extend(key % columns)
    program.linear_constraint_matrix.coefficients.extend(value)
    return program, constant, scale, slots_low, slots_high


def _solved(
    program: model_pb2.ModelProto,
    solver: mathopt.SolverType,
    parameters: mathopt.SolveParameters,
    deadline: float,
) -> result_pb2.SolveResultProto:
    """The result, as a message, of what may take until the deadline.

    An interrupt waits for SCIP: with something to interrupt it, it writes errors to standard error.
    """
    from ortools.math_opt.python import mathopt
    from ortools.util.python.solve_interrupter import SolveInterrupter

    if deadline < math.inf:
        parameters.time_limit = timedelta(seconds=max(0.001, deadline - time.monotonic()))
    ending = SolveInterrupter()
    heard = ending if solver != mathopt.SolverType.GSCIP else None

    def call() -> result_pb2.SolveResultProto:
        model = mathopt.Model.from_model_proto(program)
        return mathopt.solve(model, solver, params=parameters, interrupter=heard).to_proto()

    return interruptible_call(call, ending.interrupt)
