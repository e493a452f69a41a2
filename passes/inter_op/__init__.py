"""The stage dynamic program: which consecutive layers form a stage, on how many devices.

Nothing of JAX is needed. In the order in which the parts build on each other:

- `lattice`: the states between which a program may be cut, and which cut may follow which;
- `problem`: what every possible stage costs, and the limits of a plan;
- `sweep`: the recursion from the end: the best rest of a plan for every cut and budget;
- `search`: the exact search over paths of cuts, for any stage costs and sum + bottleneck;
- `stages`: `best_stages`, which searches the chain of layers for the least step time that fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar import _lazy

if TYPE_CHECKING:
    from .lattice import Lattice, downsets, inclusion_lattice
    from .problem import StageKind, StagePath, StageProblem, Step
    from .search import best_path, least_bottlenecks, least_memory_path
    from .stages import Stage, StageChoice, StageOption, best_stages, one_f_one_b_in_flight
else:
    __getattr__, __dir__ = _lazy.exports(
        __name__,
        {
            "Lattice": ".lattice",
            "Stage": ".stages",
            "StageChoice": ".stages",
            "StageKind": ".problem",
            "StageOption": ".stages",
            "StagePath": ".problem",
            "StageProblem": ".problem",
            "Step": ".problem",
            "best_path": ".search",
            "best_stages": ".stages",
            "downsets": ".lattice",
            "inclusion_lattice": ".lattice",
            "least_bottlenecks": ".search",
            "least_memory_path": ".search",
            "one_f_one_b_in_flight": ".stages",
        },
    )

__all__ = [
    "Lattice",
    "Stage",
    "StageChoice",
    "StageKind",
    "StageOption",
    "StagePath",
    "StageProblem",
    "Step",
    "best_path",
    "best_stages",
    "downsets",
    "inclusion_lattice",
    "least_bottlenecks",
    "least_memory_path",
    "one_f_one_b_in_flight",
]
