"""`plan.explain`: what was chosen, what else could have been, and why it was not."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from rich.console import Console

import autopar
from autopar.report.name_matching import near_names, segments
from autopar.report.reasons import layout_text

CLUSTER = autopar.Cluster.preset("h100", devices_per_node=4)
THIS_FILE = Path(__file__).name


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _infer(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def _plan_inference(**options: Any) -> autopar.Plan:
    """Whole weights are quicker, and eight of them take 8 MiB of a device."""
    weights = [_shape(512, 512)] * 8
    return autopar.plan(
        _infer, weights, _shape(4096, 512), cluster=CLUSTER, batch_argnums=(1,), **options
    )


def _train(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss(params: dict[str, Any]) -> jax.Array:
        y = x
        for name in ("block_0", "block_1"):
            with jax.named_scope(name):
                y = y + jnp.tanh(y @ params[name]["up"]) @ params[name]["down"]
        return jnp.mean(y**2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments}, value


def _plan_training(**options: Any) -> autopar.Plan:
    block = {"up": _shape(64, 256), "down": _shape(256, 64)}
    params = {"block_0": block, "block_1": block}
    state = {"params": params, "moments": params}
    return autopar.plan(_train, state, _shape(512, 64), cluster=CLUSTER, **options)


def test_where_memory_suffices_nothing_is_because_of_it() -> None:
    found = _plan_inference(memory_limit="1GiB", microbatches=1).explain("*")
    assert found.seconds_per_gib == 0
    assert "memory" not in {item.forced_by for item in found.decisions}
    assert all(item.more_seconds is None or item.more_seconds >= 0 for item in found.decisions)
    assert "does not bind" in str(found)


def test_where_memory_binds_a_gib_has_its_price() -> None:
    tight, roomy = (_plan_inference(memory_limit=f"{n}MiB", microbatches=1) for n in (12, 13))
    saved = tight.estimates.step_seconds - roomy.estimates.step_seconds
    assert saved > 0
    found = tight.explain("*")
    assert found.seconds_per_gib == pytest.approx(1024 * saved, rel=0.25)
    forced = [item for item in found.decisions if item.forced_by == "memory"]
    assert forced
    assert all(item.more_seconds < 0 < item.more_bytes for item in forced)  # type: ignore[operator]
    assert "a GiB more on each device would save" in str(found)


def test_where_the_limit_leaves_no_choice_memory_still_has_a_price() -> None:
    assert _plan_inference(memory_limit="11MiB", microbatches=1).explain("x").seconds_per_gib > 0


def test_a_parameter_has_its_line_and_a_runner_up() -> None:
    plan = _plan_training(logical_mesh=(4,))
    (item,) = plan.explain("state['params']['block_1']['up']").decisions
    assert item.role == "state"
    assert item.value == "float32[64, 256]"
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert item.source.startswith(f"{THIS_FILE}:")
    assert "jnp.tanh(y @" in lines[int(item.source.rpartition(":")[2]) - 1]
    leaf = next(x for x in plan.inputs if x.path == item.name)
    parts = [axes[0] if axes else None for axes in leaf.spec]
    assert eval(item.sharding, {"P": PartitionSpec}) == PartitionSpec(*parts)
    assert item.runner_up != item.sharding
    assert item.more_seconds is not None


def test_a_runner_up_costs_what_a_plan_with_it_does_not_undercut() -> None:
    plan = _plan_training(logical_mesh=(4,), microbatches=1)
    checked = 0
    for item in plan.explain("params").decisions:
        if item.role != "state" or item.runner_up is None:
            continue
        spec = eval(item.runner_up, {"P": PartitionSpec})
        options: dict[str, Any] = {"logical_mesh": (4,), "microbatches": 1}
        other = _plan_training(pins={item.name: spec}, **options)
        more = other.estimates.step_seconds - plan.estimates.step_seconds
        assert item.more_seconds is not None
        assert -1e-9 <= more <= item.more_seconds + 1e-9
        checked += 1
    assert checked


def test_what_forced_it_is_told() -> None:
    pinned = _plan_training(pins={"block_0/up": (None, "x")}, logical_mesh=(4,))
    (item,) = pinned.explain("params/block_0/up").decisions
    assert item.forced_by == "pin"
    assert "'block_0/up'" in item.why
    whole = _plan_training(method="data").explain("params/block_0/up")
    assert whole.decisions[0].forced_by == "method"
    assert "method='data'" in str(whole)
    output = whole = _plan_training(method="data").explain("result[1]")
    assert output.decisions[0].forced_by == "computed"


def test_layers_lines_and_folded_names() -> None:
    plan = _plan_training()
    layer = plan.explain("block_0")
    roles = {item.role for item in layer.decisions}
    assert roles == {"state", "computation"}
    assert not [item for item in layer.decisions if "block_1" in item.name]
    both = plan.explain("params/block_{0..1}/{up,down}")
    assert len(both.decisions) == 4
    line = next(item.source for item in layer.decisions if item.role == "computation")
    assert all(item.source == line for item in plan.explain(line).decisions)
    with pytest.raises(autopar.AutoparError) as caught:
        plan.explain("block_0/upp")
    assert "no leaf, layer or line called 'block_0/upp'" in str(caught.value)
    assert "block_0/up'" in str(caught.value)
    with pytest.raises(autopar.AutoparError, match=line):
        plan.explain(f"{line}0000")
    with pytest.raises(autopar.AutoparError, match=re.escape(f"{line.partition(':')[0]}:")):
        plan.explain(line.partition(":")[0])
    with pytest.raises(autopar.AutoparError, match="explain takes a name"):
        plan.explain(3)  # type: ignore[arg-type]


def test_a_loaded_plan_explains_as_the_saved_one(tmp_path: Path) -> None:
    plan = _plan_training(stages=2, microbatches=4)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.explain("*") == plan.explain("*")
    assert loaded.decisions_hash == plan.decisions_hash
    assert _plan_training(stages=2, microbatches=4).to_json() == plan.to_json()
    assert {item.stage for item in plan.explain("block_1").decisions} == {1}


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_terminal(width: int) -> None:
    for name in ("*", "state['params']['block_0']['up']"):
        text = io.StringIO()
        Console(width=width, file=text).print(_plan_training().explain(name))
        assert max(map(len, text.getvalue().splitlines())) <= width


def test_layouts_and_names_are_read() -> None:
    assert layout_text("[-|xy]") == "P(None, ('x', 'y'))"
    assert layout_text("[]") == "P()"
    assert layout_text("[x] +sum(y)") == "P('x'), a sum over y left to do"
    assert segments("transpose(jvp(GPT))/rematted/Block_0") == ("GPT", "rematted", "Block_0")
    assert near_names("blok_0", ["state/block_0/w", "other"]) == ["state/block_0/w"]


def test_paths_are_written_whole() -> None:
    said = " ".join(str(_plan_training(method="zero3").explain("block_1")).split())
    assert "block_1" in said.partition("Why block_1 lies so")[2]
    assert "/../" not in said
