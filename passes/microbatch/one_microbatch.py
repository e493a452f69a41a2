"""The loop of a step in one microbatch: what pipelines cut where the batch cannot be split.

What touches rows of the batch, and what leads from them back to rows, is one pass through the
loop; what only follows from its results (the optimizer) comes after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from autopar.passes.graph import graph as graphs
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Graph, batch_sizes, variables
from autopar.passes.graph.microbatched import LoopPhase, Microbatched, in_phases
from autopar.passes.microbatch.batch_states import WHOLE
from autopar.passes.microbatch.equations import Context
from autopar.passes.microbatch.liveness import whole_step
from autopar.passes.microbatch.loop_body import LoopBody, scan_of
from autopar.passes.microbatch.new_program import NewProgram
from autopar.passes.microbatch.propagate import Forward, forward, input_states
from autopar.passes.primitives.factor_rule import FactorRule

_LITTLE = 64  # elements; what is made of so few is made again wherever it is read


def in_one_microbatch(graph: Graph, rules: Mapping[JaxprEqn, FactorRule]) -> Microbatched:
    """The step with a loop that runs once, over the whole batch."""
    context = Context(rules, 1, tuple(sorted(batch_sizes(graph), reverse=True)))
    found = forward(graph.jaxpr, input_states(graph, 1), context)
    eqns = graph.jaxpr.eqns
    inside = _in_loop(graph, found)
    inside |= _made_for_loop(graph, inside)
    loop = [eqn for index, eqn in enumerate(eqns) if index in inside]
    needed_inside = graphs.made_from(eqns, [v for eqn in loop for v in eqn.invars]) - inside
    made = {var for eqn in loop for var in eqn.outvars}
    rows = [
        var
        for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True)
        if label.batch_axis is not None
    ]
    read = dict.fromkeys(v for eqn in loop for v in variables(eqn.invars))
    operands = [var for var in read if var not in made]
    after = [e for i, e in enumerate(eqns) if i not in inside and i not in needed_inside]
    wanted = {*variables(graph.jaxpr.outvars), *(v for e in after for v in variables(e.invars))}
    results = [var for eqn in loop for var in eqn.outvars if var in wanted]
    summed = [_is_sum(var, found) for var in results]

    def evaluate(*values: Any) -> list[Any]:
        known = dict(zip(operands, values, strict=True))
        sums = [var for var, flag in zip(results, summed, strict=True) if flag]
        start = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in sums]
        sliced = [var for var in operands if var in rows]
        stacks = [jnp.expand_dims(known[var], 0) for var in sliced]
        body = LoopBody(1, {}, {var: jax.typeof(value) for var, value in known.items()})
        inner = [body.give(var, WHOLE, stack) for var, stack in zip(sliced, stacks, strict=True)]
        for eqn in loop:
            body.run(whole_step(eqn))
        carries = [jax_compat.new_var(jax.typeof(value)) for value in start]
        totals = [
            body.combined("sum", carry, var, WHOLE)
            for carry, var in zip(carries, sums, strict=True)
        ]
        others = [
            body.read(var, WHOLE) for var, flag in zip(results, summed, strict=True) if not flag
        ]
        closed = body.closed([*carries, *inner], [*totals, *others])
        outer = [known[x] if isinstance(x, Var) else x for x, _ in body.outer]
        found = scan_of(closed, outer, start, stacks, 1)
        added, kept = iter(found[: len(start)]), iter(found[len(start) :])
        return [next(added) if flag else lax.squeeze(next(kept), (0,)) for flag in summed]

    program = NewProgram()
    for index in sorted(needed_inside):
        program.take(eqns[index])
    new = program.trace(evaluate, operands, results)
    for eqn in after:
        program.take(eqn)
    jaxpr = graph.jaxpr.replace(
        eqns=program.eqns, outvars=[program.read(atom) for atom in graph.jaxpr.outvars]
    )
    scans = [LoopPhase(eqn) for eqn in new if eqn.primitive.name == "scan"]
    return in_phases(graphs.with_jaxpr(graph, graphs.eliminate_dead_code(jaxpr)), scans)


def _in_loop(graph: Graph, found: Forward) -> set[int]:
    """Equations that touch rows of the batch, and those through which rows lead to such."""
    eqns = graph.jaxpr.eqns
    inside = {
        index
        for index, eqn in enumerate(eqns)
        if any(found.states[var].wide for var in (*variables(eqn.invars), *eqn.outvars))
    }
    follows = {var for index in inside for var in eqns[index].outvars}
    for eqn in eqns:
        if not follows.isdisjoint(variables(eqn.invars)):
            follows.update(eqn.outvars)
    wanted: set[Var] = set()
    for index in reversed(range(len(eqns))):
        eqn = eqns[index]
        if index in inside or (
            not wanted.isdisjoint(eqn.outvars) and not follows.isdisjoint(eqn.outvars)
        ):
            inside.add(index)
            wanted.update(variables(eqn.invars))
    return inside


def _made_for_loop(graph: Graph, inside: set[int]) -> set[int]:
    """Equations that make much of little (random bits, masks) for the loop alone."""
    eqns, made = graph.jaxpr.eqns, set[int]()
    little = {var for var in graph.jaxpr.invars if math.prod(var.aval.shape) <= _LITTLE}
    for index, eqn in enumerate(eqns):
        if index not in inside and not eqn.effects and little.issuperset(variables(eqn.invars)):
            little.update(eqn.outvars)
            if any(math.prod(var.aval.shape) > _LITTLE for var in eqn.outvars):
                made.add(index)
    readers, results = graphs.readers_of(eqns), set(variables(graph.jaxpr.outvars))
    for index in sorted(made, reverse=True):
        read = [i for var in eqns[index].outvars for i in readers.get(var, ())]
        leaves = not results.isdisjoint(eqns[index].outvars)
        if leaves or not read or not all(i in inside or i in made for i in read):
            made.discard(index)
    return made


def _is_sum(var: Var, found: Forward) -> bool:
    """Whether a value leaves the loop as a sum would: it has no rows of the batch."""
    return not found.states[var].wide and jnp.issubdtype(var.aval.dtype, jnp.floating)
