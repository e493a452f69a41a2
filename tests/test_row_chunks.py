"""Steps that take their rows in chunks, by `jax.lax.map(f, xs, batch_size=k)`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.errors import InexactMicrobatchError

ROWS, WIDTH = 24, 16


def step_in_chunks(chunk: int) -> Any:
    def loss(params: Any, x: Any) -> Any:
        row = lambda v: jnp.tanh(v @ params["a"]) @ params["b"]  # noqa: E731
        return jnp.mean(jax.lax.map(row, x, batch_size=chunk) ** 2)

    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arguments() -> tuple[Any, Any]:
    numbers = np.random.default_rng(0)
    params = {name: numbers.normal(size=(WIDTH, WIDTH)).astype("f") / 4 for name in "ab"}
    return params, numbers.normal(size=(ROWS, WIDTH)).astype("f")


@pytest.mark.parametrize("chunk", [3, 5, 6, 7])
def test_chunks_that_mix_microbatches_are_refused_with_those_that_do(chunk: int) -> None:
    with pytest.raises(InexactMicrobatchError) as refused:
        autopar.plan(step_in_chunks(chunk), *arguments(), microbatches=4)
    said = " ".join(str(refused.value).split())
    assert f"rows in chunks of {chunk}, as by jax.lax.map(..., batch_size={chunk})" in said
    assert "use chunks of 4, 8, 12, 24 rows" in said


@pytest.mark.parametrize("chunk", [4, 8, 12, 24])
def test_chunks_that_are_named_compute_what_jit_does(chunk: int) -> None:
    step, given = step_in_chunks(chunk), arguments()
    ours = autopar.compile(step, *given, microbatches=4, donate_argnums=())
    assert ours.plan.num_microbatches == 4
    pairs = zip(jax.tree.leaves(ours(*given)), jax.tree.leaves(jax.jit(step)(*given)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
