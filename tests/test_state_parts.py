"""What each mesh holds is told of every layout of a state, with and without an optimizer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.notebook.plan_page import memory_rows
from autopar.report.state_parts import input_categories, stage_contents

WIDTH = 64
CLUSTER = autopar.Cluster.preset("p3.16xlarge")


def weight() -> jax.Array:
    return jnp.ones((WIDTH, WIDTH))


def listed() -> Any:
    return {"embed": weight(), "layers": [{"w": weight()} for _ in range(4)], "head": weight()}


def apply_listed(params: Any, x: jax.Array) -> jax.Array:
    x = x @ params["embed"]
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"])
    return x @ params["head"]


def named() -> Any:
    block = {"up": {"kernel": weight()}, "down": {"kernel": weight()}}
    return {"params": {f"block_{i}": block for i in range(4)}}


def apply_named(params: Any, x: jax.Array) -> jax.Array:
    for i in range(4):
        block = params["params"][f"block_{i}"]
        x = x + jnp.tanh(x @ block["up"]["kernel"]) @ block["down"]["kernel"]
    return x


def nested() -> Any:
    return {"embed": {"w": weight()}, "decoder": {f"block_{i}": weight() for i in range(4)}}


def apply_nested(params: Any, x: jax.Array) -> jax.Array:
    x = x @ params["embed"]["w"]
    for i in range(4):
        x = x + jnp.tanh(x @ params["decoder"][f"block_{i}"])
    return x


LISTED = (("embed", "layers/0"), ("layers/1",), ("layers/{2,3}",), ("head",))
NAMED = (("block_0",), ("block_1",), ("block_2",), ("block_3",))
NESTED = (
    ("embed", "decoder/block_0"),
    ("decoder/block_1",),
    ("decoder/block_2",),
    ("decoder/block_3",),
)

Apply = Callable[[Any, jax.Array], jax.Array]


@pytest.mark.parametrize("with_moments", [False, True])
@pytest.mark.parametrize(
    ("made", "apply", "parts"),
    [
        (listed, apply_listed, LISTED),
        (named, apply_named, NAMED),
        (nested, apply_nested, NESTED),
    ],
    ids=["listed", "named", "nested"],
)
def test_what_each_stage_holds(
    made: Callable[[], Any], apply: Apply, parts: tuple[tuple[str, ...], ...], with_moments: bool
) -> None:
    def gradients(params: Any, x: jax.Array) -> Any:
        return jax.value_and_grad(lambda params: jnp.mean(apply(params, x) ** 2))(params)

    def step(params: Any, x: jax.Array) -> Any:
        loss, gradient = gradients(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient), loss

    def step_with_moments(state: Any, x: jax.Array) -> Any:
        (params, moments), (loss, gradient) = state, gradients(state[0], x)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient)
        return (jax.tree.map(lambda w, m: w - 0.1 * m, params, moments), moments), loss

    params, x = made(), jnp.ones((32, WIDTH))
    options: dict[str, Any] = {"cluster": CLUSTER, "stages": 4, "microbatches": 4}
    if with_moments:
        plan = autopar.plan(step_with_moments, (params, params), x, **options)
    else:
        plan = autopar.plan(step, params, x, **options)
    assert [set(names) for names in stage_contents(plan)] == [set(names) for names in parts]
    kinds = {input_categories(plan)[t.path] for t in plan.inputs if t.role == "state"}
    assert kinds == ({"state/0", "state/1"} if with_moments else {"state"})
    assert "the whole step" not in memory_rows(plan), "a stage is not the whole step"


def test_one_mesh_holds_all_of_a_model() -> None:
    def step(params: Any, x: jax.Array) -> jax.Array:
        return jax.tree.map(lambda w: 0.9 * w + 0.0 * jnp.sum(apply_listed(params, x)), params)

    plan = autopar.plan(step, listed(), jnp.ones((32, WIDTH)), cluster=CLUSTER, stages=1)
    assert stage_contents(plan) == (("embed", "head", "layers"),)
    assert set(input_categories(plan).values()) == {"state", "batch"}
