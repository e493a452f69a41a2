# mypy: disallow-untyped-defs=False
"""Decoders as language models are trained: remat policies, scans, bfloat16, odd heads, kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from programs import Case, data

from .common import HEADS, TOKENS, WIDTH, next_token_loss, normal, rms_norm, supervised

LAYERS = 2
"""Each is written out, which takes XLA as long again."""
SCANNED_LAYERS = 3
POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("attention"),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["attention"],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def attention(q, k, v):
    """Causal attention of [batch, time, heads, depth], its softmax in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    scores = scores / jnp.sqrt(jnp.float32(q.shape[-1]))
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def block(x, params, attend=attention):
    """One pre-norm layer on [batch, time, width]."""
    dtype = x.dtype
    y = rms_norm(x, params["norm1"]) @ params["qkv"].astype(dtype)
    q, k, v = (part.reshape(*x.shape[:2], HEADS, -1) for part in jnp.split(y, 3, axis=-1))
    y = checkpoint_name(attend(q, k, v), "attention")
    x = x + y.reshape(x.shape) @ params["out"].astype(dtype)
    y = rms_norm(x, params["norm2"])
    gate, up = jnp.split(y @ params["up"].astype(dtype), 2, axis=-1)
    y = checkpoint_name(jax.nn.silu(gate) * up, "hidden")
    return x + y @ params["down"].astype(dtype)


def layer_params(seed, *stack):
    """The parameters of one layer, or of several along a leading axis."""
    return {
        "norm1": jnp.ones((*stack, WIDTH)),
        "norm2": jnp.ones((*stack, WIDTH)),
        "qkv": normal(seed, *stack, WIDTH, 3 * WIDTH),
        "out": normal(seed + 1, *stack, WIDTH, WIDTH),
        "up": normal(seed + 2, *stack, WIDTH, 4 * WIDTH),
        "down": normal(seed + 3, *stack, 2 * WIDTH, WIDTH),
    }


def model_params(scan: bool, tied: bool = False) -> dict[str, Any]:
    """Parameters of a decoder."""
    layers = (
        layer_params(1, SCANNED_LAYERS) if scan else [layer_params(10 * i) for i in range(LAYERS)]
    )
    params = {
        "embed": normal(90, data.VOCABULARY, WIDTH) * 3,
        "layers": layers,
        "norm": jnp.ones(WIDTH),
    }
    return params if tied else {**params, "head": normal(91, WIDTH, data.VOCABULARY)}


def hidden(params, inputs, dtype, layer):
    """What the head gets: [batch, time, width]."""
    x = params["embed"][inputs].astype(dtype)
    if isinstance(params["layers"], list):
        for one in params["layers"]:
            x = layer(x, one)
    else:
        x, _ = jax.lax.scan(lambda x, one: (layer(x, one), None), x, params["layers"])
    return rms_norm(x, params["norm"])


def build(
    remat: str | None = None,
    scan: bool = False,
    dtype: Any = jnp.float32,
    prevent_cse: bool = True,
) -> Case:
    """A decoder with float32 parameters that computes in `dtype`."""
    layer = block
    if remat:
        layer = jax.checkpoint(block, policy=POLICIES[remat], prevent_cse=prevent_cse)

    def loss_fn(params, tokens):
        x = hidden(params, tokens[:, :-1], dtype, layer)
        logits = jnp.einsum(
            "btw,wv->btv", x, params["head"].astype(dtype), preferred_element_type=jnp.float32
        )
        return next_token_loss(logits, tokens)

    return supervised(loss_fn, model_params(scan), TOKENS)


def build_checkpointed_head() -> Case:
    """A tied head and its loss inside `jax.checkpoint`, with a z-loss."""

    @jax.checkpoint
    def head_loss(embed, x, tokens):
        logits = x @ embed.T
        log_z = jax.nn.logsumexp(logits, axis=-1)
        return next_token_loss(logits, tokens) + 1e-3 * jnp.mean(log_z**2)

    def loss_fn(params, tokens):
        x = hidden(params, tokens[:, :-1], jnp.float32, jax.checkpoint(block))
        return head_loss(params["embed"], x, tokens)

    return supervised(loss_fn, model_params(False, tied=True), TOKENS)


