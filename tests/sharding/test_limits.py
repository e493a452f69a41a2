"""A memory limit that binds: the plan changes until it fits, or the error says what would do."""

from __future__ import annotations

import functools

import pytest

from autopar.base.errors import MemoryLimitError
from autopar.passes.graph.graph import Graph
from autopar.passes.planner.compiler import Compiled
from sharding.steps import compiled, graph_of, momentum_shapes, momentum_step

# The state outweighs the activations, so methods differ by what they store.
SHAPES = momentum_shapes(batch=8, features=64, hidden=128)


@functools.cache
def graph() -> Graph:
    return graph_of(momentum_step, *SHAPES)


@functools.cache
def planned(method: str, memory_limit: int | None = None) -> Compiled:
    return compiled(
        graph(), method=method, memory_limit=memory_limit, microbatches=1, logical_mesh=(8,)
    )


def needs(made: Compiled) -> int:
    return made.plan.estimates.peak_bytes_per_device


def stored(made: Compiled) -> int:
    return made.plan.estimates.state_bytes_per_device


def test_methods_need_less_and_less() -> None:
    needed = [needs(planned(method)) for method in ("data", "zero1", "zero2", "zero3")]
    assert needed == sorted(needed, reverse=True) and len(set(needed)) == 4
    whole = sum(t.bytes for t in planned("data").plan.inputs if t.role == "state")
    assert stored(planned("data")) == whole
    assert stored(planned("zero1")) == stored(planned("zero2")) == whole // 2 + whole // 16
    assert stored(planned("zero3")) == whole // 8


def test_a_binding_limit_makes_the_state_sharded() -> None:
    between = (needs(planned("data")) + needs(planned("zero3"))) // 2
    bound = planned("shard", between)
    assert needs(bound) <= between < needs(planned("data"))
    assert stored(bound) < stored(planned("data"))
    cut = [t.path for t in bound.plan.inputs if t.role == "state" and any(t.spec)]
    assert cut
    # The limit costs time, and a plan without one does not pay it.
    free = planned("shard")
    assert bound.plan.estimates.step_seconds >= free.plan.estimates.step_seconds
    assert needs(planned("shard", 2 * needs(free))) == needs(free)


@pytest.mark.usefixtures("no_remedies")
@pytest.mark.parametrize("method", ["data", "zero2", "zero3", "shard"])
def test_the_least_that_the_error_names_would_do(method: str) -> None:
    with pytest.raises(MemoryLimitError, match="No plan keeps within 1,024 bytes") as caught:
        planned(method, 1024)
    least = caught.value.least_bytes
    assert least is not None and least > 1024
    assert caught.value.largest_tensors
    assert needs(planned(method, least)) <= least
    if method != "shard":  # the textbook methods leave no choice that changes the peak
        assert least <= needs(planned(method))
        with pytest.raises(MemoryLimitError):
            planned(method, least - 1)
