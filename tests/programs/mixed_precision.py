# mypy: disallow-untyped-defs=False
"""Computation in bfloat16 with parameters and optimizer state in float32."""

import jax
import jax.numpy as jnp
import optax

from . import data
from .case import Case
from .optimizers import BY_NAME

WIDTH = 32
HEADS = 4


@jax.jit
def init(key):
    """One attention layer and one feed-forward layer."""
    keys = jax.random.split(key, 5)
    return {
        "embed": jax.random.normal(keys[0], (data.VOCABULARY, WIDTH)),
        "scale": jnp.ones((3, WIDTH)),
        "qkv": jax.random.normal(keys[1], (3, WIDTH, HEADS, WIDTH // HEADS)) / 6,
        "out": jax.random.normal(keys[2], (HEADS, WIDTH // HEADS, WIDTH)) / 6,
        "up": jax.random.normal(keys[3], (WIDTH, 4 * WIDTH)) / 6,
        "down": jax.random.normal(keys[4], (4 * WIDTH, WIDTH)) / 11,
    }


def rms_norm(x, scale):
    """A norm that is computed in float32, as is usual: sums of squares need the precision."""
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-3) * scale
    return x.astype(jnp.bfloat16)


def forward(params, tokens):
    """Logits in float32 of a model whose matrix products are in bfloat16."""
    scale = params["scale"]
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    x = params["embed"][tokens]
    q, k, v = jnp.einsum("btd,cdhe->cbthe", rms_norm(x, scale[0]), params["qkv"])
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bthe,hed->btd", y, params["out"])
    x = x + jax.nn.gelu(rms_norm(x, scale[1]) @ params["up"]) @ params["down"]
    logits = rms_norm(x, scale[2]) @ params["embed"].T
    return logits.astype(jnp.float32)


def build(optimizer: str = "clipped_adamw") -> Case:
    """A small GPT whose matrix products are all bfloat16."""
    transformation = BY_NAME[optimizer]()

    def loss_fn(params, tokens):
        logits = forward(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def train_step(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = transformation.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = init(jax.random.key(0))
    batches = [(data.tokens(i, length=data.LENGTH + 1),) for i in range(data.STEPS)]
    return Case(train_step, (params, jax.jit(transformation.init)(params)), batches)
