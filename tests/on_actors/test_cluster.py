"""Ray clusters that run already, and addresses that lead nowhere."""

import os
import socket
import subprocess
import sys

import pytest
import ray
from on_actors.small_step import check_one_step, on_actors

import autopar
from autopar.base.errors import ClusterError
from autopar.runtime.ray.transport.group import reserve_port

pytestmark = pytest.mark.usefixtures("no_ray")

CLUSTER = """
import ray, sys
from autopar.runtime.ray.driver.ray_cluster import start_local
start_local(2)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray itself
def test_a_cluster_that_runs_already() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    head = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # A cluster that a driver starts wants a token that only its own processes have.
        env={**clean, "RAY_AUTH_MODE": "disabled"},
    )
    try:
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        with on_actors(autopar.Ray(address=address, deadline=60)) as step:
            check_one_step(step)
            with pytest.raises(ClusterError, match="connected to another Ray cluster"):
                on_actors(autopar.Ray(address="127.0.0.1:1", deadline=60))
        assert not ray.is_initialized()
        assert head.poll() is None, "the cluster is not ours to end"
    finally:
        head.communicate("", timeout=60)


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "no.such.host.invalid:6379", "here:there"])
def test_nothing_answers(address: str) -> None:
    assert not ray.is_initialized()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ClusterError, match=r"No Ray cluster can be reached"):
        on_actors(autopar.Ray(address=address.format(port=port), deadline=10))
    assert not ray.is_initialized()


def test_something_else_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterError, match="No Ray cluster can be reached"):
            on_actors(autopar.Ray(address=address, deadline=3))
    assert not ray.is_initialized()


def test_a_reserved_port_is_for_the_coordinator_alone() -> None:
    with reserve_port("127.0.0.1") as reserved:
        address = reserved.getsockname()
        with pytest.raises(OSError, match="in use"):
            socket.create_server(address)
        with socket.create_server(address, reuse_port=True):  # as gRPC does
            pass
