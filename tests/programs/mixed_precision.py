# mypy: disallow-untyped-defs=False
"""Computation in bfloat16 with parameters and optimizer state in float32."""

import functools

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


def layer(x, params):
    """One layer of a scan: products of bfloat16 that are added up in float32, then rounded."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    y = rms_norm(x, params["scale"][0].astype(jnp.float32))
    q, k, v = product("btd,cdhe->cbthe", y, params["qkv"]).astype(jnp.bfloat16)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + product("bthe,hed->btd", y, params["out"]).astype(jnp.bfloat16)
    y = rms_norm(x, params["scale"][1].astype(jnp.float32))
    y = jax.nn.gelu(product("btd,df->btf", y, params["up"]).astype(jnp.bfloat16))
    return x + product("btf,fd->btd", y, params["down"]).astype(jnp.bfloat16), None


def forward_scanned(params, tokens):
    """Logits of layers that are one scan, rematerialized, as MaxText and Levanter have them."""
    x = params["embed"].astype(jnp.bfloat16)[tokens]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    x = rms_norm(x, params["scale"][2])
    return jnp.matmul(x, params["embed"].T.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def build(optimizer: str = "clipped_adamw") -> Case:
    """A small GPT whose matrix products are all bfloat16."""
    return case(forward, init(jax.random.key(0)), BY_NAME[optimizer]())


def build_scanned(optimizer: str = "clipped_adamw") -> Case:
    """The same with several layers, and products that are added up in float32."""
    layers = jax.vmap(init)(jax.random.split(jax.random.key(1), 3))
    del layers["embed"]
    params = init(jax.random.key(0))
    params = {"embed": params["embed"], "scale": params["scale"], "layers": layers}
    return case(forward_scanned, params, BY_NAME[optimizer]())


def case(apply, params, transformation) -> Case:
    """The train step of a model, with its batches."""

    def loss_fn(params, tokens):
        logits = apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def train_step(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = transformation.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    batches = [(data.tokens(i, length=data.LENGTH + 1),) for i in range(data.STEPS)]
    return Case(train_step, (params, jax.jit(transformation.init)(params)), batches)
