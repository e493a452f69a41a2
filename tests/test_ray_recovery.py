"""A run that loses actors, or its driver, ends with the numbers of an undisturbed run."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from on_actors.clusters import said, wait_until_gone
from on_actors.small_step import BATCH, check_one_step, init, on_actors
from on_actors.told import noted_messages
from on_actors.training import assert_same, batch, train

import autopar
from autopar.arrays.ray_array import RayArray
from autopar.base.errors import LostActorError, StageError
from autopar.ray_executable import RayExecutable
from autopar.runtime.ray.driver import step_queue
from autopar.runtime.ray.recovery.lineage import Lineage

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray itself
    pytest.mark.usefixtures("ray_cluster"),
]

STEPS = 24
EVERY = 5
"""Steps between snapshots."""

seeds = pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 20))]
)
"""By default one that kills the second actor, and one that kills the first."""


@pytest.fixture(scope="module")
def step(ray_cluster: None) -> Iterator[RayExecutable]:
    options = autopar.Ray(deadline=6, max_restarts=1000, snapshot_every=EVERY)
    with jax.debug_nans(True), on_actors(options) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(step: RayExecutable) -> tuple[list[float], Any]:
    return train(step, STEPS)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def compiled_by(step: RayExecutable) -> list[str]:
    """The programs in the cache of a step."""
    assert step._compiled._cache is not None
    files = [file.name for file in Path(step._compiled._cache).iterdir()]
    return sorted(name for name in files if name.endswith("-cache"))


class Held:
    """Arrays of all origins that a program holds while it does other things."""

    def __init__(self, step: RayExecutable) -> None:
        self.step = step
        self.expected = jax.device_get(step.initialize(init))
        self.made = step.initialize(init)
        self.halved = step.apply(
            lambda tree: jax.tree.map(lambda x: x / 2, tree), step.initialize(init)
        )
        self.following, self.unread = step(step.initialize(init), BATCH)
        self.read = step(step.initialize(init), BATCH)[1]
        self.value = float(self.read)

    def check(self) -> None:
        jax.tree.map(np.testing.assert_array_equal, self.made, self.expected)
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(a, b / 2), self.halved, self.expected
        )
        assert float(self.unread) == float(self.read) == self.value
        state, loss = self.step(self.made, BATCH)
        assert float(loss) == self.value
        jax.tree.map(np.testing.assert_array_equal, self.following, state)
        assert self.made[0]["w"].is_deleted()


@seeds
def test_a_killed_actor(
    step: RayExecutable, undisturbed: tuple[list[float], Any], seed: int
) -> None:
    chance = random.Random(seed)
    victim, number, seconds = chance.choice([0, 1]), chance.randrange(STEPS), 0.1 * chance.random()
    before, pids, held = len(step.recoveries), step.actor_pids, Held(step)
    compiled = compiled_by(step)
    timer = threading.Timer(seconds, kill, (pids[victim],))

    def after(done: int, state: Any) -> None:
        if done == number:
            timer.start()

    found = train(step, STEPS, after=after)
    timer.join()
    step.sent_bytes()  # it may have been killed after the last step
    assert_same(found, undisturbed)
    held.check()
    (recovery,) = step.recoveries[before:]
    assert f"lost actor {victim} " in recovery.lost.what
    assert recovery.num_steps <= 4 * EVERY
    assert compiled_by(step) == compiled  # new actors take it from the cache
    wait_until_gone(pids)


def test_what_was_made_again_is_told_by_its_keys(
    step: RayExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no longer what one step returned; what the next steps return is."""
    messages = noted_messages(monkeypatch)

    def losses(killing: bool) -> list[float]:
        state, found = step.initialize(init), []
        for number in range(8):
            if killing and number == 3:
                step.finish()
                kill(step.actor_pids[0])
            state, loss = step(state, BATCH)
            found.append(loss)
        return [float(loss) for loss in found]

    expected, count = losses(killing=False), len(step.recoveries)
    assert [x.carried is None for x in messages[::2]] == [True] + 7 * [False]
    messages.clear()
    assert losses(killing=True) == expected
    assert len(step.recoveries) == count + 1
    told = messages[::2]
    again = [x for x in told[1:] if x.carried is None]
    assert again  # on the new actors
    assert [x.carried for x in told[-2:]] == [x.step - 1 for x in told[-2:]]


