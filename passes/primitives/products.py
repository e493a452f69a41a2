"""Products of arrays with several free or contracted dimensions, as products of matrices.

XLA brings every `dot_general` into the order [batch, free, contracted] x [batch, contracted, free]
first. An operand in the other order is transposed, in memory if its free or contracted dimensions
are several: weights in every backward pass (`btd,dhk->bthk` gives `bthk,dhk->btd`), and activations
for the gradient of every weight. Matrices stay as they are: what multiplies them reads either
order. So dimensions that are side by side are made one, which moves no byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

Dims = Sequence[int]


class _Side(NamedTuple):
    """An operand: its free and contracted dimensions, after `num_batch` leading batch dimensions.

    Args:
      shape: of the operand.
      num_batch: how many dimensions are batch dimensions.
      free: its free dimensions, in their order.
      contracted: its contracted dimensions, in the order of those of the other operand.
    """

    shape: Dims
    num_batch: int
    free: Dims
    contracted: Dims

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == self.num_batch + 2

    @property
    def can_merge(self) -> bool:
        return _are_side_by_side(self.free) and _are_side_by_side(self.contracted)

    @property
    def ends_contracted(self) -> bool:
        """Whether the contracted dimensions are after the free ones."""
        return self.contracted[0] > self.free[0]

    @property
    def merged(self) -> tuple[tuple[int, ...], int]:
        """The shape as a matrix, and which of its dimensions is contracted."""
        pair = [math.prod(self.shape[d] for d in dims) for dims in (self.free, self.contracted)]
        if not self.ends_contracted:
            pair.reverse()
        return (*self.shape[: self.num_batch], *pair), self.num_batch + self.ends_contracted


def as_matrices(
    left_shape: Dims, right_shape: Dims, dimension_numbers: Any
) -> tuple[tuple[int, ...], tuple[int, ...], Any, tuple[int, ...]] | None:
    """How a `dot_general` is one of matrices, if XLA would else transpose an operand in memory.

    Args:
      left_shape: of one operand.
      right_shape: of the other.
      dimension_numbers: ((contracted left, contracted right), (batch left, batch right)), as those
        of `jax.lax.dot_general`.

    Returns:
      The shapes of the matrices, their dimension numbers, and the shape of the result that theirs
      is to get; None: nothing is gained, or dimensions to merge are not side by side.
    """
    (left_contracted, right_contracted), (left_batch, right_batch) = dimension_numbers
    batch = tuple(range(len(left_batch)))
    if tuple(left_batch) != batch or tuple(right_batch) != batch or not left_contracted:
        return None
    pairs = sorted(zip(left_contracted, right_contracted, strict=True))
    left, right = (
        _Side(
            shape,
            len(batch),
            [d for d in range(len(batch), len(shape)) if d not in contracted],
            contracted,
        )
        for shape, contracted in zip(
            (left_shape, right_shape), zip(*pairs, strict=True), strict=True
        )
    )
    if not left.free or not right.free or 0 in (*left_shape, *right_shape):
        return None
    if not (left.can_merge and right.can_merge):
        return None
    if (left.is_matrix and right.is_matrix) or (left.ends_contracted and not right.ends_contracted):
        return None
    left_matrix, left_dim = left.merged
    right_matrix, right_dim = right.merged
    result = [
        *left_shape[: len(batch)],
        *(left_shape[d] for d in left.free),
        *(right_shape[d] for d in right.free),
    ]
    numbers = (((left_dim,), (right_dim,)), (batch, batch))
    return left_matrix, right_matrix, numbers, tuple(result)


def multiply(bind: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """A `dot_general` of arrays, by way of matrices where that saves transposing them.

    Args:
      bind: the primitive's.
      operands: two arrays.
      params: of the equation.
    """
    left, right = operands
    if _is_packed(left.dtype) or _is_packed(right.dtype):
        return bind(left, right, **params)
    found = as_matrices(left.shape, right.shape, params["dimension_numbers"])
    if found is None:
        return bind(left, right, **params)
    left_shape, right_shape, numbers, shape = found
    matrices = lax.reshape(left, left_shape), lax.reshape(right, right_shape)
    return lax.reshape(bind(*matrices, **{**params, "dimension_numbers": numbers}), shape)


def _is_packed(dtype: Any) -> bool:
    """Whether several elements are in a byte; XLA's products of such matrices are incomplete."""
    if jnp.issubdtype(dtype, jnp.integer):
        return bool(jnp.iinfo(dtype).bits < 8)
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8)


def _are_side_by_side(dims: Dims) -> bool:
    return list(dims) == list(range(dims[0], dims[0] + len(dims)))
