# mypy: disallow-untyped-defs=False
"""A random key as a leaf of the state: typed, raw, and of a generator that is not counter-based."""

import jax
import jax.numpy as jnp
import optax

from . import data, mlp
from .case import Case
from .optimizers import adam

MAKE_KEY = {
    "typed": lambda: jax.random.key(3),
    "raw": lambda: jax.random.PRNGKey(3),
    "rbg": lambda: jax.random.key(3, impl="rbg"),
}


def build(kind: str) -> Case:
    """Input noise, dropout and random labels are drawn from the state's key."""
    optimizer = adam()

    def train_step(state, batch):
        x, y = batch
        key, noise_key, dropout_key, label_key = jax.random.split(state["key"], 4)
        x = x + 0.1 * jax.random.normal(noise_key, x.shape)
        keep = jax.random.bernoulli(dropout_key, 0.9, x.shape)
        x = jnp.where(keep, x / 0.9, 0.0)
        flip = jax.random.uniform(label_key, y.shape) < 0.1
        y = jnp.where(flip, (y + 1) % 10, y)
        loss, grads = jax.value_and_grad(mlp.loss_fn)(state["params"], x, y)
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": key}, {"loss": loss}

    params = mlp.init(jax.random.key(0))
    state = {
        "params": params,
        "opt_state": jax.jit(optimizer.init)(params),
        "key": MAKE_KEY[kind](),
    }
    batches = [((data.vectors(i), data.classes(i)),) for i in range(data.STEPS)]
    return Case(train_step, state, batches)


def build_augmentation() -> Case:
    """Every example is augmented with a key of its own, under `jax.vmap`."""
    optimizer = adam()

    def augment(key, x):
        shift_key, scale_key = jax.random.split(key)
        x = jnp.roll(x, jax.random.randint(shift_key, (), 0, 4))
        return x * jax.random.uniform(scale_key, (), minval=0.8, maxval=1.2)

    def train_step(state, batch):
        x, y = batch
        params, opt_state, key = state
        key, step_key = jax.random.split(key)
        x = jax.vmap(augment)(jax.random.split(step_key, x.shape[0]), x)
        loss, grads = jax.value_and_grad(mlp.loss_fn)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, key), {"loss": loss}

    params = mlp.init(jax.random.key(0))
    state = (params, jax.jit(optimizer.init)(params), jax.random.key(9))
    batches = [((data.vectors(i), data.classes(i)),) for i in range(data.STEPS)]
    return Case(train_step, state, batches)
