"""Every program in pipeline stages, compared with plain `jax.jit` over three steps."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import ONE_LAYER, PROGRAMS, Program, compare, is_variant
from programs.plain_runs import plain_run
from sharding.piece_collectives import assert_pieces_contain_what_is_listed

import autopar
from autopar.base.errors import InexactMicrobatchError, MemoryLimitError, OptionError, ScheduleError

STAGES = (2, 4)
SCHEDULES = ("1f1b", "zb_h1")
ALIKE = (
    "hf_bert", "hf_gpt2", "hf_vit", "nnx_graphdef", "nnx_transformer", "scan_layers_linen",
    "lstm_linen", "key_raw", "bfloat16_scan",
)  # fmt: skip
"""The same in another library, or others of their library, are cut into stages by default.

So are real steps of `test_real_steps` in NNX, and in bfloat16 and a scan.
"""

LISTED = ("linen_gpt", "scan_layers")
"""Of these, the plan's collectives are compared with those of the compiled pieces, too."""


def combinations() -> Iterator[Any]:
    """All of them; by default one of each program that is no variant, nor like another one.

    Schedules take turns; every eighth program is cut into four stages, all others into two.
    """
    for number, program in enumerate(PROGRAMS.values()):
        turn = STAGES[number % 8 == 3], SCHEDULES[(number + number // 8) % 2]
        for stages, schedule in itertools.product(STAGES, SCHEDULES):
            chosen = (stages, schedule) == turn and not is_variant(program)
            chosen &= program.name not in ALIKE
            marks = [] if chosen else [pytest.mark.full]
            name = f"{program.name}-{stages}-{schedule}"
            yield pytest.param(program, stages, schedule, id=name, marks=marks)


@pytest.mark.parametrize(("program", "stages", "schedule"), list(combinations()))
def test_pipelined_step_equals_plain_step(program: Program, stages: int, schedule: str) -> None:
    case, plain = plain_run(program.name)
    with program.context():
        arguments = case.arguments(compare.copy_tree(case.state), case.batch)

        def compiled(schedule: str = schedule, microbatches: int = 4) -> autopar.Executable:
            asked = {"stages": stages, "schedule": schedule, "microbatches": microbatches}
            options = {**case.options, **asked}
            return autopar.compile(case.step, *arguments, **case.keywords[0], **options)

        if not program.splits:
            with pytest.raises(InexactMicrobatchError, match=re.escape(program.file.name)):
                compiled()
            whole = compiled("1f1b", microbatches=1)
            compare.assert_steps_equal(plain, whole, case, program.tolerance)
            return
        if program.name in ONE_LAYER:
            with pytest.raises(OptionError, match="more than the program has layers"):
                compiled()
            return
        step = compiled()
        assert len(step.plan.stages) == stages
        compare.assert_steps_equal(plain, step, case, program.tolerance)
        if program.name in LISTED:
            assert_pieces_contain_what_is_listed(step, microbatches=4)


# A small step for everything else.


def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1.0, 0.5 / norm)
    params = jax.tree.map(lambda p, g: p - 0.1 * scale * g, state["params"], grads)
    return {"params": params, "step": state["step"] + 1}, {"loss": loss, "norm": norm}


def init(key: Any, layers: int = 8, width: int = 16) -> Any:
    keys = jax.random.split(key, layers)
    params = [{"w": jax.random.normal(k, (width, width)) / 4, "b": jnp.zeros(width)} for k in keys]
    return {"params": params, "step": jnp.int32(0)}


BATCH = {
    "x": np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(32, 16)).astype(np.float32),
}


def run(step: Any, steps: int = 3) -> Any:
    state = init(jax.random.key(0))
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    return jax.device_get((state, metrics))


def assert_close(left: Any, right: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), left, right)


def compiled(**options: Any) -> autopar.Executable:
    return autopar.compile(train_step, init(jax.random.key(0)), BATCH, **options)