def test_an_actor_that_stops_answering(
    step: RayExecutable, undisturbed: tuple[list[float], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_queue, "GRACE_SECONDS", 2.0)  # it will not answer
    before, pids = len(step.recoveries), step.actor_pids

    def after(done: int, state: Any) -> None:
        if done == 7:
            os.kill(pids[0], signal.SIGSTOP)

    assert_same(train(step, STEPS, after=after), undisturbed)
    (recovery,) = step.recoveries[before:]
    assert recovery.lost.spot.actor == 0
    wait_until_gone(pids)


def test_the_log_stays_short(step: RayExecutable) -> None:
    train(step, 8 * EVERY)
    log = step._compiled._lineage
    assert log is not None
    assert len(log.entries) <= 4 * EVERY
    state, _ = step(init(), BATCH)
    del state
    gc.collect()  # states that errors of other tests hold, in cycles
    train(step, 2 * EVERY)
    assert len(log.saved) <= 2 * (len(jax.tree.leaves(init())) + 3 * EVERY)


def test_an_error_of_the_step_is_no_loss(step: RayExecutable) -> None:
    alive, _ = step(init(), BATCH)
    wanted = jax.device_get(alive)
    state = init()
    state[5]["scale"] = jnp.full(8, -9.0)
    before = len(step.recoveries)
    _, loss = step(state, BATCH)
    with pytest.raises(StageError, match="FloatingPointError"):
        float(loss)
    assert len(step.recoveries) == before
    jax.tree.map(np.testing.assert_array_equal, alive, wanted)
    with pytest.raises(StageError, match="is lost"):
        float(loss)
    check_one_step(step)


@pytest.mark.full
def test_an_error_that_shows_in_the_recovery(step: RayExecutable) -> None:
    alive, _ = step(init(), BATCH)
    wanted = jax.device_get(alive)
    state = init()
    state[5]["scale"] = jnp.full(8, -9.0)
    step.finish()
    kill(step.actor_pids[1])
    _, loss = step(state, BATCH)
    with pytest.raises(StageError, match="FloatingPointError"):
        float(loss)
    with pytest.raises(StageError):
        float(loss)
    following, _ = step(alive, BATCH)
    again, _ = step(wanted, BATCH)
    jax.tree.map(np.testing.assert_array_equal, following, again)
    check_one_step(step)


def test_more_losses_than_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, kills = Lineage.replay, [0]

    def disturbed(self: Lineage, running: Any) -> Any:
        if kills:
            kill(running.pool.pids[kills.pop()])
        return replay(self, running)

    monkeypatch.setattr(Lineage, "replay", disturbed)
    with on_actors(autopar.Ray(deadline=60, max_restarts=2), stages=1) as made:
        wanted = train(made, 3)

        def after(done: int, state: Any) -> None:
            if done == 1:
                kill(made.actor_pids[0])

        assert_same(train(made, 3, after=after), wanted)
        assert not kills
        assert len(made.recoveries) == 1
        state, _ = made(init(), BATCH)
        pids = made.actor_pids
        kill(pids[0])
        with pytest.raises(LostActorError, match="started again 2 times before") as found:
            np.asarray(state[0]["w"])
        assert "max_restarts=2" in str(found.value)
        with pytest.raises(LostActorError):
            made(init(), BATCH)
    wait_until_gone(pids)


def test_a_step_that_is_shut_down_by_another_thread_while_it_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay, pids = Lineage.replay, list[int]()

    def ended(self: Lineage, running: Any) -> Any:
        pids.extend(running.pool.pids)
        other = threading.Thread(target=made.shutdown)
        other.start()
        other.join()
        return replay(self, running)

    monkeypatch.setattr(Lineage, "replay", ended)
    made = on_actors(autopar.Ray(deadline=60, max_restarts=2), stages=1)
    state, _ = made(init(), BATCH)
    kill(made.actor_pids[0])
    with pytest.raises(LostActorError):
        np.asarray(state[0]["w"])
    wait_until_gone(pids)
    with pytest.raises(LostActorError, match="are gone"):
        made(init(), BATCH)


def test_checkpoints_while_an_actor_is_lost(
    step: RayExecutable, undisturbed: tuple[list[float], Any], tmp_path: Path
) -> None:
    """The new actors read their rows of the batches by themselves, as the old ones did."""
    values = dict(BATCH)

    class Source:
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, number: int) -> Any:
            return {name: x * np.float32(1 + number % 7) for name, x in values.items()}

    read: list[str] = []

    def rows() -> Iterator[Any]:
        for each in step.prefetch(Source()):
            read.append(type(each["x"]).__name__)
            yield each

    with autopar.Checkpoints(tmp_path / "run") as checkpoints:

        def after(done: int, state: Any) -> None:
            if done % 8 == 7:
                checkpoints.save(done + 1, state)
            if done == 15:
                kill(step.actor_pids[1])

        before = len(step.recoveries)
        found = train(step, STEPS, after=after, batches=rows())
    assert_same(found, undisturbed)
    assert len(step.recoveries) > before
    assert read == ["ndarray", *["SourcedLeaf"] * (STEPS - 2), "ndarray"]
    assert checkpoints.steps == (8, 16, 24)
    like, _ = step(init(), BATCH)
    number, state, _ = checkpoints.restore(like, step=8)
    assert all(isinstance(leaf, RayArray) for leaf in jax.tree.leaves(state))
    losses, last = train(step, STEPS, state, first=number)
    assert_same((losses, last), (undisturbed[0][8:], undisturbed[1]))


