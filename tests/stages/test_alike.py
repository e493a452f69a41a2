"""Stages that compute the same are planned once, and each plan says its own names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from plain_jit import equals_plain_jit

import autopar
from autopar.passes.graph.alike import pairs_if_alike
from autopar.passes.planner import alike_stages, candidates, mesh_choice
from autopar.passes.planner.planned_stage import PlannedStage

WIDTH, LAYERS = 32, 4


def params(width: int = WIDTH) -> dict[str, Any]:
    return {f"layer_{i}": {"w": jnp.ones((width, width))} for i in range(LAYERS)}


def step_with(scale: Callable[[int], float]) -> Callable[..., Any]:
    def step(state: dict[str, Any], x: jax.Array) -> Any:
        def loss(state: dict[str, Any]) -> jax.Array:
            y = x
            for number, (name, layer) in enumerate(sorted(state.items())):
                with jax.named_scope(name):
                    y = jnp.tanh(y @ layer["w"]) * scale(number)
            return jnp.mean(y * y)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return step


def planned(
    monkeypatch: pytest.MonkeyPatch, scale: Callable[[int], float], **options: Any
) -> tuple[autopar.Plan, int]:
    """The plan in stages of a layer, and how many of them were planned."""
    calls: list[object] = []
    real = mesh_choice.plan_stage

    def counted(*arguments: Any) -> PlannedStage:
        calls.append(arguments)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(candidates, "plan_stage", counted)
        made = autopar.plan(
            step_with(scale),
            params(),
            jnp.ones((48, WIDTH)),
            cluster=autopar.Cluster.preset("cpu", devices_per_node=8),
            stages=LAYERS,
            microbatches=8,
            schedule="1f1b",
            **options,
        )
    return made, len(calls)


def test_stages_that_are_alike_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, calls = planned(monkeypatch, lambda number: 1.0)
    assert calls == 3  # the first, the last, and one for those between
    monkeypatch.setattr(
        candidates,
        "first_alike",
        lambda stages, *_: [alike_stages.Likeness(number, {}) for number in range(len(stages))],
    )
    expected, calls = planned(monkeypatch, lambda number: 1.0)
    assert calls == LAYERS
    assert found.to_dict() == expected.to_dict()
    assert any("layer_2" in item.node for item in found.stages[2].strategies)


@pytest.mark.parametrize(("scale", "calls"), [(lambda number: 1.0 + (number == 2), 4)])
def test_another_number_in_a_stage_makes_it_another(
    monkeypatch: pytest.MonkeyPatch, scale: Callable[[int], float], calls: int
) -> None:
    assert planned(monkeypatch, scale)[1] == calls


def test_a_pinned_stage_is_like_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = {"*layer_2*": ("x", None)}
    assert planned(monkeypatch, lambda number: 1.0, pins=pins)[1] == 4


def test_each_stage_has_its_own_numbers() -> None:
    values = {
        name: {"w": jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / 6}
        for i, name in enumerate(params())
    }
    x = jax.random.normal(jax.random.key(9), (12, WIDTH))
    equals_plain_jit(
        step_with(lambda number: 1.0), values, x, stages=LAYERS, microbatches=4, schedule="1f1b"
    )


def test_programs_are_compared_to_the_last_number() -> None:
    def traced(function: Callable[..., Any], *arguments: Any) -> Any:
        return jax.make_jaxpr(function)(*arguments).jaxpr

    x = jnp.ones(3)

    def scanned(times: float, length: int = 4) -> Callable[..., Any]:
        def function(x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda c, _: (c * times, None), x, None, length=length)[0]

        return function

    one = traced(scanned(2.0), x)
    pairs = pairs_if_alike(one, traced(scanned(2.0), x))
    assert pairs is not None and len(pairs) == 2  # the scan and what is in it
    for other, argument in (
        (scanned(2.5), x),
        (scanned(2.0, 5), x),
        (scanned(2.0), jnp.ones(4)),
        (scanned(2.0), jnp.ones(3, jnp.bfloat16)),
        (lambda x: x * 2.0, x),
    ):
        assert pairs_if_alike(one, traced(other, argument)) is None
    both = traced(lambda a, b: a - b, x, x)
    swapped = traced(lambda a, b: b - a, x, x)
    assert pairs_if_alike(both, swapped) is None
