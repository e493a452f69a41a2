"""The integer program of a model in CP-SAT, for what is small after reduction.

One 0/1 variable per strategy and one per allowed pair of strategies, tied by the equations of the
local polytope, one inequality per point of time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.passes.solver.interrupted import interruptible_call
from autopar.passes.solver.model import INFINITE, Contradiction, Model

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

BUILD_PART = 0.75
"""The part of a time limit after which building the program is given up, without a solution."""

CP_SAT_SECONDS = 5.0
"""About how many seconds a unit of CP-SAT's deterministic time takes on such programs."""


@dataclass(frozen=True)
class CpSatAnswer:
    """What OR-Tools says about a model: the best choice it has, the bound it proved."""

    chosen: dict[int, int] | None
    bound: int  # internal cost without the model's offset
    infeasible: bool
    optimal: bool
    work: float = 0.0


def solve_cp_sat(
    model: Model,
    *,
    time_limit: float = math.inf,
    work_limit: float = math.inf,
    workers: int = 1,
    seed: int = 0,
) -> CpSatAnswer:
    """The local-polytope model in CP-SAT, which is exact in integers.

    Costs above 2^50 in sum are divided by a power of two, rounding down, so the bound stays valid;
    the choice is then optimal only up to that rounding.
    """
    from ortools.sat.python import cp_model

    start = time.monotonic()

    def is_late() -> bool:
        return time.monotonic() - start > BUILD_PART * time_limit

    shift = max(0, model.largest_cost().bit_length() - 50)
    program = cp_model.CpModel()
    pick = {u: [program.new_bool_var("") for _ in model.cost_of(u)] for u in model.nodes}
    variables: list[cp_model.IntVar] = []
    weights: list[int] = []
    for u, literals in pick.items():
        if is_late():
            return CpSatAnswer(None, 0, False, False)
        costs = model.cost_of(u)
        program.add_exactly_one(literals)
        for literal, cost in zip(literals, costs.tolist(), strict=True):
            if cost >= INFINITE:
                program.add(literal == 0)
            else:
                variables.append(literal)
                weights.append(cost >> shift)
        for v, matrix in model.edges[u].items():
            if u < v:
                pairs = np.argwhere(matrix < INFINITE)
                by_row: list[list[cp_model.IntVar]] = [[] for _ in literals]
                by_column: list[list[cp_model.IntVar]] = [[] for _ in pick[v]]
                for s, t in pairs.tolist():
                    pair = program.new_bool_var("")
                    by_row[s].append(pair)
                    by_column[t].append(pair)
                    variables.append(pair)
                    weights.append(int(matrix[s, t]) >> shift)
                both = zip([*literals, *pick[v]], [*by_row, *by_column], strict=True)
                for literal, tied in both:
                    program.add_exactly_one([*tied, literal.negated()])
    for terms, amounts, room in memory_terms(model):
        if is_late():
            return CpSatAnswer(None, 0, False, False)
        program.add(
            cp_model.LinearExpr.weighted_sum([pick[u][s] for u, s in terms], amounts) <= room
        )
    program.minimize(cp_model.LinearExpr.weighted_sum(variables, weights))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = max(0.01, time_limit - (time.monotonic() - start))
    solver.parameters.max_deterministic_time = max(0.0, work_limit / CP_SAT_SECONDS)
    solver.parameters.catch_sigint_signal = False
    status = interruptible_call(lambda: solver.solve(program), solver.stop_search)
    chosen = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        chosen = {
            u: next(s for s, literal in enumerate(literals) if solver.boolean_value(literal))
            for u, literals in pick.items()
        }
    bound = 0 if status == cp_model.INFEASIBLE else math.ceil(solver.best_objective_bound - 1e-6)
    return CpSatAnswer(
        chosen,
        max(0, bound << shift),
        status == cp_model.INFEASIBLE,
        status == cp_model.OPTIMAL,
        solver.response_proto.deterministic_time * CP_SAT_SECONDS,
    )


def memory_terms(model: Model) -> list[tuple[list[tuple[int, int]], list[int], int]]:
    """Per point of time: (node, strategy) pairs, what each uses, and the room for them."""
    if model.limit is None:
        return []
    terms: list[list[tuple[int, int]]] = [[] for _ in model.base]
    amounts: list[list[int]] = [[] for _ in model.base]
    for u in model.nodes:
        for rows in model.memory[u]:
            for start, end, usage in zip(rows.starts, rows.ends, rows.usage, strict=True):
                used = np.flatnonzero(usage)
                for point in range(start, end):
                    terms[point] += [(u, s) for s in used.tolist()]
                    amounts[point] += usage[used].tolist()
    room = (model.limit - model.base).tolist()
    if min(room, default=0) < 0:
        raise Contradiction
    return list(zip(terms, amounts, room, strict=True))
