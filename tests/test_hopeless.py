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
from autopar.passes.planner import hopeless, layout_search
from autopar.passes.planner.automatic_stages import AutomaticStages
from autopar.passes.planner.hopeless import hopeless_plans, may_fit
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
LAYOUT = StageLayout((), (CLUSTER.num_devices,))


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

    monkeypatch.setattr(hopeless, "LITTLE_STATE", 0)
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
def test_where_only_the_whole_batch_may_fit_a_small_plan_of_it_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout_search, "LONG_PROGRAM", 0)
    limit = 7 * SHARE // 4
    assert possible(limit) == [1]
    made = hopeless_plans(searched(limit), LAYOUT)
    assert {candidate.split.num_microbatches for candidate in made} == {1, 8}
    monkeypatch.undo()
    with pytest.raises(MemoryLimitError):  # nor does a search of all plans find one
        autopar.plan(step, STATE, ROWS_OF, cluster=CLUSTER, memory_limit=limit, microbatches=1)


@pytest.mark.usefixtures("nothing_is_searched")
def test_what_bounds_leave_open_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_search, "LONG_PROGRAM", 0)
    assert not hopeless_plans(searched(4 * SHARE), LAYOUT)
    assert not hopeless_plans(searched(3 * SHARE // 2, microbatches=1), LAYOUT)
    assert hopeless_plans(searched(SHARE - 1, microbatches=1), LAYOUT)
    stages = StageLayout((1,), (2, 2))
    assert not hopeless_plans(searched(SHARE - 1, stages=2), stages)


def several_loops(state: dict[str, Any], x: jax.Array) -> Any:
    """A loss of every pair of rows."""

    def loss(state: dict[str, Any]) -> jax.Array:
        y = x
        for name in sorted(state):
            y = jnp.tanh(y @ state[name])
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(y @ y.T)))

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


@pytest.mark.parametrize("options", [{}, {"microbatches": 4}, {"method": "zero3"}])
def test_a_step_of_several_loops_is_refused_for_its_memory(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopeless, "LITTLE_STATE", 0)
    asked = {"stages": 1, "memory_limit": SHARE - 1, **options}
    with pytest.raises(MemoryLimitError, match="no plan can fit"):
        autopar.plan(several_loops, STATE, ROWS_OF, cluster=CLUSTER, **asked)
