"""`plan.hot_lines`: where a step's time goes by line."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from attention_ways import (
    STACK,
    by_hand,
    line_at,
    line_of,
    planned,
    scanned,
    shapes_of,
    step_with,
)

import autopar
from autopar.base.line_times import MOST_LINES
from autopar.base.user_code import is_of_a_model
from autopar.passes.planner.timed_lines import place_and_pass, place_of
from autopar.report.rich_parts import as_text


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return planned(step_with(by_hand, remat=True), shapes_of())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cluster": "8xh100", "microbatches": 2},
        {"cluster": "8xh100", "method": "zero3", "microbatches": 1},
        {"cluster": "8xh100", "stages": 2, "microbatches": 4},
        {"cluster": "8xh100", "stages": 2, "microbatches": 4, "remat": "full"},
        {"cluster": "8 v5e"},
    ],
    ids=str,
)
def test_lines_take_together_what_the_plan_expects(options: Any) -> None:
    plan = planned(step_with(by_hand), shapes_of(256), **options)
    estimates, lines = plan.estimates, plan.hot_lines.lines
    computing = sum(line.product_seconds + line.memory_seconds for line in lines)
    moving = sum(line.communication_seconds for line in lines)
    assert computing == pytest.approx(estimates.compute_seconds, rel=1e-9)
    assert moving == pytest.approx(estimates.communication_seconds, rel=1e-9, abs=1e-15)
    for x in lines:
        assert x.forward_seconds + x.backward_seconds + x.again_seconds <= 1.0001 * x.seconds
    # Little of that is what the plan expects of no line.
    told = sum(x.seconds for x in lines if x.source)
    assert told > 0.8 * (computing + moving)


def test_lines_take_what_their_instructions_do() -> None:
    """Whatever else the integer program expects of a step: lines are not the longer for it."""
    options: Any = {"cluster": "4xh100", "method": "data", "batch_argnums": (1,)}
    taken = []
    for microbatches in (1, 8):
        plan = planned(scanned(""), STACK, microbatches=microbatches, **options)
        taken.append(line_at(plan, line_of(scanned, "jnp.tanh")).product_seconds)
    flops = 3 * 2 * 8 * 8192 * 2 * 1024 * 4096 / 4
    assert flops / 1e15 < taken[0] < 2 * flops / 1e15
    assert taken[1] < 1.8 * taken[0]  # each microbatch reads the weights


def test_every_device_adds_up_all_of_its_partial_sums() -> None:
    """Gradients of replicated weights are partial over the devices, which share no part of that."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    shapes = [jax.ShapeDtypeStruct((rows, 8192), "float32") for rows in (8192, 64)]
    plan = autopar.plan(step, *shapes, cluster="8xh100", method="data", microbatches=8)
    lines = plan.hot_lines.lines
    read_and_written = 2 * 8192 * 8192 * 4 / 3.35e12
    assert sum(x.memory_seconds for x in lines if x.source) > 7 * read_and_written
    assert sum(x.seconds for x in lines if x.source) > 0.9 * sum(x.seconds for x in lines)


def test_overlap_shortens_communication_alone() -> None:
    cluster = replace(autopar.Cluster.preset("h100", devices_per_node=8), overlap=0.5)
    plan = planned(step_with(by_hand), shapes_of(256), cluster=cluster, method="zero3")
    lines = plan.hot_lines.lines
    moving = sum(line.communication_seconds for line in lines)
    assert moving == pytest.approx(plan.estimates.communication_seconds, rel=1e-9)


def test_a_line_knows_its_kinds_and_passes(plan: autopar.Plan) -> None:
    up = line_at(plan, line_of(step_with, 'layer["up"]'))
    assert up.function == "block" and "dot_general" in up.operations
    # Forward once and again; backward two products for each, but for the gradient of nothing.
    assert up.product_seconds > up.memory_seconds > 0
    assert up.forward_seconds > 0 and up.again_seconds > 0
    assert up.backward_seconds > up.forward_seconds
    softmax = line_at(plan, line_of(by_hand, "jax.nn.softmax"))
    assert softmax.product_seconds == 0 and softmax.function == "by_hand"
    assert softmax.again_seconds == pytest.approx(softmax.forward_seconds, rel=0.1)
    update = line_at(plan, line_of(step_with, "0.1 * g"))
    assert update.seconds > 0 == update.forward_seconds == update.backward_seconds


