"""Sums of gradients over devices come last on TPUs, and products that nothing else is in."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.passes.sharding import fused_peak
from autopar.passes.sharding.compiler_rules import GPU, RULES, TPU
from autopar.passes.sharding.fused_peak import SPARE_BYTES
from autopar.passes.sharding.held_values import HeldValues, held_values
from autopar.passes.sharding.instruction_values import made_by
from autopar.passes.sharding.late_sums import are_late, late_times
from autopar.passes.sharding.layout import local_shape
from autopar.passes.sharding.peak_memory import peak
from autopar.passes.sharding.run_order import is_gradient_sum, weight_products
from autopar.passes.sharding.spmd_program import Compute, Relayout, SpmdProgram, local_bytes
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
    assert peak(program, {}, donated, memory=large + SPARE_BYTES).bytes == large


def test_a_device_that_is_full_has_less_left_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler leaves there what it can, unless it would be too much."""
    found = {True: 100, False: 60}
    monkeypatch.setattr(
        fused_peak, "_peak", lambda block, mesh, rules, *asked: (found[rules.sums_last], {})
    )
    block = program_of(train_step, "zero2").block

    def at(memory: int) -> tuple[int, dict[Any, int]]:
        return fused_peak.fused_peak(block, (8,), RULES[TPU], (), memory)

    assert at(2**40) == (100, {}) == at(100)
    assert at(99) == (99, {"left to the end": 39}) and at(80) == (80, {"left to the end": 20})
    assert at(79) == (100, {}) == at(60), "it would not come down to that"


@pytest.mark.parametrize("pins", [{}, {"**positions": (None, "x")}])
def test_what_a_forward_pass_gathers_is_no_new_state(pins: dict[str, Any]) -> None:
    """All of the program waits for it: all of it would be sorted to the end, as it stands."""

    def step(weights: Any, x: Any) -> Any:
        def loss_fn(weights: Any) -> Any:
            y = x + jnp.sin(weights["positions"])
            y = jnp.tanh(y @ weights["first"])
            return jnp.mean(jnp.square(jnp.tanh(y @ weights["plain"]) @ weights["last"]))

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss_fn)(weights))

    shapes = ({**SHAPES[0], "positions": shaped(SEQUENCE, WIDTH)}, SHAPES[1])
    graph = graph_of(step, *shapes, batch_argnums=(1,))
    made = sharded(compiled(graph, method="zero2", microbatches=1, pins=pins))
    block, mesh = made.block, made.mesh
    program = dataclasses.replace(made, rules=RULES[TPU])
    held = held_of(program)
    times = held.run_times([made_by(x) for x in block.instructions])
    left, _ = weight_products(block)
    found = late_times(block, held, times, mesh, left)
    order = sorted(range(len(found)), key=found.__getitem__)
    products = [
        number
        for number in order
        if isinstance(x := block.instructions[number], Compute)
        and x.eqn.primitive.name == "dot_general"
    ]
    lefts = [number for number in products if any(x is block.instructions[number] for x in left)]
    assert products[-len(lefts) :] == lefts, "they follow all other products"


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


def test_a_scale_is_gathered_once_for_both_passes() -> None:
    """Behind the barrier of a layer that runs again it would be gathered once more."""

    def step(weights: Any, x: Any) -> Any:
        def loss_fn(weights: Any) -> Any:
            y = x
            for w in weights:
                y = y + jnp.tanh(jnp.tanh(y) * w["scale"] @ w["up"]) @ w["down"]
            return jnp.mean(jnp.square(y))

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss_fn)(weights))

    one = {"scale": shaped(WIDTH), "up": shaped(WIDTH, 512), "down": shaped(512, WIDTH)}
    graph = graph_of(step, [one] * 3, SHAPES[1], batch_argnums=(1,))
    program = sharded(compiled(graph, method="zero3", microbatches=1, remat="full"))
    gathers = [
        math.prod(instruction.target.atom.aval.shape)
        for instruction in program.block.instructions
        if isinstance(instruction, Relayout)
        and any(x.kind == "all-gather" for x in instruction.steps)
    ]
    assert gathers.count(WIDTH) == 3
    assert gathers.count(WIDTH * 512) > 6, "weights are gathered again"
