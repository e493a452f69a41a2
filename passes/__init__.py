"""The compiler: pure functions from immutable values to immutable values; no accelerator is touched.

A train step flows through them in this order:

- `graph`: a trace becomes one flat program whose inputs and outputs know what they are;
- `factors`: which dimensions of an equation's operands and results are the same factor;
- `microbatch`: an exact split of the batch into a loop, with a certificate for every output;
- `sharding`: a strategy for every equation on a logical mesh, chosen by an integer linear program;
- `solver`: that program, a plain problem that knows nothing of JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar import _lazy

if TYPE_CHECKING:
    from .graph import Graph
    from .solver import Problem, Solution, solve
else:
    __getattr__, __dir__ = _lazy.exports(
        __name__,
        {
            "Graph": ".graph",
            "Problem": ".solver",
            "Solution": ".solver",
            "solve": ".solver",
        },
    )

__all__ = ["Graph", "Problem", "Solution", "solve"]
