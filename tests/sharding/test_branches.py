"""What a step takes that branches: as long as its longest branch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Plan


def plan_of(branches: int, heavy: int) -> Plan:
    """A layer of so many branches of so many products each, the last one of none."""

    def train_step(w: Any, kind: Any, x: Any) -> Any:
        def branch(number: int) -> Any:
            def body(h: Any) -> Any:
                for _ in range(heavy if number < branches - 1 else 0):
                    h = jnp.tanh(h @ w)
                return h * (number + 2)

            return body

        return w, jax.lax.switch(kind, [branch(n) for n in range(branches)], x)

    shapes = ((1024, 1024), jnp.float32), ((), jnp.int32), ((8192, 1024), jnp.float32)
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    more: dict[str, Any] = {"method": "data", "batch_argnums": 2, "microbatches": 1}
    return autopar.plan(train_step, *given, cluster="1x8 h100", **more)


def sorts(h: jax.Array) -> jax.Array:
    for turn in range(8):
        h = jnp.sort(h, axis=1) * (turn + 1)
    return h


def test_a_branch_without_operations_may_be_the_longest() -> None:
    """Sorts do no floating-point operations, and take longer than a product."""

    def step(w: Any, kind: Any, x: Any) -> Any:
        return w, jax.lax.cond(kind > 0, sorts, lambda h: h @ w, x)

    def alone(w: Any, kind: Any, x: Any) -> Any:
        return w, sorts(x)

    shapes = ((1024, 1024), jnp.float32), ((), jnp.int32), ((8192, 1024), jnp.float32)
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    more: dict[str, Any] = {"method": "data", "batch_argnums": 2, "microbatches": 1}
    found, least = (
        autopar.plan(each, *given, cluster="1x8 h100", **more).estimates.step_seconds
        for each in (step, alone)
    )
    assert found == pytest.approx(least, rel=0.1)


def test_a_step_takes_as_long_as_its_longest_branch() -> None:
    few, many = plan_of(2, 2), plan_of(6, 2)
    assert few.estimates.compute_seconds > 0
    assert many.estimates.step_seconds == pytest.approx(few.estimates.step_seconds, rel=0.1)
    assert many.estimates.flops == few.estimates.flops
    longer = plan_of(2, 4)
    assert longer.estimates.flops == pytest.approx(2 * few.estimates.flops, rel=0.01)
    assert longer.estimates.step_seconds > 1.5 * few.estimates.step_seconds


SIDE = 1024
SQUARE = 4 * SIDE**2


def newton(x: jax.Array) -> jax.Array:
    x = x / (jnp.linalg.norm(x) + 1e-6)
    for _ in range(2):
        y = x @ x
        x = 1.5 * x - 0.5 * y @ x
    return x


def refresh(state: Any, g: Any) -> Any:
    """What a branch makes of one leaf takes the place of another one, which the other returns."""
    whole, root, count = state
    whole = 0.9 * whole + g @ g.T
    root = jax.lax.cond(count % 20 == 0, lambda x, _: newton(x), lambda _, r: r, whole, root)
    return whole, root, count + 1


def made_of_a_temporary(state: Any, g: Any) -> Any:
    """What a branch is given is there to its end, though it is read at the beginning alone."""
    whole, root, count = state
    made = jax.lax.cond(count % 20 == 0, newton, jnp.zeros_like, g @ g.T)
    return whole + made @ made, root, count + 1


def given_back(state: Any, g: Any) -> Any:
    """What a branch returns as it was given is copied."""
    whole, root, count = state
    made = jax.lax.cond(count % 20 != 0, newton, lambda x: x, g @ g.T)
    return whole + made @ made, root, count + 1


def without_branches(state: Any, g: Any) -> Any:
    whole, root, count = state
    whole = 0.9 * whole + g @ g.T
    return whole, 0.5 * root + newton(whole), count + 1


@pytest.mark.parametrize(
    ("step", "beside"),
    [(refresh, 3), (made_of_a_temporary, 4), (given_back, 4), (without_branches, 3)],
)
def test_results_of_a_branch_are_made_in_it(step: Any, beside: int) -> None:
    """XLA for H100s (jaxlib 0.10.2) needs as many arrays beside the three that are given."""
    array = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    state = array, array, jax.ShapeDtypeStruct((), jnp.int32)
    plan = autopar.plan(step, state, array, cluster="1x1 h100")
    assert plan.estimates.peak_bytes_per_device == pytest.approx((3 + beside) * SQUARE, rel=0.01)


def test_what_is_copied_at_the_end_of_a_branch_is_counted() -> None:
    """One branch does nothing else. XLA for H100s (jaxlib 0.10.2) swaps these with one less."""

    def step(state: Any, g: Any) -> Any:
        whole, root, count = state
        pair = g @ g.T, g.T @ g
        one, other = jax.lax.cond(count > 0, lambda x, y: (y, x), lambda x, y: (x @ y, y), *pair)
        return whole + one @ other, root, count + 1

    array = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    state = array, array, jax.ShapeDtypeStruct((), jnp.int32)
    plan = autopar.plan(step, state, array, cluster="1x1 h100")
    assert plan.estimates.peak_bytes_per_device == pytest.approx(7 * SQUARE, rel=0.01)


def test_each_of_several_results_that_are_one_value_is_there() -> None:
    def step_of(distinct: bool) -> Any:
        def step(state: Any, g: Any) -> Any:
            whole, count = state
            x = g @ g.T

            def work(x: Any) -> Any:
                return tuple(x @ (x * n if distinct else x) for n in range(4))

            made = jax.lax.cond(count > 0, work, lambda x: (x,) * 4, x)
            return whole + made[0] @ made[1] + made[2] @ made[3], count + 1

        return step

    array = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    state = array, jax.ShapeDtypeStruct((), jnp.int32)
    one, several = (
        autopar.plan(step_of(distinct), state, array, cluster="1x1 h100")
        for distinct in (False, True)
    )
    peaks = [plan.estimates.peak_bytes_per_device for plan in (one, several)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def test_branches_return_numbers_as_they_are_written() -> None:
    """Loops of at most so many steps, which say that they are done (`True`, `0`, `1.5`)."""

    def step(w: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            def body(carry: Any, _: Any) -> Any:
                def run(carry: Any) -> Any:
                    _, _, _, h = carry
                    return True, 3, 1.5, jnp.tanh(h @ w)

                return jax.lax.cond(carry[0], lambda carry: carry, run, carry), None

            start = jnp.zeros((), bool), jnp.zeros((), jnp.int32), jnp.float32(0), x
            (done, count, rate, h), _ = jax.lax.scan(body, start, None, length=3)
            return rate * jnp.mean(jnp.square(h)), (done, count)

        (loss, told), gradient = jax.value_and_grad(loss_fn, has_aux=True)(w)
        return w - 0.1 * gradient, loss, told

    args = 0.5 * jnp.eye(8), jnp.ones((16, 8))
    wanted = jax.jit(step)(*args)
    found = autopar.compile(step, *args, method="data", donate_argnums=())(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_gradients_of_branches_are_added_up_once_a_step() -> None:
    """Layers of two kinds in turn, as a scan: what a branch makes of a microbatch is a part."""

    def train_step(params: Any, x: Any) -> Any:
        def layer(h: Any, given: Any) -> Any:
            (w, v), number = given
            kinds = (lambda h: h + jnp.tanh(h @ w), lambda h: h * jnp.tanh(h @ v), lambda h: h)
            return jax.lax.switch(number % 3, kinds, h), None

        def loss_fn(params: Any) -> Any:
            return jnp.mean(jax.lax.scan(layer, x, (params, jnp.arange(6)))[0] ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(6, 64, 64)), "float32") / 8 for _ in range(2)]
    x = jnp.asarray(rng.normal(size=(32, 64)), "float32")
    step = autopar.compile(
        train_step, params, x, method="data", microbatches=4, logical_mesh=(8,), donate_argnums=()
    )
    found, expected = step(params, x), jax.jit(train_step)(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
    (stage,) = step.plan.stages
    assert {c.kind for c in stage.collectives} >= {"all-reduce"}
    assert {c.times for c in stage.collectives} == {1}
