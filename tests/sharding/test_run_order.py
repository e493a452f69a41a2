"""Programs that are told their order compute the same, and wait for what nothing else waits for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.options import Options
from autopar.passes.planner import rewritings
from autopar.passes.planner.compiler import compile_graph
from autopar.passes.sharding import loop_order, run_order
from autopar.passes.sharding.compiler_rules import CPU, RULES
from autopar.passes.sharding.run_order import after_ties, ties
from autopar.passes.sharding.spmd_program import Compute, Loop, Relayout, reads, writes
from autopar.passes.sharding.waiting import Tie, is_product
from sharding.steps import CLUSTER, compiled, graph_of, shaped, sharded

WIDTH, DEPTH = 16, 4


def train_step(weights: Any, x: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        y = x
        for name in sorted(weights):
            y = jax.checkpoint(lambda y, w: jnp.tanh(y @ w["in"] + w["bias"]))(y, weights[name])
        return jnp.mean(jnp.square(y))

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


LAYER = {"in": shaped(WIDTH, WIDTH), "bias": shaped(WIDTH)}
SHAPES = ({f"layer_{i}": LAYER for i in range(DEPTH)}, shaped(32, WIDTH))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_order, "BUCKET_BYTES", 1)
    monkeypatch.setattr(run_order, "LARGE_BYTES", 1)
    monkeypatch.setattr(loop_order, "LARGE_BYTES", 1)


def test_weight_gradients_and_their_sums_are_waited_for(small: None) -> None:
    program = sharded(compiled(graph_of(train_step, *SHAPES), method="zero3", microbatches=1))
    found = ties(program.block, program.mesh)
    waited = [value for tie in found.values() for value in tie.results]
    assert len(waited) == len(set(waited))
    instructions = program.block.instructions
    made = {v: t for t, x in enumerate(instructions) for v in getattr(x, "results", ())}
    sums = {x.target: t for t, x in enumerate(instructions) if isinstance(x, Relayout)}
    for time, tie in found.items():
        own = {gather.source for gather in tie.gathers}
        assert all({**made, **sums}[v] < time for v in tie.results if v not in own)
        assert tie.operand not in tie.results
    assert sum(tie.sources != () for tie in found.values()) >= 1
    assert any(value.layout.partial for value in waited), "products of weights' gradients"


def check_in_order(monkeypatch: pytest.MonkeyPatch, fn: Any, shapes: Any) -> None:
    """A step that is run in the order of its barriers computes what `jax.jit` does."""
    monkeypatch.setitem(RULES, CPU, dataclasses.replace(RULES[CPU], keeps_order=True))
    random = np.random.default_rng(0)
    weights, x = jax.tree.map(lambda s: random.normal(size=s.shape).astype(s.dtype), shapes)
    wanted = jax.jit(fn)(weights, x)
    step = autopar.compile(fn, weights, x, method="zero3", microbatches=1)
    found = step(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


def test_the_numbers_stay(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_order(monkeypatch, train_step, SHAPES)


def scanned_step(weights: Any, x: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
        h, _ = jax.lax.scan(layer, x, weights["layers"])
        return jnp.mean(jnp.square(jax.nn.softmax(h @ weights["head"]) @ weights["head"].T))

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


SCANNED = (
    {"layers": shaped(DEPTH, WIDTH, WIDTH), "head": shaped(WIDTH, 4 * WIDTH)},
    shaped(32, WIDTH),
)


def test_the_backward_loop_waits_for_what_comes_before_it(small: None) -> None:
    program = sharded(compiled(graph_of(scanned_step, *SCANNED), method="zero3", microbatches=1))
    instructions = program.block.instructions
    forward, backward = (t for t, x in enumerate(instructions) if isinstance(x, Loop))
    tie = ties(program.block, program.mesh)[backward]
    assert tie.operand in instructions[forward].results  # type: ignore[union-attr]
    made = {v: t for t, x in enumerate(instructions) for v in writes(x)}
    assert all(forward < made[v] < backward for v in tie.results)
    assert set(tie.results) & set(reads(instructions[backward])), "the gradient of the last layer"
    shapes = [tuple(v.atom.aval.shape) for v in tie.results]
    assert (4 * WIDTH, WIDTH) in shapes or (WIDTH, 4 * WIDTH) in shapes, "the head's gradient"


def test_the_numbers_of_a_scan_stay(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_order(monkeypatch, scanned_step, SCANNED)


def test_a_reduction_with_two_results(small: None) -> None:
    def greatest(x: Any) -> Any:
        def larger(one: Any, other: Any) -> Any:
            first = one[0] >= other[0]
            return tuple(jnp.where(first, a, b) for a, b in zip(one, other, strict=True))

        places = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jax.lax.reduce((x, places), (-jnp.inf, np.int32(0)), larger, (1,))

    def step(weights: Any, x: Any) -> Any:
        value, place = greatest(x @ weights)
        for _ in range(3):
            x = jnp.tanh(x @ weights)
        return x, value, place

    program = sharded(compiled(graph_of(step, LAYER["in"], SHAPES[1]), microbatches=1))
    assert ties(program.block, program.mesh)


def convolutions(weights: Any, x: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        y = x
        for name in sorted(weights):
            filters = weights[name]
            numbers = jax.lax.conv_dimension_numbers(
                y.shape, filters.shape, ("NHWC", "HWIO", "NHWC")
            )
            y = jnp.tanh(
                jax.lax.conv_general_dilated(y, filters, (1, 1), "SAME", None, None, numbers)
            )
        return jnp.mean(jnp.square(y))

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


FILTERS = ({f"layer_{i}": shaped(3, 3, 8, 8) for i in range(DEPTH)}, shaped(16, 8, 8, 8))


def test_a_gradient_is_added_after_what_waits_for_it() -> None:
    program = sharded(compiled(graph_of(convolutions, *FILTERS), method="zero3", microbatches=1))
    waiting = ties(program.block, program.mesh)
    postponed = after_ties(program.block, waiting)
    instructions = program.block.instructions
    assert any(isinstance(instructions[number], Relayout) for number in postponed)
    made = {v: number for number, x in enumerate(instructions) for v in writes(x)}
    for number, after in postponed.items():
        own = reads(instructions[number])
        assert number < after
        assert any(
            v in waiting[after].results or postponed.get(made.get(v, -1)) == after for v in own
        )
        for other, instruction in enumerate(instructions[number + 1 :], number + 1):
            if not set(writes(instructions[number])).isdisjoint(reads(instruction)):
                assert postponed.get(other, other) >= after


def test_what_is_waited_for_twice_is_read_after_the_later() -> None:
    program = sharded(compiled(graph_of(convolutions, *FILTERS), method="zero3", microbatches=1))
    instructions = program.block.instructions
    waiting = ties(program.block, program.mesh)
    postponed = after_ties(program.block, waiting)
    number = next(n for n in postponed if isinstance(instructions[n], Relayout))
    first, (value,) = postponed[number], reads(instructions[number])
    later = {first + 1: Tie(waiting[first].operand, (value,), ())}
    assert after_ties(program.block, {**waiting, **later})[number] == first + 1
    assert after_ties(program.block, {**later, **waiting})[number] == first + 1


def test_the_numbers_of_convolutions_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_order(monkeypatch, convolutions, FILTERS)


EXPERTS, TOKENS, HIDDEN = 8, 16, 32


def experts_step(weights: Any, x: Any) -> Any:
    """Layers of experts: their gradients are stacked products that are transposed."""

    def loss_fn(weights: Any) -> Any:
        y = x
        for name in sorted(weights):
            y = jnp.tanh(jnp.einsum("eth,ehf->etf", y, weights[name]))
        return jnp.mean(jnp.square(y))

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


EXPERT_SHAPES = (
    {f"layer_{i}": shaped(EXPERTS, HIDDEN, HIDDEN) for i in range(DEPTH)},
    shaped(EXPERTS, TOKENS, HIDDEN),
)


def test_what_a_product_is_turned_into_is_waited_for() -> None:
    one = dataclasses.replace(CLUSTER, num_nodes=1, devices_per_node=1)
    made = compile_graph(graph_of(experts_step, *EXPERT_SHAPES), Options(microbatches=1), one)
    program = sharded(made)
    found = ties(program.block, program.mesh)
    computed = [x for x in program.block.instructions if isinstance(x, Compute)]
    makers = {v: x for x in computed for v in writes(x)}
    waited = [makers[value].eqn for tie in found.values() for value in tie.results]
    kinds = [eqn.primitive.name for eqn in waited]
    assert kinds.count("transpose") >= DEPTH - 1
    # No product is held of which only a transposed copy is used.
    turned = {x.eqn.invars[0] for x in makers.values() if x.eqn.primitive.name == "transpose"}
    assert not turned & {out for eqn in waited for out in eqn.outvars}


def test_the_numbers_of_experts_stay(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_order(monkeypatch, experts_step, EXPERT_SHAPES)


def test_what_is_fused_as_a_multiplication_is_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewritings, "with_sums_for_vectors", lambda graph: graph)  # as for TPUs

    def routed(weights: Any, x: Any) -> Any:
        def loss_fn(weights: Any) -> Any:
            y = x
            for name in sorted(weights):
                y = jnp.tanh(y @ weights[name])
                outer = jnp.einsum("th,tc->thc", y, y[:, :2])  # nothing is summed up
                one = jnp.einsum("th,h->t", y, y[0])  # of a vector
                y = y + outer.sum(2) + one[:, None]
            return jnp.mean(y)

        return jax.value_and_grad(loss_fn)(weights)

    shapes = ({f"layer_{i}": shaped(WIDTH, WIDTH) for i in range(DEPTH)}, shaped(32, WIDTH))
    program = sharded(compiled(graph_of(routed, *shapes), method="data", microbatches=1))
    dots = [
        x
        for x in program.block.instructions
        if isinstance(x, Compute) and x.eqn.primitive.name == "dot_general"
    ]
    products = [x for x in dots if is_product(x)]
    assert len(products) == 3 * DEPTH - 1  # of x there is no gradient
    assert len(dots) > len(products)
    for x in products:
        assert all(atom.aval.ndim == 2 and min(atom.aval.shape) > 2 for atom in x.eqn.invars)
