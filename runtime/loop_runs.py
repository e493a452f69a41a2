"""How a device runs a loop: a scan, one into buffers that are there, or as long as it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from autopar.passes.graph.tested_loops import GOES_ON


def run_loop(
    params: Mapping[str, Any],
    body: Callable[[Any, Any], tuple[Any, Sequence[Any]]],
    init: Any,
    xs: Any,
    stacks: Sequence[Any] | None,
) -> tuple[Any, Sequence[Any]]:
    """What a loop carries at last, and its stacks: a scan, or as long as what it carries says.

    Args:
      params: of the loop's equation; a `while` has `GOES_ON`.
      body: as of `jax.lax.scan`.
      init: the carry in the first trip.
      xs: arrays `[length, ...]` of which each trip has its slices.
      stacks: what the loop's results are written into; None: it makes them.
    """
    if GOES_ON in params:
        place = params[GOES_ON]
        nothing = jax.tree.map(lambda _: None, xs)
        last = lax.while_loop(lambda carry: carry[place], lambda x: body(x, nothing)[0], init)
        return last, ()
    if stacks is not None:
        return scan_into(stacks, body, init, xs, params["length"], params["reverse"])
    asked = {name: params[name] for name in ("length", "reverse", "unroll")}
    carried, made = lax.scan(body, init, xs, **asked)
    return carried, made


def scan_into(
    stacks: Sequence[Any],
    body: Callable[[Any, Any], tuple[Any, Sequence[Any]]],
    init: Any,
    xs: Any,
    length: int,
    reverse: bool,
) -> tuple[Any, list[Any]]:
    """What `jax.lax.scan` makes, of stacks that are there: the same loop, trip by trip.

    Args:
      stacks: `[length, ...]`, what each trip returns beside the carry is written into.
      body: as of `jax.lax.scan`.
      init: the carry in the first trip.
      xs: arrays `[length, ...]` of which each trip has its slices.
      length: the number of trips.
      reverse: whether the last slices come first.
    """

    def trip(state: tuple[Any, Any, list[Any]]) -> tuple[Any, Any, list[Any]]:
        number, carry, written = state
        place = length - number - 1 if reverse else number
        slices = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(
                x, place, keepdims=False, allow_negative_indices=False
            ),
            xs,
        )
        carry, made = body(carry, slices)
        written = [
            lax.dynamic_update_index_in_dim(stack, y, place, 0, allow_negative_indices=False)
            for stack, y in zip(written, made, strict=True)
        ]
        return number + 1, carry, written

    state = 0, init, [*stacks]
    _, carry, written = lax.while_loop(lambda state: state[0] < length, trip, state)
    return carry, written
