"""The last stage runs a microbatch forward and backward in one program, if nothing is between."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.passes.schedules.make import make_schedule

WIDTH, WORDS, DEPTH, ROWS = 16, 512, 4, 32


def train_step(params: Any, x: Any) -> Any:
    """A head that is much larger than the layers, as a language model's is."""

    def loss_fn(params: Any) -> Any:
        y = x
        for w in params["layers"]:
            y = y + jnp.tanh(y @ w)
        logits = y @ params["head"]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments() -> tuple[Any, Any]:
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32) / 4

    layers = [matrix(WIDTH, WIDTH) for _ in range(DEPTH)]
    return {"layers": layers, "head": matrix(WIDTH, WORDS)}, matrix(ROWS, WIDTH)


def planned(**options: Any) -> autopar.Plan:
    options = {"cluster": "4x2 h100", "stages": 2, "microbatches": 4, "method": "data", **options}
    return autopar.plan(train_step, *arguments(), **options)


def names(plan: autopar.Plan) -> set[str]:
    assert plan.pipeline is not None and plan.pipeline.model is not None
    return {piece.name for piece in plan.pipeline.model.pieces if piece.when in ("F", "B", "W")}


@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b"])
def test_logits_wait_for_nobody(schedule: str) -> None:
    plan = planned(schedule=schedule)
    assert names(plan) == {"F0", "B0", "B1"}
    apart = planned(schedule=schedule, stages=[autopar.Stage(), autopar.Stage(remat="full")])
    assert names(apart) == {"F0", "B0", "F1", "B1"}
    assert plan.stages[1].remat == "none" and apart.stages[1].remat == "full"
    logits = ROWS // 4 // 4 * WORDS * 4
    kept, again = (x.stages[1].peak_bytes_per_device for x in (plan, apart))
    assert kept <= again + logits // 4
    assert plan.estimates.step_seconds <= apart.estimates.step_seconds


def test_a_schedule_with_something_in_between_has_both() -> None:
    plan = planned(schedule="gpipe")
    assert names(plan) == {"F0", "B0", "F1", "B1"}
    together = planned(schedule="1f1b")
    logits = ROWS // 4 // 4 * WORDS * 4
    more = plan.stages[1].peak_bytes_per_device - together.stages[1].peak_bytes_per_device
    assert more >= 4 * logits  # of every microbatch in flight


def test_split_backward_passes_still_have_their_weights_gradients() -> None:
    assert names(planned(schedule="zb_h1")) == {"F0", "B0", "W0", "B1", "W1"}


def test_the_numbers_are_those_of_the_plain_step() -> None:
    params, x = arguments()
    wanted = jax.jit(train_step)(params, x)
    for schedule in ("1f1b", "eager_1f1b", "zb_h1", "gpipe"):
        options: dict[str, Any] = {"stages": 2, "microbatches": 4, "schedule": schedule}
        step = autopar.compile(train_step, params, x, donate_argnums=(), **options)
        found = step(params, x)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(np.asarray(one), other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["1f1b", "eager_1f1b", "zb_h1", "zb_h2"])
def test_only_the_last_stage_has_nothing_in_between(name: str) -> None:
    assert make_schedule(name, 3, 6).at_once == (False, False, True)
    chunks = make_schedule("interleaved_1f1b", 2, 4, num_chunks=2)
    assert chunks.at_once[:-1] == (False, False, False)