def test_checkpoints_of_one_plan_for_another(
    step: RayExecutable, undisturbed: tuple[list[float], Any], tmp_path: Path
) -> None:
    from on_actors.small_step import train_step

    state = init()
    for number in range(8):
        state, _ = step(state, batch(number))
    with autopar.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(8, state)
        step(state, batch(8))  # consumes it
    local = autopar.compile(
        train_step,
        init(),
        BATCH,
        stages=3,
        microbatches=4,
        cluster=autopar.Cluster.preset("cpu", devices_per_node=3),
    )
    number, state, _ = checkpoints.restore(local.initialize(init))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    for number in range(8, 12):
        state, loss = local(state, batch(number))
        np.testing.assert_allclose(loss, undisturbed[0][number], rtol=2e-5)
    with autopar.Checkpoints(tmp_path / "local") as others:
        others.save(12, state)
        like, _ = step(init(), BATCH)
        _, state, _ = others.restore(like)
    losses, _ = train(step, STEPS, state, first=12)
    np.testing.assert_allclose(losses, undisturbed[0][12:], rtol=2e-4)


def test_a_checkpoint_of_a_failed_step(step: RayExecutable, tmp_path: Path) -> None:
    state = init()
    state[5]["scale"] = jnp.full(8, -9.0)
    state, _ = step(state, BATCH)
    checkpoints = autopar.Checkpoints(tmp_path / "run")
    with pytest.raises(StageError, match="FloatingPointError"):
        checkpoints.save(1, state)
        checkpoints.wait()
    assert checkpoints.steps == ()
    check_one_step(step)


def stacked_step(state: Any, x: Any) -> Any:
    def loss_fn(layers: Any) -> Any:
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, layers)
        return jnp.mean(y**2) + 0 * jnp.sum(noise)

    key, noise_key = jax.random.split(state["key"])
    noise = jax.random.normal(noise_key, (8, 8))
    loss, grads = jax.value_and_grad(loss_fn)(state["layers"])
    layers = state["layers"] - 0.1 * grads + 0.01 * noise
    return {**state, "key": key, "layers": layers, "step": state["step"] + 1}, loss


