# mypy: disallow-untyped-defs=False
"""A contrastive loss: every example is compared with all others of the batch."""

import jax
import jax.numpy as jnp
import optax

from . import data, mlp
from .case import Case
from .optimizers import adam


def build() -> Case:
    """InfoNCE between two encoders, as CLIP is trained, with a learned temperature."""
    optimizer = adam()

    def encode(params, x):
        x = mlp.apply(params, x)
        return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-3)

    def loss_fn(params, batch):
        images = encode(params["image"], batch["image"])
        texts = encode(params["text"], batch["text"])
        logits = jnp.exp(params["log_scale"]) * images @ texts.T
        labels = jnp.arange(logits.shape[0])
        by_image = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        by_text = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)
        return (by_image.mean() + by_text.mean()) / 2

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = {
        "image": mlp.init(jax.random.key(0)),
        "text": mlp.init(jax.random.key(1)),
        "log_scale": jnp.asarray(1.0),
    }
    batches = [
        ({"image": data.vectors(i), "text": data.vectors(i) + 0.3 * data.vectors(50 + i)},)
        for i in range(data.STEPS)
    ]
    return Case(train_step, (params, jax.jit(optimizer.init)(params)), batches)