def build_chunked_head() -> Case:
    """The head's loss over chunks of time, so that all logits never exist at once."""

    @jax.checkpoint
    def chunk_loss(head, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x @ head, labels).sum()

    def loss_fn(params, tokens):
        x = hidden(params, tokens[:, :-1], jnp.float32, block)
        rows, time, width = x.shape
        chunks = jnp.moveaxis(x.reshape(rows, 4, time // 4, width), 1, 0)
        labels = jnp.moveaxis(tokens[:, 1:].reshape(rows, 4, time // 4), 1, 0)
        total, _ = jax.lax.scan(
            lambda total, xs: (total + chunk_loss(params["head"], *xs), None),
            jnp.float32(0),
            (chunks, labels),
        )
        return total / labels.size

    return supervised(loss_fn, model_params(False), TOKENS)


def rope(x):
    """Rotary positions on [batch, time, heads, depth]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 100 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def build_llama() -> Case:
    """Rotary positions, two key heads for four query heads, packed documents, masked loss."""
    depth, key_heads = WIDTH // HEADS, 2

    def attend(params, x, segments):
        shape = x.shape[:2]
        q = rope((x @ params["q"]).reshape(*shape, HEADS, depth))
        k = rope((x @ params["k"]).reshape(*shape, key_heads, depth))
        v = (x @ params["v"]).reshape(*shape, key_heads, depth)
        k, v = (jnp.repeat(part, HEADS // key_heads, axis=2) for part in (k, v))
        same = segments[:, :, None] == segments[:, None, :]
        visible = (same & jnp.tril(jnp.ones(same.shape[-2:], bool)))[:, None]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * depth**-0.5
        scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
        return y.reshape(x.shape) @ params["out"]

    def loss_fn(params, batch):
        tokens, segments = batch["tokens"][:, :-1], batch["segments"][:, :-1]
        x = params["embed"][tokens]
        for layer in params["layers"]:
            x = x + attend(layer, rms_norm(x, layer["norm1"]), segments)
            y = rms_norm(x, layer["norm2"])
            x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
        logits = rms_norm(x, params["norm"]) @ params["head"]
        labels = batch["tokens"][:, 1:]
        weights = (batch["segments"][:, 1:] == segments).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(losses * weights) / jnp.sum(weights)

    def layer(seed):
        return {
            "norm1": jnp.ones(WIDTH),
            "norm2": jnp.ones(WIDTH),
            "q": normal(seed, WIDTH, WIDTH),
            "k": normal(seed + 1, WIDTH, key_heads * depth),
            "v": normal(seed + 2, WIDTH, key_heads * depth),
            "out": normal(seed + 3, WIDTH, WIDTH),
            "gate": normal(seed + 4, WIDTH, 2 * WIDTH),
            "up": normal(seed + 5, WIDTH, 2 * WIDTH),
            "down": normal(seed + 6, 2 * WIDTH, WIDTH),
        }

    params = {**model_params(False), "layers": [layer(20 * i) for i in range(2)]}
    batches = []
    for i, (tokens,) in enumerate(TOKENS):
        ends = data.lengths(i)[:, None]
        segments = (jnp.arange(tokens.shape[1]) >= ends).astype(jnp.int32)
        batches.append(({"tokens": tokens, "segments": segments},))
    return supervised(loss_fn, params, batches)


def blockwise_attention(q, k, v, size=4):
    """Attention with a running softmax over blocks of keys, as flash attention computes it."""
    rows, time, heads, depth = q.shape
    k, v = (
        jnp.moveaxis(part.reshape(rows, time // size, size, heads, depth), 1, 0) for part in (k, v)
    )
    place = jnp.arange(time)

    def step(carry, xs):
        top, total, out = carry
        k, v, start = xs
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * depth**-0.5
        visible = place[:, None] >= start + jnp.arange(size)
        scores = jnp.where(visible, scores, -1e30)
        new = jnp.maximum(top, scores.max(axis=-1))
        old, weights = jnp.exp(top - new), jnp.exp(scores - new[..., None])
        out = out * old[..., None] + jnp.einsum("bhqk,bkhd->bhqd", weights, v)
        return (new, total * old + weights.sum(axis=-1), out), None

    shape = (rows, heads, time)
    start = (jnp.full(shape, -1e30), jnp.zeros(shape), jnp.zeros((*shape, depth)))
    (_, total, out), _ = jax.lax.scan(step, start, (k, v, jnp.arange(0, time, size)))
    return jnp.swapaxes(out / total[..., None], 1, 2)


@jax.custom_vjp
def flash(q, k, v):
    """Blockwise attention that keeps only its inputs for the backward pass."""
    return blockwise_attention(q, k, v)


def _flash_backward(kept, cotangent):
    return jax.vjp(blockwise_attention, *kept)[1](cotangent)


flash.defvjp(lambda q, k, v: (flash(q, k, v), (q, k, v)), _flash_backward)


def build_attention(kind: str) -> Case:
    """A decoder whose attention is JAX's own, or written blockwise with its own backward pass."""
    attend = {
        "flash": flash,
        "jax": functools.partial(jax.nn.dot_product_attention, is_causal=True),
    }[kind]
    layer = functools.partial(block, attend=attend)

    def loss_fn(params, tokens):
        x = hidden(params, tokens[:, :-1], jnp.float32, layer)
        return next_token_loss(x @ params["head"], tokens)

    return supervised(loss_fn, model_params(False), TOKENS)


def build_inner_jit() -> Case:
    """A jitted helper that closes over a mask and a table."""
    mask = jnp.tril(jnp.ones((data.LENGTH, data.LENGTH), bool))
    table = normal(5, data.LENGTH, WIDTH)

    @jax.jit
    def attend(q, k, v):
        scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3, -1e30)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    @jax.jit
    def positions(x):
        return x + table

    @jax.jit
    def loss_fn(params, tokens):
        layer = functools.partial(block, attend=attend)
        params = {**params, "embed": params["embed"]}
        x = positions(params["embed"][tokens[:, :-1]])
        for one in params["layers"]:
            x = jax.checkpoint(layer)(x, one)
        return next_token_loss(x @ params["head"], tokens)

    return supervised(loss_fn, model_params(False), TOKENS)


def build_by_hand_accumulation() -> Case:
    """A step that accumulates gradients over its own microbatches."""
    optimizer = optax.adamw(1e-2, eps=1e-2)

    def loss_fn(params, tokens):
        return next_token_loss(
            hidden(params, tokens[:, :-1], jnp.float32, block) @ params["head"], tokens
        )

    def train_step(state, tokens):
        params, opt_state = state

        def accumulate(total, part):
            loss, grads = jax.value_and_grad(loss_fn)(params, part)
            return jax.tree.map(jnp.add, total, (loss, grads)), None

        parts = tokens.reshape(2, tokens.shape[0] // 2, -1)
        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(accumulate, zeros, parts)
        grads = jax.tree.map(lambda g: g / 2, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss / 2

    params = model_params(False)
    return Case(train_step, (params, jax.jit(optimizer.init)(params)), TOKENS)


def build_experts(kind: str) -> Case:
    """A mixture of experts: products of groups, or one-hot sums with a loss of balance."""
    experts = 4

    def grouped(params, x, gates, chosen):
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=experts)
        rows = jax.nn.relu(jax.lax.ragged_dot(x[order], params["up"], sizes))
        rows = jax.lax.ragged_dot(rows, params["down"], sizes)
        return jnp.zeros_like(x).at[order].set(rows) * gates[:, None]

    def summed(params, x, gates, chosen):
        pick = jax.nn.one_hot(chosen, experts) * gates[:, None]
        y = jax.nn.relu(jnp.einsum("nw,ewf->enf", x, params["up"]))
        return jnp.einsum("enf,efw,ne->nw", y, params["down"], pick)

    def loss_fn(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        rows = x.reshape(-1, WIDTH)
        gates = jax.nn.softmax(rows @ params["router"])
        chosen = jnp.argmax(gates, axis=-1)
        best = jnp.max(gates, axis=-1)
        rows = rows + (grouped if kind == "grouped" else summed)(params, rows, best, chosen)
        loss = next_token_loss(rows.reshape(x.shape) @ params["head"], tokens)
        if kind == "grouped":
            return loss
        balance = jnp.mean(gates, axis=0) * jnp.mean(jax.nn.one_hot(chosen, experts), axis=0)
        return loss + 0.01 * experts * jnp.sum(balance)

    params = {
        **model_params(False),
        "router": normal(50, WIDTH, experts),
        "up": normal(51, experts, WIDTH, 64),
        "down": normal(52, experts, 64, WIDTH),
    }
    del params["layers"], params["norm"]
    return supervised(loss_fn, params, TOKENS)
