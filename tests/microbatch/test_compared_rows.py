"""What is compared with the whole batch's maximum is what the maximum was taken of."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from microbatch.helpers import analyzed, check_split

import autopar
from autopar.passes.graph.primitives import HEAVY

ROWS, WIDTH, HIDDEN, SEGMENTS = 16, 64, 32, 4


def normal(seed: int, *shape: int) -> Any:
    values = np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[0])
    return jnp.asarray(values, "float32")


def head(params: Any, batch: Any) -> Any:
    h = batch["x"][:, :HIDDEN]
    for name in ("first", "second"):
        h = jnp.tanh(h @ params[name])
    return h @ params["head"]


def largest(h: Any, batch: Any) -> Any:
    return jnp.max(h, 0)


def largest_of_segments(h: Any, batch: Any) -> Any:
    return jnp.full((SEGMENTS, h.shape[1]), -9.0).at[batch["segment"]].max(h)


@pytest.fixture
def arguments() -> Any:
    params = {
        "first": normal(1, HIDDEN, HIDDEN),
        "second": normal(2, HIDDEN, HIDDEN),
        "head": normal(3, HIDDEN, 8),
        "wide": normal(4, WIDTH, 700),
        "last": normal(5, 700, WIDTH),
    }
    segment = np.random.default_rng(7).integers(0, SEGMENTS, ROWS, "int32")
    return params, {"x": 4 * normal(6, ROWS, WIDTH), "segment": jnp.asarray(segment)}


def step_of(reduced: Any, is_small: bool) -> Any:
    """Of a small head beside a large one, which the loop is for, or of all there is."""

    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            loss = jnp.mean(reduced(head(params, batch), batch) ** 2)
            y = jnp.tanh(batch["x"] @ params["wide"]) @ params["last"]
            return loss + jnp.mean(y**2) if is_small else loss

        return jax.value_and_grad(loss_fn)(params)

    return step


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("reduced", [largest, largest_of_segments])
@pytest.mark.parametrize("count", [2, 16])
def test_gradients_of_maxima(count: int, reduced: Any, is_small: bool, arguments: Any) -> None:
    """In microbatches of one row for each device or of few, products are rounded otherwise."""
    step = step_of(reduced, is_small)
    (loss, found) = autopar.compile(step, *arguments, microbatches=count)(*arguments)
    expected, gradients = jax.jit(step)(*arguments)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, gradient in gradients.items():
        scale = np.abs(gradient).max() + 1e-9
        assert np.abs(found[name] - gradient).max() < 1e-4 * scale, name


@pytest.mark.parametrize("reduced", [largest, largest_of_segments])
def test_one_program_computes_the_rows(reduced: Any, arguments: Any) -> None:
    """Before the loop: the loop is given them, and computes none of these products again."""
    step = step_of(reduced, is_small=True)
    check_split(step, arguments, 4, tolerance=1e-4)
    _, analysis = analyzed(step, arguments, 4)
    (part,) = analysis.parts or (analysis,)
    made = {id(x.eqn) for x in part.phases.prologue if x.eqn.primitive.name in HEAVY}
    again = [x for x in part.phases.loop if id(x.eqn) in made]
    rows = {var.aval.shape for var, _ in part.phases.sliced}
    assert made and (ROWS, 8) in rows
    assert all(var.aval.shape != (ROWS, 8) for x in again for var in x.eqn.outvars)


@pytest.mark.parametrize("reduced", [largest, largest_of_segments])
def test_the_first_loop_gives_the_rows(reduced: Any, arguments: Any) -> None:
    _, analysis = analyzed(step_of(reduced, is_small=False), arguments, 4, max_flops_share=0.0)
    assert len(analysis.parts) == 2
    kept = [var.aval.shape for var in analysis.cuts[0].kept]
    assert (ROWS, 8) in kept


@pytest.mark.parametrize("last", [lambda h: h.max(1), lambda h: jnp.maximum(h[:, 0], h[:, 1])])
def test_other_comparisons_are_no_reason(last: Any) -> None:
    """Rows that statistics of the batch scale are compared with each other, not with these."""

    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            first, *layers = params
            h = x * first
            center, spread = h.mean(0), jnp.sqrt(h.var(0) + 1e-5)
            h = (h - jax.lax.stop_gradient(center)) / jax.lax.stop_gradient(spread)
            h = h.reshape(ROWS, 4, HIDDEN)
            for w in layers:
                h = jnp.tanh(h @ w)
            return jnp.mean(last(h) ** 2)

        return jax.value_and_grad(loss_fn)(params)

    sizes = (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN)
    params = [jnp.ones(4 * HIDDEN), *(normal(n, *size) for n, size in enumerate(sizes))]
    shares = {"max_flops_share": 0.03, "max_bytes_share": 0.3}
    args = params, normal(6, ROWS, 4 * HIDDEN)
    analysis = check_split(step, args, 4, tolerance=1e-4, max_loops=1, **shares)
    assert analysis.costs.loop_share > 0.9
