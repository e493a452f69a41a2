"""A `cond` of little work is a choice between two results; another one stays."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.passes.graph.graph import walk
from autopar.passes.trace.trace import trace

DEPTH, WIDTH = 6, 16


def loss_of(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def stepping(tx: Any) -> Callable[..., Any]:
    """A step of an optimizer of Optax's."""

    def step(state: Any, x: Any) -> Any:
        weights, inner = state
        loss, gradient = jax.value_and_grad(loss_of)(weights, x)
        updates, inner = tx.update(gradient, inner, weights)
        return (optax.apply_updates(weights, updates), inner), loss

    return step


def start(tx: Any) -> Any:
    keys = jax.random.split(jax.random.key(0), DEPTH)
    weights = [0.3 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]
    return weights, tx.init(weights)


def batches() -> list[Any]:
    """Four; the third one has no number in it."""
    found = np.random.default_rng(0).normal(size=(4, 32, WIDTH)).astype(np.float32)
    found[2, 3, 4] = np.nan
    return list(found)


def conditionals(fn: Callable[..., Any], *args: Any) -> int:
    graph = trace(fn, args, batch_argnums=()).graph
    return [eqn.primitive.name for eqn in walk(graph.jaxpr)].count("cond")


ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
SKIPPING = {
    "apply_if_finite": optax.apply_if_finite(ADAM, 5),
    "MultiSteps": optax.MultiSteps(
        ADAM, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "every second": optax.transforms.conditionally_transform(ADAM, lambda count: count % 2 == 0),
}


@pytest.mark.parametrize(
    "options", [{}, {"stages": 2, "microbatches": 4, "method": "zero2"}], ids=str
)
@pytest.mark.parametrize("name", SKIPPING)
def test_optimizers_that_skip_steps(name: str, options: dict[str, Any]) -> None:
    """Each leaf of their state lies with its parameter; a step without numbers leaves no trace."""
    tx = SKIPPING[name]
    step = stepping(tx)
    assert conditionals(step, start(tx), batches()[0]) == 0
    run = autopar.parallelize(step, donate_argnums=(), batch_argnums=1, **options)
    plain, state, expected = jax.jit(step), start(tx), start(tx)
    for x in batches():
        state, loss = run(state, x)
        expected, expected_loss = plain(expected, x)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    found = run.gather(state)
    for one, two in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=1e-5)


def test_stages_have_the_state_of_their_own_layers() -> None:
    tx = SKIPPING["apply_if_finite"]
    shapes = jax.eval_shape(lambda: (start(tx), batches()[0]))
    plan = autopar.plan(stepping(tx), *shapes, cluster="1x2 h100", stages=2, microbatches=2)
    first, second = (stage.peak_bytes_per_device for stage in plan.stages)
    assert max(first, second) < 1.5 * min(first, second)


X = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64)


@pytest.mark.parametrize(
    "branch",
    [
        lambda x: x @ x,  # all of the step's FLOPs
        lambda x: jnp.sort(x),
        lambda x: x + jnp.sum((x[:, None] - x[None]) ** 2, axis=2),  # larger than all that is there
        lambda x: jnp.linalg.cholesky(x),
        lambda x: x.at[0].set(1.0),  # in place, where it is chosen
        lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 0, lambda x: x + 1, x),
        lambda x: jax.pure_callback(lambda x: x, x, x),
        lambda x: functools.reduce(lambda x, _: jnp.sin(x), range(40), x),
        lambda x: jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=40)[0],
        lambda x: x + sum(jax.random.normal(jax.random.key(i), x.shape) for i in range(5)),
        lambda x: x + jax.random.gamma(jax.random.key(0), 2.0, x.shape),
    ],
    ids=[
        "product",
        "sort",
        "large",
        "function",
        "in_place",
        "loop",
        "callback",
        "passes",
        "trips",
        "random",
        "gamma",
    ],
)
def test_work_is_done_where_it_is_chosen(branch: Callable[[Any], Any]) -> None:
    assert conditionals(lambda x, n: jax.lax.cond(n > 0, branch, lambda x: x, x), X, 1) == 1


def test_what_is_compiled_for_one_platform_is_left() -> None:
    def step(x: Any) -> Any:
        return jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    assert conditionals(step, X) == 1


def test_products_of_an_optimizer_that_are_little_beside_the_step() -> None:
    """As those of Muon: at most a fiftieth of its FLOPs."""

    def step(w: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        finite = jnp.all(jnp.isfinite(gradient))
        return jax.lax.cond(finite, lambda: w - gradient @ gradient.T @ w, lambda: w)

    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    few, many = (jax.ShapeDtypeStruct((rows, 64), jnp.float32) for rows in (640, 6400))
    assert [conditionals(step, w, x) for x in (few, many)] == [1, 0]


def test_the_result_is_that_of_the_chosen_branch_alone() -> None:
    """Also of keys, whole numbers and branches that pass on what they are given."""

    def step(state: Any, chosen: Any) -> Any:
        x, n, key = state
        return jax.lax.cond(
            chosen,
            lambda: (jnp.log(x), n // 0 + n, jax.random.split(key)[0]),
            lambda: (x, n, key),
        )

    state = (jnp.asarray(X), jnp.int32(3), jax.random.key(1))
    assert conditionals(step, state, True) == 0
    for chosen in (True, False):
        found = autopar.parallelize(step, donate_argnums=(), batch_argnums=())(state, chosen)
        expected = jax.jit(step)(state, chosen)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
        assert found[1] == expected[1]
        keys, expected_keys = (jax.random.key_data(x[2]) for x in (found, expected))
        np.testing.assert_array_equal(keys, expected_keys)
