# mypy: disallow-untyped-defs=False
"""Batches with leaves whose leading dimension is not the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .case import Case
from .optimizers import adam
from .scan_layers import init, rms_norm

WIDTH = 32


def build() -> Case:
    """Positions [T], an attention mask [T, T] and a scalar temperature come with the tokens."""
    optimizer = adam()

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"][:, :-1]]
        angles = batch["positions"][:, None] / 10.0 ** jnp.linspace(0, 3, WIDTH // 2)
        x = x + jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        layers = jax.tree.map(lambda p: p[0], params["layers"])
        q, k, v = jnp.split(rms_norm(x, layers["scale"][0]) @ layers["qkv"], 3, axis=-1)
        scores = jnp.einsum("bqd,bkd->bqk", q, k) / jnp.sqrt(WIDTH)
        weights = jax.nn.softmax(scores + batch["mask"])
        x = x + jnp.einsum("bqk,bkd->bqd", weights, v) @ layers["out"]
        logits = x @ params["head"] / batch["temperature"]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["tokens"][:, 1:]
        ).mean()

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = init(jax.random.key(0), jnp.float32)
    length = data.LENGTH
    batches = [
        (
            {
                "tokens": data.tokens(i, length=length + 1),
                "positions": np.arange(length, dtype=np.int32) + i,
                "mask": np.where(np.tri(length), 0, -1e9).astype(np.float32),
                "temperature": np.float32(1 + i / 10),
            },
        )
        for i in range(data.STEPS)
    ]
    axes = {"tokens": 0, "positions": None, "mask": None, "temperature": None}
    return Case(
        train_step,
        (params, jax.jit(optimizer.init)(params)),
        batches,
        options={"batch_axes": (None, axes)},
    )
