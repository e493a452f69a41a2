# mypy: disallow-untyped-defs=False
"""An exponential moving average of the parameters, and a loss that also looks at it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from . import data, mlp
from .case import Case
from .optimizers import adam


class State(NamedTuple):
    """At first `average` and `params` are the very same arrays, as users make them."""

    params: list
    average: list
    opt_state: optax.OptState


def build() -> Case:
    """The average is the teacher of a consistency loss; `optax.ema` averages the gradients too."""
    optimizer = optax.chain(optax.ema(0.5), adam())

    def loss_fn(params, average, batch):
        x, y = batch
        logits = mlp.apply(params, x)
        teacher = jax.nn.softmax(jax.lax.stop_gradient(mlp.apply(average, x)))
        hard = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return hard + 0.5 * optax.softmax_cross_entropy(logits, teacher).mean()

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, state.average, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        average = optax.incremental_update(params, state.average, step_size=0.1)
        distance = optax.tree.norm(jax.tree.map(jnp.subtract, params, average))
        return State(params, average, opt_state), {"loss": loss, "distance": distance}

    params = mlp.init(jax.random.key(0))
    state = State(params, params, jax.jit(optimizer.init)(params))
    batches = [((data.vectors(i), data.classes(i)),) for i in range(data.STEPS)]
    return Case(train_step, state, batches)
