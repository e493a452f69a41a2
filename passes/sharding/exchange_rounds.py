"""The all-to-alls by which devices exchange rows inside an equation (see `exchanges.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import EXCHANGE
from autopar.passes.primitives.exchanges import round_rows
from autopar.passes.sharding.layout import Layout, cuts_product, local_shape, num_parts
from autopar.passes.sharding.reshard import ReshardStep
from autopar.passes.sharding.scopes import aval_shape, itemsize


def exchange_round(
    eqn: JaxprEqn, operands: Sequence[Layout], results: Sequence[Layout], mesh: tuple[int, ...]
) -> tuple[ReshardStep, int] | None:
    """A round of an exchange and the bytes of a device's buffer in it; None: devices send nothing.

    Args:
      eqn: any equation.
      operands: how its operands lie.
      results: how its results lie.
      mesh: the sizes of the logical mesh's axes.
    """
    if eqn.primitive.name != EXCHANGE:
        return None
    axes = operands[0].dims[0]
    if not axes or results[0].dims[0] != axes:
        return None
    features = local_shape(aval_shape(eqn.invars[0]), operands[0], mesh)
    row = math.prod(features[1 if eqn.params["to_blocks"] else 2 :]) * itemsize(eqn.invars[0].aval)
    (pairs,), parts = aval_shape(eqn.invars[1]), num_parts(axes, mesh)
    cut = cuts_product(operands[0], mesh)
    step = ReshardStep("all-to-all", axes, dim=0, target=0, parts_in=cut, parts_out=cut)
    return step, parts * round_rows(pairs, parts) * row
