"""Every model by name, with its train step and the shapes of its arguments."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import autopar
from models import deepseek, gpt, llama, llama3, moe, sparse, wide_resnet

LOSS_SCALE = 2.0**12  # for float16, whose small gradients would vanish


@dataclass(frozen=True)
class Entry:
    """A model: its size, its module for a size, dtype and remat, and its usual batch.

    Args:
      size: a dataclass that has `layers`.
      module: makes the Flax module.
      batch: sequences (or images) of a step.
      clipped: whether gradients are clipped by their global norm.
    """

    size: Any
    module: Callable[..., Any]
    batch: int
    clipped: bool = False


class TrainStep(NamedTuple):
    """A train step, `step(state, batch)`, and the shapes of its arguments."""

    step: Callable[..., Any]
    state: Any
    batch: Any
    tokens_per_step: int  # of images: how many there are


TODAY = ("llama3", "mixtral", "qwen3")
"""Families in the form that their users have: one scan, cuDNN's attention, gradients clipped."""


def _entries() -> dict[str, Entry]:
    found = {}
    for family, sizes, module, batch in (
        ("gpt", gpt.SIZES, gpt.GPT, 1024),
        ("moe", moe.SIZES, moe.MoE, 1024),
        ("wide-resnet", wide_resnet.SIZES, wide_resnet.WideResNet, 1536),
        ("llama", llama.SIZES, llama.Llama, 512),
        ("llama-scanned", llama.SIZES, functools.partial(llama.Llama, scanned=True), 512),
        ("deepseek", deepseek.SIZES, deepseek.DeepSeek, 1024),
        ("llama3", llama3.SIZES, llama3.Llama3, 2048),
        ("mixtral", sparse.MIXTRAL, sparse.SparseDecoder, 1024),
        ("qwen3", sparse.QWEN3, sparse.SparseDecoder, 1024),
    ):
        clipped = family in TODAY
        entries = {key: Entry(size, module, batch, clipped) for key, size in sizes.items()}
        found.update({f"{family}-{key}": entry for key, entry in entries.items()})
    return found


ENTRIES = _entries()
NAMES = tuple(ENTRIES)


def build(
    name: str,
    dtype: Any = jnp.bfloat16,
    remat: bool | str = True,
    batch: int | None = None,
    layers: int | None = None,
    size: Any = None,
    **fields: Any,
) -> TrainStep:
    """The train step of a model: mixed precision, float32 parameters, AdamW.

    Args:
      name: one of `NAMES`.
      dtype: of activations and products.
      remat: whether every block's backward pass computes its forward pass again; "dots": all but
        its products.
      batch: sequences or images of a step, instead of the model's usual number.
      layers: instead of the model's own number.
      size: of the same family, instead of the model's own.
      fields: more of its module.

    >>> built = build("gpt-125M", layers=2)
    >>> built.batch["inputs"].shape, built.tokens_per_step
    ((1024, 1024), 1048576)
    """
    entry = ENTRIES[name]
    size, count = _with_layers(size or entry.size, layers), batch or entry.batch
    module = entry.module(size=size, dtype=dtype, remat=remat, **fields)
    shapes, tokens = _batch(size, count)
    optimizer = optax.adamw(1e-4)
    if entry.clipped:
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)

    def init(key: jax.Array) -> TrainState:
        example = jnp.zeros((1, *shapes["inputs"].shape[1:]), shapes["inputs"].dtype)
        params = module.init(key, example)["params"]
        return TrainState.create(apply_fn=module.apply, params=params, tx=optimizer)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        scale = LOSS_SCALE if dtype == jnp.float16 else 1.0

        def loss_fn(params: Any) -> jax.Array:
            found = state.apply_fn({"params": params}, batch["inputs"])
            logits, more = found if isinstance(found, tuple) else (found, 0.0)
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), batch["targets"]
            )
            return (losses.mean() + more) * scale

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        if scale != 1:
            loss, grads = jax.tree.map(lambda x: x / scale, (loss, grads))
        return state.apply_gradients(grads=grads), {"loss": loss}

    with autopar.tracing_for("h100"):  # attention by cuDNN, which need not be here
        return TrainStep(step, jax.eval_shape(init, jax.random.key(0)), shapes, tokens)


def num_parameters(name: str) -> int:
    """Of the whole model, from the shapes of shallow ones: all but the first blocks are alike."""

    def counted(layers: int | None) -> int:
        state = build(name, batch=8, layers=layers).state
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))

    layers = ENTRIES[name].size.layers
    if isinstance(ENTRIES[name].size, wide_resnet.WideResNetSize):
        return counted(None)
    two, four = counted(2), counted(4)
    return two + (four - two) * (layers - 2) // 2


def _with_layers(size: Any, layers: int | None) -> Any:
    return size if layers is None else dataclasses.replace(size, layers=layers)


def _batch(size: Any, count: int) -> tuple[dict[str, jax.ShapeDtypeStruct], int]:
    """The shapes of a batch, and the tokens (or images) in it."""
    if isinstance(size, wide_resnet.WideResNetSize):
        images = jax.ShapeDtypeStruct((count, size.pixels, size.pixels, 3), jnp.float32)
        return {"inputs": images, "targets": jax.ShapeDtypeStruct((count,), jnp.int32)}, count
    shape: tuple[int, ...] = (count, size.sequence)
    if isinstance(size, moe.MoESize):
        together = size.group // size.sequence
        shape = (count // together, together, size.sequence)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    return {"inputs": tokens, "targets": tokens}, math.prod(shape)
