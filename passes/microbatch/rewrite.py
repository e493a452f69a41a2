"""Build the split program: prologue, one scan over the microbatches, epilogue.

Equations before and after the loop are taken over as they are. The loop is written as a Python
function that evaluates its steps, and traced; so the result is an ordinary flat graph with the same
inputs and outputs.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from autopar.passes.graph import graph as graphs
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom, Graph
from autopar.passes.graph.microbatched import LoopPhase, Microbatched, in_phases
from autopar.passes.microbatch.batch_states import WHOLE, Form, Place
from autopar.passes.microbatch.liveness import ABSENT, PhaseStep
from autopar.passes.microbatch.phases import Phases
from autopar.passes.microbatch.run_steps import Env, combine, identity, local_struct, run


def rewrite(graph: Graph, phases: Phases, num_microbatches: int) -> Microbatched:
    """The program that evaluates `phases` with one scan over the microbatches."""
    program = _NewProgram(phases.same)
    for step in phases.prologue:
        program.add(step)
    made = program.trace(
        lambda *values: _loop(phases, _wholes(needed, values, phases.same), num_microbatches),
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


class _NewProgram:
    """The equations of the new program, on the old one's variables."""

    def __init__(self, same: Mapping[Var, Var]) -> None:
        self.same = same
        self.eqns: list[JaxprEqn] = []
        self.renamed: dict[Var, Atom] = {}

    def read(self, atom: Atom) -> Atom:
        return graphs.read_atom(self.renamed, graphs.read_atom(self.same, atom))

    def add(self, step: PhaseStep) -> None:
        """One step outside of the loop."""
        eqn = step.eqn
        if step.bodies or ABSENT in step.operand_forms:
            operands = list(dict.fromkeys(var for var, _ in step.reads))
            kept = [var for var, _ in step.makes]

            def evaluate(*values: Any) -> list[Any]:
                env = _wholes(operands, values)
                run([step], env)
                return [env.read(var, WHOLE) for var in kept]

            self.trace(evaluate, operands, kept)
            return
        if ABSENT in step.result_forms:  # another phase gives these results
            kept = [var for var, _ in step.makes]
            outvars = [v if v in kept else jax_compat.new_var(v.aval) for v in eqn.outvars]
            eqn = eqn.replace(outvars=outvars)
        if any(self.read(atom) is not atom for atom in eqn.invars):
            eqn = eqn.replace(invars=[self.read(atom) for atom in eqn.invars])
        self.eqns.append(eqn)

    def trace(
        self, function: Callable[..., list[Any]], operands: Sequence[Var], results: Sequence[Var]
    ) -> list[JaxprEqn]:
        """Append the equations of a function that computes `results` from `operands`."""
        closed = graphs.flatten(jax.make_jaxpr(function)(*(local_struct(v.aval) for v in operands)))
        flat = closed.jaxpr
        # Slicing an equation may bring a few numbers with it; the program has no new inputs.
        for var, value in zip(flat.constvars, closed.consts, strict=True):
            self.trace(functools.partial(_spelled_out, value), [], [var])
        names: dict[Var, Atom] = {
            inner: self.read(outer) for inner, outer in zip(flat.invars, operands, strict=True)
        }
        made = {var for eqn in flat.eqns for var in eqn.outvars}
        for inner, outer in zip(flat.outvars, results, strict=True):
            if inner in made and inner not in names:
                names[inner] = outer
            else:
                self.renamed[outer] = graphs.read_atom(names, inner)

        def named(atoms: Sequence[Atom]) -> list[Atom]:
            return [graphs.read_atom(names, atom) for atom in atoms]

        new = [e.replace(invars=named(e.invars), outvars=named(e.outvars)) for e in flat.eqns]
        self.eqns += new
        return new


def _spelled_out(value: Any) -> list[Any]:
    """A small array from literals."""
    assert value.size <= 64, f"the split program holds an array of shape {value.shape}"
    items = [lax.full((1,), item, value.dtype) for item in np.asarray(value).ravel()]
    return [lax.reshape(lax.concatenate(items, 0), value.shape)]


def _wholes(
    variables: Sequence[Var], values: Sequence[Any], same: Mapping[Var, Var] | None = None
) -> Env:
    wholes = {(var, WHOLE): value for var, value in zip(variables, values, strict=True)}
    return Env(wholes, same=same or {})


def _read_whole(phases: Phases) -> list[Var]:
    """The variables whose whole values the loop reads, to use or to slice them."""
    made: set[tuple[Var, Form]] = {*phases.sliced}.union(*(step.makes for step in phases.loop))
    read = [pair for step in phases.loop for pair in step.reads if pair not in made]
    return list(dict.fromkeys(phases.same.get(var, var) for var, _ in (*phases.sliced, *read)))


def _loop(phases: Phases, env: Env, parts: int) -> list[Any]:
    """Run the loop, and return what leaves it as whole values."""
    sliced = [microbatches(env.read(var, WHOLE), place, parts) for var, place in phases.sliced]
    start = [_accumulator(monoid, var) for var, monoid in phases.accumulated]

    def body(carry: list[Any], xs: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        index, rows = xs
        # It writes values of its own.
        local = Env(ChainMap({}, env.values), parts, index, phases.same)
        local.values.update(zip(phases.sliced, rows, strict=True))
        run(phases.loop, local)
        carry = [
            combine(monoid, total, _as(local.read(var, monoid), total.dtype))
            for total, (var, monoid) in zip(carry, phases.accumulated, strict=True)
        ]
        return carry, [local.read(var, place) for var, place in phases.collected]

    if not phases.loop:
        return []
    totals, stacked = lax.scan(body, start, (lax.iota(np.int32, parts), sliced), length=parts)
    return [
        *(
            jax_compat.with_type_of(total, var.aval)
            for (var, _), total in zip(phases.accumulated, totals, strict=True)
        ),
        *(
            jax_compat.with_type_of(collect(rows, place, var.aval.shape), var.aval)
            for (var, place), rows in zip(phases.collected, stacked, strict=True)
        ),
    ]


def _as(value: jax.Array, dtype: np.dtype) -> jax.Array:
    return value if value.dtype == dtype else lax.convert_element_type(value, dtype)


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
