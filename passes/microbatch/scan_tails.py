"""What iterations of a scan make of sums over the batch, and no other waits for: after the scan.

Products in eight bits have scales that follow from the largest number of past steps, and layers
that are a scan give back what they saw in this one: `history.at[0].set(max(abs(x)))`. A scan over
layers that is evaluated microbatch by microbatch cannot: inside of it no maximum over the batch is
complete. So the scan gives the maxima, a stack of them, and what is made of each follows outside:
of all iterations at once, or in a scan without carries. The same equations see the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from autopar.passes.graph import graph as graphs
from autopar.passes.graph import jax_compat
from autopar.passes.graph.barriers import is_barrier, part_of_barrier
from autopar.passes.graph.graph import Atom, Graph, variables
from autopar.passes.graph.microbatched import LoopPhase, scan_like, stacked
from autopar.passes.graph.primitives import (
    ELEMENTWISE,
    MOVES,
    REDUCTIONS,
    RESHAPES,
    SCATTERS,
)
from autopar.passes.graph.scans import ScanParts
from autopar.passes.microbatch.batch_states import BatchState
from autopar.passes.microbatch.equations import Context
from autopar.passes.microbatch.new_program import NewProgram
from autopar.passes.microbatch.propagate import Forward, scan_bodies, shifted, transfer
from autopar.passes.primitives.populate import populate

_MANY_AT_ONCE = (ELEMENTWISE | RESHAPES | REDUCTIONS | MOVES | SCATTERS.keys()) - {
    "constrain", "device_put", "exchange", "name", "reduce", "tie", "to_host",
}  # fmt: skip
"""JAX maps these over a dimension, and each result is what it is alone."""


def with_tails_apart(graph: Graph, states: Sequence[BatchState], context: Context) -> Graph | None:
    """The same program in which scans give sums, of which the rest is made; None if there is none.

    Args:
      graph: the traced step.
      states: those of its inputs.
      context: what the analysis of its equations refers to.
    """
    made = _apart(graph.jaxpr, states, context)
    return None if made is None else graphs.with_jaxpr(graph, made)


def _apart(jaxpr: Jaxpr, states: Sequence[BatchState], context: Context) -> Jaxpr | None:
    if not _has_scans(jaxpr):
        return None
    program = NewProgram()
    known, is_other = Forward(jaxpr, dict(zip(jaxpr.invars, states, strict=True)), ()), False
    for eqn in jaxpr.eqns:
        given = [known.state(atom) for atom in eqn.invars]
        _, found = transfer(eqn, given, context)
        is_split = any(state.kind == "split" for state in given)
        parts = _in_two(eqn, given, context) if _is_scan(eqn) and is_split else None
        if parts is None:
            program.take(eqn)
        else:
            is_other, found = True, [*parts.states]
            program.take(parts.scan)
            program.trace(parts.tail, parts.read, parts.made)
        known.states.update(zip(eqn.outvars, found, strict=True))
    if not is_other:
        return None
    outvars = [program.read(atom) for atom in jaxpr.outvars]
    return graphs.eliminate_dead_code(
        jax_compat.replace_jaxpr(jaxpr, eqns=program.eqns, outvars=outvars)
    )


class _Parts(NamedTuple):
    """A scan without its tail, and a function that is its tail in all iterations at once.

    The function makes variables of the program of those that it reads. `states` are those of all
    results that the scan had.
    """

    scan: JaxprEqn
    tail: Callable[..., list[Any]]
    read: list[Var]
    made: list[Var]
    states: tuple[BatchState, ...]


def _in_two(eqn: JaxprEqn, given: Sequence[BatchState], context: Context) -> _Parts | None:
    """A scan in two parts; None if an iteration waits for what only the whole batch determines."""
    if eqn.effects:
        return None
    eqn, context = _apart_inside(eqn, given, context)
    bodies = scan_bodies(eqn, given, context)
    if bodies is None:
        return None
    (found,), loop = bodies.forwards, LoopPhase(eqn)
    carried = [item.result for item in loop.accumulators]
    asked = [(x, v) for x, v in loop.stacks if not isinstance(v, DropVar)]
    late = [(x, v) for x, v in asked if found.state(x).kind == "late"]
    if not late or any(found.state(x).kind == "late" for x in carried):
        return None
    tail = _tail(found, [x for x, _ in late])
    if tail is None or any(item.carry in tail.reads for item in loop.accumulators):
        return None
    length = eqn.params["length"]
    sums = {var: stacked(var, length) for var in tail.sums}
    kept = [(x, v) for x, v in asked if found.state(x).kind != "late"]
    stacks = [*kept, *sums.items()]
    wanted = [*carried, *(x for x, _ in stacks)]
    body = graphs.eliminate_dead_code(jax_compat.replace_jaxpr(loop.body, outvars=wanted))
    read = graphs.used_vars(body)
    consts, slices = (
        [pair for pair in pairs.items() if pair[0] in read] for pairs in (loop.consts, loop.slices)
    )
    scan = scan_like(eqn, consts, loop.accumulators, slices, stacks, body.eqns)
    outer = {**loop.consts, **loop.slices, **sums}
    return _Parts(
        scan,
        _in_all_iterations(tail, outer, loop.consts, length),
        variables(outer[var] for var in tail.inputs),
        [var for _, var in late],
        bodies.results,
    )


def _apart_inside(
    eqn: JaxprEqn, given: Sequence[BatchState], context: Context
) -> tuple[JaxprEqn, Context]:
    """The same scan in whose body scans are in two parts, and the context of that."""
    scan = ScanParts.of(eqn)
    consts, starts, stacks = scan.operands(given)
    found = scan_bodies(eqn, given, context) if _has_scans(scan.body) else None
    if found is None:
        return eqn, context
    # What inner scans are late with alone is not late when they are apart.
    carried = scan.operands(found.operands)[1]
    pairs = zip(starts, carried, strict=True)
    carries = [start if carry.kind == "late" else carry for start, carry in pairs]
    states = [*consts, *carries, *(shifted(state, -1) for state in stacks)]
    body = _apart(scan.body, states, replace(context, inside=True))
    if body is None:
        return eqn, context
    counts = scan.num_consts, scan.num_carry
    params = jax_compat.scan_params(eqn.params, ClosedJaxpr(body, ()), *counts)
    rules = populate(body, warns=False)
    return eqn.replace(params=params), replace(context, rules=rules, occurrences={})


def _is_scan(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan"


def _has_scans(jaxpr: Jaxpr) -> bool:
    return any(map(_is_scan, jaxpr.eqns))


class _Tail(NamedTuple):
    """What an iteration makes of sums.

    `sums` are variables of the body that it is given, `reads` inputs of the body: constants and
    slices, for what is carried is another in each iteration.
    """

    body: Jaxpr
    sums: list[Var]
    reads: list[Var]

    @property
    def inputs(self) -> list[Var]:
        """What it is a function of."""
        return [*self.sums, *self.reads]


def _tail(found: Forward, results: Sequence[Atom]) -> _Tail | None:
    """What makes results of sums, slices and constants; None if it needs rows, or no sum.

    What follows from slices and constants alone is computed once more.
    """
    eqns, sums, live = list[JaxprEqn](), list[Var](), set(variables(results))
    for eqn in reversed(found.jaxpr.eqns):
        asked = [place for place, var in enumerate(eqn.outvars) if var in live]
        kinds = [found.states[eqn.outvars[place]].kind for place in asked]
        own = [place for place, kind in zip(asked, kinds, strict=True) if kind != "partial"]
        sums += (eqn.outvars[place] for place in asked if place not in own)
        if not own:
            continue
        if "split" in kinds:
            return None
        if is_barrier(eqn):
            eqn = part_of_barrier(eqn, own)
        else:
            outvars = [jax_compat.new_var(v.aval) if v in sums else v for v in eqn.outvars]
            eqn = eqn.replace(outvars=outvars)
        eqns.append(eqn)
        live.update(variables(eqn.invars))
    reads = [var for var in found.jaxpr.invars if var in live]
    late = any(found.states[var].kind == "late" for var in reads)
    if not (sums or late) or any(found.states[var].kind == "split" for var in reads):
        return None
    inputs = {"invars": [*sums, *reads], "outvars": list(results), "eqns": eqns[::-1]}
    return _Tail(jax_compat.replace_jaxpr(found.jaxpr, **inputs), sums, reads)


def _in_all_iterations(
    tail: _Tail, outer: Mapping[Var, Atom], consts: Collection[Var], length: int
) -> Callable[..., list[Any]]:
    """A function of what a tail reads outside, which gives stacks of its results.

    Of operations that are not known to be the same for many at once (random bits, kernels, calls of
    the host) it is a scan.

    Args:
      tail: the tail.
      outer: what its inputs are outside of the scan, stacks or constants; maybe literals.
      consts: those of its inputs that are constants.
      length: the number of iterations.
    """
    function = jaxpr_as_fun(ClosedJaxpr(tail.body, ()))
    literals = {v: outer[v] for v in tail.inputs if isinstance(outer[v], Literal)}
    inputs = [var for var in tail.inputs if var not in literals]
    slices = [var for var in inputs if var not in consts]

    def iteration(fixed: Mapping[Var, Any], sliced: Sequence[Any]) -> list[Any]:
        given = {**fixed, **dict(zip(slices, sliced, strict=True))}
        numbers = {var: jnp.asarray(x.val, var.aval.dtype) for var, x in literals.items()}
        return list(function(*({**given, **numbers}[var] for var in tail.inputs)))

    def at_once(*values: Any) -> list[Any]:
        known = dict(zip(inputs, values, strict=True))
        fixed = {var: known[var] for var in inputs if var in consts}
        stacks = [known[var] for var in slices]
        if all(eqn.primitive.name in _MANY_AT_ONCE for eqn in tail.body.eqns):
            return list(jax.vmap(lambda xs: iteration(fixed, xs), axis_size=length)(stacks))
        return list(lax.scan(lambda _, xs: (None, iteration(fixed, xs)), None, stacks, length)[1])

    return at_once
