"""Measured steps: the same rows as the simulated ones, in the same order; nothing is consumed."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bare_schedules import simulate_schedule

import autopar
from autopar.base.cluster import Cluster
from autopar.base.errors import DonatedBufferError, TraceError
from autopar.passes.pipeline.instructions import (
    Accumulate,
    Buffer,
    PipelineProgram,
    Recv,
    Reshard,
    Run,
    Send,
)
from autopar.passes.pipeline.simulate import simulate
from autopar.passes.schedules.make import make_schedule
from autopar.profile import Profile
from autopar.runtime.event_times import Times, alone, events, in_line, together
from autopar.runtime.local import PipelineStep

WIDTH, ROWS = 512, 1024


def train_step(state: Any, batch: Any) -> Any:
    """Momentum, so that the step reads and writes more than what its loop needs."""

    def loss_fn(weights: Any) -> Any:
        x = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    loss, gradients = jax.value_and_grad(loss_fn)(state["weights"])
    momentum = [0.9 * m + g for m, g in zip(state["momentum"], gradients, strict=True)]
    weights = [w - 0.1 * m for w, m in zip(state["weights"], momentum, strict=True)]
    return {"weights": weights, "momentum": momentum}, loss


def make_state(width: int = WIDTH) -> Any:
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    return {"weights": weights, "momentum": [jnp.zeros((width, width)) for _ in keys]}


def make_batch(width: int = WIDTH, rows: int = ROWS) -> Any:
    return np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)


def compiled(devices: int, width: int = WIDTH, **options: Any) -> autopar.Executable:
    options = {"stages": 2, "microbatches": 4, "schedule": "1f1b", **options}
    return autopar.compile(
        train_step,
        make_state(width),
        make_batch(width),
        cluster=Cluster.local(jax.devices()[:devices]),
        progress=False,
        **options,
    )


def pipeline_step(step: autopar.Executable) -> PipelineStep:
    found = step._compiled
    assert isinstance(found, PipelineStep)
    return found


def assert_sound(profile: Profile) -> None:
    """Every instruction once, one after the other on each mesh, and no recv before its send."""
    program = profile.timeline.program
    assert profile.expected.program is program
    places = [(m, i) for m, found in enumerate(program.meshes) for i in range(len(found))]
    for timeline in (profile.timeline, profile.expected):
        assert [(e.mesh, e.index) for e in timeline.events] == places
        for before, after in itertools.pairwise(timeline.events):
            assert before.start <= before.end
            assert before.mesh != after.mesh or before.end <= after.start + 1e-12
        at = {(e.mesh, e.index): e for e in timeline.events}
        sent = {
            getattr(program.meshes[m][i], "tag", None): at[m, i].end
            for m, i in places
            if not isinstance(program.meshes[m][i], Recv)
        }
        for m, i in places:
            instruction = program.meshes[m][i]
            if isinstance(instruction, Recv):
                assert at[m, i].start >= sent[instruction.tag]
    assert set(profile.seconds) == set(places)
    assert all(seconds >= 0 for seconds in profile.seconds.values())
    runs = [p for p in places if isinstance(program.meshes[p[0]][p[1]], Run)]
    assert all(profile.seconds[place] > 0 for place in runs)
    assert profile.step_seconds > 0 and profile.expected.step_seconds > 0


def needed(program: PipelineProgram) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of runs of which the second cannot begin before the first has ended."""
    before: dict[tuple[int, int], set[tuple[int, int]]] = {}
    of_buffer: dict[tuple[int, Buffer], set[tuple[int, int]]] = {}
    sent: dict[int, set[tuple[int, int]]] = {}
    for place in program.order:
        mesh, instruction = place[0], program.meshes[place[0]][place[1]]
        if isinstance(instruction, Send):
            sent[instruction.tag] = set().union(
                *(of_buffer.get((mesh, b), set()) for b in instruction.buffers)
            )
            continue
        found = set().union(*(of_buffer.get((mesh, b), set()) for b in instruction.reads))
        if isinstance(instruction, Recv):
            found |= sent[instruction.tag]
        if isinstance(instruction, Run):
            before[place] = set(found)
            found.add(place)
        for buffer in instruction.writes:
            of_buffer[mesh, buffer] = found
    return {(first, place) for place, found in before.items() for first in found}


