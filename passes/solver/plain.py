"""The plain integer program, given to OR-Tools as it is.

One 0/1 variable per strategy and one per allowed pair of strategies, tied by the equations of the
local polytope, one inequality per point of time. The solver uses it on what is left after reduction
when that is small; `plain` applies it to the whole problem, as one would do without this package,
for comparison.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import numpy as np
from ortools.math_opt.python import mathopt
from ortools.sat.python import cp_model

from autopar.passes.solver.model import INFINITE, Contradiction, Model
from autopar.passes.solver.problem import Problem, evaluate
from autopar.passes.solver.solution import Infeasible, Solution, relative_gap

Engine = Literal["cp-sat", "highs"]

BUILD_PART = 0.75
"""The part of a time limit after which building the program is given up, without a solution."""


CP_SAT_SECONDS = 5.0
"""About how many seconds a unit of CP-SAT's deterministic time takes on such programs."""


@dataclass(frozen=True)
class Answer:
    """What OR-Tools says about a model: the best choice it has, the bound it proved."""

    chosen: dict[int, int] | None
    bound: int  # internal cost without the model's offset
    infeasible: bool
    optimal: bool
    work: float = 0.0


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
            model, time_limit=time_limit, work_limit=work_limit, workers=workers, seed=seed
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


def solve_cp_sat(
    model: Model,
    *,
    time_limit: float | None = None,
    work_limit: float | None = None,
    workers: int = 1,
    seed: int = 0,
    hint: dict[int, int] | None = None,
) -> Answer:
    """The local-polytope model in CP-SAT, which is exact in integers.

    Costs above 2^50 in sum are divided by a power of two, rounding down, so the bound stays valid;
    the choice is then optimal only up to that rounding.
    """
    start = time.monotonic()
    shift = max(0, model.largest_cost().bit_length() - 50)
    program = cp_model.CpModel()
    pick = {u: [program.new_bool_var("") for _ in model.cost_of(u)] for u in model.nodes}
    variables: list[cp_model.IntVar] = []
    weights: list[int] = []
    for u, literals in pick.items():
        if time_limit is not None and time.monotonic() - start > BUILD_PART * time_limit:
            return Answer(None, 0, False, False)
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
                for literal, row in zip(literals, by_row, strict=True):
                    program.add_exactly_one([*row, literal.negated()])
                for literal, column in zip(pick[v], by_column, strict=True):
                    program.add_exactly_one([*column, literal.negated()])
    for terms, amounts, room in _memory_terms(model):
        if time_limit is not None and time.monotonic() - start > BUILD_PART * time_limit:
            return Answer(None, 0, False, False)
        program.add(
            cp_model.LinearExpr.weighted_sum([pick[u][s] for u, s in terms], amounts) <= room
        )
    program.minimize(cp_model.LinearExpr.weighted_sum(variables, weights))
    if hint is not None:
        for u, literals in pick.items():
            for s, literal in enumerate(literals):
                program.add_hint(literal, s == hint[u])
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    if time_limit is not None:
        solver.parameters.max_time_in_seconds = max(0.01, time_limit - (time.monotonic() - start))
    if work_limit is not None:
        solver.parameters.max_deterministic_time = max(0.0, work_limit / CP_SAT_SECONDS)
    status = solver.solve(program)
    chosen = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        chosen = {
            u: next(s for s, literal in enumerate(literals) if solver.boolean_value(literal))
            for u, literals in pick.items()
        }
    bound = 0 if status == cp_model.INFEASIBLE else math.ceil(solver.best_objective_bound - 1e-6)
    return Answer(
        chosen,
        max(0, bound << shift),
        status == cp_model.INFEASIBLE,
        status == cp_model.OPTIMAL,
        solver.response_proto.deterministic_time * CP_SAT_SECONDS,
    )


def solve_highs(model: Model, *, time_limit: float | None = None) -> Answer:
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
            return Answer(None, 0, False, False)
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
    for terms, amounts, room in _memory_terms(model):
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
    return Answer(
        chosen,
        max(0, math.floor(bound)) if math.isfinite(bound) else 0,
        infeasible,
        result.termination.reason == mathopt.TerminationReason.OPTIMAL,
    )


def _largest_cost(model: Model) -> int:
    tables = [model.cost_of(u) for u in model.nodes]
    tables += [m for u in model.nodes for v, m in model.edges[u].items() if u < v]
    return max((int(t.max(where=t < INFINITE, initial=0)) for t in tables), default=0)


def _memory_terms(model: Model) -> list[tuple[list[tuple[int, int]], list[int], int]]:
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
        raise Contradiction(int(model.base.max()), int(model.base.argmax()))
    return list(zip(terms, amounts, room, strict=True))
