"""The integer program's account of memory in scans is that of the programs that are made of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counted_rows import rows_over_peaks

import autopar
from autopar.base.options import Options
from autopar.passes.graph.logical import no_mesh
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.stage_shardings import MeshSearch
from autopar.passes.sharding.folded_hosts import FoldedHosts
from autopar.passes.sharding.integer_program import PICOSECONDS, to_problem
from autopar.passes.sharding.memory_price import MemoryPrices
from autopar.passes.sharding.memory_rows import memory_rows, row_bytes, rows_peak
from autopar.passes.solver import solve
from autopar.passes.solver.flat import Flat
from autopar.passes.trace.trace import trace

CLUSTER = autopar.Cluster.preset("p3.16xlarge")
HOSTS = autopar.Cluster.preset("dgx-h100")
LAYERS = 32


def scanned(state: jax.Array, x: jax.Array) -> Any:
    """Layers in a scan, of which the carry is kept."""

    def layer(y: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(y @ w), None

    def loss(state: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(jax.checkpoint(layer), x, state)
        return jnp.mean(y * y)

    value, gradient = jax.value_and_grad(loss)(state)
    return state - 0.1 * gradient, value


def arguments(width: int, rows: int) -> tuple[Any, Any]:
    state = jax.ShapeDtypeStruct((LAYERS, width, width), jnp.float32)
    return state, jax.ShapeDtypeStruct((rows, width), jnp.float32)


def search_of(
    width: int,
    rows: int,
    mesh: tuple[int, ...],
    microbatches: int = 1,
    cluster: autopar.Cluster = CLUSTER,
    **more: Any,
) -> MeshSearch:
    options = Options.from_kwargs(stages=1, microbatches=microbatches, **more)
    with autopar.tracing_for(cluster):
        graph = trace(
            scanned, arguments(width, rows), microbatches=microbatches, method="auto"
        ).graph
    split = LayoutSearch.of(graph, options, cluster, lambda line: None).split(microbatches)
    return MeshSearch.of(split, mesh, options, cluster, None, None)


@pytest.mark.parametrize(("width", "rows"), [(512, 512), (1024, 256), (1024, 8192)])
@pytest.mark.parametrize(("mesh", "microbatches"), [((8,), 1), ((4, 2), 1), ((8,), 4)])
def test_rows_count_what_a_scanned_program_needs(
    width: int, rows: int, mesh: tuple[int, ...], microbatches: int
) -> None:
    """Weights that are gathered for the loop, its stacks once, and gradients as they are added.

    By the quickest plan, by one that is chosen for its bytes, and by the one with the fewest: that
    needs hardly more than the others. What is there for a moment of a trip, a layer's weight that
    is gathered or its gradient before it is scattered, has no row: of the smallest, two of 32.
    """
    moments = 2 * 4 * width * width
    with no_mesh():
        search = search_of(width, rows, mesh, microbatches)
        free = search.free()
        small, (least,) = search.dear(free, 1), search.least(False)
    counted = memory_rows(search.built)
    for planned in (free, small, least):
        told = rows_peak(search.built, counted, planned.solution.assignment)
        needed = planned.peak.bytes
        assert min(0.9 * needed, needed - moments) <= told <= 1.05 * needed
    assert least.peak.bytes <= small.peak.bytes + moments < free.peak.bytes


def test_a_plan_within_a_limit_gathers_layer_by_layer() -> None:
    """Where all layers' weights do not fit at once, solving within the limit finds what does."""
    with no_mesh():
        search = search_of(512, 512, (8,))
        free, stack = search.free(), LAYERS * 4 * 512**2
        assert free.peak.bytes > 2 * stack
        within = dataclasses.replace(search, limit=stack).tightened(
            dataclasses.replace(free, fits=False)
        )
    assert within.fits and within.peak.bytes <= stack


