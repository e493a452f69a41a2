"""What `jax.lax.platform_dependent` chooses, where only one of its branches can ever run.

`jnp.diagonal` has another form for the inside of a TPU kernel (platform "mosaic"), which nobody
looks into here. The choice among platforms on which a step may run is left to the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

INSIDE_KERNELS = frozenset({"mosaic"})


def only_platform(eqn: JaxprEqn) -> Literal | None:
    """The number of the one branch that is for a step at all; None: there are several."""
    if eqn.primitive.name != "platform_index":
        return None
    names = eqn.params["platforms"]
    able = [i for i, of in enumerate(names) if of is None or not {*of} <= INSIDE_KERNELS]
    if len(able) != 1:
        return None
    return jex_core.Literal(np.int32(able[0]), eqn.outvars[0].aval)


def known_branch(eqn: JaxprEqn, operands: Sequence[Any]) -> ClosedJaxpr | None:
    """The branch of a `cond` whose index is a number."""
    if eqn.primitive.name != "cond" or not isinstance(operands[0], jex_core.Literal):
        return None
    branches = eqn.params["branches"]
    branch: ClosedJaxpr = branches[int(np.clip(operands[0].val, 0, len(branches) - 1))]
    return branch
