"""Train steps of other kinds than the registry's: dropout, noise, recurrence, graphs.

Their sizes are usual ones. They take part where planned and compiled memory are compared
(`benchmarks/compilers.py`), not in the tables of published systems.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training.train_state import TrainState

from models import bert, delta, graph_network, lstm, unet, vit
from models.registry import TrainStep

DTYPE = jnp.bfloat16


class KeyedState(TrainState):
    """A state with the key of what is drawn."""

    key: jax.Array = struct.field()


def build_other(name: str, batch: int, remat: bool | str, layers: int | None) -> TrainStep:
    """The train step of a family and size, as `registry.build` gives those of others.

    Args:
      name: one of `OTHERS`.
      batch: sequences, images or graphs of a step.
      remat: whether every block's backward pass computes its forward pass again; "dots": all but
        its products.
      layers: instead of the model's own number.
    """
    family, _, key = name.partition("-")
    sizes, made = _FAMILIES[family]
    size = sizes[key]
    if layers is not None and family not in ("unet", "lstm"):
        size = dataclasses.replace(size, layers=layers)
    return made(size, batch, remat)


def _trained(module: Any, loss: Callable[..., Any], batch: Any, has_key: bool) -> TrainStep:
    """The step of a module whose loss is a function of the bound module, the batch and a key."""

    def init(key: jax.Array) -> KeyedState:
        zeros = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), batch)
        bound: dict[str, Any] = {}

        def run(self: Any, batch: Any) -> jax.Array:
            found: jax.Array = loss(self, batch, key)
            return found

        bound = module.init({"params": key, "dropout": key}, zeros, method=run)
        return KeyedState.create(
            apply_fn=module.apply, params=bound["params"], tx=optax.adamw(1e-4), key=key
        )

    def step(state: KeyedState, batch: Any) -> tuple[KeyedState, dict[str, jax.Array]]:
        own, following = jax.random.split(state.key) if has_key else (state.key, state.key)

        def loss_fn(params: Any) -> jax.Array:
            def run(self: Any, batch: Any) -> jax.Array:
                found: jax.Array = loss(self, batch, own)
                return found

            rngs = {"dropout": own} if has_key else {}
            found: jax.Array = state.apply_fn({"params": params}, batch, method=run, rngs=rngs)
            return found

        value, gradients = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=gradients, key=following), {"loss": value}

    count = jax.tree.leaves(batch)[0].shape[0]
    return TrainStep(step, jax.eval_shape(init, jax.random.key(0)), batch, count)


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def _bert(size: bert.BertSize, count: int, remat: bool | str) -> TrainStep:
    tokens = jax.ShapeDtypeStruct((count, size.sequence), jnp.int32)
    flags = jax.ShapeDtypeStruct(tokens.shape, jnp.bool_)
    batch = {"tokens": tokens, "targets": tokens, "is_token": flags, "is_masked": flags}

    def loss(self: Any, batch: Any, key: jax.Array) -> jax.Array:
        losses = _cross_entropy(self(batch["tokens"], batch["is_token"]), batch["targets"])
        weights = batch["is_masked"].astype(jnp.float32)
        return (losses * weights).sum() / weights.sum()

    return _trained(bert.Bert(size, DTYPE, remat), loss, batch, has_key=True)


def _vit(size: vit.ViTSize, count: int, remat: bool | str) -> TrainStep:
    images = jax.ShapeDtypeStruct((count, size.pixels, size.pixels, 3), jnp.float32)
    batch = {"images": images, "targets": jax.ShapeDtypeStruct((count,), jnp.int32)}

    def loss(self: Any, batch: Any, key: jax.Array) -> jax.Array:
        return _cross_entropy(self(batch["images"]), batch["targets"]).mean()

    return _trained(vit.ViT(size, DTYPE, remat), loss, batch, has_key=False)


def _unet(size: unet.UNetSize, count: int, remat: bool | str) -> TrainStep:
    images = jax.ShapeDtypeStruct((count, size.pixels, size.pixels, 3), jnp.float32)

    def loss(self: Any, batch: Any, key: jax.Array) -> jax.Array:
        images = batch["images"]
        one, other = jax.random.split(key)
        times = jax.random.uniform(one, images.shape[:1])
        noise = jax.random.normal(other, images.shape)
        share = times[:, None, None, None]
        found = self(jnp.sqrt(1 - share) * images + jnp.sqrt(share) * noise, 1000 * times)
        return jnp.mean((found.astype(jnp.float32) - noise) ** 2)

    return _trained(unet.UNet(size, DTYPE, remat), loss, {"images": images}, has_key=True)


def _lstm(size: lstm.LSTMSize, count: int, remat: bool | str) -> TrainStep:
    return _of_tokens(lstm.LSTM(size, DTYPE, remat), count, size.sequence)


def _delta(size: delta.DeltaSize, count: int, remat: bool | str) -> TrainStep:
    return _of_tokens(delta.DeltaDecoder(size, DTYPE, remat), count, size.sequence)


def _of_tokens(module: Any, count: int, sequence: int) -> TrainStep:
    """A language model's step."""
    tokens = jax.ShapeDtypeStruct((count, sequence), jnp.int32)

    def loss(self: Any, batch: Any, key: jax.Array) -> jax.Array:
        return _cross_entropy(self(batch["tokens"]), batch["targets"]).mean()

    batch = {"tokens": tokens, "targets": tokens}
    return _trained(module, loss, batch, has_key=False)


def _graphs(size: graph_network.GraphSize, count: int, remat: bool | str) -> TrainStep:
    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *shape), jnp.float32)

    batch = {
        "nodes": floats(size.nodes, size.features),
        "edges": floats(size.edges, size.features),
        "ends": jax.ShapeDtypeStruct((count, 2, size.edges), jnp.int32),
        "targets": floats(size.nodes, 3),
    }

    def loss(self: Any, batch: Any, key: jax.Array) -> jax.Array:
        found = self(batch["nodes"], batch["edges"], batch["ends"])
        return jnp.mean((found.astype(jnp.float32) - batch["targets"]) ** 2)

    return _trained(_vmapped(size, remat), loss, batch, has_key=False)


def _vmapped(size: graph_network.GraphSize, remat: bool | str) -> Any:
    import flax.linen as nn

    made = nn.vmap(
        graph_network.GraphNetwork,
        variable_axes={"params": None},
        split_rngs={"params": False},
    )
    return made(size, DTYPE, remat)


_FAMILIES: dict[str, tuple[dict[str, Any], Callable[..., TrainStep]]] = {
    "bert": (bert.SIZES, _bert),
    "vit": (vit.SIZES, _vit),
    "unet": (unet.SIZES, _unet),
    "lstm": (lstm.SIZES, _lstm),
    "delta": (delta.SIZES, _delta),
    "graph": (graph_network.SIZES, _graphs),
}
OTHERS = tuple(f"{family}-{key}" for family, (sizes, _) in _FAMILIES.items() for key in sizes)
