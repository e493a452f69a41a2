"""Sums over devices stay in loops whose trips make them; stacks lie in their own order."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import with_layout_constraint

import autopar
from autopar.passes.sharding.compiler_rules import CPU, GPU, RULES, TPU, CompilerRules
from autopar.passes.sharding.spmd_program import Relayout
from autopar.runtime import loop_carries
from autopar.runtime.loop_carries import added_in_loop, in_order

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


def scanned_step(params: Any, x: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return jnp.tanh(jnp.einsum("bij,jk->bki", h, w)).swapaxes(1, 2), None

        h, _ = jax.lax.scan(layer, x, params)
        return jnp.mean(jnp.square(h))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return params - 0.1 * grads, loss


def test_stacks_lie_as_they_are_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_carries, "STACKED_BYTES", 1)
    rules = dataclasses.replace(RULES[CPU], keeps_order=True)
    told: list[tuple[int, ...]] = []

    def noted(value: Any, layout: Any) -> Any:
        told.append(value.shape)
        return with_layout_constraint(value, layout)

    monkeypatch.setattr(loop_carries, "with_layout_constraint", noted)
    monkeypatch.setitem(RULES, CPU, rules)
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=(LAYERS, 16, 16)) / 4, jnp.float32)
    args = params, jnp.asarray(rng.normal(size=(BATCH, 8, 16)), jnp.float32)
    wanted = jax.jit(scanned_step)(*args)
    run = autopar.compile(scanned_step, *args, method="data", microbatches=1, batch_argnums=(1,))
    found = run(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)
    assert told and all(len(shape) == 3 for shape in told), "the activations, no matrix"


def test_only_large_slices_with_an_order_to_choose_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cube, keys = jnp.zeros((2, 2, 2)), jax.random.split(jax.random.key(0), 8).reshape(2, 2, 2)
    values = [cube, keys, jnp.zeros((2, 2))]

    def told(rules: CompilerRules) -> list[bool]:
        found = jax.make_jaxpr(lambda *own: in_order(own, rules))(*values).jaxpr
        return [out is not own for own, out in zip(found.invars, found.outvars, strict=True)]

    assert told(RULES[GPU]) == [False, False, False], "small"
    monkeypatch.setattr(loop_carries, "STACKED_BYTES", 1)
    assert told(RULES[GPU]) == [True, False, False]
    assert told(RULES[CPU]) == [False, False, False]
