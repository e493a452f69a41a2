"""The transfer function of scan, while and cond: a fixpoint over carries, body by body.

A body runs on slices if every value in it does, so inside it no sum can be completed and no row can
be looked at from another one. What fails there makes the results that depend on it late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import inner_jaxprs
from autopar.passes.graph.primitives import ADDS
from autopar.passes.microbatch import batch_states as lattice
from autopar.passes.microbatch.batch_states import State
from autopar.passes.microbatch.equations import (
    ALL_WHOLE,
    MEETS,
    MIXES,
    Context,
    Decision,
    guess_place,
)

if TYPE_CHECKING:
    from autopar.passes.microbatch.propagate import Forward


@dataclass(frozen=True)
class Bodies:
    """The analysed bodies of a control-flow equation, in the order of its params."""

    forwards: tuple[Forward, ...]
    operands: tuple[State, ...]  # with the fixpoint's states for the carries
    results: tuple[State, ...]


def transfer(
    eqn: JaxprEqn, states: Sequence[State], context: Context
) -> tuple[Decision, list[State]]:
    """How a control-flow equation is evaluated on operands in these states."""
    kinds = {state.kind for state in states}
    if kinds <= {"whole"}:
        return ALL_WHOLE, _whole_results(eqn, states)
    if eqn.effects:
        return _unsplit(
            eqn, states, context, "an effect in its body happens once, on the whole batch"
        )
    if "late" in kinds:
        return _unsplit(eqn, states, context, MEETS)
    if "split" not in kinds and not context.inside:
        return _unsplit(eqn, states, context, "it is not linear in a sum over the batch")
    inside = replace(context, inside=True)
    analyse = {"scan": _scan, "while": _while, "cond": _cond}[eqn.primitive.name]
    found = analyse(eqn, states, inside)
    if isinstance(found, str):
        return _unsplit(eqn, states, context, found)
    decision, results = found
    params = any(state.params for state in states)
    results = [_with_origin(state, params, context) for state in results]
    if all(state.kind == "late" for state in results):
        return _unsplit(eqn, states, context, _failure(decision))
    if any(state.kind == "late" for state in results) and all(state.early for state in states):
        places = (guess_place(var.aval.shape, context) for var in eqn.outvars)
        results = [
            state if state.kind != "late" else _early_state(*place)
            for state, place in zip(results, places, strict=True)
        ]
    return decision, results


def _with_origin(state: State, params: bool, context: Context) -> State:
    """A body's result state with what the equation's operands depend on."""
    if state.kind == "whole":
        return lattice.whole(state.zero, True, params, state.blurred)
    if state.kind == "split":
        return lattice.split(state.place, params)
    if state.kind == "partial":
        if context.inside or params:
            return lattice.partial(state.monoid, params)
        return lattice.whole(batch=True)
    return state


def _whole_results(eqn: JaxprEqn, states: Sequence[State]) -> list[State]:
    state = lattice.whole(
        batch=any(state.batch for state in states),
        params=any(state.params for state in states),
        blurred=any(state.blurred for state in states),
    )
    return [state] * len(eqn.outvars)


def _early_state(place: lattice.Place | None, blurred: bool) -> State:
    if place is not None:
        return lattice.split(place, params=False)
    return lattice.whole(batch=True, blurred=blurred)


def _unsplit(
    eqn: JaxprEqn, states: Sequence[State], context: Context, reason: str
) -> tuple[Decision, list[State]]:
    params = any(state.params for state in states)
    if not any(state.wide for state in states):
        return Decision("late", reason=reason), [lattice.late(params=params)] * len(eqn.outvars)
    places = [guess_place(var.aval.shape, context) for var in eqn.outvars]
    if not context.inside and all(state.early for state in states):
        return Decision("early", reason=reason), [_early_state(*place) for place in places]
    results = [lattice.late(place, params, blurred) for place, blurred in places]
    return Decision("late", reason=reason), results


def _failure(decision: Decision) -> str:
    """The reason that the first late equation of a body gives."""
    inner = decision.inner
    for body in inner.forwards if isinstance(inner, Bodies) else ():
        for found in body.decisions:
            if found.mode == "late":
                return found.reason if found.inner is None else _failure(found)
    return MIXES


def whole_bodies(eqn: JaxprEqn) -> Bodies:
    """The bodies of control flow on whole operands."""
    from autopar.passes.microbatch.propagate import Forward

    forwards = []
    for body in inner_jaxprs(eqn):
        made = (var for inner in body.eqns for var in inner.outvars)
        states = dict.fromkeys((*body.invars, *body.constvars, *made), lattice.whole())
        forwards.append(Forward(body, states, (ALL_WHOLE,) * len(body.eqns)))
    operands = (lattice.whole(),) * len(eqn.invars)
    return Bodies(tuple(forwards), operands, (lattice.whole(),) * len(eqn.outvars))


def body_of(params: Any) -> Jaxpr:
    """The jaxpr of a body, closed or not."""
    return params.jaxpr if isinstance(params, ClosedJaxpr) else params


def _decide(
    operands: Sequence[State], results: Sequence[State], forwards: tuple[Forward, ...]
) -> tuple[Decision, list[State]]:
    bodies = Bodies(forwards, tuple(operands), tuple(results))
    forms = tuple(state.form for state in operands)
    return Decision("inner", forms, tuple(s.form for s in results), inner=bodies), list(results)


def _scan(
    eqn: JaxprEqn, states: Sequence[State], context: Context
) -> tuple[Decision, list[State]] | str:
    params = eqn.params
    first, num_carry = jax_compat.scan_counts(params)
    last = first + num_carry
    if any(state.place is not None and state.place[0] == 0 for state in states[last:]):
        return _mapped(eqn, states, context)
    xs = [_shifted(state, -1) for state in states[last:]]
    body = body_of(params["jaxpr"])

    def run(carry: Sequence[State]) -> Forward:
        return _forward(body, [*states[:first], *carry, *xs], context)

    carry, forward = _fixpoint(states[first:last], run, num_carry)
    results = [*carry, *(_shifted(state, 1) for state in forward.results[last - first :])]
    return _decide([*states[:first], *carry, *states[last:]], results, (forward,))


def _forward(body: Jaxpr, states: Sequence[State], context: Context) -> Forward:
    from autopar.passes.microbatch.propagate import forward

    return forward(body, states, context)


def _shifted(state: State, by: int) -> State:
    """The state of a scan's stacked value from that of one step's, or back."""
    if state.place is None:
        return state
    return replace(state, place=(state.place[0] + by, state.place[1]))


def _fixpoint(carry: Sequence[State], run: Any, count: int) -> tuple[list[State], Forward]:
    """Carry states that one more iteration does not change, and the body's analysis with them."""
    carry = list(carry)
    while True:  # `join` only climbs a lattice of height four.
        forward = run(carry)
        found = [
            lattice.join(before, after)
            for before, after in zip(carry, forward.results[:count], strict=True)
        ]
        if found == carry:
            return carry, forward
        carry = found


