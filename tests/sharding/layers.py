"""Layers whose known plans tests look for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sharding.steps import Shapes, shaped


def norm(x: Any, scale: Any) -> Any:
    """Root mean square normalization, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    return (y * scale).astype(x.dtype)


def mixture(weights: Any, x: Any) -> Any:
    """Every token goes to one expert, as far as there are places: two times its share."""
    length, experts = x.shape[1], weights["router"].shape[1]
    gates = jax.nn.softmax(x.astype(jnp.float32) @ weights["router"])
    chosen = jax.nn.one_hot(gates.argmax(-1), experts)
    place = (jnp.cumsum(chosen, axis=1) * chosen - 1).astype(jnp.int32)
    sent = jax.nn.one_hot(place, 2 * length // experts, dtype=x.dtype)
    up, down = (weights[name].astype(x.dtype) for name in ("up", "down"))
    taken = jnp.einsum("btec,bth->ebch", sent, x)
    hidden = jax.nn.gelu(jnp.einsum("ebch,ehf->ebcf", taken, up))
    made = jnp.einsum("ebcf,efh->ebch", hidden, down)
    return x + jnp.einsum("btec,ebch->bth", sent * gates[..., None].astype(x.dtype), made)


def mixture_shapes(experts: int, width: int, hidden: int) -> Shapes:
    """The weights of `mixture`."""
    matrices = {"up": shaped(experts, width, hidden), "down": shaped(experts, hidden, width)}
    return {"router": shaped(width, experts), **matrices}
