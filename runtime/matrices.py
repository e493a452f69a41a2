"""Functions of matrices on the CPUs of one process, of which each has a device of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from autopar.passes.primitives.cuts import bind_with
from autopar.passes.primitives.shardings import matrix_batch_rank


def one_by_one(eqn: JaxprEqn, operands: Sequence[Any], changes: Mapping[str, Any]) -> list[Any]:
    """A function of matrices, of one after the other.

    jaxlib's kernels for CPUs do several matrices by tasks of XLA's threads, and wait for them on
    such a thread: where every thread runs a device, as with Shampoo or SOAP on virtual devices, all
    wait for ever (found with jaxlib 0.10.2, in plain `jax.jit` as well).
    """
    rank = matrix_batch_rank(eqn)
    shape = operands[0].shape[:rank]
    if math.prod(shape) <= 1:
        return bind_with(eqn, operands, changes)
    flat = [x.reshape(-1, *x.shape[rank:]) for x in operands]
    made = lax.map(lambda matrices: bind_with(eqn, matrices, changes), flat)
    return [x.reshape(*shape, *x.shape[1:]) for x in made]
