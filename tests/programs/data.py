"""Small random batches with some structure in them, always the same."""

from typing import Any

import numpy as np

BATCH = 32
"""Rows of a batch: four microbatches of eight rows, one per device."""
LENGTH = 16
"""Tokens of a sequence."""
VOCABULARY = 61
"""Kinds of tokens; a prime, so that nothing divides it."""
STEPS = 3
"""Batches that a case holds."""


def tokens(index: int, rows: int = BATCH, length: int = LENGTH) -> np.ndarray:
    """Integers of shape [rows, length] in which a token tells something about the next."""
    rng = np.random.default_rng([1, index])
    first = rng.integers(0, VOCABULARY, (rows, 1))
    stride = rng.integers(1, 4, (rows, 1))
    return ((first + stride * np.arange(length)) % VOCABULARY).astype(np.int32)


def lengths(index: int, rows: int = BATCH, length: int = LENGTH) -> np.ndarray:
    """Valid tokens of every row, between 2 and `length`."""
    return np.random.default_rng([2, index]).integers(2, length + 1, rows).astype(np.int32)


def images(
    index: int, size: int = 8, channels: int = 3, rows: int = BATCH, dtype: Any = np.float32
) -> np.ndarray:
    """Normal noise plus a gradient whose direction is the label, [rows, size, size, channels]."""
    rng = np.random.default_rng([3, index])
    ramp = np.linspace(-1, 1, size)[:, None, None]
    noise = rng.normal(size=(rows, size, size, channels))
    return (noise + classes(index, rows)[:, None, None, None] / 5 * ramp).astype(dtype)


def classes(index: int, rows: int = BATCH, kinds: int = 10) -> np.ndarray:
    """Integer labels of shape [rows]."""
    return np.random.default_rng([4, index]).integers(0, kinds, rows).astype(np.int32)


def vectors(index: int, width: int = 24, rows: int = BATCH, dtype: Any = np.float32) -> np.ndarray:
    """Normal vectors of shape [rows, width], shifted by the label."""
    rng = np.random.default_rng([5, index])
    shift = classes(index, rows)[:, None] / 5 * np.cos(np.arange(width))
    return (rng.normal(size=(rows, width)) + shift).astype(dtype)
