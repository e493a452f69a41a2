"""Backward scans cut in two, so that zero-bubble schedules find weight gradients in them.

The backward pass of `lax.scan` is one scan. What its iterations hand on to each other, such as the
gradient of an activation, other stages wait for; the weight gradients that it makes on the way
nobody waits for. The first scan hands on, and keeps for every iteration what the second one, which
computes the rest, cannot read elsewhere. Both compute the same numbers as the scan that they were.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom, made_from, variables
from autopar.passes.graph.microbatched import LoopPhase, Microbatched, scan_like, stacked
from autopar.passes.graph.primitives import ADDS, CASTS, HEAVY
from autopar.passes.slicing.anatomy import Anatomy

_SUMS = ADDS | CASTS


def split_backward_scans(parts: Anatomy) -> Microbatched:
    """The program with the loop's backward scans cut in two where weight gradients can wait."""
    awaited = _awaited(parts)
    eqns: list[JaxprEqn] = []
    for index, eqn in enumerate(parts.body.eqns):
        is_scan = index in parts.backward and eqn.primitive.name == "scan" and not eqn.effects
        eqns += _split(eqn, awaited) if is_scan else [eqn]
    if len(eqns) == len(parts.body.eqns):
        return parts.step
    closed = ClosedJaxpr(jax_compat.replace_jaxpr(parts.body, eqns=eqns), ())
    scan = parts.loop.scan
    return parts.step.with_scan(scan.replace(params={**scan.params, "jaxpr": closed}))


def _awaited(parts: Anatomy) -> set[Var]:
    """What a heavy equation of the backward pass is made from."""
    found: set[Var] = set()
    for index in sorted(parts.backward, reverse=True):
        eqn = parts.body.eqns[index]
        if eqn.primitive.name in HEAVY or any(var in found for var in eqn.outvars):
            found.update(variables(eqn.invars))
    return found


class _ScanPart(NamedTuple):
    """A part of a scan's body: numbers of results and of equations."""

    results: set[int]
    eqns: set[int]


def _split(eqn: JaxprEqn, awaited: Collection[Var]) -> list[JaxprEqn]:
    if eqn.params["jaxpr"].jaxpr.constvars or eqn.params["jaxpr"].consts:
        return [eqn]
    loop = LoopPhase(eqn)
    body, carries = loop.body, [item.carry for item in loop.accumulators]
    handed_on = {place for place, carry in enumerate(carries) if not _is_sum(body, carry, place)}
    asked = {place for place, var in enumerate(eqn.outvars) if var in awaited}
    first = _closure(body, carries, handed_on | asked)
    read = {place for place, var in enumerate(eqn.outvars) if not isinstance(var, DropVar)}
    others = read - first.results
    if not first.results or not others:
        return [eqn]
    second = _closure(body, carries, others)
    later = second.eqns - first.eqns
    if not any(body.eqns[index].primitive.name in HEAVY for index in later):
        return [eqn]
    results = others | (second.results - first.results)
    again, kept = _again(body, first, _ScanPart(results, later), carries)
    stacks = [(var, stacked(var, eqn.params["length"])) for var in kept]
    return [
        _part(loop, first, given=(), kept=stacks),
        _part(loop, _ScanPart(results, later | again), given=stacks, kept=()),
    ]


def _is_sum(body: Jaxpr, carry: Var, place: int) -> bool:
    """Whether what is carried is only added to: nothing else depends on what it was."""
    reached: set[Atom] = {carry}
    for eqn in body.eqns:
        if not reached.isdisjoint(variables(eqn.invars)):
            if eqn.primitive.name not in _SUMS:
                return False
            reached.update(eqn.outvars)
    others = (*body.outvars[:place], *body.outvars[place + 1 :])
    return reached.isdisjoint(variables(others))


def _closure(body: Jaxpr, carries: Sequence[Var], results: set[int]) -> _ScanPart:
    """The equations that results are made from, and all results that they hand on for that."""
    while True:
        wanted = [body.outvars[place] for place in results]
        eqns = made_from(body.eqns, wanted)
        read = set(variables([*wanted, *(v for i in eqns for v in body.eqns[i].invars)]))
        more = results | {place for place, carry in enumerate(carries) if carry in read}
        if more == results:
            return _ScanPart(results, eqns)
        results = more


def _again(
    body: Jaxpr, first: _ScanPart, second: _ScanPart, carries: Sequence[Var]
) -> tuple[set[int], list[Var]]:
    """What the second part computes once more because it is cheap, and what is kept for it."""
    hidden = {var for place, var in enumerate(carries) if place in first.results}
    cheap: list[int] = []
    for index in sorted(first.eqns):
        eqn = body.eqns[index]
        if eqn.primitive.name in HEAVY or not hidden.isdisjoint(variables(eqn.invars)):
            hidden.update(eqn.outvars)
        else:
            cheap.append(index)
    wanted = [v for index in second.eqns for v in body.eqns[index].invars]
    wanted += (body.outvars[place] for place in second.results)
    again = {cheap[n] for n in made_from([body.eqns[index] for index in cheap], wanted)}
    read = set(variables([*wanted, *(v for index in again for v in body.eqns[index].invars)]))
    order = [*carries, *(var for eqn in body.eqns for var in eqn.outvars)]
    return again, [var for var in order if var in hidden and var in read]


def _part(
    loop: LoopPhase,
    part: _ScanPart,
    given: Sequence[tuple[Var, Var]],
    kept: Sequence[tuple[Var, Var]],
) -> JaxprEqn:
    """A scan that gives a part's results.

    Of the body's variables, `given` are slices here, each with the stacked value, and `kept` are
    stacked as further results, each with the stack.
    """
    carries = loop.accumulators
    stacks = [pair for n, pair in enumerate(loop.stacks, len(carries)) if n in part.results]
    own = [item for place, item in enumerate(carries) if place in part.results]
    eqns = [loop.body.eqns[index] for index in sorted(part.eqns)]
    results = [*(item.result for item in own), *(atom for atom, _ in (*stacks, *kept))]
    read = set(variables([*(v for eqn in eqns for v in eqn.invars), *results]))
    consts, slices = (
        [pair for pair in pairs.items() if pair[0] in read] for pairs in (loop.consts, loop.slices)
    )
    scan = scan_like(loop.scan, consts, own, [*slices, *given], [*stacks, *kept], eqns)
    return _with_own_variables(scan)


def _with_own_variables(scan: JaxprEqn) -> JaxprEqn:
    """The same scan, whose body shares no variable with another one."""
    body = scan.params["jaxpr"].jaxpr
    renamed: dict[Var, Var] = {}

    def new(made: Sequence[Var]) -> list[Var]:
        fresh = [v if isinstance(v, DropVar) else jax_compat.new_var(v.aval) for v in made]
        renamed.update(zip(made, fresh, strict=True))
        return fresh

    def read(atoms: Sequence[Atom]) -> list[Atom]:
        return [atom if isinstance(atom, Literal) else renamed[atom] for atom in atoms]

    invars = new(body.invars)
    eqns = [e.replace(invars=read(e.invars), outvars=new(e.outvars)) for e in body.eqns]
    body = body.replace(invars=invars, outvars=read(body.outvars), eqns=eqns)
    return scan.replace(params={**scan.params, "jaxpr": ClosedJaxpr(body, ())})
