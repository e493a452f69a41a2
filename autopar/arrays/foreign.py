"""Arrays of other libraries."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def on_host(leaf: Any) -> Any:
    """An array of another library as a NumPy array; JAX's arrays and what is no array stay.

    It is a copy: a source may write its next batch into the memory of the last one.
    """
    if isinstance(leaf, (jax.Array, str, bytes)) or leaf is None:
        return leaf
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if hasattr(leaf, "detach") and hasattr(leaf, "cpu"):  # PyTorch's
        leaf = leaf.detach().cpu()
        if str(leaf.dtype) == "torch.bfloat16":  # which NumPy does not know
            bits = leaf.view(__import__("torch").int16).numpy()
            return bits.view(jax.numpy.bfloat16).copy()
        return leaf.numpy().copy()
    if callable(getattr(leaf, "numpy", None)):  # TensorFlow's
        return np.array(leaf.numpy())
    if hasattr(leaf, "__array__"):
        return np.array(leaf)
    return leaf
