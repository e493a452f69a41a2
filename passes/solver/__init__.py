"""The solver for one strategy per node, node and edge costs, and memory over time under a limit.

It is pure: a `Problem` goes in, a `Solution` with a proven lower bound comes out, and nothing of
JAX is needed. `solve` is the solver, `plain` the plain OR-Tools model to compare it with.
"""

from autopar.passes.solver.plain import plain
from autopar.passes.solver.problem import (
    FORBIDDEN,
    Problem,
    ProblemError,
    evaluate,
    is_allowed,
    peak_usage,
)
from autopar.passes.solver.search import solve
from autopar.passes.solver.solution import Infeasible, Solution

__all__ = [
    "FORBIDDEN",
    "Infeasible",
    "Problem",
    "ProblemError",
    "Solution",
    "evaluate",
    "is_allowed",
    "peak_usage",
    "plain",
    "solve",
]
