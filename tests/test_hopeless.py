"""What no plan can hold is told by bounds, before anything is searched, and nothing else is."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from small_steps import perceptron as step

import autopar
from autopar.base.errors import MemoryLimitError
from autopar.base.options import Options
from autopar.passes.planner import layout_search
from autopar.passes.planner.automatic_stages import AutomaticStages
from autopar.passes.planner.hopeless import may_fit
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.layouts import StageLayout
from autopar.passes.planner.small_plans import small_plans
from autopar.passes.trace.trace import trace

CLUSTER = replace(autopar.Cluster.preset("p3.16xlarge", devices_per_node=2), num_nodes=2)
WIDTH, ROWS = 32, 8
STATE = {f"w{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(4)}
ROWS_OF = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
SHARE = 4 * WIDTH * WIDTH * 4 // CLUSTER.num_devices
COUNTS = [1, 2, 4, 8]


def searched(limit: int, **options: Any) -> LayoutSearch:
    graph = trace(step, (STATE, ROWS_OF)).graph
    asked = Options.from_kwargs(memory_limit=limit, **options)
    return LayoutSearch.of(graph, asked, CLUSTER, lambda message: None)


def possible(limit: int, **options: Any) -> list[int]:
    search = searched(limit, **options)
    return may_fit(search, COUNTS, lambda: search.least_memory)


@pytest.fixture
def nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*args: Any) -> None:
        raise AssertionError("it cannot fit")

    monkeypatch.setattr(layout_search, "LITTLE_STATE", 0)
    monkeypatch.setattr(LayoutSearch, "candidates", unwanted)
    monkeypatch.setattr(AutomaticStages, "promise", unwanted)


def test_a_state_alone_is_too_much() -> None:
    assert not possible(SHARE - 1)
    assert possible(SHARE)


def test_sums_over_microbatches_come_beside_the_state() -> None:
    assert possible(2 * SHARE - 1) == [1]  # of the whole batch gradients need not be there at once
    assert possible(2 * SHARE + 8) == COUNTS  # and the loss


@pytest.mark.parametrize(
    ("limit", "options"),
    [(2.5, {"stages": 1}), (2.75, {"stages": 1, "microbatches": 2}), (2.85, {"stages": 2})],
)
def test_what_fits_tightly_is_not_said_not_to(limit: float, options: dict[str, Any]) -> None:
    asked = {**options, "memory_limit": int(limit * SHARE)}
    plan = autopar.plan(step, STATE, ROWS_OF, cluster=CLUSTER, **asked)
    assert plan.estimates.peak_bytes_per_device > 0.85 * asked["memory_limit"]
    assert plan.num_microbatches in possible(asked["memory_limit"])


@pytest.mark.usefixtures("nothing_is_searched")
def test_it_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(MemoryLimitError) as refused:
        autopar.plan(step, STATE, ROWS_OF, cluster=CLUSTER, memory_limit=SHARE - 1)
    error, text = refused.value, " ".join(str(refused.value).split())
    assert "shared evenly among all 4 devices, is 4 KiB on each: no plan can fit" in text
    assert error.least_bytes is not None and 2 * SHARE < error.least_bytes < 4 * SHARE
    (nodes, memory) = error.would_fit
    assert nodes == "8 nodes (16 devices) instead of 2" and memory.startswith("memory_limit=")


def test_small_plans_need_less_than_quick_ones() -> None:
    search = searched(SHARE, method="auto")
    (kept, *_) = small_plans(search, COUNTS)
    quick = autopar.plan(step, STATE, ROWS_OF, cluster=CLUSTER, stages=1, microbatches=8)
    assert kept.peak.bytes < quick.estimates.peak_bytes_per_device


@pytest.mark.usefixtures("nothing_is_searched")
def test_where_only_the_whole_batch_may_fit_a_small_plan_of_it_tells() -> None:
    search = searched(2 * SHARE - 1)
    layout = StageLayout((), (4,))
    made = search.hopeless(layout)
    assert {candidate.split.num_microbatches for candidate in made} == {1, 8}
    assert min(max(candidate.peak_bytes) for candidate in made) > 1.1 * (2 * SHARE - 1)
