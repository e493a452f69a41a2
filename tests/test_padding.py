"""Loops that devices do not divide: which are padded, and that no number changes by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from microbatch.helpers import run, trace
from programs import PROGRAMS

import autopar
from autopar.base.cluster import Cluster
from autopar.passes.graph import graph as graphs
from autopar.passes.graph.graph import Graph
from autopar.passes.padding import pad, uneven
from autopar.passes.padding.uneven import loops_to_pad, padded_size
from autopar.passes.primitives.populate import populate

VOCABULARY, WIDTH, HEADS, LENGTH = 257, 25, 12, 3


def gpt_loss(weights: Any, tokens: Any) -> Any:
    """One block of attention between a tied embedding and its logits."""
    x = weights["embedding"][tokens[:, :-1]]
    q, k, v = (jnp.einsum("bth,hnd->btnd", x, weights[name]) for name in "qkv")
    scores = jnp.einsum("btnd,bsnd->bnts", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    attended = jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("btnd,ndh->bth", attended, weights["o"])
    logits = x @ weights["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5, momentum=0.9))


def gpt_step(state: Any, tokens: Any) -> Any:
    weights, optimizer = state
    loss, gradients = jax.value_and_grad(gpt_loss)(weights, tokens)
    updates, optimizer = OPTIMIZER.update(gradients, optimizer)
    return (optax.apply_updates(weights, updates), optimizer), loss


def gpt_arguments(heads: int = HEADS) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys("qkv", (WIDTH, heads, 2))
    shapes |= {"embedding": (VOCABULARY, WIDTH), "o": (heads, 2, WIDTH)}
    weights = {n: random.normal(size=s).astype(np.float32) for n, s in sorted(shapes.items())}
    tokens = random.integers(0, VOCABULARY, (6, LENGTH + 1))
    return (weights, OPTIMIZER.init(weights)), tokens


def assert_equal_leaves(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def padded_in_all(graph: Graph, devices: int) -> Graph:
    """The graph with all its uneven loops padded."""
    rules = populate(graph.jaxpr)
    loops = loops_to_pad(graph, rules, devices)[-1]
    made = pad.padded_graph(graph, rules, {k: n for loop in loops for k, n in loop.dims.items()})
    graphs.check(made)
    return made


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs are padded too."""
    monkeypatch.setattr(uneven, "LEAST_BYTES", 0)


@pytest.fixture(params=[0.0, np.nan], ids=["zeros", "nan"])
def beyond(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is zero, or what would be seen wherever it reached."""
    monkeypatch.setattr(pad, "BEYOND", request.param)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loop that has parameters is padded."""
    monkeypatch.setattr(uneven, "MOST_WASTE", (3, 1))
    monkeypatch.setattr(uneven, "LEAST_SHARE", 0.0)


def test_sizes() -> None:
    sizes = [50257, 12, 768, 5, 1, 50304]
    assert [padded_size(n, 8) for n in sizes] == [50264, 16, None, None, None, None]


def test_a_vocabulary_and_heads_are_padded() -> None:
    graph = trace(gpt_step, gpt_arguments())
    found = loops_to_pad(graph, populate(graph.jaxpr), 8)
    sizes = [[(loop.size, loop.padded) for loop in loops] for loops in found]
    assert sizes == [[(257, 264)], [(257, 264), (25, 32), (12, 16)]]
    shapes = {v.aval.shape for v, _ in found[-1][0].dims}
    assert {(VOCABULARY, WIDTH), (6, LENGTH, VOCABULARY)} <= shapes


def test_small_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uneven, "LEAST_BYTES", 2**20)
    graph = trace(gpt_step, gpt_arguments())
    assert loops_to_pad(graph, populate(graph.jaxpr), 8) == ()


@pytest.mark.usefixtures("beyond")
def test_padding_reaches_no_number() -> None:
    arguments = gpt_arguments()
    graph = trace(gpt_step, arguments)
    made = padded_in_all(graph, 8)
    assert (6, LENGTH, 264) in {v.aval.shape for eqn in made.jaxpr.eqns for v in eqn.outvars}
    assert_equal_leaves(run(made, arguments), run(graph, arguments))


@pytest.mark.usefixtures("beyond", "eager")
@pytest.mark.parametrize("name", ["scan_layers", "moe_sort"])
def test_padding_changes_no_program(name: str) -> None:
    program = PROGRAMS[name]
    if reason := program.missing():
        pytest.skip(reason)
    case = program.build()
    arguments = case.arguments(case.state, case.batch)
    graph = trace(case.step, arguments)
    assert_equal_leaves(run(padded_in_all(graph, 7), arguments), run(graph, arguments))


FILL, CLIP = lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.CLIP
PROMISED = lax.GatherScatterMode.PROMISE_IN_BOUNDS  # XLA clips gathers and drops scatters
INDICES = np.array([0, 4, -1, 5, 7, 63], np.int32)  # of five rows: some are out of bounds


def looked_up(mode: Any) -> Callable[..., Any]:
    return lambda w, x: w.at[INDICES].get(mode=mode) @ x


def added(mode: Any) -> Callable[..., Any]:
    return lambda w, x: (w @ x).at[INDICES].add(jnp.ones((6, 3)), mode=mode)


def small_indices(w: Any, x: Any) -> Any:
    return jnp.where((w @ x) > 0, w @ x, 0)[INDICES.astype(np.int8)]


