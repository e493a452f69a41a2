"""What was gathered for loops lies as it came: fewer copies, and the same numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.passes.sharding.compiler_rules import CPU, RULES
from autopar.passes.sharding.spmd_program import Block, Compute
from autopar.passes.sharding.turned_gathers import turned_gathers
from autopar.runtime.turned_arrays import TurnedArray
from sharding.steps import compiled, graph_of, sharded

LAYERS, WIDTH = 3, 16
SHAPES = {
    # Heads apart, as Flax's DenseGeneral has them, and the sizes all different from the devices'.
    "in": (LAYERS, WIDTH, 4, 24),
    "out": (LAYERS, 4, 24, WIDTH),
    "scale": (LAYERS, WIDTH),
    "late": (LAYERS, WIDTH, WIDTH),
}


def layer(x: Any, w: Any) -> Any:
    y = jnp.einsum("bd,dhk->bhk", x * w["scale"], w["in"])
    return x + jnp.einsum("bhk,hkd->bd", jnp.tanh(y), w["out"]), None


def train_step(weights: Any, x: Any) -> Any:
    """A scan whose layers are computed again, and one from the last layer to the first."""

    def loss_fn(weights: Any) -> Any:
        parts = {k: v for k, v in weights.items() if k != "late"}
        y, _ = jax.lax.scan(jax.checkpoint(layer), x, parts)
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), y, weights["late"], reverse=True)
        return jnp.mean(jnp.square(y))

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def arguments(dtype: Any = np.float32) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    weights = {k: (0.3 * random.normal(size=s)).astype(dtype) for k, s in SHAPES.items()}
    return weights, random.normal(size=(32, WIDTH)).astype(dtype)


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Programs are written for CPUs as for GPUs; how many values a block turns is noted."""
    monkeypatch.setitem(RULES, CPU, dataclasses.replace(RULES[CPU], turns_gathers=True))
    noted: list[int] = []

    def counted(block: Block) -> Any:
        found = turned_gathers(block)
        noted.append(len(found))
        return found

    monkeypatch.setattr("autopar.runtime.spmd.turned_gathers", counted)
    return noted


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"logical_mesh": (4, 2)}])
def test_the_numbers_are_those_of_the_plain_step(
    as_on_gpus: list[int], options: dict[str, Any]
) -> None:
    weights, x = arguments()
    wanted = jax.jit(train_step)(weights, x)
    step = autopar.compile(
        train_step, weights, x, **{"method": "zero3", "microbatches": 1, **options}
    )
    found = step(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
    assert sum(as_on_gpus), "nothing was turned"


def test_gathers_run_along_the_first_dimension(as_on_gpus: list[int]) -> None:
    """In the compiled program no stack is gathered along another one."""
    weights, x = arguments()
    step = autopar.compile(train_step, weights, x, method="zero3", microbatches=1)
    gathers = [line for line in step.hlo().splitlines() if " all-gather(" in line]
    stacks = [line for line in gathers if f",{LAYERS}," in line.split(" all-gather(")[0]]
    assert stacks
    assert all("dimensions={0}" in line for line in stacks), stacks


def carrying_step(weights: Any, x: Any) -> Any:
    """A loop in a loop begins with what was gathered outside, and adds it up again."""

    def loss_fn(weights: Any) -> Any:
        def outer(y: Any, row: Any) -> Any:
            total, _ = jax.lax.scan(lambda w, _: (0.9 * w, None), weights["late"], None, length=2)
            return jnp.tanh(y @ total.sum(0) + row), None

        y, _ = jax.lax.scan(outer, x, weights["scale"])
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), y, weights["late"])
        return jnp.mean(jnp.square(y))

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_a_loop_inside_begins_with_is_in_its_own_order(
    as_on_gpus: list[int], microbatches: int
) -> None:
    weights, x = arguments()
    wanted = jax.jit(carrying_step)(weights, x)
    step = autopar.compile(carrying_step, weights, x, method="zero3", microbatches=microbatches)
    found = step(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


def test_only_what_loops_alone_read_is_turned() -> None:
    """What is returned as well, or read by an equation, is in the usual order."""
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), arguments())
    program = sharded(compiled(graph_of(train_step, *shapes), method="zero3", microbatches=1))
    block = program.block
    found = turned_gathers(block)
    assert found
    assert turned_gathers(dataclasses.replace(block, outputs=(*block.outputs, *found))) == set()
    reading = next(x for x in block.instructions if isinstance(x, Compute))
    also = dataclasses.replace(reading, operands=(*reading.operands, *found))
    more = dataclasses.replace(block, instructions=(*block.instructions, also))
    assert turned_gathers(more) == set()


def test_an_array_in_another_order() -> None:
    value = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    turned = TurnedArray.of(jnp.asarray(value)).with_first(2).with_first(3)
    assert turned.order == (3, 2, 0, 1)
    assert turned.array.shape == (5, 4, 2, 3)
    np.testing.assert_array_equal(turned.value, value)
    np.testing.assert_array_equal(turned.row(1).value, value[1])
    leaves, tree = jax.tree.flatten(turned)
    assert len(leaves) == 1
    assert jax.tree.unflatten(tree, leaves).order == turned.order