@pytest.mark.parametrize(
    ("options", "num_stages"),
    [
        ({"schedule": "gpipe", "stages": 2}, 2),
        ({"schedule": "1f1b", "stages": [1, 6], "logical_mesh": (2,)}, 3),
        ({"schedule": "eager_1f1b", "stages": 4}, 4),
        ({"schedule": "interleaved_1f1b", "stages": 2, "num_chunks": 2}, 4),
        ({"schedule": "zb_h2", "stages": 4, "microbatches": 8}, 4),
        ({"stages": 2, "method": "zero2"}, 2),
        ({"stages": 2, "method": "data", "microbatches": "auto"}, 2),
        ({"stages": 8, "schedule": "1f1b"}, 8),
        ({"stages": 2, "schedule": "1f1b", "remat": "full"}, 2),
        ({"stages": 2, "schedule": "zb_h1", "remat": "full"}, 2),
    ],
    ids=str,
)
def test_schedules_and_shapes(options: dict[str, Any], num_stages: int) -> None:
    if options["stages"] == [1, 6]:
        options = {**options, "cluster": autopar.Cluster.preset("cpu", devices_per_node=6)}
    step = compiled(**{"microbatches": 4, **options})
    assert len(step.plan.stages) == num_stages
    assert_close(run(step), run(jax.jit(train_step)))


def test_rematerialization_keeps_less() -> None:
    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            y = x
            for w in params:
                y = jnp.sin(jnp.tanh(jnp.sin(y @ w)) * 2) + y
            return jnp.mean(y**2)

        grads = jax.grad(loss_fn)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)]

    params = [jnp.eye(16) * (1 + i / 8) for i in range(8)]
    x = np.random.default_rng(0).normal(size=(1024, 16)).astype(np.float32)

    def kept(remat: str, **options: Any) -> tuple[autopar.Plan, int]:
        options = {"stages": 2, "microbatches": 8, "schedule": "1f1b", "method": "data", **options}
        plan = autopar.plan(step, params, x, remat=remat, **options)
        return plan, max(stage.peak_bytes_per_device for stage in plan.stages)

    none, most = kept("none")
    full, least = kept("full")
    assert least < most
    assert [stage.remat for stage in full.stages] == ["full", "full"]
    chosen, size = kept("auto", memory_limit=(least + most) // 2)
    assert any(stage.remat == "full" or stage.recomputation for stage in chosen.stages)
    assert size <= (least + most) // 2
    assert [stage.remat for stage in none.stages] == ["none", "none"]


def test_a_users_schedule_runs() -> None:
    def one_at_a_time(num_meshes: int, num_microbatches: int) -> list[list[tuple[Any, ...]]]:
        order = [t for m in range(num_microbatches) for t in (("F", m), ("B", m))]
        return [[(kind, stage, m) for kind, m in order] for stage in range(num_meshes)]

    step = compiled(stages=2, microbatches=4, schedule=one_at_a_time)
    assert_close(run(step), run(jax.jit(train_step)))


def test_what_crosses_is_one_activation_each_way() -> None:
    plan = compiled(stages=4, microbatches=4, schedule="1f1b").plan
    assert plan.pipeline is not None
    crossing = [(t.source, t.target, t.shape) for t in plan.pipeline.transfers if t.times == 4]
    activation = (8, 16)
    forward = [(s, s + 1, activation) for s in range(3)]
    backward = [(s + 1, s, activation) for s in range(3)]
    assert sorted(crossing) == sorted([*forward, *backward])


def test_a_saved_plan_runs_again(tmp_path: Path) -> None:
    step = compiled(stages=2, microbatches=4)
    path = tmp_path / "plan.json"
    step.plan.save(path)
    again = compiled(stages=2, microbatches=4, plan=path)
    assert again.plan.to_json() == step.plan.to_json()
    jax.tree.map(np.testing.assert_array_equal, run(again), run(step))


def test_the_same_request_gives_the_same_plan() -> None:
    options: dict[str, Any] = {"stages": 2, "microbatches": 4}
    assert compiled(**options).plan.to_json() == compiled(**options).plan.to_json()


def test_plans_need_no_devices() -> None:
    given = train_step, jax.eval_shape(init, jax.random.key(0)), BATCH
    cluster = autopar.Cluster.preset("dgx-h100", nodes=8)
    plan = autopar.plan(*given, stages=4, cluster=cluster)
    assert [stage.num_devices for stage in plan.stages] == [16] * 4
    assert "4 stages on 4 meshes" in str(plan)
    # Of a row for each of 16 devices at the most: fewer microbatches than four for each mesh.
    four_each = autopar.plan(*given, stages=4, cluster=cluster, microbatches=16)
    assert plan.num_microbatches < 16
    assert plan.estimates.step_seconds < four_each.estimates.step_seconds


def test_state_is_born_on_its_stage_and_donated() -> None:
    step = compiled(stages=2, microbatches=4)
    state = step.initialize(init, jax.random.key(0))
    expected = init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(expected))
    first, last = state["params"][0]["w"], state["params"][-1]["w"]
    assert first.sharding.device_set.isdisjoint(last.sharding.device_set)
    after, _ = step(state, BATCH)
    assert first.is_deleted()
    assert last.is_deleted()
    assert after["params"][0]["w"].sharding.device_set == first.sharding.device_set
    with pytest.raises(autopar.AutoparError, match="donated by an earlier call"):
        step(state, BATCH)


