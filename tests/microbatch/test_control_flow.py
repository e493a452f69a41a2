"""Scans, loops and branches of the user's own, on rows of a microbatch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from microbatch.helpers import analyzed, check_split

import autopar
from autopar.base.errors import InexactMicrobatchError
from autopar.passes.microbatch import split


def normal(seed: int, *shape: int, dtype: Any = "float32") -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("time_first", [False, True])
def test_recurrence_over_time(time_first: bool, dtype: str) -> None:
    """The carry is split along the batch; backward, gradients are summed in a scan's carry."""

    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            def cell(carry: Any, x_t: Any) -> Any:
                h, t = carry
                h = jnp.tanh(h @ params["u"] + x_t @ params["w"]) * jnp.cos(t)
                return (h, t + 0.1), h

            xs = jnp.moveaxis(x, 0, 1)
            (h, _), hs = lax.scan(cell, (jnp.zeros((x.shape[0], 5), x.dtype), 0.0), xs)
            if time_first:
                hs = jnp.flip(hs, 0)
            return jnp.mean(h**2) + jnp.mean(hs[1:] * hs[:-1])

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), loss

    with jax.enable_x64(dtype == "float64"):
        params = {"u": normal(0, 5, 5, dtype=dtype), "w": normal(1, 3, 5, dtype=dtype)}
        analysis = check_split(step, (params, normal(2, 8, 6, 3, dtype=dtype)), 4)
    assert analysis.costs.loop_share > 0.9


@pytest.mark.parametrize("checkpoint", [False, True])
def test_scan_over_layers(checkpoint: bool) -> None:
    """Stacked parameters; their gradients are sums that a backward scan stacks."""

    def step(params: Any, x: Any) -> Any:
        def layer(x: Any, inputs: Any) -> Any:
            w, key = inputs
            kept = jax.random.bernoulli(key, 0.8, x.shape)
            return x + jnp.where(kept, jnp.tanh(x @ w), 0), None

        def loss_fn(ws: Any) -> Any:
            keys = jax.random.split(jax.random.key(1), 3)
            body = jax.checkpoint(layer) if checkpoint else layer
            return jnp.mean(lax.scan(body, x, (ws, keys))[0] ** 2)

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        return params - gradients, loss

    analysis = check_split(step, (normal(0, 3, 6, 6), normal(1, 8, 6)), 4)
    assert analysis.costs.loop_share > 0.9
    largest = max(var.aval.size for s in analysis.phases.prologue for var in s.eqn.outvars)
    assert largest < 8 * 6 * 3


@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients_that_a_scan_rounds(checkpoint: bool) -> None:
    """In bfloat16, gradients of layers are rounded where they are made: each microbatch's is."""

    def step(params: Any, x: Any) -> Any:
        def layer(x: Any, inputs: Any) -> Any:
            w, scale = inputs
            h = (x.astype(jnp.float32) * scale.astype(jnp.float32)).astype(jnp.bfloat16)
            h = jnp.matmul(h, w.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
            return x + jnp.tanh(h).astype(jnp.bfloat16), None

        def loss_fn(params: Any) -> Any:
            body = jax.checkpoint(layer) if checkpoint else layer
            y, _ = lax.scan(body, x.astype(jnp.bfloat16), params)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        return gradients, loss

    scales = normal(1, 3, 6).astype(jnp.bfloat16)
    analysis = check_split(
        step, ((normal(0, 3, 6, 6), scales), normal(2, 8, 6)), 4, tolerance=2**-7
    )
    assert analysis.costs.loop_share > 0.9


def test_a_gradient_that_is_summed_over_two_scans() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            body = lambda h, _: (jnp.tanh(h @ w), None)  # noqa: E731
            h = lax.scan(body, x, None, length=3)[0]
            return jnp.mean(lax.scan(body, h * 2, None, length=2)[0])

        return jax.value_and_grad(loss_fn)(w)

    check_split(step, (normal(0, 4, 4), normal(1, 8, 4)), 4)


def test_accumulation_that_does_not_start_at_zero() -> None:
    def step(w: Any, x: Any) -> Any:
        def add(total: Any, x_t: Any) -> Any:
            return total + jnp.sum(x_t * w, axis=0), total.shape[0]

        return lax.scan(add, w + 3, jnp.moveaxis(x, 1, 0))[0]

    check_split(step, (normal(0, 4), normal(1, 8, 5, 4)), 4)


def test_monoids_in_a_carry() -> None:
    def step(w: Any, x: Any) -> Any:
        def body(carry: Any, x_t: Any) -> Any:
            high, low = carry
            return (jnp.maximum(high, (x_t * w).max()), jnp.minimum(low, x_t.min(0))), None

        start = (jnp.float32(-1e9), jnp.full((3,), 7.0))
        return lax.scan(body, start, jnp.moveaxis(x, 1, 0))[0]

    check_split(step, (np.float32(2), normal(1, 8, 5, 3)), 4)


def test_while_and_fori_loops() -> None:
    def step(w: Any, x: Any) -> Any:
        y = lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ w) + i, x)
        n, z = lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] * 0.5 + x), (0, y))
        return jnp.sum(z), n, z

    check_split(step, (normal(0, 4, 4), normal(1, 8, 4)), 4)


