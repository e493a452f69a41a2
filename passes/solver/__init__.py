"""The solver for one strategy per node, node and edge costs, and memory over time under a limit.

It is pure: a `Problem` goes in, a `Solution` with a proven lower bound comes out, and nothing of
JAX is needed.
"""

from .problem import FORBIDDEN, Problem, ProblemError
from .search import solve
from .solution import Infeasible, Solution, TooDear

__all__ = ["FORBIDDEN", "Infeasible", "Problem", "ProblemError", "Solution", "TooDear", "solve"]
