"""The compiler: pure functions from values to values; no accelerator is touched.

`compiler` composes them on one page. A train step flows through them in this order:

- `trace`: the step becomes one flat `graph` whose inputs and outputs know what they are;
- `factors`: which dimensions of an equation's operands and results are the same factor;
- `microbatch`: an exact split of the batch into a loop, with a certificate for every output;
- `sharding`: a strategy for every equation on a logical mesh, and the program that it lowers to;
- `solver`: the integer linear program that chooses, a plain problem that knows nothing of JAX;
- `stages`: the microbatched program cut into pipeline stages, each sharded on a mesh of its own;
- `inter_op`: the dynamic program that chooses where to cut and how many devices a stage gets;
- `schedules`: in which order the meshes run the stages' tasks, and the checker of such orders;
- `pipeline`: one list of instructions per mesh, verified, and simulated with a virtual clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.base import lazy as _lazy

if TYPE_CHECKING:
    from .graph.graph import Graph
    from .planner.compiler import compile_graph
    from .solver import Problem, Solution, solve
else:
    __getattr__, __dir__ = _lazy.exports(
        __name__,
        {
            "Graph": ".graph.graph",
            "Problem": ".solver",
            "Solution": ".solver",
            "compile_graph": ".planner.compiler",
            "solve": ".solver",
        },
    )

__all__ = ["Graph", "Problem", "Solution", "compile_graph", "solve"]
