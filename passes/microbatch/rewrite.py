"""Build the split program: prologue, one scan over the microbatches, epilogue.

The program is written as a Python function that evaluates the phases' steps, and traced again; so
the result is an ordinary flat graph with the same inputs and outputs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Var

from autopar.passes import graph as graphs
from autopar.passes import jax_compat
from autopar.passes.graph import Graph
from autopar.passes.microbatch.execute import Env, combine, identity, local_struct, run
from autopar.passes.microbatch.lattice import WHOLE, Place
from autopar.passes.microbatch.phases import Phases


def rewrite(graph: Graph, phases: Phases, num_microbatches: int) -> Graph:
    """The graph that evaluates `phases` with one scan over the microbatches."""
    jaxpr = graph.jaxpr

    def program(*inputs: Any) -> list[Any]:
        env = Env({(var, WHOLE): value for var, value in zip(jaxpr.invars, inputs, strict=True)})
        run(phases.prologue, env)
        _loop(phases, env, num_microbatches)
        run(phases.epilogue, env)
        return [env.read(atom, WHOLE) for atom in jaxpr.outvars]

    structs = [local_struct(var.aval, WHOLE, 1) for var in jaxpr.invars]
    closed = jax.make_jaxpr(program)(*structs)
    assert not closed.consts, "the split program holds arrays that are not inputs"
    flat = graphs.flatten(closed.jaxpr)
    for old, new in zip(jaxpr.outvars, flat.outvars, strict=True):
        assert (old.aval.shape, old.aval.dtype) == (new.aval.shape, new.aval.dtype), (old, new)
    flat = jax_compat.replace_jaxpr(flat, invars=flat.invars)
    return graphs.with_jaxpr(graph, flat)


def _loop(phases: Phases, env: Env, parts: int) -> None:
    """Run the loop, and write what leaves it into `env` as whole values."""
    sliced = [microbatches(env.read(var, WHOLE), place, parts) for var, place in phases.sliced]
    start = [_accumulator(monoid, var) for var, monoid in phases.accumulated]

    def body(carry: list[Any], xs: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        index, rows = xs
        local = env.inner(parts, index)
        for (var, place), value in zip(phases.sliced, rows, strict=True):
            local.write(var, place, value)
        run(phases.loop, local)
        carry = [
            combine(monoid, total, _as(local.read(var, monoid), total.dtype))
            for total, (var, monoid) in zip(carry, phases.accumulated, strict=True)
        ]
        return carry, [local.read(var, place) for var, place in phases.collected]

    totals, stacked = lax.scan(body, start, (lax.iota(np.int32, parts), sliced), length=parts)
    for (var, _), total in zip(phases.accumulated, totals, strict=True):
        env.write(var, WHOLE, _as(total, var.aval.dtype))
    for (var, place), rows in zip(phases.collected, stacked, strict=True):
        env.write(var, WHOLE, collect(rows, place, var.aval.shape))


def _as(value: Any, dtype: Any) -> Any:
    return value if value.dtype == dtype else lax.convert_element_type(value, dtype)


def _accumulator(monoid: str, var: Var) -> Any:
    """Sums are accumulated in at least 32 bits: rounding each partial sum would add up."""
    dtype = var.aval.dtype
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        dtype = np.dtype(np.float32)
    return identity(monoid, var.aval.shape, dtype)


def microbatches(value: Any, place: Place, parts: int) -> Any:
    """[.., major * parts * rest, ..] as [parts, .., major * rest, ..]: rows by microbatch."""
    (dim, major), shape = place, value.shape
    rest = shape[dim] // (major * parts)
    inner = (rest,) if rest > 1 else ()
    viewed = lax.reshape(value, (*shape[:dim], major, parts, *inner, *shape[dim + 1 :]))
    order = (dim + 1, *(k for k in range(len(viewed.shape)) if k != dim + 1))
    rows = lax.transpose(viewed, order)
    return (
        rows
        if rest == 1
        else _reshape(rows, (parts, *shape[:dim], major * rest, *shape[dim + 1 :]))
    )


def collect(stacked: Any, place: Place, shape: tuple[int, ...]) -> Any:
    """The inverse of `microbatches`."""
    dim, major = place
    parts = stacked.shape[0]
    rest = shape[dim] // (major * parts)
    inner = (rest,) if rest > 1 else ()
    viewed = _reshape(stacked, (parts, *shape[:dim], major, *inner, *shape[dim + 1 :]))
    order = (*range(1, dim + 2), 0, *range(dim + 2, len(viewed.shape)))
    return lax.reshape(lax.transpose(viewed, order), shape)


def _reshape(value: Any, shape: tuple[int, ...]) -> Any:
    return value if value.shape == shape else lax.reshape(value, shape)
