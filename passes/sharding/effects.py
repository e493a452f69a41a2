"""Effects on the host: a program of several devices has them once, and in no order."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.extend.core import DropVar, JaxprEqn

from autopar.base.errors import AutoparError
from autopar.passes.graph.graph import user_source


def check_effects(eqn: JaxprEqn, mesh: Sequence[int]) -> None:
    """See that several devices can do what an equation does.

    Raises:
      AutoparError: it gives the step a value beside its effect, or its effect has a place among
        others.
    """
    if eqn.effects and any(not isinstance(var, DropVar) for var in eqn.outvars):
        raise AutoparError(
            f"{eqn.primitive.name} has a side effect and returns a value that the step uses.",
            where=user_source(eqn),
            why="on several devices it would run several times.",
            hint="return the value from the step and call the host after it.",
        )
    is_ordered = any(type(effect).__name__.startswith("Ordered") for effect in eqn.effects)
    if is_ordered and math.prod(mesh) > 1:
        raise AutoparError(
            f"{eqn.primitive.name} has an ordered effect.",
            where=user_source(eqn),
            why="JAX keeps the order of effects on one device only.",
            hint="leave out ordered=True, or return the value and use it after the step.",
        )
