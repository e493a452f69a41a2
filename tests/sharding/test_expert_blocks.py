"""Grouped products in blocks of experts: the rewritten program, its exchanges, and plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import eval_jaxpr
from plain_jit import equals_plain_jit

import autopar
from autopar.base.cluster import Cluster
from autopar.passes.experts.blocks import in_blocks, num_groups
from autopar.passes.graph.graph import Graph, flatten, walk
from autopar.passes.primitives.exchanges import EXPECTED_ROUNDS
from sharding.steps import arrays, shaped

EXPERTS, WIDTH, HIDDEN = 8, 8, 16
Weights = Any
CPU = Cluster.preset("cpu", devices_per_node=8)
# What moves is dear, so that plans send as little as they can.
SLOW_LINKS = dataclasses.replace(
    CPU, intra_node=dataclasses.replace(CPU.intra_node, bandwidth=1e5, latency=0.0)
)
SHAPES = {
    "scale": shaped(WIDTH),
    "router": shaped(WIDTH, EXPERTS),
    "gate": shaped(EXPERTS, WIDTH, HIDDEN),
    "up": shaped(EXPERTS, WIDTH, HIDDEN),
    "down": shaped(EXPERTS, HIDDEN, WIDTH),
}


def mixture(weights: Weights, x: Any, top: int = 2) -> Any:
    """Tokens sorted by expert, multiplied in groups, and put back."""
    rows = x.reshape(-1, x.shape[-1])
    gates, chosen = lax.top_k(jax.nn.softmax(rows @ weights["router"]), top)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
    taken = rows[order // top]
    hidden = jax.nn.silu(lax.ragged_dot(taken, weights["gate"], sizes))
    hidden = hidden * lax.ragged_dot(taken, weights["up"], sizes)
    made = lax.ragged_dot(hidden, weights["down"], sizes)[jnp.argsort(order)]
    mixed = jnp.einsum("rkd,rk->rd", made.reshape(-1, top, WIDTH), gates)
    return x + mixed.reshape(x.shape)


def descent(loss: Callable[[Weights, Any], Any]) -> Callable[[Weights, Any], Any]:
    def step(weights: Weights, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def square(weights: Weights, x: Any) -> Any:
    return (mixture(weights, x * weights["scale"]) ** 2).mean()


def some_weights() -> Weights:
    return jax.tree.map(lambda w: 0.3 * w, arrays(SHAPES))


def sorted_rows(weights: Weights, x: Any) -> Any:
    """What real models do beside: gates on sorted rows, indices out of bounds, sums by token."""
    rows = x.reshape(-1, WIDTH)
    chosen = jnp.argmax(rows @ weights["router"], -1)
    order = jnp.argsort(chosen)
    # Some rows are in no group, and the last group asks for more than there are.
    sizes = jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32) - 1
    sizes = jnp.maximum(sizes, 0)
    gate = jax.nn.sigmoid(rows @ weights["scale"])[order]
    taken = jnp.take(rows, order, axis=0)
    hidden = lax.ragged_dot(taken, weights["up"], sizes) + 1.0
    hidden = jnp.tanh(hidden) * gate[:, None]
    norms = hidden.max(-1, keepdims=True) - hidden.sum(-1)[:, None]
    made = lax.ragged_dot(hidden / (2 + norms**2), weights["down"], sizes) + norms
    made = jnp.where((rows > 0)[order], made, 0.5 * made)
    back = jnp.zeros_like(rows).at[order].add(made, mode="drop")
    far = jnp.take(made, jnp.arange(len(rows)) - 3, axis=0, fill_value=0.5, mode="fill")
    return (back**2).mean() + made[::2].sum() + jnp.nansum(far * rows)


def layers(weights: Weights, x: Any) -> Any:
    """Two layers in a loop, computed again in the backward pass."""

    @jax.checkpoint
    def layer(x: Any, scale: Any) -> Any:
        return mixture(weights, x * scale), x.sum()

    x, sums = lax.scan(layer, x, jnp.stack([weights["scale"], weights["scale"] + 1]))
    return (x**2).mean() + sums.sum()


@pytest.mark.parametrize(("loss", "blocks"), [(square, 8), (sorted_rows, 2), (layers, 4)])
def test_the_rewritten_program_is_the_same(loss: Any, blocks: int) -> None:
    weights, x = some_weights(), arrays(shaped(3, 5, WIDTH))
    one_expert = {**weights, "router": jnp.zeros((WIDTH, EXPERTS)).at[:, 3].set(1.0)}
    closed = flatten(jax.make_jaxpr(descent(loss))(weights, x))
    graph = Graph(closed.jaxpr, (), ())
    assert num_groups(graph) == EXPERTS
    made = in_blocks(graph, blocks).jaxpr
    names = {eqn.primitive.name for eqn in walk(made)}
    assert "ragged_dot_general" not in names and "block_product" in names
    before, after = (
        jax.jit(lambda *xs, jaxpr=jaxpr: eval_jaxpr(jaxpr, (), *xs))
        for jaxpr in (closed.jaxpr, made)
    )
    for arguments in ((weights, x), (one_expert, jnp.abs(x))):
        leaves = jax.tree.leaves(arguments)
        for one, other in zip(after(*leaves), before(*leaves), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("routing", "options"),
    [
        ("any", {}),
        ("one expert", {}),
        ("two experts", {"logical_mesh": (2, 4)}),
    ],
)
def test_devices_exchange_rows(routing: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Four times a layer: rows to experts and back, forward and backward; in one plan, saved."""
    weights, x = some_weights(), arrays(shaped(8, 3, WIDTH))
    top = 2
    if routing != "any":
        weights["router"] = jnp.zeros((WIDTH, EXPERTS))
        top = 1 if routing == "one expert" else 2

    def loss(weights: Weights, x: Any) -> Any:
        return (mixture(weights, x * weights["scale"], top) ** 2).mean()

    options = {"method": "expert", "microbatches": 1, "cluster": SLOW_LINKS, **options}
    step = descent(loss)
    compiled = equals_plain_jit(step, weights, x, **options)
    plan = compiled.plan
    assert plan.expert_blocks == 8
    sent = [c.times for c in plan.stages[0].collectives if c.kind == "all-to-all"]
    assert sent == [EXPECTED_ROUNDS] * 4
    assert "rows are sent to 8 blocks of experts" in str(plan)
    specs = {t.path.split("'")[1]: t.spec for t in plan.inputs if "[" in t.path}
    assert specs["gate"][0] == specs["down"][0] == plan.stages[0].axis_names
    if routing == "any":
        plan.save(tmp_path / "plan.json")
        loaded = autopar.Plan.load(tmp_path / "plan.json")
        assert loaded.expert_blocks == 8
        equals_plain_jit(step, weights, x, plan=loaded, **options)


def test_a_batch_that_does_not_divide() -> None:
    """Its rows are whole on every device; experts are cut all the same."""
    weights, x = some_weights(), arrays(shaped(5, 3, WIDTH))
    pins = {f"*{name}": ("x", None, None) for name in ("gate", "up", "down")}
    options: dict[str, Any] = {"microbatches": 1, "cluster": SLOW_LINKS, "pins": pins}
    assert equals_plain_jit(descent(square), weights, x, **options).plan.expert_blocks == 8
