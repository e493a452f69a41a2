"""A run of the small step: batches by number, losses, and a state at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from on_actors.small_step import BATCH, init

import autopar


def batch(number: int) -> dict[str, np.ndarray]:
    """Another one for every step; the caller may overwrite it."""
    return {name: value * np.float32(1 + number % 7) for name, value in BATCH.items()}


def train(
    step: Any,
    steps: int,
    state: Any = None,
    first: int = 0,
    after: Callable[[int, Any], None] = lambda number, state: None,
    batches: Iterable[Any] | None = None,
) -> tuple[list[float], Any]:
    """Losses and the last state of steps `first` to `steps`, on the host.

    Args:
      step: the train step.
      steps: after the last one.
      state: to begin with; None: a new one.
      first: the number of the first.
      after: called after each with its number and the state.
      batches: of the steps; None: those of `batch`, in memory that is used again.
    """
    state = init() if state is None else state
    losses = []
    for number, rows in enumerate(_again(first, steps) if batches is None else batches, first):
        state, loss = step(state, rows)
        losses.append(loss)
        after(number, state)
    return [float(loss) for loss in losses], jax.device_get(state)


def _again(first: int, steps: int) -> Iterator[dict[str, np.ndarray]]:
    rows = batch(0)
    for number in range(first, steps):
        for name, value in batch(number).items():
            rows[name][...] = value
        yield rows


def assert_same(left: tuple[list[float], Any], right: tuple[list[float], Any]) -> None:
    """The same numbers, bit for bit."""
    assert left[0] == right[0]
    jax.tree.map(np.testing.assert_array_equal, left[1], right[1])


def train_with_checkpoints(step: Any, folder: str, steps: int, every: int) -> dict[int, float]:
    """Train from the last checkpoint, or from the start; the losses of all steps by number."""
    losses: dict[int, float] = {}
    state, first = init(), 0
    with autopar.Checkpoints(folder, keep=2) as checkpoints:
        if checkpoints.latest is not None:
            shapes = jax.eval_shape(init)
            first, state, found = checkpoints.restore(shapes)
            losses = {int(number): loss for number, loss in found.items()}
        for number in range(first, steps):
            state, loss = step(state, batch(number))
            losses[number] = float(loss)
            if (number + 1) % every == 0:
                checkpoints.save(number + 1, state, extra=losses)
                print("saved", number + 1, flush=True)
    return losses