def test_leaves_that_nothing_reads_go_through() -> None:
    def step(state: Any, batch: Any) -> Any:
        new, metrics = train_step({k: state[k] for k in ("params", "step")}, batch)
        return {**state, **new}, metrics

    extra = {"kept": jnp.arange(3), "empty": jnp.zeros((0, 4))}
    batch = {**BATCH, "a": np.zeros((32, 2), np.float32), "z": np.ones((32, 3), np.int8)}
    state = {**init(jax.random.key(0)), **extra}
    made = autopar.compile(step, state, batch, stages=2, microbatches=4)
    for _ in range(3):
        state, _ = made(state, batch)
    np.testing.assert_array_equal(state["kept"], np.arange(3))
    assert state["empty"].shape == (0, 4)
    assert_close(jax.device_get(state["params"]), run(jax.jit(train_step))[0]["params"])


@pytest.mark.filterwarnings("ignore:One trip is counted:autopar.errors.AutoparWarning")
def test_while_loops_in_the_update() -> None:
    """Gradients that are halved until they are small: each loop is on the stage of its leaf."""

    def small(gradient: Any) -> Any:
        return jax.lax.while_loop(lambda g: jnp.max(jnp.abs(g)) > 1e-3, lambda g: g / 2, gradient)

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            x = batch["x"]
            for layer in params:
                x = jnp.tanh(x @ layer["w"] + layer["b"])
            return jnp.mean((x - batch["y"]) ** 2)

        grads = jax.grad(loss_fn)(state["params"])
        params = jax.tree.map(lambda p, g: p - small(g), state["params"], grads)
        return {"params": params, "step": state["step"] + 1}, {}

    made = autopar.compile(step, init(jax.random.key(0)), BATCH, stages=2, microbatches=4)
    assert_close(run(made), run(jax.jit(step)))


def test_steps_that_nobody_waits_for() -> None:
    step = compiled(stages=2, microbatches=8, schedule="zb_h1", method="data")
    assert_close(run(step, steps=40), run(jax.jit(train_step), steps=40))


