"""What a stage's devices hold: its own account, the integer program's rows, and the timeline."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.passes.planner import candidates
from autopar.passes.planner.candidates import PlannedStep
from autopar.passes.schedules.flight import in_flight
from autopar.passes.schedules.make import make_schedule
from autopar.passes.sharding.memory_rows import StageMemory, memory_rows, rows_peak

WIDTH, DEPTH = 32, 4
CLUSTER = autopar.Cluster.preset("p3.16xlarge")


def train_step(params: Any, x: Any) -> Any:
    def block(w: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

    def loss_fn(params: Any) -> Any:
        y = x
        for w in params:
            y = jax.checkpoint(block)(w, y)
        return jnp.mean(jnp.square(y))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments(rows: int) -> tuple[Any, Any]:
    up, down = ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    shapes = {
        "up": jax.ShapeDtypeStruct(up, "float32"),
        "down": jax.ShapeDtypeStruct(down, "float32"),
    }
    return [shapes] * DEPTH, jax.ShapeDtypeStruct((rows, 64, WIDTH), "float32")


def planned(monkeypatch: Any, rows: int, **options: Any) -> tuple[autopar.Plan, list[PlannedStep]]:
    made: list[PlannedStep] = []

    def assemble(*values: Any) -> PlannedStep:
        made.append(original(*values))
        return made[-1]

    original = candidates.assemble
    monkeypatch.setattr(candidates, "assemble", assemble)
    options = {"cluster": CLUSTER, "stages": 4, "method": "shard", **options}
    plan = autopar.plan(train_step, *arguments(rows), **options)
    monkeypatch.undo()
    return plan, made


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [("1f1b", "none"), ("1f1b", "full"), ("gpipe", "none"), ("zb_h1", "none")],
)
def test_a_stage_knows_what_the_timeline_says(
    monkeypatch: pytest.MonkeyPatch, schedule: str, remat: str
) -> None:
    _, made = planned(monkeypatch, 64, microbatches=16, schedule=schedule, remat=remat)
    (step,) = made
    above = 1.25 if schedule == "zb_h1" else 1.1  # not all that is in flight is so at once
    for stage, (known, real) in enumerate(zip(step.planned, step.peak_bytes, strict=True)):
        assert real <= known.peak.bytes <= above * real
        memory = StageMemory(in_flight(step.schedule, stage), known.remat)
        rows = memory_rows(known.built, memory)
        assert rows_peak(known.built, rows, known.solution.assignment) >= 0.7 * real


def test_stacks_of_all_microbatches_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many microbatches need no more than few; a plan that fits is the one without a limit."""
    options: dict[str, Any] = {"schedule": "1f1b", "remat": "none"}
    _, (few,) = planned(monkeypatch, 32, microbatches=8, **options)
    free, (many,) = planned(monkeypatch, 1024, microbatches=256, **options)
    inner = slice(1, -1)  # the first and the last stage hold the batch
    assert max(many.peak_bytes[inner]) < 2 * max(few.peak_bytes[inner])
    stack = 1024 * 64 * WIDTH * 4 // 2
    limit = max(many.peak_bytes) * 11 // 10
    assert max(few.peak_bytes) < stack
    tight, _ = planned(monkeypatch, 1024, microbatches=256, memory_limit=limit, **options)
    assert tight.estimates.step_seconds == free.estimates.step_seconds
    assert [s.strategies for s in tight.stages] == [s.strategies for s in free.stages]


def test_what_is_in_flight() -> None:
    def between(name: str, stage: int, count: int = 16) -> tuple[int, ...]:
        return tuple(in_flight(make_schedule(name, 4, count), stage).values())

    assert [between("1f1b", stage)[0] for stage in range(4)] == [4, 3, 2, 1]
    assert between("1f1b", 0, 2) == (2, 2, 1)
    assert between("gpipe", 2) == (16, 16, 1)
    assert between("zb_h1", 3)[0] == 1
    assert between("zb_h1", 3)[2] > 1, "weight gradients wait"
    assert between("inference", 1) == (16, 16, 0)


def test_results_that_are_numbers_at_the_worst_moment() -> None:
    """A large buffer of the state begins anew with zeros, which are a number and no variable."""

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return jnp.mean((jnp.tanh(batch["x"] @ params[0]) @ params[1] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "seen": jnp.zeros((256, 256))}, (loss, 0.0)

    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=(2, 16, 16)) / 4, "float32")
    batch = {name: jnp.asarray(rng.normal(size=(8, 16)), "float32") for name in "xy"}
    state = {"params": list(params), "seen": jnp.ones((256, 256))}
    parallel = autopar.compile(
        step, state, batch, stages=2, microbatches=2, schedule="gpipe", donate_argnums=()
    )
    found, expected = parallel(state, batch), jax.jit(step)(state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