# What only one branch needs for the backward pass is an `empty` array in the other branches.
@pytest.mark.filterwarnings("ignore::autopar.errors.UnknownPrimitiveWarning")
def test_branches_on_what_all_examples_share() -> None:
    def step(state: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            y = lax.cond(state["n"] > 2, lambda: jnp.tanh(x @ w), lambda: jnp.zeros((8, 4)))
            z = lax.switch(state["n"] % 3, [jnp.sin, jnp.cos, lambda y: 0 * y], y)
            return jnp.mean(z), y

        (loss, y), gradient = jax.value_and_grad(loss_fn, has_aux=True)(state["w"])
        return {"w": state["w"] - gradient, "n": state["n"] + 1}, loss, y

    for n in (0, 3, 4):
        check_split(step, ({"w": normal(0, 4, 4), "n": np.int32(n)}, normal(1, 8, 4)), 4)


def test_a_branch_on_a_finished_sum_is_the_epilogues() -> None:
    def step(w: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
        is_finite = jnp.int32(jnp.all(jnp.isfinite(gradient)))
        return lax.switch(is_finite, [lambda: w, lambda: w - gradient, lambda: gradient])

    analysis = check_split(step, (normal(0, 4, 4), normal(1, 8, 4)), 4)
    assert "cond" in [step.eqn.primitive.name for step in analysis.phases.epilogue]


def test_map_over_examples() -> None:
    def step(w: Any, x: Any) -> Any:
        rows = lax.map(lambda row: jnp.tanh(row @ w), x)
        total, _ = lax.scan(lambda t, row: (t + jnp.sum(row @ w), None), jnp.float32(0.5), x)
        return (
            jax.grad(lambda w: jnp.mean(lax.map(lambda row: jnp.tanh(row @ w), x)))(w),
            rows,
            total,
        )

    check_split(step, (normal(0, 4, 4), normal(1, 8, 4)), 4)


def test_a_state_carried_from_example_to_example_is_refused() -> None:
    def step(w: Any, x: Any) -> Any:
        return lax.scan(lambda h, row: (jnp.tanh(h + row @ w), h), jnp.zeros(4), x)

    graph, analysis = analyzed(step, (normal(0, 4, 4), normal(1, 8, 4)), 4)
    with pytest.raises(InexactMicrobatchError, match="Each of its iterations depends on the one"):
        split(graph, analysis)


def test_a_loop_whose_length_depends_on_the_rows_runs_once_on_all() -> None:
    def step(w: Any, x: Any) -> Any:
        return lax.while_loop(lambda y: jnp.max(y) > 1, lambda y: y * 0.5 * jnp.tanh(w[0]), x @ w)

    args = (normal(0, 4, 4), normal(1, 8, 4))
    graph, analysis = analyzed(step, args, 4, max_loops=1)
    with pytest.raises(InexactMicrobatchError, match=r"number\s+of\s+iterations\s+depends"):
        split(graph, analysis)
    assert len(check_split(step, args, 4).parts) > 1


def test_a_loop_under_vmap_ends_row_by_row() -> None:
    def step(w: Any, x: Any) -> Any:
        def halve(row: Any) -> Any:
            start = (row @ w, 0, row)
            return lax.while_loop(
                lambda c: jnp.max(c[0]) > 0.1, lambda c: (c[0] * 0.5 * w[0], c[1] + 1, c[2]), start
            )

        y, counts, _ = jax.vmap(halve)(x)
        return jnp.sum(y), y, counts

    check_split(step, (np.abs(normal(0, 4, 4)) / 4, 3 * normal(1, 8, 4)), 4)


def test_control_flow_of_the_batch_alone() -> None:
    """Segment lengths counted by a scan over time, needed inside the loop."""

    def step(w: Any, batch: Any) -> Any:
        def count(total: Any, m: Any) -> Any:
            return total + jnp.sum(m), total

        total, _ = lax.scan(count, jnp.float32(0), batch["mask"].T)
        return jax.grad(lambda w: jnp.sum(jnp.tanh(batch["x"] @ w) ** 2) / total)(w)

    mask = (normal(2, 16, 4) > 0).astype(np.float32)
    check_split(step, (normal(0, 16, 32), {"x": normal(1, 16, 16), "mask": mask}), 4)


def test_nested_scans() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            def outer(h: Any, w_l: Any) -> Any:
                def inner(c: Any, x_t: Any) -> Any:
                    c = jnp.tanh(c @ w_l + x_t)
                    return c, c

                _, hs = lax.scan(inner, jnp.zeros((x.shape[0], 3)), h)
                return hs, None

            return jnp.mean(lax.scan(outer, jnp.moveaxis(x, 1, 0), w)[0] ** 2)

        return jax.value_and_grad(loss_fn)(w)

    check_split(step, (normal(0, 2, 3, 3), normal(1, 8, 4, 3)), 4)


def repeated(fn: Any, y: Any) -> Any:
    """Twice, by a loop whose count is no row of the batch."""
    return jax.lax.while_loop(lambda c: c[1] < 2, lambda c: (fn(c[0]), c[1] + 1), (y, 0))[0]


def centred(y: Any) -> Any:
    return y - jnp.mean(y, 0)


def while_in_scan(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda y, _: (repeated(centred, y), None), x * w, None, length=2)[0]


def two_carries_in_scan(w: Any, x: Any) -> Any:
    def inner(carry: Any, _: Any) -> Any:
        return (centred(carry[0]), carry[1] + 1.0), None

    def outer(y: Any, _: Any) -> Any:
        return jax.lax.scan(inner, (y, 0.0), None, length=2)[0][0], None

    return jax.lax.scan(outer, x * w, None, length=2)[0]


def while_in_cond(w: Any, x: Any) -> Any:
    return jax.lax.cond(w.sum() > 0, lambda x: repeated(centred, x), lambda x: x, x * w)


def while_in_while(w: Any, x: Any) -> Any:
    return repeated(lambda y: repeated(centred, y), x * w)


@pytest.mark.filterwarnings("ignore:One trip is counted:autopar.errors.AutoparWarning")
@pytest.mark.parametrize(
    ("mixes", "is_divided"),
    [
        (while_in_scan, False),
        (two_carries_in_scan, False),
        (while_in_cond, True),  # on the whole batch, before what divides
        (while_in_while, True),
    ],
)
def test_rows_that_meet_in_one_of_several_carries_of_a_nested_loop(
    mixes: Any, is_divided: bool
) -> None:
    """The count beside them is known in every microbatch, and they are not: no body is divided."""

    def step(w: Any, x: Any) -> Any:
        y = mixes(w, x)
        return w + 0.1 * jnp.sum(y**2, 0), jnp.sum(y)

    w, x = np.ones(16, np.float32), np.asarray(jax.random.normal(jax.random.key(0), (64, 16)))
    options: dict[str, Any] = {"batch_argnums": (1,), "stages": 1, "donate_argnums": ()}
    if not is_divided:
        with pytest.raises(InexactMicrobatchError, match="rows of the batch with a value"):
            autopar.compile(step, w, x, microbatches=2, **options)
    for count in (1, 2) if is_divided else (1,):
        run = autopar.compile(step, w, x, microbatches=count, **options)
        for one, other in zip(run.gather(run(w, x)), jax.jit(step)(w, x), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)
