"""The solver for one strategy per node, node and edge costs, and memory over time under a limit.

It is pure: a `Problem` goes in, a `Solution` with a proven lower bound comes out, and nothing of
JAX is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.base import lazy as _lazy

if TYPE_CHECKING:
    from .problem import FORBIDDEN, Problem, ProblemError
    from .search import solve
    from .solution import Infeasible, Solution
else:
    __getattr__, __dir__ = _lazy.exports(
        __name__,
        {
            "FORBIDDEN": ".problem",
            "Infeasible": ".solution",
            "Problem": ".problem",
            "ProblemError": ".problem",
            "Solution": ".solution",
            "solve": ".search",
        },
    )

__all__ = [
    "FORBIDDEN",
    "Infeasible",
    "Problem",
    "ProblemError",
    "Solution",
    "solve",
]
