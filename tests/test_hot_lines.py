"""`plan.hot_lines`: where a step's time goes by line, and what follows from it."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.base.line_times import MOST_LINES, LineTime
from autopar.passes.graph.graph import inner_jaxprs
from autopar.passes.planner.step_lines import place_and_pass, place_of
from autopar.passes.primitives.written_attention import written_attention
from autopar.report.rich_parts import as_text

THIS_FILE = Path(__file__).name
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Shapes = dict[str, Any]


def by_hand(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def written_out(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def by_jax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def capped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = 50 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 50)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def dropping(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(keep, weights / 0.9, 0), v)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def _mixed(weights: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def scaled_by_head(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = _scores(q, k) * v[0, 0, :, 0][None, :, None, None] + v[0, 0, 0, 0]
    return _mixed(jax.nn.softmax(scores / jnp.sqrt(q.shape[-1]).astype(q.dtype)), v)


def with_a_sink(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = _scores(q, k).astype(jnp.float32)
    largest = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    weights = weights / (weights.sum(-1, keepdims=True) + jnp.exp(-largest))
    return _mixed(weights.astype(v.dtype), v)


def at_least_zero(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _mixed(jax.nn.softmax(jnp.maximum(_scores(q, k), 0)), v)


def gated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    gates = jnp.arange(q.shape[1], dtype=q.dtype)[:, None] * v[0, :, 0, 0]
    return _mixed(jax.nn.softmax(_scores(q, k) * gates), v)


def zeroed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    return _mixed(jax.nn.softmax(jnp.where(mask, _scores(q, k), 0)), v)


def squared(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(_scores(q, k))
    return _mixed(weights * weights, v)


def over_queries(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _mixed(jax.nn.softmax(_scores(q, k), axis=-2), v)


def turned_weights(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _mixed(jax.nn.softmax(_scores(q, k)).swapaxes(-1, -2), v)


def with_a_loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(_scores(q, k))
    return _mixed(weights, v) + (weights.astype(jnp.float32) ** 2).mean().astype(v.dtype)


def with_a_loss_of_sums(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = _scores(q, k)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    sums = weights.sum(-1, keepdims=True)
    return _mixed(weights / sums, v) + jnp.log(sums).mean()


def biased(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _mixed(jax.nn.softmax(_scores(q, k) + v[0, :, 0, 0]), v)


def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q = q.reshape(*q.shape[:2], 2, -1, q.shape[-1])
    weights = jax.nn.softmax(jnp.einsum("bqghd,bkhd->bghqk", q, k[:, :, : q.shape[3]]))
    return jnp.einsum("bghqk,bkhd->bqghd", weights, v[:, :, : q.shape[3]])


def _line(fn: Callable[..., Any], words: str) -> str:
    """The line of a function that has these words, as a plan names it."""
    lines, first = inspect.getsourcelines(fn)
    (number,) = [i for i, line in enumerate(lines) if words in line]
    return f"{THIS_FILE}:{first + number}"


def _step(attention: Attention, *, remat: bool = False, depth: int = 64) -> Callable[..., Any]:
    """Of a small decoder of two layers, trained by SGD."""

    def block(x: jax.Array, layer: Shapes) -> jax.Array:
        q, k, v = (x @ layer[name] for name in "qkv")
        apart = (*x.shape[:2], -1, depth)
        mixed = attention(q.reshape(apart), k.reshape(apart), v.reshape(apart))
        x = x + mixed.reshape(x.shape)
        return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]

    def loss_of(params: Shapes, batch: Shapes) -> jax.Array:
        x = params["embed"][batch["tokens"]]
        for layer in params["layers"]:
            x = (jax.checkpoint(block) if remat else block)(x, layer)
        logits = (x @ params["embed"].T).astype(jnp.float32)
        weights = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(weights, batch["targets"][..., None], -1).mean()

    def step(params: Shapes, batch: Shapes) -> tuple[Shapes, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def _shapes(length: int = 1024, width: int = 256, dtype: Any = jnp.bfloat16) -> tuple[Shapes, Any]:
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    layer = {name: shape(width, width) for name in "qkv"}
    layer |= {"up": shape(width, 4 * width), "down": shape(4 * width, width)}
    tokens = jax.ShapeDtypeStruct((8, length), jnp.int32)
    params = {"embed": shape(1024, width), "layers": [layer, layer]}
    return params, {"tokens": tokens, "targets": tokens}


def _plan(step: Callable[..., Any], shapes: tuple[Shapes, Any], **options: Any) -> autopar.Plan:
    return autopar.plan(step, *shapes, progress=False, **{"cluster": "1xh100", **options})


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return _plan(_step(by_hand, remat=True), _shapes())


def _at(plan: autopar.Plan, source: str) -> LineTime:
    (line,) = [line for line in plan.hot_lines.lines if line.source == source]
    return line


def _advice(plan: autopar.Plan) -> list[str]:
    return [advice.about for advice in plan.hot_lines.advice]


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
    plan = _plan(_step(by_hand), _shapes(256), **options)
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
        plan = _plan(_scanned(""), STACK, microbatches=microbatches, **options)
        taken.append(_at(plan, _line(_scanned, "jnp.tanh")).product_seconds)
    flops = 3 * 2 * 8 * 8192 * 2 * 1024 * 4096 / 4
    assert flops / 1e15 < taken[0] < 2 * flops / 1e15
    assert taken[1] < 1.8 * taken[0]  # each microbatch reads the weights


def test_overlap_shortens_communication_alone() -> None:
    cluster = replace(autopar.Cluster.preset("h100", devices_per_node=8), overlap=0.5)
    plan = _plan(_step(by_hand), _shapes(256), cluster=cluster, method="zero3")
    lines = plan.hot_lines.lines
    moving = sum(line.communication_seconds for line in lines)
    assert moving == pytest.approx(plan.estimates.communication_seconds, rel=1e-9)


def test_a_line_knows_its_kinds_and_passes(plan: autopar.Plan) -> None:
    up = _at(plan, _line(_step, 'layer["up"]'))
    assert up.function == "block" and "dot_general" in up.operations
    # Forward once and again; backward two products for each, but for the gradient of nothing.
    assert up.product_seconds > up.memory_seconds > 0
    assert up.forward_seconds > 0 and up.again_seconds > 0
    assert up.backward_seconds > up.forward_seconds
    softmax = _at(plan, _line(by_hand, "jax.nn.softmax"))
    assert softmax.product_seconds == 0 and softmax.function == "by_hand"
    assert softmax.again_seconds == pytest.approx(softmax.forward_seconds, rel=0.1)
    update = _at(plan, _line(_step, "0.1 * g"))
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
    again = _plan(_step(by_hand, remat=True), _shapes())
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
    assert "Where the time goes" in html and _line(by_hand, "jax.nn.softmax") in html


@pytest.mark.parametrize("attention", [by_hand, written_out, by_jax, scaled_by_head, biased])
def test_attention_that_writes_scores_is_told(attention: Attention) -> None:
    plan = _plan(_step(attention), _shapes())
    (advice,) = [x for x in plan.hot_lines.advice if x.about == "attention"]
    assert 'implementation="cudnn"' in advice.text and attention.__name__ in advice.text
    line = _at(plan, advice.source)
    assert line.function == attention.__name__
    # The bound has what products read and write of scores, too; other lines stay as they are.
    least = advice.share * plan.hot_lines.seconds
    functions = attention.__name__, "_scores", "_mixed"
    attending = [x for x in plan.hot_lines.lines if x.function in functions]
    assert least < advice.bound_seconds < sum(x.seconds for x in attending)


@pytest.mark.parametrize(
    "attention",
    [
        capped,
        dropping,
        with_a_sink,
        at_least_zero,
        gated,
        zeroed,
        squared,
        over_queries,
        turned_weights,
        with_a_loss,
        with_a_loss_of_sums,
    ],
)
def test_what_kernels_do_not_compute_is_no_attention(attention: Attention) -> None:
    assert "attention" not in _advice(_plan(_step(attention), _shapes()))


def test_a_step_that_returns_a_number_has_lines() -> None:
    def step(w: Any, x: jax.Array) -> tuple[Any, float]:
        return {"w": w["w"] + x.sum(0)}, 3.0

    assert _plan(step, ({"w": jnp.ones(8)}, jnp.ones((16, 8)))).hot_lines.lines


def test_weights_that_a_scan_returns_are_no_attention() -> None:
    def step(x: jax.Array, *, returned: bool) -> tuple[jax.Array, Any]:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array | None]:
            weights = jax.nn.softmax(_scores(x, x))
            return _mixed(weights, x), weights if returned else None

        def loss(x: jax.Array) -> tuple[jax.Array, Any]:
            x, weights = jax.lax.scan(layer, x, None, length=2)
            return x.sum(), weights

        return jax.value_and_grad(loss, has_aux=True)(x)[::-1]

    x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.float32)
    found = [
        len([*written_attention(jax.make_jaxpr(functools.partial(step, returned=it))(x).jaxpr)])
        for it in (False, True)
    ]
    assert found == [1, 0]


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (_shapes(dtype=jnp.float32), {}),  # cuDNN has none
        (_shapes(), {"cluster": "1xv100"}),
        (_shapes(64, 4096), {}),  # of a step, little
        (_shapes(1023), {}),  # masks are biases, of which lengths must be even
    ],
    ids=["float32", "before Ampere", "short rows", "odd rows"],
)
def test_attention_is_not_told_where_nothing_follows(shapes: Any, options: Any) -> None:
    assert "attention" not in _advice(_plan(_step(by_hand), shapes, **options))


def test_tpus_have_another_kernel() -> None:
    plan = _plan(_step(by_hand), _shapes(), cluster="4 v5e", microbatches=1)
    (advice,) = [x for x in plan.hot_lines.advice if x.about == "attention"]
    assert "pallas" in advice.text and "cudnn" not in advice.text


@pytest.mark.parametrize(
    ("attention", "depth", "told"),
    [(by_hand, 192, False), (by_hand, 256, True), (grouped, 64, False)],
)
def test_tpus_kernel_has_its_own_limits(attention: Attention, depth: int, told: bool) -> None:
    step, shapes = _step(attention, depth=depth), _shapes(width=768)
    plan = _plan(step, shapes, cluster="1 v5e", microbatches=1)
    assert ("attention" in _advice(plan)) == told


def test_gpus_kernel_has_grouped_heads() -> None:
    assert "attention" in _advice(_plan(_step(grouped), _shapes()))


def test_a_loss_and_its_gradient_are_no_attention() -> None:
    step = _step(lambda q, k, v: q + k + v)
    jaxpr = jax.make_jaxpr(step)(*_shapes(64)).jaxpr
    flat = [jaxpr, *(body for eqn in jaxpr.eqns for body in inner_jaxprs(eqn))]
    assert not [x for scope in flat for x in written_attention(scope)]


def test_what_is_computed_again_is_told(plan: autopar.Plan) -> None:
    (advice,) = [x for x in plan.hot_lines.advice if x.about == "recomputation"]
    assert "jax.checkpoint" in advice.text and 'remat="override"' in advice.text
    again = sum(line.again_seconds for line in plan.hot_lines.lines)
    # An override does not undo all of it.
    assert 0.9 * again < advice.bound_seconds <= again


def _scanned(checkpoint: str) -> Callable[..., Any]:
    """A step over a stack of layers, with `jax.checkpoint` around each or around the scan."""

    def body(x: jax.Array, w: Shapes) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w["a"]) @ w["b"] + x, None

    def scan(x: jax.Array, ws: Shapes) -> jax.Array:
        each = jax.checkpoint(body) if checkpoint == "layer" else body
        return jax.lax.scan(each, x, ws)[0]

    def step(ws: Shapes, x: jax.Array) -> tuple[Shapes, jax.Array]:
        run = jax.checkpoint(scan) if checkpoint == "scan" else scan
        loss, grads = jax.value_and_grad(lambda ws: (run(x, ws) ** 2).mean())(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), loss

    return step


def _layers(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


STACK = {"a": _layers(8, 1024, 4096), "b": _layers(8, 4096, 1024)}, _layers(8192, 1024)


def test_an_override_is_advised_where_it_undoes_a_checkpoint() -> None:
    options: Any = {"batch_argnums": (1,), "microbatches": 1}
    told = {}
    for checkpoint in ("layer", "scan"):
        plan = _plan(_scanned(checkpoint), STACK, **options)
        told[checkpoint] = [x for x in plan.hot_lines.advice if x.about == "recomputation"]
        assert sum(x.again_seconds for x in plan.hot_lines.lines) > 0
    assert not told["scan"] and "keeps it" in str(told["layer"][0])
    plan = _plan(_scanned("layer"), STACK, **options)
    kept = _plan(_scanned("layer"), STACK, remat="override", **options)
    # What the advice says is right: what is kept, and how much shorter the step is at most.
    peaks = [x.estimates.peak_bytes_per_device for x in (plan, kept)]
    assert plan.lines is not None
    assert plan.lines.undone_bytes == pytest.approx(peaks[1] - peaks[0], rel=0.2)
    shorter = plan.estimates.step_seconds - kept.estimates.step_seconds
    assert 0.5 * told["layer"][0].bound_seconds < shorter <= told["layer"][0].bound_seconds


def test_an_override_is_not_advised_without_room() -> None:
    options: Any = {"batch_argnums": (1,), "microbatches": 1}
    plan = _plan(_scanned("layer"), STACK, **options)
    peak = plan.estimates.peak_bytes_per_device
    for free, said in ((20 << 20, None), (200 << 20, "keeps some of it"), (1 << 30, "keeps it")):
        tight = replace(plan, options={**plan.options, "memory_limit": peak + free})
        told = [str(x) for x in tight.hot_lines.advice if x.about == "recomputation"]
        assert bool(told) == bool(said) and all(str(said) in text for text in told)


def test_recomputation_is_not_told_where_there_is_none() -> None:
    assert "recomputation" not in _advice(_plan(_step(by_hand), _shapes()))
    override = _plan(_step(by_hand, remat=True), _shapes(), remat="override", microbatches=1)
    assert "recomputation" not in _advice(override)


def test_what_the_memory_needs_again_is_told_so() -> None:
    step, shapes = _step(by_hand), _shapes()
    whole = _plan(step, shapes, microbatches=1).estimates.peak_bytes_per_device
    plan = _plan(step, shapes, microbatches=1, memory_limit=int(0.6 * whole))
    assert plan.recomputation is not None
    assert sum(line.again_seconds for line in plan.hot_lines.lines) > 0
    told = [x.text for x in plan.hot_lines.advice if x.about == "recomputation"]
    assert all("With more of it" in text for text in told)


def test_full_recomputation_in_stages_is_told() -> None:
    shared: Any = {"cluster": "2xh100", "stages": 2, "microbatches": 4}
    plan = _plan(_step(by_hand), _shapes(), remat="full", **shared)
    (advice,) = [x for x in plan.hot_lines.advice if x.about == "recomputation"]
    assert 'remat="full"' in advice.text and "less to do" in advice.text


def test_a_line_that_mostly_communicates_is_told() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8192, 8192), (64, 8192))]
    options: Any = {"cluster": "8xh100", "batch_argnums": (1,), "progress": False}
    plan = autopar.plan(step, *shapes, method="data", **options)
    (advice,) = plan.hot_lines.advice
    assert advice.about == "communication" and "gradient all-reduce" in advice.text
    assert plan.explain(advice.source).decisions
    alone = autopar.plan(step, *shapes, **{**options, "cluster": "1xh100"})
    assert not alone.hot_lines.advice


def test_a_difference_is_told_by_line(plan: autopar.Plan) -> None:
    other = _plan(_step(by_hand), _shapes())
    source = _line(by_hand, "jax.nn.softmax")
    assert any(x.startswith(f"lines.lines[{source} by_hand]") for x in plan.diff(other).details)
