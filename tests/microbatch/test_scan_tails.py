"""What scans make of sums over the batch, without waiting for it, is made after them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from microbatch.helpers import analyzed, check_split

from autopar.base.errors import InexactMicrobatchError


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype("float64")


@jax.custom_vjp
def scaled(x: Any, history: Any) -> Any:
    return x * history.max()


def _scaled_backward(kept: Any, gradient: Any) -> Any:
    history, top = kept
    return gradient * history.max(), jnp.roll(history, -1).at[0].set(jnp.sqrt(top))


scaled.defvjp(lambda x, h: (scaled(x, h), (h, jnp.abs(x).max())), _scaled_backward)


@jax.custom_vjp
def seen_backward(x: Any, history: Any) -> Any:
    return x


def _seen(history: Any, gradient: Any) -> Any:
    return gradient, jnp.roll(history, -1).at[0].set(jnp.log1p(jnp.abs(gradient).max()))


seen_backward.defvjp(lambda x, history: (x, history), _seen)


@jax.custom_vjp
def clipped_gradient(w: Any) -> Any:
    return w


clipped_gradient.defvjp(
    lambda w: (w, None), lambda _, g: (g / jnp.maximum(jnp.linalg.norm(g), 1e-3),)
)

DEPTH, WIDTH, PAST = 3, 6, 4


def layer(x: Any, given: Any) -> tuple[Any, None]:
    """A product of scaled operands, whose histories come back as gradients."""
    w, history = given
    y = jnp.tanh(scaled(x, history["x"]) @ scaled(w, history["w"]))
    return seen_backward(x + y, history["y"]), None


def clipped_layer(x: Any, given: Any) -> tuple[Any, None]:
    return x + jnp.tanh(x @ clipped_gradient(given[0])), None


def in_blocks(x: Any, given: Any) -> tuple[Any, None]:
    """A block of two layers."""
    return lax.scan(layer, x, jax.tree.map(lambda a: jnp.stack([a, a / 2]), given))


FORMS: dict[str, Callable[..., Any]] = {
    "plain": layer,
    "checkpoint": jax.checkpoint(layer),
    "dots": jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable),
    "clipped": clipped_layer,
    "blocks": in_blocks,
}


def arguments() -> tuple[Any, Any]:
    histories = {name: 1 + normal(n, DEPTH, PAST) ** 2 for n, name in enumerate("xwy", 5)}
    params = {"layers": (normal(1, DEPTH, WIDTH, WIDTH) / 4, histories), "last": normal(2, WIDTH)}
    return params, normal(3, 8, WIDTH)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_histories_of_layers_that_are_a_scan(form: str, is_reversed: bool) -> None:
    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            h, _ = lax.scan(FORMS[form], x, params["layers"], reverse=is_reversed)
            return jnp.mean((h @ params["last"]) ** 2)

        return jax.value_and_grad(loss_fn)(params)

    with jax.enable_x64(True):
        analysis = check_split(step, arguments(), 4)
    assert not analysis.parts
    assert analysis.costs.loop_share > 0.8


def drawn(x: Any, given: Any) -> tuple[Any, Any]:
    """A stack that takes random bits of a kind that draws others if it is mapped."""
    y = jnp.tanh(x @ given[0])
    key = jax.random.key(given[1], impl="rbg")
    return y, jnp.log1p(jnp.abs(y).max()) * jax.random.uniform(key, (3,), y.dtype)


def called(x: Any, given: Any) -> tuple[Any, Any]:
    y = jnp.tanh(x @ given[0])
    top = jnp.abs(y).max()
    return y, jax.pure_callback(np.sqrt, jax.ShapeDtypeStruct((), y.dtype), top)


def kept_number(x: Any, given: Any) -> tuple[Any, Any]:
    """What is carried never changes: JAX makes it a constant that is a number."""
    (x, threshold), (w, _) = x, given
    y = jnp.tanh(x @ w)
    return (y, threshold), jnp.minimum(jnp.abs(y).max(), threshold)


@pytest.mark.filterwarnings("ignore::autopar.errors.UnknownPrimitiveWarning")
@pytest.mark.parametrize("body", [drawn, called, kept_number], ids=lambda body: body.__name__)
def test_stacks_of_the_forward_pass(body: Any) -> None:
    """Of rows that are the batch itself; iterations that cannot be mapped, or read a number."""

    def step(params: Any, x: Any) -> Any:
        start = (x, 0.5) if body is kept_number else x
        given = params["layers"][0], jnp.arange(DEPTH)
        last, stacks = lax.scan(body, start, given)
        return jax.tree.leaves(last)[0] @ params["last"], stacks

    with jax.enable_x64(True):
        analysis = check_split(step, arguments(), 4)
    assert analysis.costs.loop_share > 0.8


def test_an_optimizer_that_is_a_scan_stays_one() -> None:
    """Layer by layer, to save memory: no microbatch is waited for in it."""

    def step(params: Any, x: Any) -> Any:
        def loss_fn(layers: Any) -> Any:
            h, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)
            return jnp.mean(jax.nn.logsumexp(h @ h.T, axis=-1))

        loss, grads = jax.value_and_grad(loss_fn)(params["layers"][0])
        return lax.map(lambda g: g / jnp.linalg.norm(g), grads), loss

    args = jax.tree.map(np.float32, arguments())
    graph, analysis = analyzed(step, args, 4)
    assert len(analysis.parts) > 1
    assert analysis.graph is graph


def test_what_iterations_wait_for_stays_in_them() -> None:
    """The next layer reads the maximum over the batch."""

    def step(params: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            y = jnp.tanh(x @ w)
            return y / jnp.abs(y).max(), jnp.log1p(jnp.abs(y).max())

        def loss_fn(params: Any) -> Any:
            h, tops = lax.scan(body, x, params["layers"][0])
            return jnp.mean(h**2) + tops.sum()

        return jax.value_and_grad(loss_fn)(params)

    with pytest.raises(InexactMicrobatchError, match="needs the whole batch"):
        check_split(step, jax.tree.map(np.float32, arguments()), 4, max_loops=1)


def test_what_needs_rows_is_not_made_of_sums() -> None:
    """The stack holds every row minus the batch's maximum: it waits as a whole."""

    def step(params: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            y = jnp.tanh(x @ w)
            return y, y - y.max(0)

        return lax.scan(body, x, params["layers"][0])[1].sum((0, 2))

    args = jax.tree.map(np.float32, arguments())
    with pytest.raises(InexactMicrobatchError, match="needs the whole batch"):
        check_split(step, args, 4, max_loops=1)
