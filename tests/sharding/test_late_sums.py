"""Sums of gradients over devices come last on TPUs, and products that nothing else is in."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.passes.sharding.compiler_rules import GPU, RULES, TPU
from autopar.passes.sharding.fused_peak import SPARE_BYTES
from autopar.passes.sharding.held_values import HeldValues, held_values
from autopar.passes.sharding.instruction_values import made_by
from autopar.passes.sharding.late_sums import are_late, late_times
from autopar.passes.sharding.layout import local_shape
from autopar.passes.sharding.peak_memory import peak
from autopar.passes.sharding.run_order import is_gradient_sum
from autopar.passes.sharding.spmd_program import Compute, SpmdProgram, local_bytes
from sharding.steps import compiled, graph_of, shaped, sharded

BATCH, SEQUENCE, WIDTH = 8, 64, 256
SHAPES = (
    {"first": shaped(WIDTH, 256), "plain": shaped(WIDTH, 512), "last": shaped(512, 128)},
    shaped(BATCH, SEQUENCE, WIDTH),
)


def train_step(weights: Any, x: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        y = x @ weights["first"]
        y = jnp.tanh(y @ weights["plain"])
        return jnp.mean(jnp.square(y @ weights["last"]))

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss_fn)(weights))


def program_of(step: Any, method: str, shapes: Any = SHAPES) -> SpmdProgram:
    graph = graph_of(step, *shapes, batch_argnums=(1,))
    made = sharded(compiled(graph, method=method, microbatches=1))
    return dataclasses.replace(made, rules=RULES[TPU])


def held_of(program: SpmdProgram) -> HeldValues[Any]:
    def size(value: Any) -> int:
        return local_bytes(value, program.mesh)

    made = [made_by(x) for x in program.block.instructions]
    outputs, rules = program.block.outputs, program.rules
    return held_values(made, program.block.inputs, outputs, size, lambda v: size(v) // 4, rules)


def late_products(program: SpmdProgram) -> dict[tuple[int, ...], bool]:
    """By the shapes of products' results: whether they are left to the end."""
    found = {}
    late = are_late(program.block, held_of(program), program.mesh)
    for instruction, is_late in zip(program.block.instructions, late, strict=True):
        if isinstance(instruction, Compute) and instruction.eqn.primitive.name == "dot_general":
            value = instruction.results[0]
            found[local_shape(value.atom.aval.shape, value.layout, program.mesh)] = is_late
        assert is_late or not is_gradient_sum(instruction)
    return found


@pytest.mark.parametrize("method", ["zero3", "data"])
def test_a_gradient_in_whose_kernel_nothing_else_is_runs_with_its_scattered_sum(
    method: str,
) -> None:
    found = late_products(program_of(train_step, method))
    weights = {shape: is_late for shape, is_late in found.items() if len(shape) == 2}
    assert len(weights) == 3 and not any(x for shape, x in found.items() if len(shape) == 3)
    # That of the last weight computes a tanh, which the backward pass reads too; that of the second
    # one the tanh's gradient.
    late = {frozenset(shape) for shape, is_late in weights.items() if is_late}
    assert late == ({frozenset((WIDTH, 256))} if method == "zero3" else set())


def test_whole_gradients_stay_until_the_backward_pass_is_over() -> None:
    weights = {**SHAPES[0], "last": shaped(512, 256)}
    program = program_of(train_step, "zero3", (weights, SHAPES[1]))
    at_once = dataclasses.replace(program, rules=dataclasses.replace(RULES[TPU], sums_last=False))
    donated = [True] * 3 + [False]
    large, small = (peak(x, {}, donated).bytes for x in (program, at_once))
    assert large > small
    assert not RULES[GPU].sums_last
    # Where that does not fit, the scheduler adds them earlier; with memory to spare it does not.
    assert peak(program, {}, donated, memory=small).bytes <= small
    assert peak(program, {}, donated, memory=large + SPARE_BYTES).bytes == large


def test_a_gradient_runs_with_those_that_read_what_its_kernel_reads() -> None:
    shapes = (
        {name: shaped(WIDTH, 512) for name in ("gate", "up")} | {"down": shaped(512, WIDTH)},
        SHAPES[1],
    )

    def order(activation: Any) -> tuple[bool, bool]:
        """Whether "down"'s gradient is after what the backward pass goes on with; and by itself."""

        def step(weights: Any, x: Any) -> Any:
            def loss_fn(weights: Any) -> Any:
                y = activation(x @ weights["gate"], x @ weights["up"]) @ weights["down"]
                return jnp.mean(jnp.square(y))

            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss_fn)(weights))

        program = program_of(step, "data", shapes)
        times = list(range(len(program.block.instructions)))
        moments = late_times(program.block, held_of(program), times, program.mesh)
        products = [
            n
            for n in times
            if isinstance(x := program.block.instructions[n], Compute)
            and x.eqn.primitive.name == "dot_general"
        ]
        down, following = products[3:5]
        return moments[down] > moments[following], down > following

    assert order(lambda gate, up: jax.nn.silu(gate) * up) == (True, False)
    assert order(lambda gate, up: gate + up) == (False, False)


def test_the_end_is_before_what_waits_for_more_gathers() -> None:
    def step(weights: Any, x: Any) -> Any:
        def loss_fn(weights: Any) -> Any:
            y = x
            for name in ("first", "second"):
                y = jax.checkpoint(lambda y, w: jnp.tanh(y @ w))(y, weights[name])
            return jnp.mean(jnp.square(y))

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss_fn)(weights))

    weights = {"first": shaped(WIDTH, WIDTH), "second": shaped(WIDTH, WIDTH)}
    graph = graph_of(step, weights, SHAPES[1], batch_argnums=(1,))
    made = sharded(compiled(graph, method="zero3", microbatches=1))
    block = dataclasses.replace(made, rules=RULES[TPU]).block
    held = held_of(dataclasses.replace(made, rules=RULES[TPU]))
    times = list(range(len(block.instructions)))
    moments = late_times(block, held, times, made.mesh)
    sums = [n for n in times if is_gradient_sum(block.instructions[n])]
    order = sorted(times, key=moments.__getitem__)
    after = [order[order.index(n) :] for n in sums]
    products = [
        n
        for n in times
        if isinstance(x := block.instructions[n], Compute) and x.eqn.primitive.name == "dot_general"
    ]
    # The second layer's sum comes before the first one is computed again.
    left = sorted(len(set(products).intersection(rest)) for rest in after)
    assert left[0] == 0 and left[-1] >= 1
