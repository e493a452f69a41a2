"""What goes wrong under Ray ends in one error that says where, and leaves no process behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from on_actors.clusters import is_running, said, wait_until_gone
from on_actors.small_step import BATCH, check_one_step, init, on_actors, train_step

import autopar
from autopar.arrays.ray_array import RayArray
from autopar.base.errors import ClusterError, LostActorError, StageError, TraceError
from autopar.ray_executable import RayExecutable
from autopar.runtime.ray.driver import actor_pool

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray itself


@pytest.fixture(scope="module")
def step(ray_cluster: None) -> Iterator[RayExecutable]:
    with jax.debug_nans(True), on_actors(autopar.Ray(deadline=60)) as made:
        yield made


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, which it does not in a process started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run_forever(step: RayExecutable) -> None:
    state = init()
    while True:
        state, _ = step(state, BATCH)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_nan_in_a_stage(step: RayExecutable, stage: int) -> None:
    state = init()
    state[5 * stage]["scale"] = jnp.full(8, -9.0)
    with pytest.raises(StageError) as found:
        for _ in range(9):  # it shows in the same call or in a later one
            state, _ = step(state, BATCH)
    error = found.value
    assert "FloatingPointError: nan in its results" in error.what
    spot = error.spot
    task = ("F0", "B1")[stage]  # the last stage runs forward and backward at once
    assert (spot.actor, spot.stage, spot.instruction) == (stage, f"stage {stage}", f"{task}[0]")
    assert spot.microbatch == 0
    assert f"actor {stage}, stage {stage}, {task}[0], microbatch 0" in str(error)
    with pytest.raises((StageError, RuntimeError), match=r"is lost|deleted"):
        np.asarray(state[0]["w"])
    check_one_step(step)


def test_a_result_of_a_failed_step_says_so(step: RayExecutable) -> None:
    state = init()
    state[5]["scale"] = jnp.full(8, -9.0)
    _, loss = step(state, BATCH)
    with pytest.raises(StageError, match=r"FloatingPointError"):
        float(loss)
    assert "on stage 1" in repr(loss)
    with pytest.raises(StageError, match="is lost"):
        float(loss)
    check_one_step(step)


def num_arrays(step: RayExecutable) -> list[int]:
    """How many each actor keeps."""
    step.finish()
    handles = step._compiled.running.pool.handles
    count = [
        x.__ray_call__.remote(lambda self: len(self._step.arrays.store._arrays)) for x in handles
    ]
    return list(ray.get(count, timeout=60))


def test_failed_steps_leave_no_arrays_behind(
    step: RayExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step took over is gone, also of steps after it, and of one that was half sent."""
    state, loss = step(step.initialize(init), BATCH)
    state, loss = step(state, BATCH)
    expected = num_arrays(step)
    for _ in range(2):
        state = init()
        state[0]["scale"] = jnp.full(8, -9.0)
        others = [step.initialize(init) for _ in range(2)]
        with pytest.raises(StageError):
            state, loss = step(state, BATCH)
            others = [step(other, BATCH)[0] for other in others]
            step.finish()
        del state, others
        state, loss = step(step.initialize(init), BATCH)
        state, loss = step(state, BATCH)
        assert num_arrays(step) == expected
    step.finish()
    pool = step._compiled.running.pool
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no way there"):
        first, last = pool.handles
        patch.setattr(pool, "handles", [first, Unreachable(last)])
        step(state, BATCH)
        step.finish()
    del state
    state, loss = step(step.initialize(init), BATCH)
    state, loss = step(state, BATCH)
    assert num_arrays(step) == expected
    assert np.isfinite(float(loss))
    check_one_step(step)


@pytest.mark.usefixtures("ray_cluster")
def test_a_step_that_is_shut_down_by_another_thread() -> None:
    step = on_actors(autopar.Ray(deadline=60), stages=1)
    with ThreadPoolExecutor() as threads:
        running = threads.submit(run_forever, step)
        while step.actors.running.steps.serial < 5:
            threading.Event().wait(0.01)
        step.shutdown()
        with pytest.raises(LostActorError, match="are gone") as found:
            running.result(60)
    assert found.value.why is not None and "shutdown()" in found.value.why


