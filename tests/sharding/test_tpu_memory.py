"""Rules of XLA:TPU, on programs whose buffers can be counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.passes.planner.compiler import compile_graph
from autopar.passes.sharding.compiler_rules import RULES, TPU
from autopar.passes.sharding.heap import HeapBuffer, heap_bytes, in_order, live_bytes
from autopar.passes.sharding.layout import replicated
from autopar.passes.sharding.peak_memory import MemoryPeak, peak
from autopar.passes.sharding.spmd_program import Block, Compute, ShardedValue, SpmdProgram
from autopar.runtime.verification.peak_buffers import temporary_bytes
from sharding.steps import compiled, graph_of, shaped, sharded

DEVICES = 8


def peak_of(step: Any, *shapes: Any, method: str = "data") -> MemoryPeak:
    made = compiled(graph_of(step, *shapes, batch_argnums=(1,)), method=method, microbatches=1)
    donated = [label.donated for label in made.graph.inputs]
    return peak(dataclasses.replace(sharded(made), rules=RULES[TPU]), {}, donated)


def sizes(found: MemoryPeak, text: str) -> list[int]:
    return sorted((size for label, size in found.alive if label.startswith(text)), reverse=True)


@pytest.mark.parametrize("function", [lambda x: x, jnp.tanh, lambda x: jnp.exp(x) * x])
def test_products_compute_their_operands(function: Any) -> None:
    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for weight in weights:
                y = function(y @ weight)
            return jnp.sum(y * y)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    found = peak_of(step, [shaped(64, 64)] * 4, shaped(DEVICES * 1024, 64))
    # Of every layer its product and that of the backward pass, for gradients that come at the end.
    assert len(sizes(found, "float32[8192,64]")) <= 8


@pytest.mark.parametrize("features", [128, 256])
def test_halves_are_written_before_they_are_put_together(features: int) -> None:
    def rotated(x: Any) -> Any:
        one, other = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([2 * one - other, 2 * other + one], axis=-1)

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            batch, sequence, width = x.shape
            heads = (batch, sequence, width // features, features)
            q, k, v = ((x @ weight).reshape(heads) for weight in weights)
            scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k)).astype(jnp.float32)
            y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    width, sequence = 1024, 2048
    weights = [shaped(width, width, dtype=jnp.bfloat16)] * 3
    found = peak_of(step, weights, shaped(DEVICES, sequence, width, dtype=jnp.bfloat16))
    size = sequence * width * 2
    halves = f"bfloat16[{DEVICES},{sequence},{width // features},{features // 2}]"
    # Of queries and of keys two halves each, which fill half of the lanes where these are 128.
    assert sizes(found, halves) == [size if features == 128 else size // 2] * 4
    assert len(sizes(found, f"bfloat16[{DEVICES},{sequence},{width}]")) == 1  # the values


def test_a_product_waits_for_the_sum_that_takes_it() -> None:
    def step(table: Any, tokens: Any) -> Any:
        def loss(table: Any) -> Any:
            x = table[tokens]
            for _ in range(3):
                x = jnp.sin(x) @ table[:32]
            return jnp.sum(jnp.exp(x @ table.T))  # tied: read once more, at the end

        return table - jax.grad(loss)(table)

    tokens = jax.ShapeDtypeStruct((DEVICES * 512,), jnp.int32)
    found = peak_of(step, shaped(4096, 32), tokens)
    # The logits are read by the product whose result is added to the gathers' gradient.
    assert sizes(found, "float32[4096,4096]") == [512 * 4096 * 4]
    assert sum(sizes(found, "float32[4096,32]")) < 8 * 4096 * 32 * 4


def test_products_are_left_to_the_end_where_state_is_gathered_there() -> None:
    def step(state: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for weight in weights:
                y = jnp.tanh(y @ weight)
            return jnp.sum(y * y)

        weights, velocity = state
        gradients = jax.grad(loss)(weights)
        velocity = jax.tree.map(lambda v, g: 0.5 * v + g, velocity, gradients)
        return [jax.tree.map(lambda w, v: w - v, weights, velocity), velocity]

    weights = [shaped(64, 64)] * 6
    shapes = [weights, weights], shaped(DEVICES * 1024, 64)
    prompt, left = (
        len(sizes(peak_of(step, *shapes, method=method), "float32[8192,64]"))
        for method in ("data", "zero2")
    )
    # Of the last four layers the gradients of their results are there beside these.
    assert left >= prompt + 3


def program_of(function: Any, *shapes: Any) -> SpmdProgram:
    jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr

    def whole(atom: Any) -> ShardedValue:
        return ShardedValue(atom, replicated(len(atom.aval.shape)))

    instructions = tuple(
        Compute(eqn, tuple(map(whole, eqn.invars)), tuple(map(whole, eqn.outvars)))
        for eqn in jaxpr.eqns
    )
    inputs, outputs = tuple(map(whole, jaxpr.invars)), tuple(map(whole, jaxpr.outvars))
    return SpmdProgram((1,), ("x",), Block(inputs, instructions, outputs), RULES[TPU])


@pytest.mark.parametrize("is_softmax", [True, False])
def test_exponentials_are_copied_where_programs_take_them(is_softmax: bool) -> None:
    def backward(exponentials: Any, gradient: Any, values: Any) -> Any:
        product = jnp.einsum("bqd,bkd->bqk", gradient, values)
        if not is_softmax:
            return product * exponentials
        rows = jax.lax.reduce(product * exponentials, 0.0, jax.lax.add, (2,))
        return (product - rows[..., None]) * exponentials

    rows = shaped(4, 256, 256)
    found = peak(program_of(backward, rows, shaped(4, 256, 8), shaped(4, 256, 8)), {}, [False] * 3)
    copied = dict(found.alive).get("copies in another order", 0)
    assert copied == (4 * 256 * 256 * 4 if is_softmax else 0)


def test_what_fills_vectors_in_another_order_is_copied_out() -> None:
    for last, copied in ((1000, 1), (1024, 0)):
        program = program_of(lambda x, w: x @ w, shaped(8, 256, 16), shaped(16, last))
        size = 8 * 256 * last * 4
        others = (8 * 256 * 16 + 16 * last) * 4
        assert peak(program, {}, [False] * 2).bytes == others + (1 + copied) * size


def test_an_optimizers_update_is_written_by_the_gradients_product() -> None:
    def step(state: Any, x: Any) -> Any:
        weight, first, second = state
        gradient = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(weight)
        first, second = 0.9 * first + gradient, 0.9 * second + gradient**2
        return [weight - first / jnp.sqrt(second), first, second]

    graph = graph_of(step, [shaped(512, 512)] * 3, shaped(64, 512), batch_argnums=(1,))
    made = compile_graph(graph, Options(microbatches=1), Cluster.named("1xh100"))
    donated = [label.donated for label in made.graph.inputs]
    found = peak(dataclasses.replace(sharded(made), rules=RULES[TPU]), {}, donated)
    assert sizes(found, "float32[512,512]") == [512 * 512 * 4] * 3


def attention_like(weights: Any, x: Any) -> Any:
    for weight in weights:
        scores = (x @ weight).astype(jnp.float32)
        scores = jnp.where(jnp.arange(scores.shape[-1]) < 60, scores * 2.0, -1e9)
        x = jax.nn.softmax(scores).astype(jnp.bfloat16) @ weight.T
    return jnp.sum(x.astype(jnp.float32))


def attention_shapes(row: int) -> Any:
    bfloat16 = jnp.bfloat16
    return [shaped(8, row, dtype=bfloat16)] * 3, shaped(DEVICES * 2048, 8, dtype=bfloat16)


def test_what_needs_sums_of_a_products_rows_comes_after_it() -> None:
    def step(weights: Any, x: Any) -> Any:
        gradients = jax.grad(attention_like)(weights, x)
        return jax.tree.map(lambda w, g: w - g, weights, gradients)

    found = peak_of(step, *attention_shapes(64))
    # The gradients of the softmax's results, and of its arguments.
    assert len(sizes(found, f"bfloat16[{DEVICES * 2048},64]")) >= 2


def test_parts_are_read_in_the_whole() -> None:
    def step(weights: Any, x: Any) -> Any:
        first, second = jnp.split(x @ weights, 2, axis=1)
        products = (jnp.sin(first) @ weights[:32]) * (jnp.cos(second) @ weights[32:])
        return weights + jnp.sum(products)

    found = peak_of(step, shaped(64, 64), shaped(DEVICES * 64, 64))
    assert sizes(found, f"float32[{DEVICES * 64},32]") == []


def test_holes_between_buffers_are_lost() -> None:
    # Ten lie on four; six do not fit where four were.
    buffers = [HeapBuffer(4, 0, 1), HeapBuffer(10, 1, 3), HeapBuffer(6, 2, 3)]
    assert (heap_bytes(buffers), live_bytes(buffers)) == (20, 16)
    assert heap_bytes([HeapBuffer(3, 2, 3), *buffers]) == 20, "three are where four were"
    assert heap_bytes([]) == 0


def test_a_loops_buffers_lie_in_holes_one_by_one() -> None:
    # Two holes of four, and a body that holds four twice: no hole is as large as the body.
    outside = [HeapBuffer(4, 0, 4), HeapBuffer(5, 1, 9), HeapBuffer(4, 2, 4), HeapBuffer(5, 3, 9)]
    body = [HeapBuffer(4, 0.2, 0.8), HeapBuffer(4, 0.4, 0.6)]
    placed = in_order([*outside, *(x.between(5, 6) for x in body)])
    assert all(isinstance(moment, int) for x in placed for moment in x[1:])
    assert heap_bytes(placed) == 18
    assert heap_bytes([*outside, HeapBuffer(8, 5, 6)]) == 26


def test_a_tpus_temporaries_are_read_from_its_allocations(tmp_path: Path) -> None:
    lines = (
        "BufferAssignment:",
        "allocation 0: size 4096, parameter 0, shape |f32[8,128]| at ShapeIndex {}:",
        "allocation 1: size 1000, preallocated-temp:",
        " value: <3 fusion @0> (size=1000,offset=0): f32[250]",
        "allocation 2: size 500, color 1, preallocated-temp:",
    )
    (tmp_path / "module.jit_step.after_optimizations-buffer-assignment.txt").write_text(
        "\n".join(lines), encoding="utf-8"
    )
    assert temporary_bytes(tmp_path) == 1000
    assert temporary_bytes(tmp_path / "nothing") is None
