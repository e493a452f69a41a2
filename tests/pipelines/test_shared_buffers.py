"""Buffers that two stages of one mesh share are nobody's to take over."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from autopar.passes.pipeline.emit import _release
from autopar.passes.pipeline.instructions import Buffer, Reshard, Run

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3))


def train_step(state: Any, x: Any) -> Any:
    params, moments = state

    def loss_fn(params: Any) -> Any:
        y = params["table"][x]
        for w in params["layers"]:
            y = y + jnp.tanh(y @ w)
        logits = y @ params["table"].T
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def test_a_clipped_step_in_chunks_is_the_plain_step() -> None:
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / 3, jnp.float32)

    params = {"table": matrix(32, 16), "layers": [matrix(16, 16) for _ in range(6)]}
    state = wanted = (params, OPTIMIZER.init(params))
    x = jnp.asarray(random.integers(0, 32, (16, 8)))
    chunks: dict[str, Any] = {"schedule": "interleaved_1f1b", "num_chunks": 2, "stages": 2}
    step = autopar.compile(
        train_step, state, x, microbatches=4, method="zero2", remat="full", **chunks
    )
    found = jax.tree.map(jnp.copy, state)
    for _ in range(2):
        wanted, _ = jax.jit(train_step)(wanted, x)
        found, _ = step(found, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=2e-4, atol=2e-5)


def test_the_last_of_two_names_is_donated() -> None:
    one, two, out = (Buffer(number, None) for number in range(3))

    def run(reads: tuple[Buffer, ...], donates: tuple[Buffer, ...]) -> Run:
        return Run("epilogue 0.0", 0, "epilogue", None, reads, (out,), donates)

    def donated(*runs: Run) -> list[tuple[Buffer, ...]]:
        made = _release([Reshard(one, two), *runs], kept={out}, given={one})
        return [x.donates for x in made if isinstance(x, Run)]

    assert donated(run((one,), (one,)), run((two,), (two,))) == [(), (two,)]
    assert donated(run((two,), (two,)), run((one,), (one,))) == [(), (one,)]
    assert donated(run((one, two), (one,))) == [()]
    assert donated(run((two,), (two,))) == [(two,)]
