"""Arrays of typed PRNG keys."""

from __future__ import annotations

from typing import Any

import jax


def is_key(dtype: Any) -> bool:
    """Whether it is the dtype of typed PRNG keys, which collectives and NumPy cannot carry."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))