def test_a_copy_that_two_loops_slice_is_there_once() -> None:
    """Until the first loop ends it is the first one's, then the second one's."""
    with no_mesh():
        counted = memory_rows(search_of(512, 512, (8,)).built)
    (second,) = (row for row in counted if row.value.live.since is not None)
    alike = [row for row in counted if row.same_as is second.same_as and row is not second]
    assert [row.end for row in alike] == [second.first]


def test_a_loop_makes_constants_itself() -> None:
    """Zeros that a scan slices are no stack; random numbers are."""

    def step(state: jax.Array, x: jax.Array, key: jax.Array, random: bool) -> Any:
        shape = (LAYERS, *x.shape)
        more = jax.random.normal(key, shape) if random else jnp.zeros(shape)

        def layer(y: jax.Array, own: Any) -> tuple[jax.Array, None]:
            w, b = own
            return jnp.tanh((y + b) @ w), None

        return 0.9 * state, jax.lax.scan(layer, x, (state, more))[0]

    options, counted = Options.from_kwargs(stages=1), list[int]()
    for random in (False, True):
        with autopar.tracing_for(CLUSTER):
            values = *arguments(512, 4096), jax.random.key(0)
            own = functools.partial(step, random=random)
            graph = trace(own, values, microbatches=1, method="auto").graph
        with no_mesh():
            split = LayoutSearch.of(graph, options, CLUSTER, lambda line: None).split(1)
            built = MeshSearch.of(split, (8,), options, CLUSTER, None, None).built
        stacks = [row for row in memory_rows(built) if row.value.shape == (LAYERS, 4096, 512)]
        counted.append(len(stacks))
    assert counted == [0, 1]


@pytest.mark.parametrize("limit", [0.5, 1.0, 1.3, None])
def test_leaves_that_loops_slice_may_lie_in_the_hosts_memory(limit: float | None) -> None:
    """The program that is solved in place of the one with twice the strategies has its optimum."""
    with no_mesh():
        search = search_of(512, 512, (8,), offload="auto", cluster=HOSTS)
    counted = memory_rows(search.built)
    if limit is None:
        problem = MemoryPrices(search.built, counted)._with_price(1e-10)
    else:
        problem = to_problem(search.built, int(limit * LAYERS * 4 * 512**2), counted)
    folded = FoldedHosts.of(problem, search.built)
    found = folded.unfolded(solve(folded.problem, work_limit=10.0))
    cost = Flat(problem).cost(np.array(found.assignment, np.int64))
    assert cost == found.cost == solve(problem, work_limit=10.0).cost


def test_bytes_have_their_price_once() -> None:
    """What is priced is what the rows count, also of values that may be others' buffers."""
    price = 1e-9
    with no_mesh():
        search = search_of(512, 512, (4, 2))
        plans = [search.free(), search.dear(search.free(), 0), search.dear(search.free(), 1)]
    counted = memory_rows(search.built)
    assert any(row.same_as is not None for row in counted)
    seen: list[Any] = []

    def solve(problem: Any) -> Any:
        seen.append(problem)
        return plans[0].solution

    prices = MemoryPrices(search.built, counted)
    prices.solved(price, solve)
    for planned in plans:
        own = planned.solution.assignment[: len(search.built.nodes)]
        there = sum(row_bytes(row, search.built, own) for row in counted)
        with_price = Flat(seen[0]).cost(np.array(own, np.int64))
        assert with_price is not None
        assert with_price - prices.cost(own) == pytest.approx(there * price * PICOSECONDS, rel=1e-6)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_rows_count_what_a_stage_with_a_scan_needs(
    remat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the forward pass keeps for the backward one is there for every microbatch in flight."""
    seen = rows_over_peaks(monkeypatch)
    autopar.plan(
        scanned,
        *arguments(512, 4096),
        cluster=CLUSTER,
        stages=2,
        microbatches=8,
        schedule="1f1b",
        remat=remat,
    )
    assert seen and 0.9 <= min(seen) <= max(seen) <= 1.1
