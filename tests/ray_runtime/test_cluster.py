"""Addresses that lead nowhere."""

import socket

import pytest
import ray
from ray_runtime.small_step import on_actors

import autopar
from autopar.errors import ClusterError


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "no.such.host.invalid:6379", "here:there"])
def test_nothing_answers(address: str) -> None:
    assert not ray.is_initialized()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ClusterError, match=r"No Ray cluster can be reached"):
        on_actors(autopar.Ray(address=address.format(port=port), deadline=10))
    assert not ray.is_initialized()