@pytest.mark.parametrize("decorated", [True, False])
def test_gather_and_apply_on_a_distributed_state(decorated: bool) -> None:
    step: Any = compiled(stages=2, microbatches=4)
    if decorated:
        step = autopar.parallelize(train_step, stages=2, microbatches=4)
        with pytest.raises(autopar.AutoparError, match="has no plan yet"):
            step.gather(BATCH)
        profile = step.profile(init(jax.random.key(0)), BATCH)
        assert profile.timeline.step_seconds > 0
    state, _ = step(init(jax.random.key(0)), BATCH)

    def norm(tree: Any) -> Any:
        return jnp.sqrt(sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(tree)))

    host = jax.device_get(state)
    np.testing.assert_allclose(step.apply(norm, state), norm(host), rtol=1e-6)
    np.testing.assert_allclose(norm(step.gather(state)), norm(host), rtol=1e-6)
    halved = step.apply(lambda tree: jax.tree.map(lambda x: x // 2, tree), state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(halved), strict=True):
        assert new.sharding == old.sharding
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a // 2, b), host, halved)
    mixed = step.apply(lambda tree, scale: tree["step"] * scale, state, np.float32(3))
    assert mixed == 3
    state, _ = step(state, BATCH)
    made = step.gather(state), step.apply(lambda tree: tree, state)
    step(state, BATCH)  # consumes the state, not what was made of it
    assert state["step"].is_deleted()
    expected = run(jax.jit(train_step), steps=2)[0]
    for tree in made:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), tree, expected)


def test_every_piece_is_compiled_and_readable() -> None:
    step = compiled(stages=2, microbatches=4, schedule="1f1b")
    text = step.as_text()
    assert "// piece F0" in text
    assert "// piece B1" in text
    found = set(step.memory_analysis())
    assert found >= {"F0", "B0", "B1"} and "F1" not in found  # the last stage does both at once


# Bad input.


@pytest.mark.usefixtures("no_remedies")
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"stages": 16}, OptionError, "more than the cluster has devices"),
        ({"stages": 3}, OptionError, "cannot be split into 3 equal meshes"),
        ({"stages": 8, "num_chunks": 9}, OptionError, "more than the program has layers"),
        ({"stages": [4, 99]}, OptionError, "cannot be split into 3 equal meshes"),
        ({"stages": [99]}, OptionError, "layers"),
        ({"stages": 2, "microbatches": 5}, autopar.AutoparError, "5"),
        (
            {"stages": 4, "num_chunks": 2, "microbatches": 2},
            ScheduleError,
            "microbatches",
        ),
        ({"stages": 2, "memory_limit": 1000}, MemoryLimitError, "stage"),
        ({"stages": 2, "logical_mesh": (8,)}, OptionError, "does not fit a stage"),
        pytest.param(
            {"stages": 2, "schedule": lambda p, m: [[("F", 0, 0)]]},
            ScheduleError,
            "mesh",
            id="one task",
        ),
    ],
    ids=str,
)
def test_bad_requests(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        compiled(**{"microbatches": 4, **options})


def test_a_batch_without_examples_to_split() -> None:
    def step(state: Any, batch: Any) -> Any:
        return train_step(state, batch)

    odd = {name: value[:3] for name, value in BATCH.items()}
    state = init(jax.random.key(0))
    expected = jax.jit(step)(state, odd)[1]["loss"]
    piped = autopar.compile(step, state, odd, stages=2, donate_argnums=())
    assert (len(piped.plan.stages), piped.plan.num_microbatches) == (2, 1)
    np.testing.assert_allclose(piped(state, odd)[1]["loss"], expected, rtol=1e-5)


def test_what_does_not_split_runs_in_stages(tmp_path: Any) -> None:
    """Statistics of the batch: one microbatch, as asked and by itself; the plan is followed."""

    def norm(x: Any) -> Any:
        return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)

    def step(state: Any, x: Any) -> Any:
        def loss_fn(weights: Any) -> Any:
            y = x
            for w in weights:
                y = y + jnp.tanh(norm(y @ w))
            return jnp.mean(y**2), y.mean(0)

        weights, means = state
        (loss, mean), grads = jax.value_and_grad(loss_fn, has_aux=True)(weights)
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
        return (weights, 0.9 * means + 0.1 * mean), loss

    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[4], (16, 8))
    state = [jax.random.normal(key, (8, 8)) for key in keys[:4]], jnp.zeros(8)
    compiled = functools.partial(autopar.compile, step, state, x, stages=2, donate_argnums=())
    first = compiled()
    first.plan.save(tmp_path / "plan.json")
    again = compiled(plan=autopar.Plan.load(tmp_path / "plan.json"))
    for piped in (first, again):
        assert (len(piped.plan.stages), piped.plan.num_microbatches) == (2, 1)
        plain, ours = state, state
        for _ in range(2):
            plain, expected = jax.jit(step)(plain, x)
            ours, loss = piped(ours, x)
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), piped.gather(ours), plain
        )


