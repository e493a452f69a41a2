"""Backward scans in two parts: what other stages wait for, and weight gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stages.stage_programs import MICROBATCHES, assert_equal_to_whole, microbatched_step

from autopar.passes.graph import jax_compat
from autopar.passes.primitives.populate import populate
from autopar.passes.slicing.anatomy import dissect
from autopar.passes.slicing.backward_scans import split_backward_scans
from autopar.passes.slicing.slice_stages import slice_stages
from autopar.passes.slicing.stage_graphs import Stages

WIDTH, DEPTH, ROWS = 8, 4, 16


def parameters() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    w, shared, enter = rng.normal(size=(3, DEPTH, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
    return {"w": jnp.asarray(w), "shared": jnp.asarray(shared[0]), "enter": jnp.asarray(enter[0])}


def batch() -> Any:
    x, y = np.random.default_rng(1).normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(y)


def own_weights(params: Any, x: jax.Array) -> jax.Array:
    """Each layer has a matrix, which comes as a slice."""
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["w"])[0]


def checkpointed(params: Any, x: jax.Array) -> jax.Array:
    layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
    return jax.lax.scan(layer, x, params["w"])[0]


def with_shared(params: Any, x: jax.Array) -> jax.Array:
    """All layers have one more matrix in common, whose gradient is a sum over the layers."""

    def layer(x: jax.Array, w: jax.Array) -> Any:
        return x + jnp.tanh(x @ w) @ params["shared"], None

    return jax.lax.scan(layer, x, params["w"])[0]


def recurrent(params: Any, x: jax.Array) -> jax.Array:
    """A recurrence over time: the same matrix in every iteration."""
    steps = jnp.stack([x] * DEPTH)

    def cell(h: jax.Array, x: jax.Array) -> Any:
        return jnp.tanh(h @ params["shared"] + x), None

    return jax.lax.scan(cell, jnp.zeros_like(x), steps)[0] + own_weights(params, x)


def memory_read(params: Any, x: jax.Array) -> jax.Array:
    """Every layer reads what is made before all of them, and waits for its gradient."""
    memory = jnp.sin(x @ params["shared"])

    def layer(x: jax.Array, w: jax.Array) -> Any:
        return x + jnp.tanh(x @ w) * memory, None

    return jax.lax.scan(layer, x, params["w"])[0]


def backwards(params: Any, x: jax.Array) -> jax.Array:
    layer = lambda x, w: (x + jnp.tanh(x @ w), x)  # noqa: E731
    x, seen = jax.lax.scan(layer, x, params["w"], reverse=True)
    return x + jnp.sum(seen * jnp.arange(DEPTH, dtype=x.dtype)[:, None, None], axis=0)


def step_of(predict: Any) -> Any:
    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((predict(params, x @ params["enter"]) - y) ** 2)

    def step(params: Any, data: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, *data)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def scans(stages: Stages, task: str) -> list[list[Any]]:
    """For every stage, the scans of a task."""
    found = []
    for stage in stages.graphs:
        assert stage.loop is not None
        pairs = zip(stage.loop.body.eqns, stage.tasks, strict=True)
        found.append([e for e, t in pairs if t == task and e.primitive.name == "scan"])
    return found


def dots(eqn: Any) -> int:
    return sum(e.primitive.name == "dot_general" for e in eqn.params["jaxpr"].jaxpr.eqns)


PREDICTIONS = (own_weights, checkpointed, with_shared, recurrent, memory_read, backwards)


@pytest.mark.parametrize("predict", PREDICTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_stages_compute_the_same_numbers(predict: Any, number: int) -> None:
    whole = microbatched_step(step_of(predict), (parameters(), batch()))
    stages = slice_stages(whole.step, whole.rules, number, split_backward=True)
    assert_equal_to_whole(whole, stages)
    assert any(scans(stages, "W"))


@pytest.mark.parametrize("predict", PREDICTIONS, ids=lambda f: f.__name__)
def test_split_programs_compute_the_same_numbers(predict: Any) -> None:
    whole = microbatched_step(step_of(predict), (parameters(), batch()))
    graph = split_backward_scans(dissect(whole.step)).graph
    arguments = jax.tree.leaves((parameters(), batch()))
    arguments += whole.graph.constants

    def run(jaxpr: Any) -> Any:
        return jax.jit(lambda *args: jax.core.eval_jaxpr(jaxpr, [], *args))(*arguments)

    for new, old in zip(run(graph.jaxpr), run(whole.graph.jaxpr), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


def test_matrix_products_are_shared_out_and_none_is_done_twice() -> None:
    whole = microbatched_step(step_of(own_weights), (parameters(), batch()))
    stages = slice_stages(whole.step, whole.rules, 2, split_backward=True)
    for awaited, late in zip(scans(stages, "B"), scans(stages, "W"), strict=True):
        assert [dots(eqn) for eqn in awaited] == [1]  # the gradient of the layer's input
        assert [dots(eqn) for eqn in late] == [1]  # that of its matrix
        (kept,) = [v.aval.shape for v in awaited[0].outvars[1:]]  # of each layer, nothing else
        assert kept == (DEPTH // 2, ROWS // MICROBATCHES, WIDTH)


def test_a_sum_over_the_layers_waits_unless_it_is_asked_for() -> None:
    whole = microbatched_step(step_of(with_shared), (parameters(), batch()))
    (late,) = scans(slice_stages(whole.step, whole.rules, 1, split_backward=True), "W")
    _, num_carry = jax_compat.scan_counts(late[-1].params)
    assert num_carry == 1  # the shared matrix's gradient
    whole = microbatched_step(step_of(memory_read), (parameters(), batch()))
    (awaited,) = scans(slice_stages(whole.step, whole.rules, 1, split_backward=True), "B")
    _, num_carry = jax_compat.scan_counts(awaited[-1].params)
    assert num_carry == 2  # the activation's and the memory's


def test_what_has_no_weight_gradients_stays_whole() -> None:
    def smooth(params: Any, x: jax.Array) -> jax.Array:
        del params
        return jax.lax.scan(lambda x, _: (jnp.sin(x) + x, None), x, None, length=3)[0]

    whole = microbatched_step(step_of(smooth), (parameters(), batch()))
    parts = dissect(whole.step)
    assert split_backward_scans(parts) is parts.step


def test_rules_are_found_for_both_parts() -> None:
    whole = microbatched_step(step_of(own_weights), (parameters(), batch()))
    step = split_backward_scans(dissect(whole.step))
    rules = populate(step.graph.jaxpr)
    body = dissect(step).body
    found = [eqn for eqn in body.eqns if eqn.primitive.name == "scan"]
    assert len(found) == 3  # forward, and the two parts of the backward pass
    inner = [eqn for scan in found for eqn in scan.params["jaxpr"].jaxpr.eqns]
    assert len(set(map(id, inner))) == len(inner)
    assert all(eqn in rules for eqn in inner)