@pytest.mark.parametrize("devices", [2, 4])
def test_the_simulation_has_the_order_of_the_real_run(devices: int) -> None:
    """What needs another ends after it in both, also where programs of both meshes share cores."""
    step = compiled(devices)
    profile = step.profile(make_state(), make_batch())
    assert_sound(profile)
    inner = pipeline_step(step)
    assert in_line(inner) == (() if devices == 2 else (0, 1))
    program = profile.timeline.program
    pairs = needed(program)
    assert any(first[0] != second[0] for first, second in pairs)
    for timeline in (profile.expected, profile.timeline):
        at = {(e.mesh, e.index): e for e in timeline.events}
        assert [p for p in pairs if at[p[0]].end > at[p[1]].start + 1e-9] == []
    if devices == 4:  # one queue for all: no choice is left to the clock
        assert profile.expected.run_order == profile.timeline.run_order
    ready = together(inner, inner.place(*leaves(step))).ready
    seen = [p for p in ready if isinstance(program.meshes[p[0]][p[1]], Run)]
    assert len(seen) == len(profile.timeline.run_order)


def leaves(step: autopar.Executable, width: int = WIDTH) -> tuple[list[Any], list[Any]]:
    flat = jax.tree.leaves(((make_state(width), make_batch(width)), {}))
    return step._pick_donated(flat), step._pick_kept(flat)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb_h1"},
        {"schedule": "interleaved_1f1b", "num_chunks": 2},
        {"schedule": "gpipe", "donate_argnums": ()},
    ],
    ids=lambda options: options["schedule"],
)
def test_profiling_consumes_nothing(options: dict[str, Any]) -> None:
    step = compiled(4, 32, **options)
    state, batch = make_state(32), make_batch(32)
    before = jax.device_get(state)
    profile = step.profile(state, batch)
    assert_sound(profile)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    found = step(state, batch)
    expected = jax.jit(train_step)(before, batch)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, found, expected)
    # And on the state that the step returned, which lies where the step wants it.
    assert_sound(step.profile(found[0], batch))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(found))


def test_it_prints_and_becomes_a_trace_with_the_same_rows(tmp_path: Path) -> None:
    profile = compiled(4, 32).profile(make_state(32), make_batch(32))
    lines = str(profile).splitlines()
    assert lines[0].startswith("1f1b: ") and lines[-1].split()[0] == "step"
    header = next(line for line in lines if "instruction" in line)
    assert header.split() == ["mesh", "instruction", "count", "expected", "measured", "difference"]
    assert any(line.split()[:3] == ["0", "F0", "4"] for line in lines)
    assert repr(profile).startswith("<Profile 1f1b: ")
    path = tmp_path / "trace.json"
    profile.save_trace(path)
    measured, expected = json.loads(path.read_text()), profile.expected.to_chrome_trace()
    assert measured == json.loads(json.dumps(profile.to_chrome_trace()))

    def rows(trace: Any) -> list[tuple[str, int]]:
        return [(r["name"], r["tid"]) for r in trace["traceEvents"] if r["ph"] in "XM"]

    assert rows(measured) == rows(expected)
    assert {"F0[0]", "B1[3]"} <= {name for name, _ in rows(measured)}


def test_the_peak_counts_what_xla_needs_inside() -> None:
    step = compiled(4, 32)
    profile = step.profile(make_state(32), make_batch(32))
    temporary = dict(profile.timeline.temporary_bytes)
    assert set(temporary) == {piece.name for piece in profile.timeline.program.pieces}
    for name, analysis in step.memory_analysis().items():
        assert temporary[name] >= analysis.temp_size_in_bytes >= 0
    assert profile.timeline.peak_bytes == profile.expected.peak_bytes
    # Weights and momenta of the mesh's two layers, at least.
    assert min(profile.timeline.peak_bytes) >= 2 * 2 * 32 * 32 * 4 // 2


def test_on_its_own_devices_a_step_is_no_slower() -> None:
    profile = compiled(4, 32).profile(make_state(32), make_batch(32))
    own = profile.on_own_devices
    assert own.program is profile.timeline.program
    assert own.step_seconds <= profile.expected.step_seconds * (1 + 1e-9)
    assert own.busy == pytest.approx(profile.expected.busy)
    assert 0 < own.bubble_fraction <= profile.expected.bubble_fraction + 1e-9


def test_a_step_of_one_stage_is_one_run() -> None:
    step = compiled(4, 32, stages=1, schedule="auto")
    state, batch = make_state(32), make_batch(32)
    profile = step.profile(state, batch)
    assert profile.timeline.run_order == profile.expected.run_order == ((0, "step"),)
    assert len(profile.timeline.events) == len(profile.seconds) == 1
    assert profile.timeline.bubble_fraction == 0 and profile.step_seconds > 0
    state_bytes = sum(t.bytes_per_device for t in step.plan.inputs if t.donated)
    assert profile.timeline.peak_bytes[0] >= state_bytes
    assert any(line.split()[:3] == ["0", "step", "1"] for line in str(profile).splitlines())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("stages", [1, 2])
