"""Arrays of the state that lie in the memory of the hosts between steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from odd_steps import STEPS
from sharding.steps import graph_of

import autopar
from autopar.base.options import Options
from autopar.errors import DeviceError, MemoryLimitError, OptionError
from autopar.passes.graph.microbatched import in_phases
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_shardings import MeshSearch
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding import leaf_by_leaf
from autopar.passes.sharding.folded_hosts import FoldedHosts
from autopar.passes.sharding.integer_program import to_problem
from autopar.passes.sharding.memory_rows import memory_rows
from autopar.passes.sharding.spmd_program import Relayout, host_bytes
from autopar.passes.solver import solve
from autopar.report import plot_plan
from autopar.runtime import stage_programs

LAYERS, WIDTH, ROWS = 2, 32, 16
OPTIMIZER = optax.adamw(1e-2, eps=1e-2)
CLUSTER = autopar.Cluster.preset("dgx-h100")


def train_step(state: Any, x: jax.Array) -> Any:
    params, moments = state

    def loss_fn(params: Any) -> jax.Array:
        y = x
        for w in params:
            y = y + jnp.tanh(y @ w)
        return jnp.mean(y**2)

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def arguments() -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH for key in keys[:-1]]
    return (params, OPTIMIZER.init(params)), jax.random.normal(keys[-1], (ROWS, WIDTH))


def kinds(tree: Any) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def same(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6)


@pytest.fixture(scope="module")
def expected() -> tuple[Any, Any]:
    state, x = arguments()
    for _ in range(2):
        state, loss = jax.jit(train_step)(state, x)
    return state, loss


@pytest.fixture(scope="module")
def step() -> Any:
    options: dict[str, Any] = {"method": "zero2", "offload": "optimizer", "microbatches": 2}
    return autopar.compile(train_step, *arguments(), **options)


def test_moments_live_in_the_hosts_memory(step: Any, expected: Any) -> None:
    state, x = arguments()
    state, _ = step(state, x)
    before = state
    assert kinds(state[0]) == {"device"} and kinds(state[1]) == {"pinned_host"}
    state, loss = step(state, x)
    same((state, loss), expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert kinds(state[1]) == {"pinned_host"}
    found = step.plan.host
    assert found.arrays == 2 * LAYERS and found.bytes_per_node == 2 * LAYERS * WIDTH * WIDTH * 4
    assert found.moved_bytes == 2 * found.bytes_per_node // 8
    assert step.plan.estimates.state_bytes_per_device <= LAYERS * WIDTH * WIDTH * 4 + 4
    shown = str(step.plan)
    assert "in hosts" in shown and "KiB host" in shown
    assert "[x, -] host" in str(step.plan.explain("mu"))
    tiles = plot_plan(step.plan).axes[0]
    assert any(text.get_text().endswith("of them, host") for text in tiles.texts)


def test_a_state_is_born_saved_and_restored_there(step: Any, tmp_path: Path) -> None:
    state = step.initialize(lambda: arguments()[0])
    assert kinds(state[1]) == {"pinned_host"}
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(state, step=1).state
    assert kinds(restored[1]) == {"pinned_host"}
    same(restored, state)
    x = arguments()[1]
    same(step(restored, x), jax.jit(train_step)(*arguments()))


def test_a_saved_plan_is_followed(step: Any, tmp_path: Path, expected: Any) -> None:
    step.plan.save(tmp_path / "plan.json")
    plan = autopar.Plan.load(tmp_path / "plan.json")
    assert plan == step.plan
    again = autopar.compile(
        train_step, *arguments(), plan=plan, method="zero2", offload="optimizer", microbatches=2
    )
    state, x = arguments()
    for _ in range(2):
        state, loss = again(state, x)
    same((state, loss), expected)
    moved = dataclasses.replace(plan.inputs[0], memory="host")
    with pytest.raises(autopar.errors.PlanMismatchError, match="says two things"):
        autopar.compile(
            train_step,
            *arguments(),
            plan=dataclasses.replace(plan, inputs=(moved, *plan.inputs[1:])),
            method="zero2",
            offload="optimizer",
            microbatches=2,
        )


def test_parameters_and_a_pipeline(expected: Any) -> None:
    state, x = arguments()
    step = autopar.compile(
        train_step, state, x, method="data", offload="*", microbatches=4, stages=2
    )
    for _ in range(2):
        state, loss = step(state, x)
    same((state, loss), expected)
    assert kinds(state) == {"pinned_host"}
    follow = autopar.follow(step, lambda params, x: x @ params[0] @ params[-1])
    same(follow(state[0], x), x @ expected[0][0][0] @ expected[0][0][-1])


@pytest.mark.parametrize("away", [True, False])
@pytest.mark.parametrize("mesh", [(4,), (8,)])
def test_a_state_goes_to_other_devices_and_another_memory(
    mesh: tuple[int, ...], away: bool, expected: Any
) -> None:
    """From 8 devices or 4 to two stages of 4, with the optimizer's state away, or back."""
    state, x = arguments()
    offloads = ("optimizer", "none") if away else ("none", "optimizer")
    one: dict[str, Any] = {"method": "data", "microbatches": 2, "logical_mesh": mesh}
    first = autopar.compile(train_step, state, x, offload=offloads[0], **one)
    two: dict[str, Any] = {"method": "data", "microbatches": 4, "stages": 2}
    second = autopar.compile(train_step, state, x, offload=offloads[1], **two)
    state, _ = first(state, x)
    same(second(state, x), expected)


