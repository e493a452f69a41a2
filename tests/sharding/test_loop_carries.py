"""Sums over devices that stay in the loops whose trips make them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.passes.sharding.compiler_rules import CPU, GPU, RULES, TPU, CompilerRules
from autopar.passes.sharding.spmd_program import Relayout
from autopar.runtime.loop_carries import added_in_loop

WIDTH, BATCH, LAYERS = 128, 64, 6
MEMORY = 600_000  # the gradients do not fit whole


def step(state: Any, x: Any) -> Any:
    params, momenta = state

    def loss_fn(params: Any) -> Any:
        h = x
        for weights in params:
            h = jnp.tanh(h @ weights)
        return jnp.mean(jnp.square(h))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momenta), momenta), loss


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype("float32") * WIDTH**-0.5
    state = (list(map(jnp.asarray, params)), list(map(jnp.zeros_like, params)))
    return state, jnp.asarray(rng.normal(size=(BATCH, WIDTH)), "float32")


@pytest.mark.parametrize(("method", "is_part"), [("zero2", True), ("data", False)])
@pytest.mark.parametrize("backend", [CPU, TPU])
def test_parts_of_sums_stay_where_compilers_move_them(
    backend: str, method: str, is_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[bool] = []

    def noted(instruction: Relayout, value: Any, rules: CompilerRules) -> Any:
        found = added_in_loop(instruction, value, rules)
        if value.ndim == 2:
            kept.append(found is not value)
        return found

    moves = RULES[backend].moves_scatters
    assert moves == (backend == TPU) and not RULES[GPU].moves_scatters
    monkeypatch.setitem(RULES, CPU, dataclasses.replace(RULES[CPU], moves_scatters=moves))
    monkeypatch.setattr("autopar.runtime.spmd.added_in_loop", noted)
    args = arguments()
    wanted = jax.jit(step)(*args)
    limit: dict[str, Any] = {"memory_limit": MEMORY} if is_part else {}
    run = autopar.compile(step, *args, method=method, microbatches=2, batch_argnums=(1,), **limit)
    found = run(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)
    assert sum(kept) == (LAYERS if moves and is_part else 0)
    if is_part:
        assert len(kept) >= LAYERS
