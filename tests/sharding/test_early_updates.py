"""Updates whose results are gathered run when their gradients are there, others in their order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.passes.sharding import moments
from autopar.passes.sharding.early_updates import early_times
from autopar.passes.sharding.run_order import is_gradient_sum
from autopar.passes.sharding.spmd_program import Relayout, reads
from sharding.steps import compiled, graph_of, shaped, sharded

LAYERS = 6


def step_of(is_clipped: bool) -> Any:
    def train_step(state: Any, x: Any) -> Any:
        weights, means = state

        def loss_fn(weights: Any) -> Any:
            y = x.astype(jnp.bfloat16)
            for w in weights:
                y = jnp.tanh(y @ w.astype(jnp.bfloat16))
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        loss, gradients = jax.value_and_grad(loss_fn)(weights)
        if is_clipped:
            norm = sum(jnp.sum(jnp.square(g)) for g in gradients)
            gradients = [g / (1 + norm) for g in gradients]
        means = [0.9 * m + g for m, g in zip(means, gradients, strict=True)]
        return ([w - 0.1 * m for w, m in zip(weights, means, strict=True)], means), loss

    return train_step


def shapes(width: int, rows: int) -> Any:
    weights = [shaped(width, width)] * LAYERS
    return (weights, weights), shaped(rows, width)


@pytest.mark.parametrize("is_clipped", [False, True])
def test_each_is_updated_when_its_gradient_is_there(is_clipped: bool) -> None:
    graph = graph_of(step_of(is_clipped), *shapes(32, 64))
    block = sharded(compiled(graph, method="zero2", microbatches=1)).block
    times = [*map(float, range(len(block.instructions)))]
    found = early_times(block, times)
    sums = [t for t, x in enumerate(block.instructions) if is_gradient_sum(x)]
    large = [t for t in sums if block.instructions[t].target.layout.dims]  # type: ignore[union-attr]
    gathers = [
        t
        for t, x in enumerate(block.instructions)
        if isinstance(x, Relayout) and x.purpose == "state"
    ]
    assert len(gathers) == LAYERS and len(large) == LAYERS
    before_last = [t for t in gathers if found[t] < max(large)]
    assert len(before_last) == (0 if is_clipped else LAYERS - 1)
    order = sorted(range(len(times)), key=found.__getitem__)
    place = {number: n for n, number in enumerate(order)}
    made = {v: t for t, x in enumerate(block.instructions) for v in _writes(x)}
    for time, instruction in enumerate(block.instructions):
        assert all(place[made[v]] < place[time] for v in reads(instruction) if v in made)


def _writes(instruction: Any) -> Any:
    if isinstance(instruction, Relayout):
        return [instruction.target]
    return instruction.results


def test_nothing_moves_where_nothing_is_gathered() -> None:
    graph = graph_of(step_of(False), *shapes(32, 64))
    block = sharded(compiled(graph, method="data", microbatches=1)).block
    times = [*map(float, range(len(block.instructions)))]
    assert early_times(block, times) == times


def test_gradients_are_not_all_there_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = autopar.Cluster.preset("dgx-h100")

    def peak() -> int:
        asked: dict[str, Any] = {"method": "zero1", "microbatches": 1}
        plan = autopar.plan(step_of(False), *shapes(4096, 64), cluster=cluster, **asked)
        return plan.estimates.peak_bytes_per_device

    early = peak()
    monkeypatch.setattr(moments, "early_times", lambda block, times: times)
    assert peak() - early >= (LAYERS - 3) * 4096 * 4096 * 2


@pytest.mark.parametrize("method", ["zero1", "zero2"])
def test_what_the_loss_reads_as_well_is_there(method: str) -> None:
    """The cast of a weight and a scalar of the state, which updates read like the loss."""

    def train_step(state: Any, x: Any) -> Any:
        weights, means, count = state
        scale = 1 / (1 + count)
        casts = [w.astype(jnp.bfloat16) for w in weights]

        def loss_fn(casts: Any) -> Any:
            y = x.astype(jnp.bfloat16)
            for w in casts:
                y = jnp.tanh(y @ w)
            return scale * jnp.mean(jnp.square(y.astype(jnp.float32)))

        loss, gradients = jax.value_and_grad(loss_fn)(casts)
        means = [0.9 * m + scale * g for m, g in zip(means, gradients, strict=True)]
        weights = [
            w - 0.1 * m - 0.01 * c.astype(jnp.float32)
            for w, m, c in zip(weights, means, casts, strict=True)
        ]
        return (weights, means, count + 1), loss

    state, x = shapes(32, 64)
    graph = graph_of(train_step, (*state, shaped()), x)
    block = sharded(compiled(graph, method=method, microbatches=1)).block
    times = [*map(float, range(len(block.instructions)))]
    found = early_times(block, times)
    assert found != times
    order = sorted(range(len(times)), key=found.__getitem__)
    place = {number: n for n, number in enumerate(order)}
    made = {v: t for t, x in enumerate(block.instructions) for v in _writes(x)}
    for time, instruction in enumerate(block.instructions):
        assert all(place[made[v]] < place[time] for v in reads(instruction) if v in made)