def tied_step(state: Any, tokens: jax.Array) -> Any:
    def loss_fn(state: Any) -> jax.Array:
        y = state["table"][tokens]
        for w in state["layers"]:
            y = y + jnp.tanh(y @ w)
        return jnp.mean(jax.nn.logsumexp(y @ state["table"].T, -1))

    loss, gradients = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss


def test_what_two_stages_read() -> None:
    """It is sent before the loops over microbatches, though it is copied again after them."""
    (layers, _), _ = arguments()
    state = {"table": layers[0] + 1, "layers": layers}
    tokens = jnp.arange(ROWS) % WIDTH
    step = autopar.compile(
        tied_step, state, tokens, method="data", offload="*", microbatches=2, stages=2
    )
    expected = jax.jit(tied_step)(state, tokens)
    same(step(state, tokens), expected)


def test_a_plain_state_of_few_bits() -> None:
    step, arguments = STEPS["int4_weights"]()
    found = autopar.compile(
        step, *arguments, batch_argnums=(1, 2), offload="*", method="data", donate_argnums=()
    )
    result = found(*arguments)
    assert {"int4", "uint4"} <= {str(x.dtype) for x in jax.tree.leaves(result)}
    assert kinds(result[0]) == {"pinned_host"}
    same(result, jax.jit(step)(*arguments))


def test_auto_rescues_what_does_not_fit() -> None:
    # The state is larger than the memory, and on eight devices nothing else is cut.
    options: dict[str, Any] = {"method": "data", "stages": 1, "cluster": CLUSTER}
    options["memory_limit"] = 7 * WIDTH * WIDTH * 4
    with pytest.raises(MemoryLimitError) as refused:
        autopar.plan(train_step, *arguments(), **options)
    assert "offload='auto'" in refused.value.would_fit
    plan = autopar.plan(train_step, *arguments(), offload="auto", **options)
    assert plan.host is not None and plan.host.seconds > 0
    assert plan.estimates.peak_bytes_per_device <= options["memory_limit"]
    there = {tensor.path for tensor in plan.inputs if tensor.memory == "host"}
    assert sum(".mu" in path or ".nu" in path for path in there) >= LAYERS
    free = autopar.plan(train_step, *arguments(), **{**options, "memory_limit": None})
    auto = autopar.plan(
        train_step, *arguments(), offload="auto", **{**options, "memory_limit": None}
    )
    assert auto.host is None and auto.estimates == free.estimates


def search(offload: str) -> MeshSearch:
    graph = graph_of(train_step, *arguments())
    split = SplitStep(in_phases(graph), populate(graph.jaxpr))
    options = Options(offload=offload, method="data")
    return MeshSearch.of(split, (8,), options, CLUSTER, None, None)


def test_where_a_leaf_lies_is_a_choice_of_its_own() -> None:
    """The folded integer program has the same optimum as that with both places as strategies."""
    found = search("auto")
    rows = memory_rows(found.built)
    free = solve(to_problem(found.built, None))
    peak = found.lowered(free, False).peak.bytes
    for share, moves in ((1.1, False), (0.8, True)):
        problem = to_problem(found.built, int(share * peak), rows)
        folded = FoldedHosts.of(problem, found.built)
        assert sum(map(len, folded.problem.node_costs)) < sum(map(len, problem.node_costs))
        whole, parts = solve(problem), folded.unfolded(solve(folded.problem))
        assert whole.cost == parts.cost
        program = found.lowered(parts, False).program
        assert (host_bytes(program) > 0) == moves


def test_only_a_few_leaves_are_on_the_devices() -> None:
    """What is updated comes leaf by leaf, and waits for what came before."""
    made = search("optimizer")
    planned = made.attempt(None, False)
    block = planned.program.block
    copies = [x for x in block.instructions if leaf_by_leaf.copies_of_hosts(x)]
    ways = [isinstance(x, Relayout) and x.target.layout.in_host for x in copies]
    assert ways == [False, True] * 2 * LAYERS
    numbers = {version.atom: number for number, version in enumerate(block.inputs)}
    order = [numbers[x.source.atom] for x in copies[::2] if isinstance(x, Relayout)]
    first, second = range(LAYERS + 1, 2 * LAYERS + 1), range(2 * LAYERS + 1, 3 * LAYERS + 1)
    assert order == [number for pair in zip(first, second, strict=True) for number in pair]
    plain = search("none").attempt(None, False)
    assert planned.peak.bytes < plain.peak.bytes - WIDTH * WIDTH * 4
    turns = leaf_by_leaf.copies_in_turn(block, (8,))
    assert (
        len(turns) == 2 * LAYERS
        and sum(bool(turn.stored) for turn in turns.values()) == 2 * LAYERS - 1
    )


