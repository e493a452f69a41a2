"""`Plan.simulate`: what-ifs from a plan's file alone."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bare_schedules import simulate_schedule

import autopar
from autopar.base.cluster import Cluster
from autopar.base.errors import OptionError, PlanMismatchError, ScheduleError
from autopar.passes.pipeline.instructions import Run
from autopar.passes.pipeline.timeline import Event, Timeline
from autopar.passes.schedules.make import make_schedule
from autopar.plans.plan import Plan

WIDTH, ROWS = 256, 256


def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(state: Any) -> Any:
        x = batch
        for w in state:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    loss, gradients = jax.value_and_grad(loss_fn)(state)
    return [w - 0.1 * g for w, g in zip(state, gradients, strict=True)], loss


STATE = [jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)] * 4
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
CLUSTER = Cluster.preset("dgx-h100", devices_per_node=4)


def planned(**options: Any) -> Plan:
    options = {"stages": 2, "microbatches": 4, "schedule": "1f1b", "cluster": CLUSTER, **options}
    return autopar.plan(train_step, STATE, BATCH, progress=False, **options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


@pytest.fixture(scope="module")
def split_plan() -> Plan:
    return planned(schedule="zb_h1")


def test_nothing_changed_is_what_was_planned(plan: Plan, split_plan: Plan) -> None:
    for each in (plan, split_plan):
        simulation = each.simulate()
        assert each.pipeline is not None
        assert simulation.step_seconds == pytest.approx(each.estimates.step_seconds, rel=1e-9)
        assert simulation.bubble_fraction == pytest.approx(each.pipeline.bubble_fraction, abs=1e-9)
        assert max(simulation.peak_bytes) == each.estimates.peak_bytes_per_device
        by_mesh = {stage.mesh: stage.peak_bytes_per_device for stage in each.stages}
        assert simulation.peak_bytes == tuple(by_mesh[m] for m in sorted(by_mesh))


def test_a_saved_plan_answers_the_same(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    assert planned().to_json() == plan.to_json()
    questions: list[dict[str, Any]] = [{}, {"schedule": "gpipe"}, {"microbatches": 8}]
    for question in questions:
        assert loaded.simulate(**question).timeline == plan.simulate(**question).timeline


def test_schedules_order_the_same_pieces(plan: Plan) -> None:
    """GPipe takes about as long as 1F1B and keeps all microbatches; a user's function works too."""
    gpipe, one = plan.simulate(schedule="gpipe"), plan.simulate(schedule="1f1b")
    assert gpipe.step_seconds == pytest.approx(one.step_seconds, rel=0.05)
    assert sum(gpipe.peak_bytes) > sum(one.peak_bytes)

    def mine(num_meshes: int, num_microbatches: int) -> Any:
        return make_schedule("gpipe", num_meshes, num_microbatches)

    assert plan.simulate(schedule=mine).timeline.events == gpipe.timeline.events


def test_a_split_backward_pass_runs_every_schedule(split_plan: Plan) -> None:
    seconds = {
        name: split_plan.simulate(schedule=name).step_seconds for name in ("1f1b", "zb_h1", "zb_h2")
    }
    assert seconds["zb_h2"] <= seconds["zb_h1"] * 1.001 <= seconds["1f1b"] * 1.002


def test_weight_gradients_as_tasks_need_a_plan_with_them(plan: Plan) -> None:
    with pytest.raises(ScheduleError, match="weight gradients as tasks of their own") as caught:
        plan.simulate(schedule="zb_h1")
    assert caught.value.hint is not None and "plan again with schedule='zb_h1'" in caught.value.hint


