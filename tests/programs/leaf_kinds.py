# mypy: disallow-untyped-defs=False
"""States with leaves that are not float arrays: Python numbers, integers, booleans."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.training import train_state

from . import data, mlp
from .case import Case
from .optimizers import adam


class State(train_state.TrainState):
    """Flax's own `step` starts as a Python int and comes back as an array."""

    counts: jax.Array
    frozen: list
    improving: bool
    best: float


def build() -> Case:
    """Integer statistics of the batch, boolean masks, and Python numbers in the state."""

    def train_step(state, batch):
        x, y = batch
        loss, grads = jax.value_and_grad(mlp.loss_fn)(state.params, x, y)
        grads = jax.tree.map(lambda g, f: jnp.where(f, 0.0, g), grads, state.frozen)
        counts = state.counts.at[y].add(1)
        new_state = state.apply_gradients(
            grads=grads, counts=counts, improving=loss < state.best, best=loss
        )
        return new_state, {"loss": loss, "step": state.step, "seen": jnp.sum(counts)}

    params = mlp.init(jax.random.key(0))
    frozen = [{"w": np.arange(p["w"].shape[1]) % 3 == 0, "b": np.bool_(True)} for p in params]
    state = State.create(
        apply_fn=mlp.apply,
        params=params,
        tx=adam(),
        counts=jnp.zeros(10, jnp.int32),
        frozen=frozen,
        improving=False,
        best=10.0,
    )
    batches = [((data.vectors(i), data.classes(i)),) for i in range(data.STEPS)]
    return Case(train_step, state, batches)
