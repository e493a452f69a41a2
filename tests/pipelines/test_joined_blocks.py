"""Blocks with `jax.checkpoint` that run again together, where all that enters each is too much."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from sharding.steps import graph_of

import autopar
from autopar.passes import microbatch
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import variables
from autopar.passes.graph.jumps import compared
from autopar.passes.primitives.populate import populate
from autopar.passes.recompute.choice import KeptValues
from autopar.passes.recompute.joined_blocks import JoinedBlocks

WIDTH, LENGTH, ROWS = 8, 64, 48


def normalized(x: Any) -> Any:
    """As Flax normalizes layers, with a variance that is at least 0."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, (x * x).mean(-1, keepdims=True) - mean * mean)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6)


@jax.checkpoint
def block(weights: Any, x: Any) -> Any:
    x = x + jnp.tanh(normalized(x) @ weights["up"]) @ weights["down"]
    return x + normalized(x) @ weights["last"]


def train_step(layers: Any, batch: Any) -> Any:
    def loss_of(layers: Any) -> Any:
        x = batch
        for weights in layers:
            x = block(weights, x)
        return jnp.mean((x - batch[:, ::-1]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(layers)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients), loss


def arguments(depth: int) -> tuple[Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 3 * depth + 1))

    def weights(*shape: int) -> Any:
        return 0.3 * jax.random.normal(next(keys), shape)

    layers = [
        {
            "up": weights(WIDTH, 2 * WIDTH),
            "down": weights(2 * WIDTH, WIDTH),
            "last": weights(WIDTH, WIDTH),
        }
        for _ in range(depth)
    ]
    return layers, jax.random.normal(next(keys), (ROWS, LENGTH, WIDTH))


def values_of(depth: int) -> KeptValues:
    graph = graph_of(train_step, *arguments(depth))
    whole = microbatch.in_one_microbatch(graph, populate(graph.jaxpr))
    rules = populate(whole.graph.jaxpr)
    return KeptValues.of(
        whole, rules, lambda eqn: sum(v.aval.size for v in eqn.outvars) * 1e-9, at_once=False
    )


@pytest.mark.parametrize("depth", [2, 7, 10])
def test_segments_are_as_long_as_the_others(depth: int) -> None:
    values = values_of(depth)
    joined, passed = JoinedBlocks(values), ROWS * LENGTH * WIDTH * 4
    assert len(joined) == depth - math.ceil(math.sqrt(depth))
    spared = [joined[place].saved_bytes for place in range(len(joined))]
    assert np.diff(spared).tolist() == [passed] * (len(spared) - 1)
    read_late = {
        values.maker[var]
        for number in values.late
        for var in variables(values.parts.body.eqns[number].invars)
        if var in values.crossing
    }
    for more in range(1, len(joined) + 1):
        layer_of = joined.of(more).layer_of
        assert layer_of.keys() == values.layer_of.keys()
        sizes = dict.fromkeys(sorted({*layer_of.values()}), 0)
        for number in sorted(read_late):
            sizes[layer_of[number]] += 1
        lengths = [*sizes.values()][:-1]  # of the last block nothing passes on
        assert len(sizes) == depth - more
        assert lengths == sorted(lengths, reverse=True) and max(lengths) - min(lengths) <= 1


def test_what_is_compared_with_itself_may_be_another_value() -> None:
    def backward(x: Any, largest: Any) -> Any:
        once = jnp.where(x > 0, x, 0.0)
        at_least = jnp.where(jnp.var(x) == jnp.maximum(0.0, jnp.var(x)), once, -once)
        return at_least + (x == largest)

    body = jax.make_jaxpr(backward)(jnp.ones(8), jnp.ones(())).jaxpr
    assert compared(body.eqns) >= {*body.invars}
    alone = jax.make_jaxpr(lambda x: backward(x, 0.0))(jnp.ones(8)).jaxpr
    assert not compared(alone.eqns, lambda var: False)
    assert not compared(body.eqns, lambda var: var is body.invars[1])


def test_what_is_decided_once_is_not_decided_again() -> None:
    """The backward pass reads a place that is kept, and computes the rest from what it was of."""

    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("i", "z")
    )
    def looked_up(weights: Any, y: Any) -> Any:
        z = checkpoint_name(jnp.tanh(y @ weights["in"]) * 3.0, "z")
        place = checkpoint_name(jnp.clip(jnp.floor(z).astype(jnp.int32) + 4, 0, 7), "i")
        rest = z - jnp.floor(z)
        table = weights["table"]
        return y + (table[place] * (1 - rest) + table[place + 1] * rest) @ weights["in"]

    def step(layers: Any, x: Any) -> Any:
        def loss_of(layers: Any) -> Any:
            y = x
            for weights in layers:
                y = looked_up(weights, y)
            return jnp.mean(y**2)

        return jax.value_and_grad(loss_of)(layers)

    weights = [{"in": jnp.ones((WIDTH, WIDTH)), "table": jnp.arange(9.0)} for _ in range(4)]
    graph = graph_of(step, weights, jnp.ones((ROWS, WIDTH)))
    whole = microbatch.in_one_microbatch(graph, populate(graph.jaxpr))
    values = KeptValues.of(whole, populate(whole.graph.jaxpr), lambda eqn: 1e-9, at_once=False)
    eqns = values.parts.body.eqns
    late = [eqns[number] for number in sorted(values.late)]
    floors = [v for eqn in late if eqn.primitive.name == "floor" for v in variables(eqn.invars)]
    barriers = [eqn for eqn in late if is_barrier(eqn)]
    before = {v: x for eqn in barriers for v, x in zip(eqn.outvars, eqn.invars, strict=True)}
    decided = [values.maker[before[v]] for v in floors]
    assert decided and not any(map(values.may_run_again, decided))


ASKED: dict[str, Any] = {"stages": 2, "microbatches": 6, "schedule": "gpipe"}


@functools.cache
def limit() -> int:
    """Between the memory with all blocks apart, and with all of a stage computed again."""
    kept, full = (
        planned(remat=remat).estimates.peak_bytes_per_device for remat in ("auto", "full")
    )
    return (2 * kept + full) // 3


def planned(**options: Any) -> autopar.Plan:
    cluster = autopar.Cluster.local(jax.devices()[:2])
    return autopar.plan(train_step, *arguments(8), cluster=cluster, **ASKED, **options)


def test_a_stage_is_quicker_so_than_all_again() -> None:
    plan, full = planned(memory_limit=limit()), planned(remat="full")
    again = [stage.recomputation for stage in plan.stages]
    assert any(found is not None and found.joined for found in again), plan
    assert plan.estimates.peak_bytes_per_device <= limit()
    assert plan.estimates.step_seconds < full.estimates.step_seconds
    assert "joined" in str(plan)


def test_the_numbers_are_those_of_the_plain_step(tmp_path: Path) -> None:
    asked = {**ASKED, "cluster": autopar.Cluster.local(jax.devices()[:2]), "memory_limit": limit()}
    step = autopar.compile(train_step, *arguments(8), **asked)
    assert any(x.recomputation and x.recomputation.joined for x in step.plan.stages)
    found, expected = step(*arguments(8)), jax.jit(train_step)(*arguments(8))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    step.plan.save(tmp_path / "plan.json")
    known = autopar.Plan.load(tmp_path / "plan.json")
    assert known == step.plan
    followed = autopar.compile(train_step, *arguments(8), plan=known, **asked)
    assert followed.plan.decisions_hash == known.decisions_hash
    jax.tree.map(np.testing.assert_array_equal, followed(*arguments(8)), found)
