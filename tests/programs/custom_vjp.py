# mypy: disallow-untyped-defs=False
"""User-defined derivatives: a quantizer with a straight-through gradient, and a `custom_jvp`."""

import functools

import jax
import jax.numpy as jnp
import optax

from . import data, mlp
from .case import Case
from .optimizers import adam


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def quantize(x, levels):
    """Rounds to a grid; the gradient passes where the input was within the grid's range."""
    return jnp.round(jnp.clip(x, -1, 1) * levels) / levels


def _quantize_forward(x, levels):
    return quantize(x, levels), jnp.abs(x) <= 1


def _quantize_backward(levels, inside, cotangent):
    return (jnp.where(inside, cotangent, 0.1 * cotangent),)


quantize.defvjp(_quantize_forward, _quantize_backward)


@jax.custom_vjp
def project(x, w):
    """A matrix product with a hand-written backward pass."""
    return x @ w


def _project_forward(x, w):
    return x @ w, (x, w)


def _project_backward(residuals, cotangent):
    x, w = residuals
    return cotangent @ w.T, x.T @ cotangent


project.defvjp(_project_forward, _project_backward)


@jax.custom_jvp
def softclip(x):
    """A saturating nonlinearity."""
    return x / (1 + jnp.abs(x))


@softclip.defjvp
def _softclip_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return softclip(x), t / (1 + jnp.abs(x)) ** 2


def build() -> Case:
    """A perceptron whose hidden activations are quantized."""
    optimizer = adam()

    def loss_fn(params, x, y):
        hidden = softclip(project(x, params["w1"]) + params["b1"])
        logits = (hidden + 0.1 * quantize(hidden, 4)) @ params["w2"] + params["b2"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    layers = mlp.init(jax.random.key(0))
    params = {"w1": layers[0]["w"], "b1": layers[0]["b"]}
    params |= {"w2": jax.random.normal(jax.random.key(1), (64, 10)) / 8, "b2": jnp.zeros(10)}
    batches = [((data.vectors(i), data.classes(i)),) for i in range(data.STEPS)]
    return Case(train_step, (params, jax.jit(optimizer.init)(params)), batches)
