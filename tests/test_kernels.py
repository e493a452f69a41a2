"""Steps with kernels: Pallas attention, grouped products, foreign code, on slices of every kind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factors import pallas_kernels as kernels
from jax import lax
from plain_jit import equals_plain_jit

import autopar
from autopar.errors import UnknownPrimitiveWarning


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def attention_loss(params: Any, x: Any) -> Any:
    q = jnp.einsum("btm,mhd->bhtd", x, params["q"])
    k, v = jnp.einsum("btm,imhd->ibhtd", x, params["kv"])
    out = jnp.einsum("bhtd,hdm->btm", kernels.attention(q, k, v), params["out"])
    return jnp.mean((out - x) ** 2)


def experts_loss(params: Any, x: Any) -> Any:
    """Each row goes to one of four experts, whatever is in the row."""
    rows = x.reshape(-1, x.shape[-1])
    sizes = jnp.full((4,), rows.shape[0] // 4, jnp.int32)
    hidden = jax.nn.relu(lax.ragged_dot(rows, params["in"], sizes))
    return jnp.mean((lax.ragged_dot(hidden, params["out"], sizes) - rows) ** 2)


PARAMS: dict[str, Any] = {
    "attention": {
        "q": normal(8, 8, 2),
        "kv": normal(2, 8, 4, 2, seed=1),
        "out": normal(8, 2, 8, seed=2),
    },
    "experts": {"in": normal(4, 8, 16, seed=3), "out": normal(4, 16, 8, seed=4)},
}
LOSSES = {"attention": attention_loss, "experts": experts_loss}


def step_of(loss: Any) -> Any:
    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("attention", {"method": "data"}),
        ("attention", {"method": "shard", "logical_mesh": (2, 4)}),
        ("attention", {"microbatches": 2, "stages": 2}),
        ("experts", {"method": "data"}),
        ("experts", {"logical_mesh": (2, 4), "pins": {"*in": ("y",), "*out": ("y",)}}),
    ],
    ids=str,
)
def test_steps_with_kernels_equal_plain_jit(name: str, options: dict[str, Any]) -> None:
    x = normal(16, 4, 8, seed=5)
    compiled = equals_plain_jit(step_of(LOSSES[name]), PARAMS[name], x, **options)
    if options.get("method") == "data":  # gradients alone
        (stage,) = compiled.plan.stages
        assert {c.kind for c in stage.collectives} == {"all-reduce"}, compiled.plan


def test_foreign_code_is_whole_with_a_warning_that_names_the_line() -> None:
    def step(w: Any, x: Any) -> Any:
        call = jax.ffi.ffi_call("my_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return w + jnp.sum(lax.stop_gradient(call(x * w))), w

    with pytest.warns(UnknownPrimitiveWarning, match=r"ffi_call at .*test_kernels.py.*\n?.*local"):
        autopar.plan(step, normal(), normal(16, 4), cluster=autopar.Cluster.preset("dgx-h100"))