def test_more_microbatches_share_the_same_work() -> None:
    """Where starting costs nothing, the loop takes what a clock of the schedule alone says.

    (The last stage runs a microbatch forward and backward at once.)
    """
    links = dataclasses.replace(CLUSTER.intra_node, bandwidth=1e18, latency=0.0)
    plan = planned(cluster=dataclasses.replace(CLUSTER, intra_node=links, collective_seconds=0.0))
    assert plan.pipeline is not None and plan.pipeline.model is not None
    of = {(p.when, p.stage): p.compute_seconds for p in plan.pipeline.model.pieces}
    for m in (2, 4, 8, 16, 32):
        timeline = plan.simulate(microbatches=m).timeline
        loop = [e for e in timeline.events if task_kind(timeline, e) in ("F", "B")]
        span = max(e.end for e in loop) - min(e.start for e in loop)
        forward, backward = ([of.get((k, s), 0.0) * 4 / m for s in (0, 1)] for k in "FB")
        bare = simulate_schedule(make_schedule("1f1b", 2, m), forward, backward)
        assert span == pytest.approx(bare.step_seconds, rel=1e-6)
    peaks = [sum(plan.simulate(microbatches=m).peak_bytes) for m in (2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3


def task_kind(timeline: Timeline, event: Event) -> str:
    instruction = timeline.instruction(event)
    return instruction.kind if isinstance(instruction, Run) else ""


def test_links_and_compute_change_only_what_they_should(plan: Plan) -> None:
    base = plan.simulate()
    quicker = plan.simulate(link_scale=1000.0)
    slower = plan.simulate(link_scale=1e-3)
    assert quicker.step_seconds < base.step_seconds < slower.step_seconds
    assert quicker.peak_bytes == base.peak_bytes == slower.peak_bytes
    model = plan.pipeline.model
    assert model is not None
    alone = plan.simulate(compute_scale=1e9, link_scale=1e9)
    latency = {piece.name: piece.latency_seconds for piece in model.pieces}
    for event in alone.timeline.events:
        piece = getattr(alone.timeline.instruction(event), "piece", None)
        assert event.seconds == pytest.approx(latency.get(str(piece), 0.0), abs=1e-11)


def test_more_devices_share_a_microbatch(plan: Plan) -> None:
    twice = dataclasses.replace(CLUSTER, devices_per_node=8)
    base, more = plan.simulate(), plan.simulate(cluster=twice)
    assert plan.simulate(cluster=CLUSTER).timeline == base.timeline
    assert more.timeline.devices_per_mesh == (4, 4)
    assert max(more.peak_bytes) < max(base.peak_bytes)
    model = plan.pipeline.model
    assert model is not None
    for piece in model.pieces:
        if piece.when in ("F", "B"):
            found, before = (
                next(
                    e.seconds
                    for e in simulation.timeline.events
                    if getattr(simulation.timeline.instruction(e), "piece", "") == piece.name
                )
                for simulation in (more, base)
            )
            saved = (piece.compute_seconds + piece.activation_seconds) / 2
            assert before - found == pytest.approx(saved, rel=1e-6)
    for wrong in (6, 3, 9):
        with pytest.raises(OptionError, match="cannot be simulated on") as refused:
            plan.simulate(cluster=dataclasses.replace(CLUSTER, devices_per_node=wrong))
        named = [int(n) for n in re.findall(r"\d+", str(refused.value.hint))]
        assert named
        for size in named:  # what is named can be simulated
            plan.simulate(cluster=dataclasses.replace(CLUSTER, devices_per_node=size))


def test_stages_share_fewer_meshes() -> None:
    """Half of the devices take at least twice as long, and hold what all of them held."""
    plan = planned(stages=4, cluster=dataclasses.replace(CLUSTER, devices_per_node=8))
    base = plan.simulate()
    half, one = (
        plan.simulate(cluster=dataclasses.replace(CLUSTER, devices_per_node=n)) for n in (4, 2)
    )
    assert [len(x.peak_bytes) for x in (base, half, one)] == [4, 2, 1]
    assert half.timeline.devices_per_mesh == (2, 2)
    busy = [sum(x.timeline.busy) for x in (base, half, one)]
    assert busy[1] <= busy[0] * (1 + 1e-9)  # the same work, with fewer transfers
    assert one.step_seconds > half.step_seconds > base.step_seconds
    assert min(one.peak_bytes) > max(half.peak_bytes) > min(base.peak_bytes)
    assert one.bubble_fraction == pytest.approx(0, abs=1e-6)


def test_copies_of_a_mesh_add_up_their_gradients() -> None:
    """With slow links the sum costs more than dividing the rows saves."""
    slow = dataclasses.replace(CLUSTER.intra_node, bandwidth=1e5)
    plan = planned(cluster=dataclasses.replace(CLUSTER, devices_per_node=2, intra_node=slow))
    more = plan.simulate(cluster=Cluster.from_dict({**plan.cluster, "devices_per_node": 4}))
    assert more.step_seconds > plan.simulate().step_seconds
    epilogues = [
        (e.seconds, b.seconds)
        for e, b in zip(more.timeline.events, plan.simulate().timeline.events, strict=True)
        if task_kind(more.timeline, e) == "epilogue"
    ]
    # Two gradients of a stage over two copies: each device moves their bytes once.
    assert max(after - before for after, before in epilogues) > 2 * WIDTH**2 * 4 / 1e5 * 0.99


def test_a_step_that_mostly_communicates_is_simulated_as_planned() -> None:
    """The integer program does not price sums of scalars, which here are most of the step."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - gradient, loss

    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    tiny = autopar.plan(step, shape, shape, cluster=autopar.Cluster.preset("dgx-h100"))
    assert tiny.simulate().step_seconds == pytest.approx(tiny.estimates.step_seconds)
    assert tiny.simulate(cluster=autopar.Cluster.preset("dgx-h100", nodes=2)).step_seconds > 0
    with pytest.raises(OptionError, match="use 8, 16, 32, 64 or 128 devices"):
        tiny.simulate(cluster=autopar.Cluster.preset("dgx-h100", nodes=3))


def test_a_step_without_rows_is_repeated_as_often_as_devices_do() -> None:
    def step(w: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(w @ w.T)))(w)

    plan = autopar.plan(step, jax.ShapeDtypeStruct((16, 16), jnp.float32), cluster="1x8 h100")
    assert plan.simulate(cluster=autopar.Cluster.named("3x8 h100")).step_seconds > 0
    with pytest.raises(OptionError, match="use 8 devices"):
        plan.simulate(cluster=autopar.Cluster.named("2 h100"))


def test_a_plan_that_loops_over_nothing_keeps_its_microbatches() -> None:
    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    plan = autopar.plan(lambda s, x: (s, x), shape, shape, cluster=CLUSTER, microbatches=2)
    assert plan.num_microbatches == 2


def test_a_plan_of_one_stage_is_one_run(plan: Plan) -> None:
    single = planned(stages=1, schedule="auto")
    simulation = single.simulate()
    assert simulation.step_seconds == pytest.approx(single.estimates.step_seconds)
    assert simulation.peak_bytes == (single.estimates.peak_bytes_per_device,)
    assert simulation.timeline.run_order == ((0, "step"),)
    assert simulation.bubble_fraction == 0
    half = single.simulate(compute_scale=2.0, link_scale=2.0)
    assert single.pipeline.model is not None
    (piece,) = single.pipeline.model.pieces
    moving = simulation.step_seconds - piece.latency_seconds  # starting a collective stays as it is
    assert half.step_seconds == pytest.approx(piece.latency_seconds + moving / 2)
    wrong: list[dict[str, Any]] = [{"schedule": "gpipe"}, {"microbatches": 2}]
    for question in wrong:
        with pytest.raises(OptionError, match="A plan of one stage"):
            single.simulate(**question)


def test_impossible_questions(plan: Plan) -> None:
    with pytest.raises(ScheduleError, match="There is no schedule"):
        plan.simulate(schedule="2f2b")
    with pytest.raises(OptionError, match=f"{ROWS} rows does not divide by 5"):
        plan.simulate(microbatches=5)
    for count in (0, -1, 2.0, True):
        with pytest.raises(OptionError, match="microbatches"):
            plan.simulate(microbatches=count)  # type: ignore[arg-type]
    for scale in (0, -1.0, math.inf, math.nan):
        with pytest.raises(OptionError, match="link_scale"):
            plan.simulate(link_scale=scale)
    bare = dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, model=None))
    with pytest.raises(PlanMismatchError, match="plan again"):
        bare.simulate()
    own = dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, schedule="mine"))
    with pytest.raises(ScheduleError, match="is a function"):
        own.simulate()
    assert own.simulate(schedule="1f1b").timeline == plan.simulate().timeline


def test_an_option_that_is_not_there_is_named(plan: Plan) -> None:
    anything: Any = plan
    with pytest.raises(OptionError, match="There is no option 'num_microbatches'") as caught:
        anything.simulate(num_microbatches=4)
    assert caught.value.where == "Plan.simulate"
    assert caught.value.why == (
        "the options are schedule, microbatches, cluster, link_scale, compute_scale."
    )
    assert caught.value.hint == "did you mean 'microbatches'?"
    with pytest.raises(OptionError, match="There is no option 'cahce'"):
        anything.verify("cpu", cahce=False)


def test_it_prints_and_becomes_a_trace(plan: Plan) -> None:
    simulation = plan.simulate()
    assert str(simulation).startswith("1f1b: ")
    assert repr(simulation).startswith("<Simulation 1f1b: ")
    rows = json.loads(json.dumps(simulation.to_chrome_trace()))["traceEvents"]
    assert {row["name"] for row in rows if row["ph"] == "X"} >= {"F0[0]", "B1[3]"}
