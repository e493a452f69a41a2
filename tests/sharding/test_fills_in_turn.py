"""Buffers that begin alike are filled one after the other, and hold the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.passes.sharding import fills_in_turn as module
from autopar.passes.sharding import moments
from autopar.passes.sharding.compiler_rules import CPU, GPU, RULES, TPU
from autopar.passes.sharding.filling_numbers import filling_numbers
from autopar.passes.sharding.fills_in_turn import fills_in_turn
from autopar.passes.sharding.spmd_program import Compute, Loop, reads, writes
from sharding.steps import compiled, graph_of, shaped, sharded

LAYERS, WIDTH, ROWS, MORE, CHUNKS = 4, 16, 32, 16, 4
Layer = Callable[[Any, Any], Any]


def sent_to(start: float) -> Layer:
    """A layer whose rows are put into places that depend on them, and taken out again."""

    def layer(x: Any, w: Any) -> Any:
        def one(x: Any) -> Any:
            places = jnp.argsort(x @ w[:, 0]) + 5
            buffer = jnp.full((len(x) + MORE, w.shape[0]), start)
            return buffer.at[places].set(x), places

        sent, places = jax.vmap(one)(x)
        made = jnp.tanh(sent @ w)
        return jax.vmap(lambda y, p: y[p])(made, places)

    return layer


def chunked(reverse: bool = False, unroll: int = 1) -> Layer:
    """A layer with a scan over chunks of its rows, which carries a state from one to the next."""

    def layer(x: Any, w: Any) -> Any:
        chunks = jnp.moveaxis(jnp.tanh(x @ w).reshape(len(x), CHUNKS, -1, w.shape[0]), 1, 0)

        def chunk(state: Any, rows: Any) -> Any:
            state = state + jnp.einsum("bti,btj->bij", rows, rows @ w) / rows.shape[1]
            return state, jnp.sin(rows @ state)

        state = jnp.zeros((len(x), *w.shape), x.dtype)
        _, made = jax.lax.scan(chunk, state, chunks, reverse=reverse, unroll=unroll)
        return x + jnp.moveaxis(made, 0, 1).reshape(x.shape)

    return layer


def step_of(layer: Layer) -> Callable[[Any, Any], Any]:
    def train_step(weights: Any, x: Any) -> Any:
        def loss_fn(weights: Any) -> Any:
            y = x
            for w in weights:
                y = jax.checkpoint(layer)(y, w)
            return jnp.mean(jnp.square(y))

        loss, gradients = jax.value_and_grad(loss_fn)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    return train_step


def shapes(layers: int = LAYERS, rows: int = ROWS, width: int = WIDTH) -> Any:
    return [shaped(width, width)] * layers, shaped(16, rows, width)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", 1)


@pytest.mark.parametrize(
    ("layer", "method"),
    [
        (sent_to(0.0), "data"),
        (sent_to(3.0), "data"),
        (sent_to(0.0), "zero3"),
        (sent_to(3.0), "zero3"),
        (chunked(), "data"),
        (chunked(reverse=True), "zero3"),
    ],
)
def test_the_numbers_stay(
    small: None, monkeypatch: pytest.MonkeyPatch, layer: Layer, method: str
) -> None:
    fills: list[int] = []

    def noted(*asked: Any) -> Any:
        found = fills_in_turn(*asked)
        fills.append(len(found))
        return found

    monkeypatch.setattr("autopar.runtime.spmd.fills_in_turn", noted)
    monkeypatch.setitem(RULES, CPU, dataclasses.replace(RULES[CPU], keeps_order=True))
    random = np.random.default_rng(0)
    args = jax.tree.map(lambda s: 0.3 * random.normal(size=s.shape).astype(s.dtype), shapes())
    fn = step_of(layer)
    wanted = jax.jit(fn)(*args)
    found = autopar.compile(fn, *args, method=method, microbatches=1)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * max(1.0, np.abs(b).max()))
    assert max(fills) >= LAYERS - 1


def test_each_waits_for_what_it_reads(small: None) -> None:
    program = sharded(compiled(graph_of(step_of(sent_to(0.0)), *shapes()), microbatches=1))
    found = fills_in_turn(program.block, program.mesh, RULES[GPU])
    made = {v: t for t, x in enumerate(program.block.instructions) for v in writes(x)}
    for time, fill in found.items():
        instruction = program.block.instructions[time]
        assert isinstance(instruction, Compute)
        assert fill.constant is instruction.operands[0]
        assert fill.after in instruction.operands[1:] and made[fill.after] < time
    assert len({made[fill.after] for fill in found.values()}) >= LAYERS - 1
    for rules in (RULES[CPU], RULES[TPU]):  # their compilers fill a buffer when it is needed
        assert not fills_in_turn(program.block, program.mesh, rules)


def test_loops_wait_for_what_they_read(small: None) -> None:
    graph = graph_of(step_of(chunked()), *shapes())
    program = sharded(compiled(graph, microbatches=1))
    found = fills_in_turn(program.block, program.mesh, RULES[GPU])
    made = {v: t for t, x in enumerate(program.block.instructions) for v in writes(x)}
    loops = [t for t, x in enumerate(program.block.instructions) if isinstance(x, Loop)]
    assert len(loops) == 3 * LAYERS  # forward, again, backward
    assert [*found] == loops[1:]  # of each kind the first need not wait, in the first loop
    for time, fill in found.items():
        instruction = program.block.instructions[time]
        assert fill.after in reads(instruction) and made[fill.after] < time
        before = max(t for t in loops if t < time)
        assert made[fill.after] > before  # not filled while the loop before still runs
    for rules in (RULES[CPU], RULES[TPU]):
        assert not fills_in_turn(program.block, program.mesh, rules)


def test_loops_that_are_unrolled_are_left(small: None) -> None:
    graph = graph_of(step_of(chunked(unroll=2)), *shapes())
    program = sharded(compiled(graph, microbatches=1))
    assert not fills_in_turn(program.block, program.mesh, RULES[GPU])


@pytest.mark.parametrize("layer", [sent_to(0.0), chunked()])
def test_memory_does_not_grow_with_the_number_of_buffers(
    monkeypatch: pytest.MonkeyPatch, layer: Layer
) -> None:
    cluster = autopar.Cluster.preset("dgx-h100")

    def peak(layers: int) -> int:
        fn, own = step_of(layer), shapes(layers, 4096, 1024)
        plan = autopar.plan(fn, *own, cluster=cluster, method="data", microbatches=1)
        return plan.estimates.peak_bytes_per_device

    more = peak(6) - peak(3)
    monkeypatch.setattr(moments, "fills_in_turn", lambda *asked: {})
    at_once = peak(6) - peak(3)
    buffer = 2 * 4096 * 1024 * 4
    assert at_once - more >= 3 * buffer


@pytest.mark.parametrize("start, number", [(0.0, 0.0), (-0.0, None)])
def test_zeros_of_both_signs_are_not_one_number(start: float, number: float | None) -> None:
    def fn(mask: Any, x: Any) -> Any:
        chosen = jnp.where(mask, jnp.full((8, 8), start), jnp.full((8, 8), 0.0))
        return chosen.at[jnp.arange(8)].add(x)

    graph = graph_of(fn, shaped(8, 8, dtype=bool), shaped(8, 8))
    block = sharded(compiled(graph, microbatches=1)).block
    numbers = filling_numbers(block.instructions, RULES[GPU])
    chosen = [
        numbers.get(value)
        for x in block.instructions
        if isinstance(x, Compute) and x.eqn.primitive.name == "select_n"
        for value in writes(x)
        if value.atom.aval.shape == (8, 8)
    ]
    assert chosen == [number]


@pytest.mark.parametrize(
    ("made", "other"),
    [
        (lambda s: jnp.full(s, 0.7).astype(jnp.int32).astype(jnp.float32), 0.7),
        (lambda s: jnp.full(s, 300).astype(jnp.int8).astype(jnp.float32), 300.0),
        (lambda s: jnp.full(s, 0.7).astype(jnp.bfloat16).astype(jnp.float32), 0.7),
        (lambda s: jnp.full(s, jnp.nan).astype(jnp.int32).astype(jnp.float32), 0.0),
    ],
)
def test_a_number_is_that_after_its_casts(
    small: None, monkeypatch: pytest.MonkeyPatch, made: Callable[[Any], Any], other: float
) -> None:
    """What is chosen from two arrays that were one number before a cast is not one number."""

    def train_step(weights: Any, x: Any, mask: Any) -> Any:
        def loss_fn(weights: Any) -> Any:
            y = x
            for w in weights:
                places = jnp.argsort(y @ w[:, 0])
                buffer = jnp.where(mask, made(mask.shape), jnp.full(mask.shape, other))
                y = jnp.tanh(buffer.at[places].add(y) @ w)[: len(x)]
            return jnp.mean(jnp.square(y))

        loss, gradients = jax.value_and_grad(loss_fn)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    monkeypatch.setitem(RULES, CPU, dataclasses.replace(RULES[CPU], keeps_order=True))
    random = np.random.default_rng(0)
    weights = [random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for _ in range(LAYERS)]
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    args = weights, x, random.random((ROWS + MORE, WIDTH)) < 0.5
    wanted = jax.jit(train_step)(*args)
    asked: dict[str, Any] = {"method": "data", "microbatches": 1, "donate_argnums": ()}
    found = autopar.compile(train_step, *args, **asked)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)


def test_numbers_that_their_casts_do_not_hold_are_planned() -> None:
    def fn(mask: Any) -> Any:
        turned = jnp.full((8, 8), -1, jnp.int32).astype(jnp.uint32)
        return jnp.where(mask, turned, jnp.full((8, 8), 7, jnp.uint32))

    assert autopar.plan(fn, shaped(8, 8, dtype=bool), cluster="1x8 h100").stages
