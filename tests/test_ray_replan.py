"""A cluster that loses a node for good: the step is planned again for what is left, or refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import ray
from on_actors.clusters import is_running
from on_actors.small_step import BATCH, check_one_step, init, train_step
from on_actors.training import batch, train
from ray.cluster_utils import Cluster

import autopar
from autopar.base.errors import ClusterError, OptionError
from autopar.ray_executable import RayExecutable
from autopar.runtime.ray.driver import step_queue
from autopar.runtime.ray.driver.ray_cluster import free_actors, loopback, taken_as_it_is

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray itself
    pytest.mark.usefixtures("no_ray"),
]


NOTICED_SOON = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
"""Ray's own settings would wait some 15 seconds for a node that is gone."""


NODE = {"node_ip_address": "127.0.0.1", "num_cpus": 1, "include_log_monitor": False}


@pytest.fixture(scope="module")
def nodes(no_ray: None) -> Iterator[Cluster]:
    """A cluster whose only node has a CPU and this driver."""
    head = {**NODE, "include_dashboard": False, "_system_config": NOTICED_SOON}
    with loopback():
        cluster = Cluster(True, head_node_args=head)
        ray.init(taken_as_it_is(cluster.address), logging_level="error", log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def lose_a_node(nodes: Cluster) -> Callable[[], None]:
    """A second node with a CPU joins; what takes it away."""
    with loopback():
        other = nodes.add_node(**NODE)
    return lambda: nodes.remove_node(other, allow_graceful=False)


def compiled(on_loss: str, stages: Any) -> RayExecutable:
    step = autopar.compile(
        train_step,
        init(),
        BATCH,
        stages=stages,
        microbatches=4,
        method="data",
        schedule="auto" if stages == 1 else "1f1b",
        cluster=autopar.Cluster.preset("cpu", nodes=2, devices_per_node=2),
        runtime=autopar.Ray(deadline=4, max_restarts=2, snapshot_every=5, on_loss=on_loss),
    )
    assert isinstance(step, RayExecutable)
    return step


@pytest.mark.parametrize("stages", [2, 1])  # on one actor each, and one on both
def test_a_lost_node(
    lose_a_node: Callable[[], None], stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_queue, "GRACE_SECONDS", 2.0)  # who is left may wait for who is gone
    state, wanted = init(), []
    plain = jax.jit(train_step)
    for number in range(16):
        state, loss = plain(state, batch(number))
        wanted.append(float(loss))
    with compiled("replan", stages) as step:
        assert [stage.num_devices for stage in step.plan.stages] == [4 // stages] * stages
        assert len(list(step.actor_pids)) == 2

        def after(done: int, state: Any) -> None:
            if done == 7:
                pids = step.actor_pids
                lose_a_node()
                end = time.monotonic() + 60
                while all(map(is_running, pids)):  # the node's actor ends a little later
                    assert time.monotonic() < end
                    threading.Event().wait(0.05)

        losses, found = train(step, 16, after=after)
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
        assert len(step.recoveries) == 1
        assert [stage.num_devices for stage in step.plan.stages] == [2]
        assert len(step.actor_pids) == 1
        check_one_step(step)
        made = step.initialize(init)
        assert {part.actors for part in made[5]["w"].sharding.parts} == {(0,)}
        check_one_step(step)


@pytest.mark.full
@pytest.mark.parametrize(
    ("on_loss", "stages", "error", "match"),
    [
        ("error", 2, ClusterError, "2 CPUs|2 actors"),
        ("replan", [3], (ClusterError, OptionError), "stages|meshes"),
    ],
    ids=["error", "replan"],
)
def test_a_lost_node_that_cannot_be_spared(
    lose_a_node: Callable[[], None], on_loss: str, stages: Any, error: Any, match: str
) -> None:
    step = compiled(on_loss, stages)
    state, _ = step(init(), BATCH)
    lose_a_node()
    with pytest.raises(error, match=match) as found:
        while True:
            state, _ = step(state, BATCH)
    assert any("lost actor" in note for note in found.value.__notes__)
    step.shutdown()


def test_what_ended_actors_had_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster whose node is lost, and whose other node's CPUs are given back one by one."""
    free = iter([4, 0, 0, 1, *[2] * 50])
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": next(free)})
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2})
    assert free_actors([0] * 4, 30) == 2
    monkeypatch.setattr(ray, "available_resources", dict)
    assert free_actors([0] * 4, 0.3) == 0  # other work has them
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1})
    assert free_actors([0] * 4, 30) == 1  # and another CPU, for longer than `SETTLED_SECONDS`
    once: Iterator[dict[str, float]] = iter([{}])
    monkeypatch.setattr(ray, "available_resources", lambda: next(once))
    monkeypatch.setattr(ray, "cluster_resources", dict)
    assert free_actors([0], 30) == 0  # no node is left that could give something back
