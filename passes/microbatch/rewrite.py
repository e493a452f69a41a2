"""Build the split program: prologue, one scan over the microbatches, epilogue.

Equations before and after the loop are taken over as they are. The loop is written as a Python
function that evaluates its steps, and traced; so the result is an ordinary flat graph with the same
inputs and outputs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Var

from autopar.passes.graph import graph as graphs
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom, Graph
from autopar.passes.graph.microbatched import LoopPhase, Microbatched, in_phases
from autopar.passes.microbatch.batch_states import WHOLE, Form, Place
from autopar.passes.microbatch.loop_body import LoopBody, scan_of
from autopar.passes.microbatch.new_program import NewProgram, wholes
from autopar.passes.microbatch.phases import Phases
from autopar.passes.microbatch.run_steps import Env, identity


def rewrite(graph: Graph, phases: Phases, num_microbatches: int) -> Microbatched:
    """The program that evaluates `phases` with one scan over the microbatches."""
    program = NewProgram(phases.same)
    for step in phases.prologue:
        program.add(step)
    made = program.trace(
        lambda *values: _loop(phases, wholes(needed, values, phases.same), num_microbatches),
        needed := _read_whole(phases),
        [var for var, _ in (*phases.accumulated, *phases.collected)],
    )
    loops = [LoopPhase(eqn) for eqn in made if eqn.primitive.name == "scan"]  # one, or none
    for step in phases.epilogue:
        program.add(step)
    jaxpr = graph.jaxpr.replace(
        eqns=program.eqns, outvars=[program.read(atom) for atom in graph.jaxpr.outvars]
    )
    return in_phases(graphs.with_jaxpr(graph, graphs.eliminate_dead_code(jaxpr)), loops)


def _read_whole(phases: Phases) -> list[Var]:
    """The variables whose whole values the loop reads, to use or to slice them."""
    made: set[tuple[Var, Form]] = {*phases.sliced}.union(*(step.makes for step in phases.loop))
    read = [pair for step in phases.loop for pair in step.reads if pair not in made]
    return list(dict.fromkeys(phases.same.get(var, var) for var, _ in (*phases.sliced, *read)))


def _loop(phases: Phases, env: Env, parts: int) -> list[Any]:
    """Run the loop, and return what leaves it as whole values."""
    if not phases.loop:
        return []
    sliced = [microbatches(env.read(var, WHOLE), place, parts) for var, place in phases.sliced]
    start = [_accumulator(monoid, var) for var, monoid in phases.accumulated]
    types = {var: jax.typeof(value) for (var, form), value in env.values.items() if form is WHOLE}
    body = LoopBody(parts, phases.same, types)
    rows = [body.give(*pair, stack) for pair, stack in zip(phases.sliced, sliced, strict=True)]
    carries = [jax_compat.new_var(jax.typeof(value)) for value in start]
    totals: dict[tuple[Var, str], Atom] = dict(zip(phases.accumulated, carries, strict=True))
    left = dict.fromkeys(phases.accumulated)

    def add(made: tuple[Var, str]) -> None:
        del left[made]
        totals[made] = body.combined(made[1], totals[made], *made)

    for step in phases.loop:  # what is added up is added as soon as it is there
        body.run(step)
        for made in [made for made in step.makes if made in left]:
            add(made)
    for made in [*left]:
        add(made)
    collected = [body.read(var, place) for var, place in phases.collected]
    closed = body.closed([*carries, body.index, *rows], [*totals.values(), *collected])
    outer = [env.read(x, WHOLE) if isinstance(x, Var) else x for x, _ in body.outer]
    results = scan_of(closed, outer, start, [lax.iota(np.int32, parts), *sliced], parts)
    summed, stacked = results[: len(start)], results[len(start) :]
    return [
        *(
            jax_compat.with_type_of(total, var.aval)
            for (var, _), total in zip(phases.accumulated, summed, strict=True)
        ),
        *(
            jax_compat.with_type_of(collect(rows, place, var.aval.shape), var.aval)
            for (var, place), rows in zip(phases.collected, stacked, strict=True)
        ),
    ]


def _accumulator(monoid: str, var: Var) -> Any:
    """Sums are accumulated in at least 32 bits: rounding each partial sum would add up."""
    dtype = var.aval.dtype
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        dtype = np.dtype(np.float32)
    return identity(monoid, var.aval.shape, dtype)


def microbatches(value: jax.Array, place: Place, parts: int) -> jax.Array:
    """[.., major * parts * rest, ..] as [parts, .., major * rest, ..]: rows by microbatch."""
    (dim, major), shape = place, value.shape
    rest = shape[dim] // (major * parts)
    inner = (rest,) if rest > 1 else ()
    viewed = lax.reshape(value, (*shape[:dim], major, parts, *inner, *shape[dim + 1 :]))
    order = (dim + 1, *(k for k in range(len(viewed.shape)) if k != dim + 1))
    by_microbatch = (parts, *shape[:dim], major * rest, *shape[dim + 1 :])
    return lax.reshape(lax.transpose(viewed, order), by_microbatch)


def collect(stacked: jax.Array, place: Place, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `microbatches`."""
    dim, major = place
    parts = stacked.shape[0]
    rest = shape[dim] // (major * parts)
    inner = (rest,) if rest > 1 else ()
    viewed = lax.reshape(stacked, (parts, *shape[:dim], major, *inner, *shape[dim + 1 :]))
    order = (*range(1, dim + 2), 0, *range(dim + 2, len(viewed.shape)))
    return lax.reshape(lax.transpose(viewed, order), shape)
