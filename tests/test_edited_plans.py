"""What is written in a plan's file holds: edited specs and pins are followed, or named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

Edit = Callable[[dict[str, Any]], None]
pytestmark = pytest.mark.filterwarnings("ignore:The plan is for H100")

CLUSTER = autopar.Cluster.preset("h100", devices_per_node=4)


def _step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments}, value * jnp.ones((8,))


def _arguments() -> tuple[dict[str, Any], jax.Array]:
    random = np.random.default_rng(0)
    params = {"up": random.normal(size=(8, 16)), "down": random.normal(size=(16, 8))}
    moments = {name: np.zeros_like(value) for name, value in params.items()}
    state = {"params": params, "moments": moments}
    state = jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), state)
    return state, jnp.asarray(random.normal(size=(32, 8)), jnp.float32)


def _edited(tmp_path: Path, edit: Edit, **options: Any) -> autopar.Executable:
    """The step that follows a plan whose JSON was edited."""
    plan = autopar.plan(_step, *_arguments(), cluster=CLUSTER, **options)
    plain = json.loads(plan.to_json())
    edit(plain)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plain), encoding="utf-8")
    options.pop("pins", None)
    return autopar.compile(_step, *_arguments(), plan=path, **options)


def _leaf(plain: dict[str, Any], path: str, kind: str = "inputs") -> dict[str, Any]:
    found: dict[str, Any] = next(x for x in plain[kind] if x["path"] == path)
    return found


def _check_numbers(step: autopar.Executable) -> None:
    state, x = _arguments()
    expected = jax.jit(_step)(state, x)
    got = step(*_arguments())
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


UP = "state['params']['up']"


@pytest.mark.parametrize("options", [{"method": "data"}, {"logical_mesh": (2, 2)}, {"stages": 2}])
@pytest.mark.parametrize("spec", [[[], ["x"]], [["x"], []]])
def test_an_edited_spec_is_a_pin(
    options: dict[str, Any], spec: list[list[str]], tmp_path: Path
) -> None:
    def edit(plain: dict[str, Any]) -> None:
        _leaf(plain, UP)["spec"] = spec

    if "stages" in options:
        options = {**options, "microbatches": 4, "method": "data"}
    step = _edited(tmp_path, edit, **options)
    leaf = next(x for x in step.plan.inputs if x.path == UP)
    assert [list(axes) for axes in leaf.spec] == spec
    assert f"={UP}" in step.plan.options["pins"]
    _check_numbers(step)
    # What was made of it is a plan like any other.
    again = autopar.compile(_step, *_arguments(), plan=step.plan, **options)
    assert again.plan == step.plan
    assert again.plan.explain(UP).decisions[0].forced_by == "pin"


def test_a_plan_that_was_not_edited_is_followed_as_it_is(tmp_path: Path) -> None:
    step = _edited(tmp_path, lambda plain: None, method="zero3")
    assert step.plan == autopar.plan(_step, *_arguments(), cluster=CLUSTER, method="zero3")


def test_pins_in_the_file_hold_and_may_be_added_and_removed(tmp_path: Path) -> None:
    def add(plain: dict[str, Any]) -> None:
        plain["options"]["pins"] = {"params/up": [[], ["x"]], "params/down": [["x"], []]}

    def remove(plain: dict[str, Any]) -> None:
        plain["options"]["pins"] = {}

    added = _edited(tmp_path, add, method="data")
    assert next(x for x in added.plan.inputs if x.path == UP).spec == ((), ("x",))
    _check_numbers(added)
    pins = {"params/up": (None, "x")}
    removed = _edited(tmp_path, remove, method="data", pins=pins)
    assert next(x for x in removed.plan.inputs if x.path == UP).spec == ((), ())
    kept = _edited(tmp_path, lambda plain: None, method="data", pins=pins)
    assert next(x for x in kept.plan.inputs if x.path == UP).spec == ((), ("x",))


def test_an_edited_output_is_a_pin(tmp_path: Path) -> None:
    def edit(plain: dict[str, Any]) -> None:
        _leaf(plain, "result[1]", "outputs")["spec"] = [["x"]]

    step = _edited(tmp_path, edit, method="data")
    assert step.plan.outputs[-1].spec == (("x",),)
    _check_numbers(step)


def test_new_state_that_was_edited_pins_the_old_one(tmp_path: Path) -> None:
    def edit(plain: dict[str, Any]) -> None:
        _leaf(plain, "result[0]['params']['up']", "outputs")["spec"] = [["x"], []]

    step = _edited(tmp_path, edit, method="data")
    assert next(x for x in step.plan.inputs if x.path == UP).spec == (("x",), ())


def test_edited_strategies_are_followed(tmp_path: Path) -> None:
    """Of a product that is computed whole, one of the choices that cut its rows or columns."""
    followed = 0
    for choice in ("1 [x|-]", "1 [-|x]", "2 [x|-]", "2 [-|x]"):
        node = ""

        def edit(plain: dict[str, Any], choice: str = choice) -> None:
            nonlocal node
            nodes = plain["stages"][0]["strategies"]
            changed = next(x for x in nodes if "dot" in x["node"] and x["choice"] != choice)
            changed["choice"], node = choice, changed["node"]

        try:
            step = _edited(tmp_path, edit, logical_mesh=(4,))
        except autopar.errors.PlanMismatchError as error:
            assert "which is no choice" in str(error)
            continue
        assert [x.choice for x in step.plan.stages[0].strategies if x.node == node] == [choice]
        _check_numbers(step)
        followed += 1
    assert followed


def _two_specs(plain: dict[str, Any]) -> None:
    _leaf(plain, UP)["spec"] = [["x"], []]
    _leaf(plain, "result[0]['params']['up']", "outputs")["spec"] = [[], ["x"]]


def _pin_and_spec(plain: dict[str, Any]) -> None:
    _leaf(plain, UP)["spec"] = [["x"], []]
    plain["options"]["pins"] = {"params/up": [[], ["x"]], "params/down": [["x"], []]}


def _choice_alone(plain: dict[str, Any]) -> None:
    node = next(x for x in plain["stages"][0]["strategies"] if x["node"].endswith(UP))
    node["choice"] = "1 [x|-]"


def _unknown_choice(plain: dict[str, Any]) -> None:
    node = next(x for x in plain["stages"][0]["strategies"] if "dot_general" in x["node"])
    node["choice"] = "77 [x|-]"


def _no_divisor(plain: dict[str, Any]) -> None:
    plain["inputs"][0]["spec"] = [["x"], ["x"]]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_two_specs, r"two things of state\['params'\]\['up'\], which result\[0\]"),
        (_pin_and_spec, r"up'\]\" and 'params/up' give one tensor two shardings"),
        (_choice_alone, r"two things of state\['params'\]\['up'\]"),
        (_unknown_choice, r"The plan chooses '77 \[x\|-\]' for"),
        (_no_divisor, "an axis cuts two dimensions"),
    ],
)
def test_what_contradicts_itself_is_named(edit: Edit, message: str, tmp_path: Path) -> None:
    with pytest.raises(autopar.AutoparError) as caught:
        _edited(tmp_path, edit, method="data")
    text = " ".join(str(caught.value).split())
    assert re.search(message, text), text


def _stage(**changed: Any) -> Edit:
    return lambda plain: plain["stages"][0].update(changed)


def _renamed(plain: dict[str, Any]) -> None:
    plain["inputs"][0]["path"] += "_0"


EDITS_OF_FIXED: dict[str, tuple[Edit, str]] = {
    "layers": (_stage(layers=[0, 2]), "stages"),
    "logical mesh": (_stage(logical_mesh=[2, 1], axis_names=["x", "y"]), "stages"),
    "mesh": (_stage(mesh=1), "stages"),
    "remat": (_stage(remat="full"), "stages"),
    "stages of a leaf": (lambda plain: _leaf(plain, UP).update(stages=[1]), "stages"),
    "boundaries": (lambda plain: plain["pipeline"].update(boundaries=[2]), "stages"),
    "microbatches": (lambda plain: plain.update(num_microbatches=2), "microbatches"),
    "a leaf's name": (_renamed, "leaves"),
    "a leaf less": (lambda plain: plain["inputs"].pop(0) and None, "leaves"),
    "nodes": (lambda plain: plain["cluster"].update(num_nodes=2), "cluster"),
}


@pytest.mark.parametrize("name", EDITS_OF_FIXED)
def test_what_all_else_follows_from_is_not_edited(name: str, tmp_path: Path) -> None:
    edit, part = EDITS_OF_FIXED[name]
    with pytest.raises(autopar.errors.PlanMismatchError) as caught:
        _edited(tmp_path, edit, stages=2, microbatches=4)
    assert f"of its {part} was edited" in str(caught.value)
    assert "plan again" in str(caught.value)


def test_a_mesh_with_more_axes_than_names_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(autopar.errors.PlanMismatchError, match="2 axes has the names"):
        _edited(tmp_path, _stage(logical_mesh=[2, 2]), stages=2, microbatches=4)


def test_an_edit_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    def edit(plain: dict[str, Any]) -> None:
        for leaf in plain["inputs"]:
            if leaf["role"] == "state":
                leaf["spec"] = [[], []]

    peak = autopar.plan(_step, *_arguments(), cluster=CLUSTER, method="zero3")
    limit = peak.estimates.peak_bytes_per_device
    with pytest.raises(autopar.errors.MemoryLimitError, match="the plan was edited"):
        _edited(tmp_path, edit, method="zero3", memory_limit=limit, microbatches=1)
