"""Weights are gathered while the products before their reader run, and not earlier."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.passes.sharding import loop_order, moments, run_order
from autopar.passes.sharding.compiler_rules import CPU, RULES
from autopar.passes.sharding.gathers_in_time import GATHERS_AHEAD, gathers_in_time
from autopar.passes.sharding.run_order import after_ties, ties
from autopar.passes.sharding.spmd_program import Relayout, reads, writes
from autopar.passes.sharding.waiting import is_product
from sharding.steps import compiled, graph_of, shaped, sharded

WIDTH, LAYERS, ROWS = 32, 8, 32


def train_step(weights: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w.astype(x.dtype))

    def loss_fn(weights: Any) -> Any:
        y = x.astype(jnp.bfloat16)
        for w in weights:
            y = jax.checkpoint(layer)(y, w)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


SHAPES = [shaped(WIDTH, WIDTH)] * LAYERS, shaped(ROWS, WIDTH)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_order, "LARGE_BYTES", 1)


def test_gathers_begin_with_an_earlier_product(small: None) -> None:
    program = sharded(compiled(graph_of(train_step, *SHAPES), method="zero3", microbatches=1))
    instructions = program.block.instructions
    products = [t for t, x in enumerate(instructions) if is_product(x)]
    forward = products[:LAYERS]
    found = ties(program.block, program.mesh)
    begun = {gather.target: time for time, tie in found.items() for gather in tie.gathers}
    made = {v: t for t, x in enumerate(instructions) for v in writes(x)}
    gathered = {x.target for x in instructions if isinstance(x, Relayout)}
    for place, time in enumerate(forward[GATHERS_AHEAD:]):
        (weight,) = gathered & set(reads(instructions[time]))
        assert begun[weight] == forward[place], "so many products before the one that reads it"
        tie = found[begun[weight]]
        assert tie.operand not in gathered, "it waits for what is computed, not for a gather"
        assert tie.operand in reads(instructions[forward[place]])
        (gather,) = (x for x in tie.gathers if x.target == weight)
        assert isinstance(instructions[gather.number], Relayout)
        assert gather.source in tie.results
        before = [writes(instructions[number])[0] for number in gather.before]
        assert made[gather.source] < forward[place] or gather.source in before
    moved = [n for tie in found.values() for gather in tie.gathers for n in gather.before]
    assert len(moved) == len(set(moved)), "what makes a source runs once"


def test_what_several_gathers_are_made_of_is_left(small: None) -> None:
    program = sharded(compiled(graph_of(train_step, *SHAPES), method="zero3", microbatches=1))
    block = program.block
    products = [t for t, x in enumerate(block.instructions) if is_product(x)]
    assert gathers_in_time(block, program.mesh, products)
    moves = [x for x in block.instructions if isinstance(x, Relayout)]
    of_one = tuple(
        dataclasses.replace(x, source=moves[0].source) if isinstance(x, Relayout) else x
        for x in block.instructions
    )
    alike = dataclasses.replace(block, instructions=of_one)
    assert not gathers_in_time(alike, program.mesh, products)


def test_the_numbers_stay(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def noted(*asked: Any) -> Any:
        found = ties(*asked)
        begun.append(sum(len(tie.gathers) for tie in found.values()))
        return found

    monkeypatch.setitem(RULES, CPU, dataclasses.replace(RULES[CPU], keeps_order=True))
    monkeypatch.setattr("autopar.runtime.spmd.ties", noted)
    random = np.random.default_rng(0)
    args = jax.tree.map(lambda s: random.normal(size=s.shape).astype(s.dtype), SHAPES)
    wanted = jax.jit(train_step)(*args)
    found = autopar.compile(train_step, *args, method="zero3", microbatches=1)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3), found, wanted)
    assert max(begun) >= LAYERS - GATHERS_AHEAD


def test_what_is_gathered_meanwhile_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [shaped(4096, 4096)] * LAYERS, shaped(64, 4096)
    asked: dict[str, Any] = {"method": "zero3", "microbatches": 1, "batch_argnums": (1,)}

    def infer(weights: Any, x: Any) -> Any:
        y = x.astype(jnp.bfloat16)
        for w in weights:
            y = jnp.tanh(y @ w.astype(y.dtype))
        return y

    def peak() -> int:
        plan = autopar.plan(infer, *shapes, cluster=autopar.Cluster.preset("dgx-h100"), **asked)
        return plan.estimates.peak_bytes_per_device

    ahead = peak()
    monkeypatch.setattr(run_order, "gathers_in_time", lambda *asked: {})
    monkeypatch.setattr(moments, "ties", run_order.ties)
    assert ahead - peak() >= 1.5 * 4096 * 4096 * 2, "two more weights, less their parts"


def mixed_step(weights: Any, x: Any) -> Any:
    """Weights that one product reads as they are, and another one cast and transposed."""

    def loss_fn(weights: Any) -> Any:
        casts = [w.astype(jnp.bfloat16) for w in weights]
        y = x
        for w, cast in zip(weights, casts, strict=True):
            y = jnp.tanh(y @ w)
            y = jnp.tanh(y.astype(jnp.bfloat16) @ cast.T).astype(jnp.float32)
        return jnp.mean(jnp.square(y))

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


@pytest.mark.parametrize("step", [train_step, mixed_step])
def test_every_instruction_runs_once_after_what_it_reads(small: None, step: Any) -> None:
    program = sharded(compiled(graph_of(step, *SHAPES), method="zero3", microbatches=1))
    block = program.block
    found = ties(block, program.mesh)
    assert any(gather.before for tie in found.values() for gather in tie.gathers)
    moved = after_ties(block, found)
    there, ran = {*block.inputs}, list[int]()

    def run(number: int) -> None:
        assert there.issuperset(reads(block.instructions[number]))
        there.update(writes(block.instructions[number]))
        ran.append(number)

    for number in range(len(block.instructions)):
        if number in found:
            for gather in found[number].gathers:
                for place in gather.before:
                    run(place)
                    assert place not in moved
            assert there.issuperset((found[number].operand, *found[number].results))
        for place, after in moved.items():
            if after == number:
                run(place)
        if number not in moved and number not in ran:
            run(number)
    assert sorted(ran) == [*range(len(block.instructions))]
