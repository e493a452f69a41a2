# mypy: disallow-untyped-defs=False
"""Dynamic loss scaling: a step whose gradients are not finite is skipped and the scale halved.

The second batch holds an infinity, so that both outcomes happen in three steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.training import dynamic_scale, train_state

from . import data, mlp
from .case import Case
from .optimizers import BY_NAME, adam


def _batches():
    batches = []
    for i in range(data.STEPS):
        x = data.vectors(i, mlp.SIZES[0])
        if i == 1:
            x[5, 3] = np.inf
        batches.append(((x, data.classes(i)),))
    return batches


class ScaledState(train_state.TrainState):
    """A state with Flax's `DynamicScale`."""

    dynamic_scale: Any = struct.field(pytree_node=True)


def build_where() -> Case:
    """Flax's `DynamicScale`; the update is selected with `jnp.where`, as in Flax's examples."""

    def train_step(state, batch):
        def loss_fn(params):
            return mlp.loss_fn(params, *batch)

        gradient = state.dynamic_scale.value_and_grad(loss_fn)
        scale, is_finite, loss, grads = gradient(state.params)
        new_state = state.apply_gradients(grads=grads)

        def select(new, old):
            return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)

        new_state = new_state.replace(
            opt_state=select(new_state.opt_state, state.opt_state),
            params=select(new_state.params, state.params),
            dynamic_scale=scale,
        )
        return new_state, {"loss": loss, "finite": is_finite, "scale": scale.scale}

    state = ScaledState.create(
        apply_fn=mlp.apply,
        params=mlp.init(jax.random.key(0)),
        tx=adam(),
        dynamic_scale=dynamic_scale.DynamicScale(growth_interval=2, scale=1024.0),
    )
    return Case(train_step, state, _batches())


def build_cond(optimizer: str = "momentum") -> Case:
    """A hand-written scale; the update is a branch of `jax.lax.cond`."""
    transformation = BY_NAME[optimizer]()

    def train_step(state, batch):
        scale = state["scale"]

        def loss_fn(params):
            loss = mlp.loss_fn(params, *batch)
            return loss * scale, loss

        (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.array(True)
        for g in jax.tree.leaves(grads):
            finite &= jnp.isfinite(g).all()

        def update(state):
            updates, opt_state = transformation.update(grads, state["opt_state"], state["params"])
            return {
                "params": optax.apply_updates(state["params"], updates),
                "opt_state": opt_state,
                "scale": scale * 2,
                "skipped": state["skipped"],
            }

        def skip(state):
            return {**state, "scale": scale / 2, "skipped": state["skipped"] + 1}

        return jax.lax.cond(finite, update, skip, state), {"loss": loss, "finite": finite}

    params = mlp.init(jax.random.key(1))
    state = {
        "params": params,
        "opt_state": jax.jit(transformation.init)(params),
        "scale": jnp.float32(256),
        "skipped": jnp.int32(0),
    }
    return Case(train_step, state, _batches())