def test_results_that_are_one_value() -> None:
    """They are arrays of their own: the next step takes over the state's only."""

    def step(state: Any, batch: Any) -> Any:
        new, metrics = train_step(state, batch)
        metrics = {**metrics, "again": metrics["loss"], "w": new["params"][0]["w"]}
        return {**new, "two": [state["two"][0] + 1, state["two"][0] + 1]}, {
            **metrics,
            "old": state["two"][0],
            "too": state["two"][0],
        }

    def start() -> Any:
        return {**init(jax.random.key(0)), "two": [jnp.zeros(3), jnp.zeros(3)]}

    parallel = autopar.compile(step, start(), BATCH, stages=2, microbatches=4)
    state, plain, seen, wanted = start(), start(), [], []
    for _ in range(3):
        state, metrics = parallel(state, BATCH)
        plain, plain_metrics = jax.jit(step)(plain, BATCH)
        seen.append(metrics)
        wanted.append(plain_metrics)
    assert_close(jax.device_get((state, seen)), jax.device_get((plain, wanted)))


def test_what_the_state_takes_up_is_copied() -> None:
    """The next step takes over the state, but not the caller's batch, and no constant."""
    scale = np.arange(16, dtype=np.float32)

    def step(state: Any, batch: Any) -> Any:
        new, metrics = train_step(state, batch)
        return {**new, "scale": jnp.asarray(scale), "last": batch["x"]}, metrics["loss"]

    def start() -> Any:
        made = init(jax.random.key(0))
        return {**made, "scale": jnp.zeros(16), "last": jnp.zeros(BATCH["x"].shape)}

    parallel = autopar.compile(step, start(), BATCH, stages=2, microbatches=4)
    own = jax.device_put(BATCH, parallel.in_shardings[1])
    state, plain = start(), start()
    for number in range(3):
        batch = (
            own
            if number == 0
            else jax.tree.map(functools.partial(np.add, np.float32(number)), BATCH)
        )
        state, loss = parallel(state, batch)
        plain, plain_loss = jax.jit(step)(plain, jax.device_get(batch))
    assert_close(jax.device_get((state, loss)), jax.device_get((plain, plain_loss)))
    jax.tree.map(np.testing.assert_array_equal, own, BATCH)


def test_activations_of_all_layers_are_returned() -> None:
    """A scan's stacked results, cut into stages, leave the step."""

    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            def layer(x: Any, w: Any) -> Any:
                x = jnp.tanh(x @ w)
                return x, x

            x, hidden = jax.lax.scan(layer, batch["x"], params)
            return jnp.mean((x - batch["y"]) ** 2), hidden

        (loss, hidden), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return params - 0.1 * grads, (loss, hidden)

    def start() -> Any:
        return jax.random.normal(jax.random.key(0), (4, 16, 16)) / 4

    for schedule in ("1f1b", "zb_h1"):
        parallel = autopar.compile(
            step, start(), BATCH, stages=2, microbatches=4, schedule=schedule
        )
        params, plain = start(), start()
        for _ in range(2):
            params, results = parallel(params, BATCH)
            plain, wanted = jax.jit(step)(plain, BATCH)
        assert_close(jax.device_get((params, results)), jax.device_get((plain, wanted)))