def test_wrong_arguments(stages: int) -> None:
    step = compiled(4, 32, stages=stages, schedule="auto")
    with pytest.raises(TraceError, match="compiled for other arguments"):
        step.profile(make_state(32), make_batch(32, rows=8))
    state = make_state(32)
    step(state, make_batch(32))
    with pytest.raises(DonatedBufferError, match="donated by an earlier call"):
        step.profile(state, make_batch(32))


def test_static_arguments_and_keywords() -> None:
    def step_fn(state: Any, *, scale: float, batch: Any) -> Any:
        return state + jnp.sum(jnp.tanh(batch @ state), 0) * scale, jnp.sum(state)

    state, batch = jnp.ones((8, 8)), np.ones((8, 8), np.float32)
    step = autopar.compile(step_fn, state, scale=0.5, batch=batch, method="data", progress=False)
    profile = step.profile(state, batch=batch, scale=0.5)
    assert profile.timeline.run_order == ((0, "step"),)
    assert not state.is_deleted()


def test_an_instruction_that_fails_raises() -> None:
    """And the threads that wait for results end."""
    step = compiled(4, 32)
    inner = pipeline_step(step)
    threads = threading.active_count()
    for measure in (alone, together):
        buffers = inner.place(*leaves(step, 32))
        next(x for b, x in buffers.items() if b.microbatch is None and x.ndim == 2).delete()
        with pytest.raises(RuntimeError, match="deleted"):
            measure(inner, buffers)
    assert threading.active_count() == threads


# The simulator's line


def test_runs_in_line_start_one_at_a_time_in_the_order_of_dispatch() -> None:
    bare = simulate_schedule(make_schedule("1f1b", 3, 4), 1.0).program
    seconds = {"F": 1.0, "B": 2.0}

    def cost(run: Run) -> float:
        return seconds[run.kind] + run.stage

    timeline = simulate(bare, cost, in_line=(0, 1, 2))
    runs = sorted(
        (e for e in timeline.events if isinstance(timeline.instruction(e), Run)),
        key=lambda e: e.start,
    )
    for before, after in itertools.pairwise(runs):
        assert before.end == after.start  # transfers take no time, so somebody always runs
    dispatched = [p for p in bare.order if isinstance(bare.meshes[p[0]][p[1]], Run)]
    assert [(e.mesh, e.index) for e in runs] == dispatched
    assert timeline.step_seconds == pytest.approx(4 * (3 * (1 + 2) + 2 * (0 + 1 + 2)))
    # Cores that each run has to itself change nothing.
    assert simulate(bare, cost, in_line=(0, 1, 2), shared_cores=2).events == timeline.events


def test_a_mesh_outside_the_line_does_not_wait_for_it() -> None:
    bare = simulate_schedule(make_schedule("gpipe", 2, 4), 1.0).program
    free = simulate(bare, lambda run: 1.0)
    assert simulate(bare, lambda run: 1.0, in_line=()).events == free.events
    assert simulate(bare, lambda run: 1.0, in_line=(1,)).events == free.events
    assert simulate(bare, lambda run: 1.0, in_line=(0, 1)).step_seconds == 16.0


def test_events_follow_from_when_results_were_seen() -> None:
    """A late dispatch, a late arrival and a queue each hold a run back."""
    bare = simulate_schedule(make_schedule("inference", 2, 1), 1.0).program
    kinds = {p: type(bare.meshes[p[0]][p[1]]) for p in bare.order}
    runs = [p for p in bare.order if kinds[p] is Run]
    (recv,) = [p for p in bare.order if kinds[p] is Recv]
    dispatched = {p: 100.0 + 0.001 * number for number, p in enumerate(bare.order)}
    ready = {runs[0]: 102.0, recv: 102.5, runs[1]: 105.0}
    found = {(e.mesh, e.index): e for e in events(bare, Times(dispatched, ready), ())}
    first, second = (found[p] for p in runs)
    start = dispatched[runs[0]] - min(dispatched.values())
    assert (first.start, first.end) == pytest.approx((start, 2.0))
    assert (second.start, second.end) == pytest.approx((2.5, 5.0))
    late = {**dispatched, runs[1]: 104.0}
    again = {(e.mesh, e.index): e for e in events(bare, Times(late, ready), ())}
    assert again[runs[1]].start == pytest.approx(4.0)
    assert not any(kind in (Accumulate, Reshard) for kind in kinds.values())
    assert all(isinstance(b, Buffer) for p in runs for b in bare.meshes[p[0]][p[1]].writes)
