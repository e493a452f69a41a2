"""Meshes over several actors, which compute together: numbers, arrays, faults, checkpoints."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_actors.clusters import wait_until_gone
from on_actors.equality import check_program
from on_actors.profiles import check_profile
from on_actors.small_step import BATCH, init, layers_step, train_step
from on_actors.training import assert_same, train
from programs import PROGRAMS, Program

import autopar
from autopar.base.errors import LostActorError, StageError
from autopar.ray_executable import RayExecutable
from autopar.runtime.ray.driver import step_queue

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray itself
    pytest.mark.usefixtures("ray_cluster"),
]

CHOSEN = ("key_typed",)
"""In the default run; the others are marked `full`."""


def programs() -> Iterator[Any]:
    for program in PROGRAMS.values():
        if program.splits and not program.prints:
            marks = [] if program.name in CHOSEN else [pytest.mark.full]
            yield pytest.param(program, id=program.name, marks=marks)


@pytest.mark.parametrize("program", list(programs()))
def test_a_stage_over_two_actors_equals_the_plain_step(program: Program) -> None:
    two_nodes = autopar.Cluster.preset("cpu", nodes=2, devices_per_node=2)
    check_program(program, two_nodes, stages=1, microbatches=4)


def on_four(**options: Any) -> RayExecutable:
    """Two stages, each of two actors with a device."""
    step = autopar.compile(
        train_step,
        init(),
        BATCH,
        stages=2,
        microbatches=4,
        method="data",
        schedule="1f1b",
        cluster=autopar.Cluster.preset("cpu", nodes=4, devices_per_node=1),
        runtime=autopar.Ray(**{"deadline": 60, **options}),
    )
    assert isinstance(step, RayExecutable)
    return step


@pytest.fixture(scope="module")
def step(ray_cluster: None) -> Iterator[RayExecutable]:
    options = {"deadline": 10, "max_restarts": 9, "snapshot_every": 5}
    with jax.debug_nans(True), on_four(**options) as made:
        yield made


def test_two_stages_of_two_actors(step: RayExecutable) -> None:
    state, loss = step(step.initialize(init), BATCH)
    wanted, wanted_loss = jax.jit(train_step)(init(), BATCH)
    places = [part.actors for x in (state[0]["w"], state[-1]["w"]) for part in x.sharding.parts]
    assert places == [(0, 1), (2, 3)]
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    norm = autopar.follow(step, lambda state: sum(jnp.sum(layer["w"] ** 2) for layer in state))
    np.testing.assert_allclose(norm(state), sum(np.sum(x["w"] ** 2) for x in wanted), rtol=1e-5)


def test_a_profile(step: RayExecutable) -> None:
    state = step.initialize(init)
    check_profile(step.profile(state, BATCH))
    step(state, BATCH)  # nothing was consumed


def test_arrays_cut_over_actors() -> None:
    def stacked(key: Any) -> Any:
        return {"w": jax.random.normal(key, (4, 8, 8)) / 4, "b": jnp.zeros((4, 8))}

    key, x = jax.random.key(1), BATCH["x"]
    made = autopar.compile(
        layers_step,
        jax.eval_shape(stacked, key),
        x,
        stages=2,
        microbatches=4,
        method="zero3",
        cluster=autopar.Cluster.preset("cpu", nodes=4, devices_per_node=1),
        runtime=autopar.Ray(deadline=60),
    )
    assert isinstance(made, RayExecutable)
    with made:
        state = made.initialize(stacked, key)
        assert state["w"].sharding.ends == (2, 4)
        assert any(axes is not None for part in state["w"].sharding.parts for axes in part.spec)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), state, stacked(key))
        twice = made.apply(lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree), state)
        got, loss = made(twice, x)
        wanted, wanted_loss = jax.jit(layers_step)(jax.tree.map(lambda y: 2 * y, stacked(key)), x)
        np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
        for name in ("w", "b"):
            np.testing.assert_allclose(got[name], wanted[name], rtol=2e-5, atol=2e-6)


def test_a_nan_is_named_and_the_actors_go_on(step: RayExecutable) -> None:
    state = init()
    state[5]["scale"] = jnp.full(8, -9.0)
    with pytest.raises(StageError, match="FloatingPointError: nan in its results") as found:
        for _ in range(9):  # it shows in the same call or in a later one
            state, _ = step(state, BATCH)
    assert found.value.spot.actor in (2, 3)
    assert (found.value.spot.stage, found.value.spot.instruction) == ("stage 1", "B1[0]")
    test_two_stages_of_two_actors(step)


def test_a_nan_that_one_process_alone_sees(step: RayExecutable) -> None:
    before, y = len(step.recoveries), BATCH["y"].copy()
    y[-1] = np.nan
    with pytest.raises(StageError, match="FloatingPointError: nan in its results"):
        step.gather(step(init(), {**BATCH, "y": y}))
    test_two_stages_of_two_actors(step)  # the failed call is not tried again
    assert len(step.recoveries) <= before + 1


@pytest.mark.parametrize(
    "victim", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (0, 2, 3))]
)
def test_a_killed_process_of_a_mesh(
    step: RayExecutable, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_queue, "GRACE_SECONDS", 2.0)  # its neighbour waits for it in a sum
    undisturbed, pids, before = train(step, 16), step.actor_pids, len(step.recoveries)

    def after(done: int, state: Any) -> None:
        if done == 8:
            os.kill(pids[victim], signal.SIGKILL)

    assert_same(train(step, 16, after=after), undisturbed)
    (recovery,) = step.recoveries[before:]
    assert f"lost actor {victim} " in recovery.lost.what
    wait_until_gone(pids)


@pytest.mark.full
def test_a_process_that_stops_answering() -> None:
    with on_four(deadline=5) as made:
        state, _ = made(init(), BATCH)
        jax.block_until_ready(state)
        os.kill(made.actor_pids[1], signal.SIGSTOP)
        with pytest.raises(LostActorError, match="lost actor 1 ") as found:
            for _ in range(9):
                state, _ = made(state, BATCH)
        assert found.value.spot.actor == 1
    wait_until_gone(made.actor_pids)


def test_a_checkpoint_by_several_processes(step: RayExecutable, tmp_path: Path) -> None:
    state, _ = step(step.initialize(init), BATCH)
    wanted = jax.device_get(state)
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    with autopar.Checkpoints(tmp_path) as checkpoints:
        for like in (init(), step.initialize(init)):
            _, restored, _ = checkpoints.restore(like)
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), wanted)
    assert len(list((tmp_path / "step_00000001").glob("*_actor_*"))) > 2