def test_hosts_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(CLUSTER, host_memory_bytes=4 * WIDTH * WIDTH * 4)
    with pytest.raises(MemoryLimitError, match="The hosts of dgx-h100"):
        autopar.plan(
            train_step, *arguments(), cluster=small, offload="optimizer", method="data", stages=1
        )
    none = dataclasses.replace(CLUSTER, host_bandwidth=0.0)
    with pytest.raises(OptionError, match="host_bandwidth is 0"):
        autopar.plan(train_step, *arguments(), cluster=none, offload="optimizer")
    monkeypatch.setattr(stage_programs, "HOST_MEMORY", "another")
    with pytest.raises(DeviceError, match="cannot"):
        autopar.compile(train_step, *arguments(), offload="optimizer", method="data")


def test_a_simulation_on_slower_hosts() -> None:
    slow = dataclasses.replace(CLUSTER, host_bandwidth=CLUSTER.host_bandwidth / 100)
    options: dict[str, Any] = {"offload": "*", "method": "zero2", "stages": 1, "microbatches": 1}
    plan = autopar.plan(train_step, *arguments(), cluster=CLUSTER, **options)
    other = autopar.plan(train_step, *arguments(), cluster=slow, **options)
    assert other.estimates.step_seconds > 1.2 * plan.estimates.step_seconds
    expected = pytest.approx(other.estimates.step_seconds, rel=0.02)
    assert plan.simulate(cluster=slow).step_seconds == expected
    with pytest.raises(OptionError, match="host_bandwidth is 0"):
        plan.simulate(cluster=dataclasses.replace(CLUSTER, host_bandwidth=0.0))


@pytest.mark.parametrize(
    ("offload", "words"),
    [
        ("optimzer", "names no array of the state"),
        (["auto"], "'auto' is no path"),
        (3, "must be one of 'none', 'auto', 'optimizer'"),
        ("x", "names no array of the state"),
    ],
)
def test_what_offload_cannot_be(offload: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        autopar.plan(train_step, *arguments(), cluster=CLUSTER, offload=offload)


def layers_step(params: Any, x: jax.Array) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        y = x
        for up, down in params:
            y = y + jax.nn.gelu(y @ up) @ down
        return jnp.mean(y**2)

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def test_a_step_without_an_optimizers_state_says_so() -> None:
    params = [(jnp.zeros((8, 32)), jnp.zeros((32, 8)))]
    with pytest.warns(autopar.errors.AutoparWarning, match="puts nothing into the hosts' memory"):
        autopar.plan(layers_step, params, jnp.ones((8, 8)), cluster=CLUSTER, offload="optimizer")


def test_activations_wait_in_the_hosts_memory(tmp_path: Path) -> None:
    """Where even what is computed again does not save enough, what is kept waits there."""
    keys = jax.random.split(jax.random.key(1), 4)
    params = [(jax.random.normal(k, (8, 32)) / 8, jax.random.normal(k, (32, 8)) / 8) for k in keys]
    x = jax.random.normal(keys[0], (512, 8))
    options: dict[str, Any] = {"method": "data", "microbatches": 2, "stages": 1}
    full = autopar.plan(layers_step, params, x, remat="full", **options)
    options["memory_limit"] = full.estimates.peak_bytes_per_device - 1024
    step = autopar.compile(layers_step, params, x, offload="auto", **options)
    host, again = step.plan.host, step.plan.recomputation
    assert host is not None and host.values and again is not None and again.hosted
    assert "values of a microbatch" in str(step.plan)
    expected = jax.jit(layers_step)(params, x)
    same(step(jax.tree.map(jnp.array, params), x), expected)
    step.plan.save(tmp_path / "plan.json")
    followed = autopar.compile(
        layers_step, params, x, offload="auto", plan=tmp_path / "plan.json", **options
    )
    assert followed.plan == step.plan
    same(followed(jax.tree.map(jnp.array, params), x), expected)


def test_a_leaf_that_two_stages_read() -> None:
    def step(w: Any, x: jax.Array) -> Any:
        def loss_fn(w: Any) -> jax.Array:
            return jnp.mean(jnp.tanh(jnp.tanh(x @ w["tied"]) @ w["own"]) @ w["tied"].T) ** 2

        loss, gradients = jax.value_and_grad(loss_fn)(w)
        return jax.tree.map(lambda p, g: p - g, w, gradients), loss

    keys = jax.random.split(jax.random.key(2), 3)
    w = {
        name: jax.random.normal(key, (8, 8))
        for name, key in zip(("tied", "own"), keys, strict=False)
    }
    x = jax.random.normal(keys[2], (16, 8))
    expected = jax.jit(step)(w, x)
    same(autopar.compile(step, w, x, stages=2, microbatches=2, offload="*")(w, x), expected)
