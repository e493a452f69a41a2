"""Gradients with a factor that is one number of the whole batch: their sums are scaled last."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from microbatch.helpers import check_split

from autopar.base.errors import InexactMicrobatchError


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype("float64")


def hidden(params: Any, x: Any) -> Any:
    """Two layers, then a scan over two more."""
    x = jnp.tanh(x @ params["first"])
    return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])[0]


def root_mean_square(y: Any, _: Any) -> Any:
    return jnp.sqrt(jnp.mean(y**2))


def log_mean_exp(y: Any, _: Any) -> Any:
    return jnp.log(jnp.mean(jnp.exp(y)))


def squared_mean(y: Any, _: Any) -> Any:
    return jnp.mean(y) ** 2


def fixed_denominator(y: Any, _: Any) -> Any:
    weights = jax.nn.sigmoid(y)
    return jnp.sum(weights / lax.stop_gradient(weights.sum()) * y**2)


def denominator(y: Any, _: Any) -> Any:
    weights = jax.nn.sigmoid(y)
    return jnp.sum(weights * y**2) / weights.sum()


def dice(y: Any, target: Any) -> Any:
    p = jax.nn.sigmoid(y)
    return 1 - 2 * jnp.sum(p * target) / (jnp.sum(p) + jnp.sum(target) + 1)


def with_another_loss(y: Any, target: Any) -> Any:
    return jnp.sqrt(jnp.mean(y**2)) + jnp.mean((y - target) ** 2)


LOSSES = [
    root_mean_square,
    log_mean_exp,
    squared_mean,
    fixed_denominator,
    denominator,
    dice,
    with_another_loss,
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_scaled_after_the_loop(loss: Callable[..., Any]) -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return loss(hidden(params, batch["x"]) @ params["last"], batch["y"])

        value, gradients = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    with jax.enable_x64(True):
        params = {"first": normal(0, 5, 6), "layers": normal(1, 2, 6, 6), "last": normal(2, 6, 3)}
        batch = {"x": normal(3, 8, 5), "y": normal(4, 8, 3) > 0}
        analysis = check_split(step, (params, batch), 4)
    assert analysis.costs.loop_share > 0.9


def test_what_is_not_linear_needs_a_second_loop() -> None:
    """A temperature from the whole batch inside a softmax."""

    def step(w: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            y = x @ w
            return jnp.mean(jax.nn.logsumexp(y / jnp.std(y), axis=-1))

        return jax.value_and_grad(loss_fn)(w)

    args = (normal(0, 5, 6).astype("float32"), normal(1, 8, 5).astype("float32"))
    with pytest.raises(InexactMicrobatchError, match="needs the whole batch"):
        check_split(step, args, 4, max_loops=1)
    assert len(check_split(step, args, 4).parts) > 1
