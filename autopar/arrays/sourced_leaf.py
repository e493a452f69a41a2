"""`SourcedLeaf`: a leaf of a batch that its reader fetches from the source itself.

On Ray actors, what the driver reads is sent to every actor that needs it. Of a source with indices
that is small as bytes (files rather than arrays), only the number of the batch is sent: each actor
reads it from a source of its own, and keeps the rows of its devices.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from autopar.arrays.foreign import on_host
from autopar.arrays.operators import WholeArray


class SourcedLeaf(WholeArray):
    """A leaf of a batch of a source, known by its place there; looking at it reads it here.

    Args:
      source: has the batches, by number.
      data: the same as bytes that another process can read.
      number: of the batch.
      leaf: its number among the leaves of the batch.
      shape, dtype: that it shall have.
    """

    weak_type = False

    def __init__(
        self, source: Any, data: bytes, number: int, leaf: int, shape: tuple[int, ...], dtype: Any
    ):
        self.source, self.data, self.number, self.leaf = source, data, number, leaf
        self.shape, self.dtype = shape, np.dtype(dtype)

    def is_deleted(self) -> bool:
        """Never: it can be read again."""
        return False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        leaves = jax.tree.leaves(self.source[self.number])
        found = checked_leaf(leaves, self.number, self.leaf, self.shape, self.dtype)
        return found if dtype is None else found.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        return jax.numpy.asarray(np.asarray(self))

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"SourcedLeaf({self.dtype.name}[{sizes}] of batch {self.number})"


def checked_leaf(
    leaves: list[Any], number: int, leaf: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray:
    """A leaf of a batch that was read, if it is as it shall be.

    Raises:
      ValueError: it has another shape or dtype.
    """
    found = np.asarray(on_host(leaves[leaf])) if leaf < len(leaves) else None
    if found is not None and found.dtype.kind == dtype.kind:
        found = found.astype(dtype, copy=False)
    if found is None or found.shape != shape or found.dtype != dtype:
        what = "there is none" if found is None else f"{found.dtype}{list(found.shape)}"
        raise ValueError(
            f"leaf {leaf} of batch {number} of the source shall be {dtype}{list(shape)}, and is "
            f"{what}"
        )
    return found