class Unreachable:
    """An actor that cannot be told of steps."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.step = self

    def remote(self, *_: Any) -> Any:
        raise OSError("no way there")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)


def test_an_interruption(step: RayExecutable, interruptible: None) -> None:
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_forever(step)
    timer.join()
    check_one_step(step)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 3))])
def test_a_killed_actor(ray_cluster: None, seed: int) -> None:
    chance = random.Random(seed)
    step = on_actors(autopar.Ray(deadline=60))
    victim = chance.choice([0, 1])
    state, _ = step(init(), BATCH)
    timer = threading.Timer(chance.random(), os.kill, (step.actor_pids[victim], signal.SIGKILL))
    timer.start()
    with pytest.raises(LostActorError, match=f"lost actor {victim} ") as found:
        run_forever(step)
    assert found.value.spot.stage.endswith(str(victim))
    wait_until_gone(step.actor_pids)
    with pytest.raises(LostActorError, match="are gone"):
        np.asarray(state[0]["w"])
    with pytest.raises(LostActorError, match="are gone"):
        step(init(), BATCH)
    step.shutdown()


def test_an_actor_that_stops_answering(ray_cluster: None) -> None:
    step = on_actors(autopar.Ray(deadline=3))
    check_one_step(step)
    os.kill(step.actor_pids[0], signal.SIGSTOP)
    with pytest.raises(LostActorError) as found:
        run_forever(step)
    assert found.value.spot.actor == 0
    assert "F0[" in str(found.value)
    wait_until_gone(step.actor_pids)


def endless_step(state: Any, batch: Any) -> Any:
    """A step that computes without end where its state says so."""
    layers, loss = train_step(state["layers"], batch)
    rounds = jax.lax.while_loop(lambda n: (n < 3) | (state["endless"] > 0), lambda n: n + 1, 0)
    return {"layers": layers, "endless": state["endless"]}, (loss, rounds)


@pytest.mark.parametrize("look", ["state", pytest.param("checkpoint", marks=pytest.mark.full)])
def test_a_stage_that_computes_without_end(ray_cluster: None, tmp_path: Path, look: str) -> None:
    state = {"layers": init(), "endless": jnp.int32(0)}
    step = autopar.compile(
        endless_step, state, BATCH, stages=2, microbatches=4, method="data",
        # A device each: all of them compute until the actors are ended.
        cluster=autopar.Cluster.preset("cpu", devices_per_node=2), runtime=autopar.Ray(deadline=3),
    )  # fmt: skip
    assert isinstance(step, RayExecutable)
    state, (_, rounds) = step(state, BATCH)
    assert int(rounds) == 3
    state, _ = step({**state, "endless": jnp.int32(1)}, BATCH)
    with pytest.raises(StageError, match=r"(?s)deadline|seconds") as found:
        if look == "state":
            jax.block_until_ready(state)
        else:
            with autopar.Checkpoints(tmp_path / "run") as checkpoints:
                checkpoints.save(2, state)
    assert found.value.spot is not None
    wait_until_gone(step.actor_pids)


def on_nodes(number: int, deadline: float) -> RayExecutable:
    """A step of one stage with an actor on each of so many nodes."""
    cluster = autopar.Cluster.preset("cpu", nodes=number, devices_per_node=1)
    ray = autopar.Ray(deadline=deadline)
    step = autopar.compile(train_step, init(), BATCH, method="data", cluster=cluster, runtime=ray)
    assert isinstance(step, RayExecutable)
    return step


def test_too_few_cpus(ray_cluster: None) -> None:
    with pytest.raises(ClusterError, match=r"needs 16 actors .* has 8 CPUs"):
        on_nodes(16, deadline=60)


def test_cpus_that_do_not_become_free(step: RayExecutable) -> None:
    with pytest.raises(ClusterError, match="did not become free within 1 seconds"):
        on_nodes(8, deadline=1)
    check_one_step(step)


def test_a_step_that_cannot_be_sent(ray_cluster: None) -> None:
    lock = threading.Lock()

    def locked(x: Any) -> None:
        with lock:
            del x

    def with_callback(w: Any, x: Any) -> Any:
        jax.debug.callback(locked, w[0, 0])
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    with pytest.raises(TraceError, match=r"with_callback cannot be sent to another.*lock"):
        autopar.compile(
            with_callback,
            jnp.ones((8, 4)),
            BATCH["x"],
            cluster=autopar.Cluster.preset("cpu", devices_per_node=1),
            runtime=autopar.Ray(deadline=60),
        )


def test_too_few_gpus(ray_cluster: None) -> None:
    with pytest.raises(ClusterError, match=r"needs 4 GPUs, and the Ray cluster has 0"):
        on_actors(autopar.Ray(deadline=60, devices="gpu"))


def test_other_versions_on_a_node(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_pool, "versions", lambda: (("jax", "0.1.2"),))
    with pytest.raises(ClusterError, match="runs other versions") as found:
        on_actors(autopar.Ray(deadline=60))
    assert found.value.why is not None
    assert f"jax {jax.__version__}" in found.value.why
    assert "here are jax 0.1.2" in found.value.why


def test_an_init_function_that_fails(step: RayExecutable) -> None:
    with pytest.raises(StageError, match="invalid value"):
        step.initialize(lambda x: jax.tree.map(lambda leaf: leaf * jnp.log(x), init()), -1.0)
    check_one_step(step)


def test_a_state_of_another_step(step: RayExecutable) -> None:
    state, _ = step(init(), BATCH)
    handle = state[0]["w"]
    assert isinstance(handle, RayArray)
    copy = [{name: np.asarray(leaf) for name, leaf in layer.items()} for layer in state]
    mixed = [state[0], *copy[1:]]
    (_, loss), (_, wanted) = step(mixed, BATCH), jax.jit(train_step)(copy, BATCH)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)


SCRIPT = """
import ray, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts tests may ignore it
from on_actors.small_step import *
step = on_actors(autopar.Ray(deadline=60))
nodes = [node["NodeManagerAddress"] for node in ray.nodes()]
print("pids", *step.actor_pids, flush=True)
print("nodes", nodes, ray.get_runtime_context().gcs_address, flush=True)
state = init()
while True:
    state, _ = step(state, BATCH)
