# mypy: disallow-untyped-defs=False
"""Two views of every example, concatenated along the batch for one pass and split again."""

import jax
import jax.numpy as jnp
import optax

from . import data, mlp
from .case import Case
from .optimizers import momentum


def _normalize(x):
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-3)


def build() -> Case:
    """SimSiam: each view predicts the other; no example meets another one."""
    optimizer = momentum()

    def loss_fn(params, views):
        first, second = views
        projected = mlp.apply(params["encoder"], jnp.concatenate([first, second], axis=0))
        predicted = _normalize(projected @ params["predictor"])
        target = jax.lax.stop_gradient(_normalize(projected))
        first_predicted, second_predicted = jnp.split(predicted, 2, axis=0)
        first_target, second_target = jnp.split(target, 2, axis=0)
        agreement = first_predicted * second_target + second_predicted * first_target
        return -jnp.mean(jnp.sum(agreement, axis=-1)) / 2

    def train_step(state, views):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, views)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = {
        "encoder": mlp.init(jax.random.key(0)),
        "predictor": jax.random.normal(jax.random.key(1), (mlp.SIZES[-1], mlp.SIZES[-1])),
    }
    batches = []
    for i in range(data.STEPS):
        x = data.vectors(i)
        views = (x + 0.1 * data.vectors(100 + i), x + 0.1 * data.vectors(200 + i))
        batches.append((views,))
    return Case(train_step, (params, jax.jit(optimizer.init)(params)), batches)
