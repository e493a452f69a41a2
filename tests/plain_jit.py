"""A compiled step beside plain `jax.jit` of it on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import autopar


def equals_plain_jit(
    step: Callable[..., Any],
    *arguments: Any,
    rtol: float = 2e-5,
    atol: float = 2e-6,
    **options: Any,
) -> autopar.Executable:
    """Compile a step, compare what it computes with what `jax.jit` does, and return it."""
    compiled = autopar.compile(step, *arguments, donate_argnums=(), **options)
    found, expected = compiled.gather(compiled(*arguments)), jax.jit(step)(*arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)
    return compiled
