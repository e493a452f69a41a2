"""The models and train steps of the published rows, and what a row is.

Decoders as the authors of the rows describe them: GPTs with learned positions and tied embeddings,
and Llamas. Two kinds of mixed precision: parameters in 16 bits, of which the optimizer keeps a
float32 copy (Alpa, Megatron-LM), or parameters in float32 that are cast where they are read (FSDP).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from models.llama import LlamaSize
from models.llama3 import Llama3


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder.

    `attention` is "written" (products and a softmax), "recomputed" (that, computed again by the
    backward pass: Korthikanti et al.'s selective recomputation) or "cudnn" (a flash kernel);
    `recomputed` has the backward pass compute whole blocks again. A Llama has `inner` features in
    its feed-forward network, and `key_heads`.
    """

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int = 1024
    dtype: str = "float16"
    attention: str = "written"
    recomputed: bool = True
    copied: bool = True
    inner: int = 0
    key_heads: int = 0


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured step.

    `mesh` is the logical mesh of each of `stages` equal stages; `microbatches` are of the whole
    batch. `cluster` is `cluster_of`'s; `overlap` is the cluster's (`autopar.Cluster`).
    """

    name: str
    source: str
    cluster: str
    model: Decoder
    batch: int
    microbatches: int
    method: str
    mesh: tuple[int, ...]
    stages: int
    seconds: float
    chunks: int = 1
    overlap: float = 0.0


class Block(nn.Module):
    """A transformer block; heads are the outer part of the projection's features."""

    model: Decoder

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        model = self.model
        width, dtype = x.shape[-1], model.dtype
        stored = dtype if model.copied else "float32"
        dense = lambda size: nn.Dense(size, dtype=dtype, param_dtype=stored)  # noqa: E731
        norm = lambda: nn.LayerNorm(dtype=dtype, param_dtype=stored)  # noqa: E731
        qkv = dense(3 * width)(norm()(x))
        q, k, v = jnp.split(qkv.reshape(*qkv.shape[:-1], model.heads, -1), 3, axis=-1)
        y = _ATTENTIONS[model.attention](q, k, v).reshape(x.shape)
        x = x + dense(width)(y)
        return x + dense(width)(nn.gelu(dense(4 * width)(norm()(x))))


def _written(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    sequence = q.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    mask = jnp.tril(jnp.ones((sequence, sequence), bool))
    scores = jnp.where(mask, scores.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


_ATTENTIONS = {"written": _written, "recomputed": jax.checkpoint(_written), "cudnn": _cudnn}


class PublishedGPT(nn.Module):
    """A decoder with learned positions and tied embeddings."""

    model: Decoder

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        model = self.model
        stored = model.dtype if model.copied else "float32"
        embed = nn.Embed(model.vocabulary, model.hidden, model.dtype, stored)
        places = nn.Embed(model.sequence, model.hidden, model.dtype, stored)
        x = embed(tokens) + places(jnp.arange(tokens.shape[-1]))
        block = nn.remat(Block) if model.recomputed else Block
        if model.attention == "recomputed":  # a block stays one part of the program to cut at
            block = nn.remat(Block, policy=jax.checkpoint_policies.everything_saveable)
        for _ in range(model.layers):
            x = block(model)(x)
        return embed.attend(nn.LayerNorm(dtype=model.dtype, param_dtype=stored)(x))


def module_of(model: Decoder) -> nn.Module:
    """The Flax module of a decoder; a Llama is one scan over its blocks."""
    if not model.inner:
        return PublishedGPT(model)
    size = LlamaSize(
        model.hidden, model.inner, model.layers, model.heads, model.key_heads, model.sequence,
        model.vocabulary,
    )  # fmt: skip
    kind = "cudnn" if model.attention == "cudnn" else "xla"
    return Llama3(size, model.dtype, remat=model.recomputed, attention=kind)


def train_step(row: Row) -> tuple[Any, Any, Any]:
    """The step and the shapes of its state and batch."""
    decoder = row.model
    model, optimizer = module_of(decoder), optax.adamw(1e-4)

    def loss_of(parameters: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": parameters}, batch["x"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def copied_step(state: Any, batch: Any) -> Any:
        parameters, master, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        updates, moments = optimizer.update(gradients, moments, master)
        master = optax.apply_updates(master, updates)
        return (jax.tree.map(lambda p: p.astype(decoder.dtype), master), master, moments), loss

    def cast_step(state: Any, batch: Any) -> Any:
        parameters, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), loss

    tokens = jnp.zeros((1, decoder.sequence), jnp.int32)
    shaped = model
    if decoder.attention == "cudnn":  # which JAX does not find here
        shaped = module_of(dataclasses.replace(decoder, attention="written"))
    parameters = jax.eval_shape(lambda: shaped.init(jax.random.key(0), tokens))["params"]
    wide = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), parameters)
    moments = jax.eval_shape(optimizer.init, wide)
    batch = jax.ShapeDtypeStruct((row.batch, decoder.sequence), jnp.int32)
    if decoder.copied:
        return copied_step, (parameters, wide, moments), {"x": batch, "y": batch}
    return cast_step, (wide, moments), {"x": batch, "y": batch}