def test_trips_and_microbatches_count() -> None:
    def step(ws: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    def product(layers: int, microbatches: int) -> float:
        shapes = jax.ShapeDtypeStruct((layers, 1024, 1024), jnp.float32)
        x = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
        options = {"batch_argnums": (1,), "microbatches": microbatches}
        plan = autopar.plan(step, shapes, x, cluster="1xh100", progress=False, **options)
        return sum(line.product_seconds for line in plan.hot_lines.lines)

    assert product(8, 1) == pytest.approx(4 * product(2, 1), rel=0.05)
    assert product(8, 4) == pytest.approx(product(8, 1), rel=0.2)


def test_a_file_answers_as_the_plan(plan: autopar.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and str(loaded.hot_lines) == str(plan.hot_lines)
    again = planned(step_with(by_hand, remat=True), shapes_of())
    assert again.to_json() == plan.to_json()


def test_a_file_of_an_older_version_has_none(plan: autopar.Plan) -> None:
    plain = json.loads(plan.to_json())
    del plain["lines"]
    older = autopar.Plan.from_json(json.dumps(plain))
    assert older.hot_lines.lines == () == older.hot_lines.advice
    assert "Where the time goes" not in str(older) and older._repr_html_()
    assert str(older.hot_lines) == "Where the time goes: the plan does not say."


def test_a_plan_that_computes_nothing_says_so() -> None:
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan = autopar.plan(lambda w, x: (w, x), shape, shape, cluster="1xh100", progress=False)
    assert str(plan.hot_lines) == "Where the time goes: nothing of a step takes any."
    assert "nothing of a step takes any" in plan.hot_lines._repr_html_()


def test_files_of_one_name_are_apart(tmp_path: Path) -> None:
    called: list[Any] = []
    for folder, text in (("a", "x @ w"), ("b", "jnp.tanh(x) + w.sum()")):
        space: dict[str, Any] = {"jnp": jnp}
        path = str(tmp_path / folder / "layers.py")
        exec(compile(f"def call(w, x):\n    return {text}\n", path, "exec"), space)
        called.append(space["call"])
    shape = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    first, second = called
    plan = autopar.plan(
        lambda w, x: second(w, first(w, x)), shape, shape, cluster="1xh100", progress=False
    )
    lines = [x for x in plan.hot_lines.lines if x.source == "layers.py:2"]
    assert sorted(x.product_seconds > 0 for x in lines) == [False, True]
    assert str(tmp_path) not in plan.to_json()
    assert not plan.diff(plan).details


def test_an_equation_of_no_line_keeps_its_pass() -> None:
    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda w, x: jax.vjp(lambda w: jnp.sin(x @ w), w)[1](x))(shape, shape)
    eqns = {eqn.primitive.name: eqn for eqn in reversed(jaxpr.jaxpr.eqns)}
    forward, backward = eqns["dot_general"], eqns["mul"]
    own = place_of(forward), "forward"
    assert place_and_pass(forward, "", {}) == own
    stack = backward.source_info.name_stack
    of_none = backward.replace(source_info=type(backward.source_info)(None, stack))
    made = dict.fromkeys(of_none.invars, own)
    assert place_and_pass(of_none, "", made) == (own[0], "backward")
    nowhere = of_none.replace(source_info=type(backward.source_info)(None, type(stack)()))
    assert place_and_pass(nowhere, "", made) == own


def test_many_lines_are_few_and_others() -> None:
    body = "\n".join(f"    x = jnp.sin(x) * {i}\n    x = x @ w" for i in range(1, 25))
    space: dict[str, Any] = {"jnp": jnp}
    exec(compile(f"def step(w, x):\n{body}\n    return x", "many.py", "exec"), space)
    shape = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    plan = autopar.plan(space["step"], shape, shape, cluster="1xh100", progress=False)
    *told, others = plan.hot_lines.lines
    assert len(told) == MOST_LINES and all(line.source for line in told)
    assert not others.source and others.lines == 48 - MOST_LINES
    assert [x.seconds for x in told] == sorted((x.seconds for x in told), reverse=True)
    assert f"{others.lines} others" in str(plan.hot_lines)


def test_it_prints(plan: autopar.Plan) -> None:
    wide, narrow = as_text(plan.hot_lines, 120), as_text(plan.hot_lines, 80)
    assert "backward" in wide and "And in which pass" not in wide
    assert "And in which pass" in narrow and max(map(len, narrow.splitlines())) <= 80
    assert "Where the time goes" in str(plan)
    html = plan.hot_lines._repr_html_()
    assert "Where the time goes" in html and line_of(by_hand, "jax.nn.softmax") in html


def test_a_step_that_returns_a_number_has_lines() -> None:
    def step(w: Any, x: jax.Array) -> tuple[Any, float]:
        return {"w": w["w"] + x.sum(0)}, 3.0

    assert planned(step, ({"w": jnp.ones(8)}, jnp.ones((16, 8)))).hot_lines.lines


def test_a_difference_is_told_by_line(plan: autopar.Plan) -> None:
    other = planned(step_with(by_hand), shapes_of())
    source = line_of(by_hand, "jax.nn.softmax")
    assert any(x.startswith(f"lines.lines[{source} by_hand]") for x in plan.diff(other).details)


def test_lines_of_models_from_a_library_are_told() -> None:
    """Its one line of the user's would have all of the step."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=1, n_head=2)
    model = transformers.FlaxGPT2LMHeadModel(config, _do_init=False)
    params = jax.eval_shape(lambda key: model.init_weights(key, (1, 8)), jax.random.key(0))

    def step(params: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = model(tokens, params=params).logits
            return -jnp.mean(jax.nn.log_softmax(logits))

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    tokens = jax.ShapeDtypeStruct((64, 64), jnp.int32)
    lines = autopar.plan(step, params, tokens, cluster="2xh100").hot_lines.lines
    files = {line.source.partition(":")[0] for line in lines}
    assert {"modeling_flax_gpt2.py", Path(__file__).name} <= files
    assert not files & {"attention.py", "linear.py", "normalization.py"}, "lines of flax"


@pytest.mark.parametrize(
    ("file", "is_told"),
    [
        ("transformers/models/gpt2/modeling_flax_gpt2.py", True),
        ("one_module.py", True),
        ("flax/linen/linear.py", False),
        ("equinox/nn/_linear.py", False),
        (autopar.__file__, False),
        (json.__file__, False),
        ("/home/me/train.py", True),
    ],
)
def test_libraries_with_which_models_are_written_hold_none(file: str, is_told: bool) -> None:
    packages = sysconfig.get_paths()["purelib"]
    assert is_of_a_model(str(Path(packages, file))) == is_told  # absolute ones stay
