"""A whole problem as one plain integer program for OR-Tools, to compare the solver with.

This is what one would do without the solver: the program that it gives to CP-SAT for what is left
after reduction (`autopar.passes.solver.cp_sat`), here for all of the problem, in CP-SAT or HiGHS.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Literal

import numpy as np
from contest import evaluate
from ortools.math_opt.python import mathopt

from autopar.passes.solver import Infeasible, Problem, Solution
from autopar.passes.solver.cp_sat import BUILD_PART, CpSatAnswer, memory_terms, solve_cp_sat
from autopar.passes.solver.model import INFINITE, Model
from autopar.passes.solver.solution import relative_gap

Engine = Literal["cp-sat", "highs"]


def plain(
    problem: Problem,
    *,
    time_limit: float | None = None,
    work_limit: float | None = None,
    engine: Engine = "cp-sat",
    workers: int = 1,
    seed: int = 0,
) -> Solution:
    """Solves the problem by one plain OR-Tools model, without anything of this package's own.

    Args:
        problem: what to solve.
        time_limit: seconds that OR-Tools may take.
        work_limit: CP-SAT's deterministic time, in units of about a second.
        engine: "cp-sat", or "highs" for the mixed-integer program (its bound is floating point).
        workers: CP-SAT's threads.
        seed: CP-SAT's random seed.

    Raises:
        Infeasible: if OR-Tools proves that there is no solution, or finds none in time.
    """
    model = Model(problem)
    if engine == "highs":
        answer = solve_highs(model, time_limit=time_limit)
    else:
        answer = solve_cp_sat(
            model,
            time_limit=math.inf if time_limit is None else time_limit,
            work_limit=math.inf if work_limit is None else work_limit,
            workers=workers,
            seed=seed,
        )
    if answer.chosen is None:
        raise Infeasible(
            "The plain model has no solution."
            if answer.infeasible
            else "The plain model found no solution in time.",
            proven=answer.infeasible,
        )
    assignment = model.reconstruct(answer.chosen)
    cost = evaluate(problem, assignment)
    bound = min(cost, (model.offset + answer.bound) << model.shift)
    return Solution(assignment, cost, bound, relative_gap(cost, bound), {"engine": engine})


def solve_highs(model: Model, *, time_limit: float | None = None) -> CpSatAnswer:
    """The same model as a mixed-integer program in HiGHS, in floating point."""
    program = mathopt.Model()
    start = time.monotonic()
    scale = 1e6 / max(1, _largest_cost(model))
    pick: dict[int, list[mathopt.Variable]] = {}
    objective: list[mathopt.LinearTerm] = []
    for u in model.nodes:
        costs = model.cost_of(u)
        pick[u] = [program.add_binary_variable() for _ in costs]
        program.add_linear_constraint(mathopt.fast_sum(pick[u]) == 1)
        for variable, cost in zip(pick[u], costs.tolist(), strict=True):
            if cost >= INFINITE:
                variable.upper_bound = 0
            else:
                objective.append(cost * scale * variable)
    for u in model.nodes:
        if time_limit is not None and time.monotonic() - start > BUILD_PART * time_limit:
            return CpSatAnswer(None, 0, False, False)
        for v, matrix in model.edges[u].items():
            if u < v:
                by_row: list[list[mathopt.Variable]] = [[] for _ in pick[u]]
                by_column: list[list[mathopt.Variable]] = [[] for _ in pick[v]]
                for s, t in np.argwhere(matrix < INFINITE).tolist():
                    pair = program.add_variable(lb=0)
                    by_row[s].append(pair)
                    by_column[t].append(pair)
                    objective.append(int(matrix[s, t]) * scale * pair)
                for variable, row in zip(pick[u], by_row, strict=True):
                    program.add_linear_constraint(mathopt.fast_sum(row) == variable)
                for variable, column in zip(pick[v], by_column, strict=True):
                    program.add_linear_constraint(mathopt.fast_sum(column) == variable)
    for terms, amounts, room in memory_terms(model):
        unit = 1.0 / max(1, room)
        program.add_linear_constraint(
            mathopt.fast_sum(
                amount * unit * pick[u][s] for (u, s), amount in zip(terms, amounts, strict=True)
            )
            <= room * unit
        )
    program.minimize(mathopt.fast_sum(objective))
    parameters = mathopt.SolveParameters(relative_gap_tolerance=0.0)
    if time_limit is not None:
        parameters.time_limit = timedelta(
            seconds=max(0.01, time_limit - (time.monotonic() - start))
        )
    result = mathopt.solve(program, mathopt.SolverType.HIGHS, params=parameters)
    infeasible = result.termination.reason == mathopt.TerminationReason.INFEASIBLE
    chosen = None
    if result.has_primal_feasible_solution():
        values = result.variable_values()
        chosen = {u: max(range(len(row)), key=lambda s: values[row[s]]) for u, row in pick.items()}
    bound = result.termination.objective_bounds.dual_bound / scale
    return CpSatAnswer(
        chosen,
        max(0, math.floor(bound)) if math.isfinite(bound) else 0,
        infeasible,
        result.termination.reason == mathopt.TerminationReason.OPTIMAL,
    )


def _largest_cost(model: Model) -> int:
    tables = [model.cost_of(u) for u in model.nodes]
    tables += [m for u in model.nodes for v, m in model.edges[u].items() if u < v]
    return max((int(t.max(where=t < INFINITE, initial=0)) for t in tables), default=0)
