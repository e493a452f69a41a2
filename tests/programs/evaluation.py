# mypy: disallow-untyped-defs=False
"""Steps without gradients: an evaluation of a batch, and greedy generation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .case import Case, same_state
from .scan_layers import init, layer


def forward(params, tokens):
    """Logits of the scanned transformer."""
    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    return x @ params["head"]


def build() -> Case:
    """Sums over the valid tokens of a batch, the way an evaluation loop adds them up."""

    def eval_step(params, batch):
        logits = forward(params, batch["tokens"][:, :-1])
        labels, weights = batch["tokens"][:, 1:], batch["weights"][:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels) * weights
        hits = (jnp.argmax(logits, axis=-1) == labels) * weights
        return {
            "loss": losses.sum(),
            "correct": hits.sum(),
            "tokens": weights.sum(),
            "by_example": losses.sum(axis=1),
        }

    params = init(jax.random.key(0), jnp.float32)
    batches = []
    for i in range(data.STEPS):
        valid = np.arange(data.LENGTH) < data.lengths(i)[:, None]
        batches.append(({"tokens": data.tokens(i), "weights": valid.astype(np.float32)},))
    return Case(eval_step, params, batches, next_state=same_state)


def build_generation() -> Case:
    """Greedy decoding of eight tokens by `jax.lax.fori_loop`, with a mask instead of a cache."""

    def generate(params, prompt):
        length = prompt.shape[1]
        tokens = jnp.pad(prompt, ((0, 0), (0, 8)))

        def extend(i, tokens):
            logits = forward(params, tokens)
            best = jnp.argmax(jax.lax.dynamic_index_in_dim(logits, i - 1, 1, False), axis=-1)
            return jax.lax.dynamic_update_index_in_dim(tokens, best.astype(tokens.dtype), i, 1)

        return jax.lax.fori_loop(length, length + 8, extend, tokens)

    params = init(jax.random.key(1), jnp.float32)
    batches = [(data.tokens(i, length=4),) for i in range(data.STEPS)]
    return Case(generate, params, batches, next_state=same_state)
