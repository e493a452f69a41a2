"""Buffers that are filled with a number before something writes into them part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.passes.graph.scans import ScanParts
from autopar.passes.graph.tested_loops import GOES_ON
from autopar.passes.sharding.layout import local_shape
from autopar.passes.sharding.spmd_program import Loop


def stacks_of(loop: Loop, mesh: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
    """What a device has of the stacks that a loop makes."""
    _, stacks = ScanParts.of(loop.eqn).results(loop.results)
    avals = [(v.atom.aval, v.layout) for v in stacks]
    return [
        jax.ShapeDtypeStruct(local_shape(aval.shape, layout, mesh), aval.dtype)
        for aval, layout in avals
    ]


def filled(like: Sequence[jax.Array | jax.ShapeDtypeStruct], after: Any) -> tuple[list[Any], Any]:
    """Buffers once another array is there: like arrays of one number each, or of zeros.

    Args:
      like: such an array; of zeros, what a device has.
      after: what they wait for.

    Returns:
      The buffers; and what they wait for, which is read as it is returned.
    """
    numbers = [
        jnp.zeros((), x.dtype)
        if isinstance(x, jax.ShapeDtypeStruct)
        else lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
        for x in like
    ]
    numbers, after = lax.optimization_barrier((numbers, after))
    return [*map(lax.broadcast, numbers, (x.shape for x in like))], after


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