def stacked() -> Any:
    return {
        "layers": jax.random.normal(jax.random.key(1), (4, 8, 8)) / 4,
        "key": jax.random.key(2),
        "step": 0,
        "kept": jnp.arange(3, dtype=jnp.bfloat16),
        "none": jnp.zeros((0, 2), jnp.int8),
    }


@pytest.mark.full
def test_leaves_of_all_kinds_are_recovered_and_saved(tmp_path: Path) -> None:
    x = np.ones((16, 8), np.float32)

    def train(step: RayExecutable, after: Any = None, state: Any = None, first: int = 0) -> Any:
        state, losses = stacked() if state is None else state, []
        for number in range(first, 12):
            state, loss = step(state, x * np.float32(1 + number))
            losses.append(loss)
            if after is not None:
                after(number, state)
        state = {**state, "key": jax.random.key_data(jax.device_get(state["key"]))}
        return [float(loss) for loss in losses], jax.device_get(state)

    step = autopar.compile(
        stacked_step,
        stacked(),
        x,
        stages=2,
        microbatches=4,
        cluster=autopar.Cluster.preset("cpu", devices_per_node=4),
        runtime=autopar.Ray(deadline=60, max_restarts=2, snapshot_every=4),
    )
    assert isinstance(step, RayExecutable)
    with step, autopar.Checkpoints(tmp_path / "run") as checkpoints:
        wanted = train(step)

        def after(number: int, state: Any) -> None:
            assert len(state["layers"].sharding.parts) == 2
            if number in (5, 8):
                checkpoints.save(number + 1, state)
                kill(step.actor_pids[number % 2])

        assert_same(train(step, after), wanted)
        assert len(step.recoveries) == 2
        like, _ = step(stacked(), x)
        for number in (6, 9):
            state = checkpoints.restore(like, step=number).state
            losses, last = train(step, None, state, number)
            assert_same((losses, last), (wanted[0][number:], wanted[1]))
        state = checkpoints.restore(stacked(), step=6).state
        assert type(state["step"]) is int
        assert isinstance(state["layers"], jax.Array)
        losses, last = train(step, None, state, 6)
        assert_same((losses, last), (wanted[0][6:], wanted[1]))


SCRIPT = """
import json, sys
from on_actors.small_step import *
from on_actors.training import train_with_checkpoints
with jax.debug_nans(True), on_actors(autopar.Ray(deadline=60)) as step:
    print("pids", *step.actor_pids, flush=True)
    losses = train_with_checkpoints(step, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
print(json.dumps(losses))
"""


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 5))]
)
def test_a_killed_driver(undisturbed: tuple[list[float], Any], seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    folder = tmp_path / "run"

    def start() -> tuple[subprocess.Popen[str], list[int]]:
        driver = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), str(STEPS), "4"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]]),
                "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            },
        )
        assert driver.stdout is not None
        return driver, list(map(int, said(driver.stdout, "pids").split()))

    driver, pids = start()
    assert driver.stdout is not None
    for _ in range(chance.randrange(1, 5)):
        said(driver.stdout, "saved")  # a checkpoint is asked for
    threading.Event().wait(0.3 * chance.random())
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_until_gone(pids)
    driver, pids = start()
    assert driver.stdout is not None
    losses = json.loads(driver.stdout.read().splitlines()[-1])
    assert driver.wait(60) == 0
    driver.stdout.close()
    assert [losses[str(number)] for number in range(STEPS)] == undisturbed[0]
    assert sorted(path.name for path in folder.iterdir()) == [
        "autopar_checkpoints.json",
        "step_00000020",
        "step_00000024",
    ]
    wait_until_gone(pids)
