# mypy: disallow-untyped-defs=False
"""A multilayer perceptron in plain JAX, and the forms that a step's signature takes around it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .case import Case
from .optimizers import BY_NAME, adam, sgd

SIZES = (24, 64, 48, 10)


@functools.partial(jax.jit, static_argnames="dtype")
def init(key: jax.Array, dtype: Any = jnp.float32) -> Any:
    """A list of layers."""
    keys = jax.random.split(key, len(SIZES) - 1)
    return [
        {
            "w": jax.random.normal(k, (m, n), dtype) / np.sqrt(m).astype(dtype),
            "b": jnp.zeros(n, dtype),
        }
        for k, m, n in zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    ]


def apply(params, x):
    """Logits."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params, x, y):
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()


def _arrays(index: int, dtype: Any = np.float32) -> Any:
    return data.vectors(index, SIZES[0], dtype=dtype), data.classes(index)


def build(optimizer: str = "adam", dtype: Any = jnp.float32) -> Case:
    """State and batch are one argument each."""
    transformation = BY_NAME[optimizer]()

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = transformation.update(grads, opt_state, params)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(grads)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    params = init(jax.random.key(0), dtype)
    batches = [(_arrays(i, dtype),) for i in range(data.STEPS)]
    return Case(train_step, (params, jax.jit(transformation.init)(params)), batches)


def build_documented() -> Case:
    """Parameters and optimizer state are arguments of their own, as in Optax's documentation."""
    optimizer = adam()

    def step(params, opt_state, batch, labels):
        loss_value, grads = jax.value_and_grad(loss_fn)(params, batch, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, loss_value

    params = init(jax.random.key(1))
    return Case(
        step,
        (params, jax.jit(optimizer.init)(params)),
        [_arrays(i) for i in range(data.STEPS)],
        arguments=lambda state, batch: (*state, *batch),
        next_state=lambda state, outputs: outputs[:2],
    )


def build_keywords() -> Case:
    """The batch comes by keyword."""
    optimizer = sgd()

    def train_step(state, *, images, labels):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = init(jax.random.key(2))
    keywords = [dict(zip(("images", "labels"), _arrays(i), strict=True)) for i in range(data.STEPS)]
    state = (params, jax.jit(optimizer.init)(params))
    return Case(train_step, state, [() for _ in keywords], keywords=keywords)


def build_static() -> Case:
    """A static argument chooses the loss."""
    optimizer = adam()

    def train_step(state, batch, loss_name):
        x, y = batch

        def loss_fn(params):
            logits = apply(params, x)
            if loss_name == "hinge":
                return optax.losses.multiclass_hinge_loss(logits, y).mean()
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = init(jax.random.key(3))
    return Case(
        train_step,
        (params, jax.jit(optimizer.init)(params)),
        [(_arrays(i), "hinge") for i in range(data.STEPS)],
        options={"static_argnums": (2,)},
    )


def build_multi_steps() -> Case:
    """The user accumulates gradients over two steps with `optax.MultiSteps`."""
    optimizer = optax.MultiSteps(adam(), every_k_schedule=2)

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), {"loss": loss, "updated": optimizer.has_updated(opt_state)}

    params = init(jax.random.key(4))
    batches = [(_arrays(i),) for i in range(data.STEPS)]
    return Case(train_step, (params, jax.jit(optimizer.init)(params)), batches)