CASES: dict[str, Callable[..., Any]] = {
    "gather that fills": looked_up(FILL),
    "gather that clips": looked_up(CLIP),
    "gather that is promised": looked_up(PROMISED),
    "scatter that is promised": added(PROMISED),
    "value of what is set": lambda w, x: jax.value_and_grad(
        lambda w: jnp.sum(w.at[jnp.array([0, 7])].set(2.0, mode="clip") ** 3)
    )(w),
    "scatter that drops": added(FILL),
    "scatter that clips": added(CLIP),
    "small indices": small_indices,
    "sum": lambda w, x: (w @ x).sum(0),
    "maximum": lambda w, x: (w @ x).max(0),
    "minimum": lambda w, x: (w @ x).min(0),
    "product": lambda w, x: (w @ x).prod(0),
    "whether all": lambda w, x: ((w @ x) > -9).all(0),
    "whether any": lambda w, x: ((w @ x) > 9).any(0),
    "argmax": lambda w, x: (w @ x).argmax(0),
    "softmax of huge numbers": lambda w, x: jax.nn.softmax(2.0**100 * (w @ x), axis=0),
    "reciprocal": lambda w, x: x @ (1 / (w @ x)).T[:, :2] @ jnp.ones((2, 3)) + (1 / (w @ x)).sum(0),
    "integers": lambda w, x: jnp.round(w @ x).astype(jnp.int32).max(0),
    "sorted": lambda w, x: jnp.sort(w @ x, axis=0),
    "running sums": lambda w, x: jnp.cumsum((w @ x)[::-1], axis=0),
    "joined": lambda w, x: jnp.concatenate([w @ x, w @ x])[3:9],
    "merged": lambda w, x: (w @ x).reshape(15) @ jnp.ones(15),
    "loop": lambda w, x: lax.scan(lambda c, r: (c + w @ r, c.sum()), jnp.zeros(5), x.T),
    "loop until": lambda w, x: lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c + 5, w @ x),
    "branches": lambda w, x: lax.switch(jnp.int32(x.sum()), [jnp.sin, jnp.cos, jnp.tan], w @ x),
    "jacobian": lambda w, x: jax.jacrev(lambda w: jax.nn.softmax(w @ x[0]))(w),
    "dropout": lambda w, x: jax.random.bernoulli(jax.random.key(0), 0.5, (5, 3)) * (w @ x),
}  # fmt: skip


@pytest.mark.usefixtures("beyond", "eager")
@pytest.mark.parametrize("name", CASES)
def test_equations(name: str) -> None:
    """A weight of five rows, on four devices."""
    random = np.random.default_rng(1)
    arguments = random.normal(size=(5, 3)).astype(np.float32), random.normal(size=(3, 3))
    graph = trace(CASES[name], arguments)
    made = padded_in_all(graph, 4)
    if name == "dropout":  # its bits are those of the true shape
        assert str(graph.jaxpr).count("random_bits") == str(made.jaxpr).count("random_bits")
    for found, wanted in zip(run(made, arguments), run(graph, arguments), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


COMPUTING = Cluster.from_dict(
    {
        "name": "slow devices, quick links",
        "num_nodes": 1,
        "devices_per_node": 8,
        "device": {
            "name": "slow",
            "memory_bytes": 2**30,
            "memory_bandwidth": 1e12,
            "peak_flops": {"float32": 1e9},
            "max_efficiency": 1.0,
            "kernel_seconds": 0.0,
        },
        "intra_node": {"bandwidth": 1e12, "latency": 0.0},
        "inter_node": {"bandwidth": 1e12, "latency": 0.0},
        "collective_seconds": 0.0,
        "source": "by hand: every cut pays",
    }
)


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 1, "logical_mesh": (8,)},
        {"microbatches": 3},
        {"stages": 2, "microbatches": 2, "schedule": "1f1b"},
    ],
    ids=["one mesh", "microbatches", "stages"],
)
def test_a_vocabulary_is_cut_unevenly(options: Any, tmp_path: Path) -> None:
    state, tokens = gpt_arguments()
    step = autopar.compile(gpt_step, state, tokens, cluster=COMPUTING, donate_argnums=(), **options)
    plan = step.plan
    assert VOCABULARY in dict(plan.padding)
    wanted = jax.jit(gpt_step)(state, tokens)
    found = step(state, tokens)
    assert_equal_leaves(found, wanted)
    assert found[0][0]["embedding"].shape == (VOCABULARY, WIDTH)
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan
    again = autopar.compile(
        gpt_step, state, tokens, cluster=COMPUTING, donate_argnums=(), plan=plan, **options
    )
    assert_equal_leaves(again(state, tokens), wanted)


def test_heads_are_cut_unevenly() -> None:
    """Seven heads: no even cut of them, and three examples leave little else to cut."""
    state, tokens = gpt_arguments(heads=7)
    tokens = tokens[:3]
    graph = trace(gpt_step, (state, tokens))
    assert [loop.size for loop in loops_to_pad(graph, populate(graph.jaxpr), 8)[-1]] == [257, 25, 7]
    step = autopar.compile(gpt_step, state, tokens, cluster=COMPUTING, microbatches=1)
    assert dict(step.plan.padding).get(7) == 8
    wanted = jax.jit(gpt_step)(state, tokens)
    assert_equal_leaves(step(state, tokens), wanted)


@pytest.mark.parametrize("method", ["zero2", "zero3"])
def test_leaves_that_do_not_divide_in_data_parallelism(method: str) -> None:
    state, _ = gpt_arguments(heads=7)
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, (16, LENGTH + 1))
    wanted = jax.jit(gpt_step)(state, tokens)
    step = autopar.compile(gpt_step, state, tokens, method=method, microbatches=2)
    assert step.plan.padding == ()
    assert_equal_leaves(step(state, tokens), wanted)
