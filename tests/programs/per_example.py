# mypy: disallow-untyped-defs=False
"""Quantities of every example: metrics that come back as arrays, gradients that are clipped."""

import jax
import jax.numpy as jnp
import optax

from . import data, mlp
from .case import Case
from .optimizers import adam, sgd


def build_metrics() -> Case:
    """Losses, predictions and concatenated scores of every example are among the outputs."""
    optimizer = adam()

    def loss_fn(params, x, y):
        logits = mlp.apply(params, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        probabilities = jax.nn.softmax(logits)
        metrics = {
            "losses": losses,
            "prediction": jnp.argmax(logits, axis=-1),
            "scores": jnp.concatenate([losses[:, None], probabilities], axis=1),
            "by_class": probabilities.T,
            "worst": jnp.max(losses),
            "correct": jnp.argmax(logits, axis=-1) == y,
        }
        return losses.mean(), metrics

    def train_step(state, batch):
        params, opt_state = state
        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, **metrics}

    params = mlp.init(jax.random.key(0))
    batches = [((data.vectors(i), data.classes(i)),) for i in range(data.STEPS)]
    return Case(train_step, (params, jax.jit(optimizer.init)(params)), batches)


def build_private() -> Case:
    """Gradients of every example by `jax.vmap`, clipped one by one, summed, with noise added."""
    optimizer = sgd()

    def train_step(state, batch):
        params, opt_state, key = state
        x, y = batch
        key, noise_key = jax.random.split(key)

        def loss_fn(params, x, y):
            return optax.softmax_cross_entropy_with_integer_labels(mlp.apply(params, x), y)

        losses, grads = jax.vmap(jax.value_and_grad(loss_fn), (None, 0, 0))(params, x, y)
        norms = jax.vmap(optax.tree.norm)(grads)
        factors = jnp.minimum(1.0, 2.0 / norms)
        leaves, treedef = jax.tree.flatten(grads)
        sums = [jnp.einsum("b,b...->...", factors, g) for g in leaves]
        keys = jax.random.split(noise_key, len(sums))
        noisy = [
            (g + 0.1 * jax.random.normal(k, g.shape)) / x.shape[0]
            for g, k in zip(sums, keys, strict=True)
        ]
        updates, opt_state = optimizer.update(jax.tree.unflatten(treedef, noisy), opt_state)
        metrics = {"loss": losses.mean(), "clipped": jnp.mean(factors < 1), "norms": norms}
        return (optax.apply_updates(params, updates), opt_state, key), metrics

    params = mlp.init(jax.random.key(1))
    batches = [((data.vectors(i), data.classes(i)),) for i in range(data.STEPS)]
    return Case(train_step, (params, jax.jit(optimizer.init)(params), jax.random.key(2)), batches)
