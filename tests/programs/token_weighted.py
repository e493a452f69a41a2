# mypy: disallow-untyped-defs=False
"""A loss averaged over the valid tokens of padded sequences: rows weigh differently."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .case import Case
from .optimizers import BY_NAME

WIDTH = 32


@functools.partial(jax.jit, static_argnames="dtype")
def init(key, dtype):
    """A two-layer model of a token given the one before."""
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (data.VOCABULARY, WIDTH), dtype),
        "hidden": jax.random.normal(keys[1], (WIDTH, 2 * WIDTH), dtype) / 6,
        "out": jax.random.normal(keys[2], (2 * WIDTH, data.VOCABULARY), dtype) / 8,
    }


def build(optimizer: str = "clipped_adamw", dtype: Any = jnp.float32) -> Case:
    """The sum of the losses over the sum of the weights, and an accuracy that divides likewise."""
    transformation = BY_NAME[optimizer]()

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"][:, :-1]]
        logits = jax.nn.gelu(x @ params["hidden"]) @ params["out"]
        labels = batch["tokens"][:, 1:]
        weights = batch["weights"][:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        loss = jnp.sum(losses * weights) / jnp.sum(weights)
        hits = jnp.where(weights > 0, jnp.argmax(logits, axis=-1) == labels, False)
        return loss, hits.sum() / jnp.count_nonzero(weights)

    def train_step(state, batch):
        params, opt_state = state
        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = transformation.update(grads, opt_state, params)
        metrics = {"loss": loss, "accuracy": accuracy, "tokens": jnp.sum(batch["weights"])}
        return (optax.apply_updates(params, updates), opt_state), metrics

    params = init(jax.random.key(0), dtype)
    batches = []
    for i in range(data.STEPS):
        valid = np.arange(data.LENGTH) < data.lengths(i)[:, None]
        batches.append(({"tokens": data.tokens(i), "weights": valid.astype(dtype)},))
    return Case(train_step, (params, jax.jit(transformation.init)(params)), batches)