"""


@pytest.mark.parametrize(
    "ending", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_actors_end_with_their_driver(ending: signal.Signals) -> None:
    folder = str(Path(__file__).parent)
    # Ray's helpers of this process would be taken for those of the driver.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    driver = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**clean, "PYTHONPATH": os.pathsep.join([folder, *sys.path[1:]])},
    )
    assert driver.stdout is not None
    try:
        pids = list(map(int, said(driver.stdout, "pids").split()))
        assert said(driver.stdout, "nodes").startswith("['127.0.0.1'] 127.0.0.1:")
        below = descendants(driver.pid)
        assert set(pids) <= set(below)
        driver.send_signal(ending)
        driver.wait(120)
        # Two helpers of Ray try for a minute to tell others that their node was killed.
        helpers = set(filter(is_agent, below))
        wait_until_gone([pid for pid in below if pid not in helpers])
        for pid in filter(is_running, helpers):
            os.kill(pid, signal.SIGKILL)
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()


def is_agent(pid: int) -> bool:
    """By its file before it has given itself a title; only Ray's own server names others' files."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
    return "agent" in title.lower() and "raylet/raylet" not in title


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        children.setdefault(int(parent), []).append(int(entry))
    found = []
    stack = list(children.get(pid, ()))
    while stack:
        found.append(stack.pop())
        stack += children.get(found[-1], ())
    return [pid for pid in found if is_running(pid)]