def _while(
    eqn: JaxprEqn, states: Sequence[State], context: Context
) -> tuple[Decision, list[State]] | str:
    params = eqn.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    condition, body = body_of(params["cond_jaxpr"]), body_of(params["body_jaxpr"])

    def run(carry: Sequence[State]) -> Forward:
        return _forward(body, [*states[first:second], *carry], context)

    carry, forward = _fixpoint(states[second:], run, len(states) - second)
    test = _forward(condition, [*states[:first], *carry], context)
    if test.results[0].kind != "whole":
        return "its number of iterations depends on rows of the batch"
    return _decide([*states[:second], *carry], carry, (test, forward))


def _cond(
    eqn: JaxprEqn, states: Sequence[State], context: Context
) -> tuple[Decision, list[State]] | str:
    if states[0].kind != "whole":
        return "its branch depends on the whole batch"
    forwards = tuple(
        _forward(body_of(branch), states[1:], context) for branch in eqn.params["branches"]
    )
    results = forwards[0].results
    for forward in forwards[1:]:
        results = [lattice.join(a, b) for a, b in zip(results, forward.results, strict=True)]
    return _decide(states, results, forwards)


def _mapped(
    eqn: JaxprEqn, states: Sequence[State], context: Context
) -> tuple[Decision, list[State]] | str:
    """A scan over the batch itself: each microbatch scans its own rows.

    Exact if an iteration depends on no other one, or only adds to a carry that it does not read.
    """
    params = eqn.params
    first, num_carry = jax_compat.scan_counts(params)
    last = first + num_carry
    majors = {
        state.place[1] if state.place is not None and state.place[0] == 0 else None
        for state in states[last:]
        if state.kind != "whole"
    }
    if len(majors) != 1 or None in majors or any(s.kind != "whole" for s in states[:first]):
        return MIXES
    (major,) = majors
    body = body_of(params["jaxpr"])
    monoids = ("sum",) * num_carry
    for k in range(num_carry):
        if states[first + k].kind == "split" or not _only_adds(body, first + k, k):
            return "each of its iterations depends on the one before"
    place = (0, major)
    forms = (*(None,) * first, *monoids, *(place,) * (len(states) - last))
    row_results = len(eqn.outvars) - num_carry
    results = [
        *(lattice.partial(monoid) for monoid in monoids),
        *(lattice.split(place),) * row_results,
    ]
    result_forms = (*monoids, *(place,) * row_results)
    return Decision("mapped", forms, result_forms), results


def _only_adds(body: Jaxpr, operand: int, result: int) -> bool:
    """Whether a carry goes through the body in one chain of additions, and nothing else."""
    current, out = body.invars[operand], body.outvars[result]
    chain = {current}
    for eqn in body.eqns:
        read = [
            k
            for k, atom in enumerate(eqn.invars)
            if not isinstance(atom, Literal) and atom in chain
        ]
        if not read:
            continue
        adds = eqn.primitive.name in ADDS or (eqn.primitive.name == "sub" and read == [0])
        if not adds or len(read) != 1 or eqn.invars[read[0]] is not current:
            return False
        current = eqn.outvars[0]
        chain.add(current)
    others = [atom for k, atom in enumerate(body.outvars) if k != result]
    return out is current and not any(
        atom in chain for atom in others if not isinstance(atom, Literal)
    )
