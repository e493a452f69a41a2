# mypy: disallow-untyped-defs=False
"""What the steps here share: the ordinary train step around a loss, and small layers."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from programs import Case, data
from programs.optimizers import clipped_adamw

WIDTH = 32
HEADS = 4
TOKENS = [(data.tokens(i, length=data.LENGTH + 1),) for i in range(data.STEPS)]
"""Three batches of token sequences, each with the token after its last."""


def supervised(
    loss_fn: Callable[..., Any],
    params: Any,
    batches: Sequence[tuple[Any, ...]],
    optimizer: optax.GradientTransformation | None = None,
    has_aux: bool = False,
    **options: Any,
) -> Case:
    """A step `(params, opt_state), *batch -> (params, opt_state), metrics` around a loss."""
    transformation = clipped_adamw() if optimizer is None else optimizer

    def train_step(state, *batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, *batch)
        updates, opt_state = transformation.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), {"loss": value, "norm": optax.tree.norm(grads)}

    params = jax.tree.map(jnp.asarray, params)
    state = (params, jax.jit(transformation.init)(params))
    return Case(train_step, state, list(batches), options=options)


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Weights of variance 1 / fan-in."""
    scale = jnp.sqrt(jnp.float32(shape[-2] if len(shape) > 1 else 1))
    return (jax.random.normal(jax.random.key(seed), shape) / scale).astype(dtype)


def dense_layers(seed: int, *sizes: int) -> list[tuple[jax.Array, jax.Array]]:
    """Weights and biases of a perceptron."""
    pairs = itertools.pairwise(sizes)
    return [(normal(seed + i, a, b), jnp.zeros(b)) for i, (a, b) in enumerate(pairs)]


def mlp(layers, x, activation=jax.nn.gelu):
    """A perceptron on the last axis; nothing follows its last layer."""
    for w, b in layers[:-1]:
        x = activation(x @ w + b)
    w, b = layers[-1]
    return x @ w + b


def rms_norm(x, scale):
    """Root-mean-square normalization, computed in float32 whatever comes."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-3)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def next_token_loss(logits, tokens):
    """Mean cross entropy of `tokens[:, 1:]`, in float32."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
