"""Cyclic garbage is looked for rarely while a plan is made, and as before afterwards."""

import gc
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.base.rare_collections import THRESHOLDS, rare_collections
from autopar.passes.planner.compiler import compile_graph
from autopar.passes.trace.trace import trace


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(701, 11, 9)
    yield gc.get_threshold()
    gc.set_threshold(*before)


def test_a_plan_is_made_with_few_collections() -> None:
    seen: list[tuple[int, int, int]] = []

    def step(w: jnp.ndarray, x: jnp.ndarray) -> jnp.ndarray:
        return w - x.T @ (x @ w)

    def told(message: str) -> None:
        seen.append(gc.get_threshold())

    traced = trace(step, (jnp.ones((8, 8)), jnp.ones((16, 8))))
    compile_graph(traced.graph, Options(), Cluster.preset("h100"), report=told)
    assert THRESHOLDS in seen
    assert gc.get_threshold() == (701, 11, 9)


def test_an_exception_ends_it_and_inner_ones_change_nothing() -> None:
    with pytest.raises(KeyboardInterrupt), rare_collections():
        with rare_collections():
            assert gc.get_threshold() == THRESHOLDS
        assert gc.get_threshold() == THRESHOLDS
        raise KeyboardInterrupt
    assert gc.get_threshold() == (701, 11, 9)


@pytest.mark.parametrize("wider", [(0, 10, 10), (10**6, 10, 10**4)])
def test_what_a_user_has_set_wider_stays(wider: tuple[int, int, int]) -> None:
    gc.set_threshold(*wider)
    with rare_collections():
        first, _, third = gc.get_threshold()
        assert first == wider[0]
        assert third >= wider[2]
    assert gc.get_threshold() == wider


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with rare_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_threads_that_overlap_restore_what_was_there_before_the_first() -> None:
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == THRESHOLDS
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (701, 11, 9)
