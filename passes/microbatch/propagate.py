"""The forward sweep: the state of every value, and how every equation is evaluated.

In scan, while and cond it is a fixpoint over carries, body by body. A body runs on slices if every
value in it does, so inside it no sum can be completed and no row can be looked at from another one.
What fails there makes the results that depend on it late.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph.graph import Atom, Graph, inner_jaxprs, variables
from autopar.passes.graph.primitives import ADDS
from autopar.passes.graph.scans import ScanParts, WhileParts
from autopar.passes.microbatch import batch_states as lattice
from autopar.passes.microbatch import equations
from autopar.passes.microbatch.batch_states import BatchState, Form
from autopar.passes.microbatch.equations import Context, Decision, Outcome, States, unsplit


@dataclass(frozen=True)
class Forward:
    """The states of a jaxpr's values, and a decision for each of its equations.

    Of a loop's body whose carry waits for the whole batch, the `cause` is the first pass through
    it after which that was so.
    """

    jaxpr: Jaxpr
    states: dict[Var, BatchState]
    decisions: tuple[Decision, ...]
    cause: Forward | None = None

    def state(self, atom: Atom) -> BatchState:
        if isinstance(atom, Literal):
            return lattice.whole(zero=not np.any(np.asarray(atom.val)))
        return self.states[atom]

    @property
    def results(self) -> list[BatchState]:
        return [self.state(atom) for atom in self.jaxpr.outvars]


def forward(jaxpr: Jaxpr, in_states: States, context: Context) -> Forward:
    """Propagate the states of a jaxpr's inputs through its equations."""
    states = dict(zip(jaxpr.invars, in_states, strict=True))
    states.update((var, lattice.whole()) for var in jaxpr.constvars)
    decisions: list[Decision] = []
    result = Forward(jaxpr, states, ())
    for eqn in jaxpr.eqns:
        decision, found = transfer(eqn, [result.state(atom) for atom in eqn.invars], context)
        decisions.append(decision)
        states.update(zip(eqn.outvars, found, strict=True))
    return Forward(jaxpr, states, tuple(decisions))


def transfer(eqn: JaxprEqn, states: States, context: Context) -> Outcome:
    """How an equation is evaluated on operands in these states, and its results' states."""
    known = _transfer if equations.is_control_flow(eqn) else equations.transfer
    return known(eqn, states, context)


def input_states(
    graph: Graph, num_microbatches: int, params: Collection[str] = ("state",)
) -> list[BatchState]:
    """What the input leaves are: batch leaves are split, everything else is whole.

    What depends on parameters (arrays of floats among the leaves of these roles) is never computed
    before the loop on the whole batch; what depends on the batch alone may be.
    """
    states = []
    for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True):
        aval = var.aval
        axis, is_batch = label.batch_axis, label.role == "batch"
        if is_batch and axis is not None:
            place = (axis, aval.shape[axis] // num_microbatches)
            states.append(lattice.split(place, params=False))
        else:
            is_tensor = bool(aval.shape) and getattr(aval.dtype, "kind", "") not in "iub?"
            is_parameter = label.role in params and is_tensor
            states.append(lattice.whole(batch=is_batch, params=is_parameter))
    return states


@dataclass(frozen=True)
class Bodies:
    """The analysed bodies of a control-flow equation, in the order of its params."""

    forwards: tuple[Forward, ...]
    operands: tuple[BatchState, ...]  # with the fixpoint's states for the carries
    results: tuple[BatchState, ...]


def _transfer(eqn: JaxprEqn, states: States, context: Context) -> Outcome:
    """How a control-flow equation is evaluated on operands in these states."""
    kinds = {state.kind for state in states}
    if kinds <= {"whole"}:
        return equations.ALL_WHOLE, equations.all_whole(eqn, states)
    found: Outcome | str
    if eqn.effects:
        found = "an effect in its body happens once, on the whole batch"
    elif "late" in kinds:
        found = equations.MEETS
    elif "split" not in kinds and not context.inside:
        found = equations.NONLINEAR
    else:
        analyse = {"scan": _scan, "while": _while, "cond": _cond}[eqn.primitive.name]
        found = analyse(eqn, states, replace(context, inside=True))
    if isinstance(found, str):
        return unsplit(eqn, states, context, found)
    decision, results = found
    params = any(state.params for state in states)
    results = [_with_origin(state, params, context) for state in results]
    late = [state.kind == "late" for state in results]
    wanted = (not isinstance(var, DropVar) for var in eqn.outvars)
    # Of a body, what is evaluated after the loop cannot be apart from the rest.
    if all(late) or (context.inside and any(itertools.compress(late, wanted))):
        whole, results = unsplit(eqn, states, context, _failure(decision))
        return whole._replace(failed=decision.inner), results
    if any(state.kind == "late" for state in results) and all(state.early for state in states):
        for k, var in enumerate(eqn.outvars):
            if results[k].kind == "late":
                place = equations.guess_place(var.aval.shape, context)
                results[k] = equations.early_state(*place)
    return decision, results


def _with_origin(state: BatchState, params: bool, context: Context) -> BatchState:
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


def _failure(decision: Decision) -> str:
    """The reason that the first late equation of a body gives."""
    inner = decision.inner
    for body in inner.forwards if isinstance(inner, Bodies) else ():
        for found in body.decisions:
            if found.mode == "late":
                return found.reason if found.inner is None else _failure(found)
    return equations.MIXES


def whole_bodies(eqn: JaxprEqn) -> Bodies:
    """The bodies of control flow on whole operands."""
    forwards = []
    for body in inner_jaxprs(eqn):
        made = (var for inner in body.eqns for var in inner.outvars)
        states = dict.fromkeys((*body.invars, *body.constvars, *made), lattice.whole())
        forwards.append(Forward(body, states, (equations.ALL_WHOLE,) * len(body.eqns)))
    operands = (lattice.whole(),) * len(eqn.invars)
    return Bodies(tuple(forwards), operands, (lattice.whole(),) * len(eqn.outvars))


def _decide(operands: States, results: States, forwards: tuple[Forward, ...]) -> Outcome:
    bodies = Bodies(forwards, tuple(operands), tuple(results))
    forms = tuple(state.form for state in operands)
    return Decision("inner", forms, tuple(s.form for s in results), inner=bodies), list(results)


def _scan(eqn: JaxprEqn, states: States, context: Context) -> Outcome | str:
    scan = ScanParts.of(eqn)
    consts, starts, stacks = scan.operands(states)
    if any(state.place is not None and state.place[0] == 0 for state in stacks):
        return _mapped(eqn, states)
    slices = [shifted(state, -1) for state in stacks]
    carry, found = _fixpoint(starts, lambda c: forward(scan.body, [*consts, *c, *slices], context))
    _, rows = scan.results(found.results)
    results = [*carry, *(shifted(state, 1) for state in rows)]
    return _decide([*consts, *carry, *stacks], results, (found,))


def scan_bodies(eqn: JaxprEqn, states: States, context: Context) -> Bodies | None:
    """The analysed body of a scan whose operands may wait for the whole batch; None if it mixes."""
    found = _scan(eqn, states, replace(context, inside=True))
    bodies = None if isinstance(found, str) else found[0].inner
    return bodies if isinstance(bodies, Bodies) else None


def shifted(state: BatchState, by: int) -> BatchState:
    """The state of a scan's stacked value from that of one step's, or back."""
    if state.place is None:
        return state
    return replace(state, place=(state.place[0] + by, state.place[1]))


def _fixpoint(carry: States, run: Callable[[States], Forward]) -> tuple[list[BatchState], Forward]:
    """Carry states that one more iteration does not change, and the body's analysis with them."""
    carry, cause = list(carry), None
    while True:  # `join` only climbs a lattice of height four.
        found = run(carry)
        joined = list(map(lattice.join, carry, found.results))  # but not a scan's stacks
        if joined == carry:
            return carry, replace(found, cause=cause)
        is_first = cause is None and all(state.kind != "late" for state in carry)
        if is_first and any(state.kind == "late" for state in joined):
            cause = found
        carry = joined


def _while(eqn: JaxprEqn, states: States, context: Context) -> Outcome | str:
    loop = WhileParts.of(eqn)
    tested, consts, starts = loop.operands(states)

    def run(starts: States) -> tuple[list[BatchState], Forward, Forward]:
        carry, found = _fixpoint(starts, lambda c: forward(loop.body, [*consts, *c], context))
        return carry, found, forward(loop.condition, [*tested, *carry], context)

    carry, found, test = run(starts)
    goes_on = test.results[0]
    if goes_on.kind == "split":
        # A loop under vmap tests and changes each row by itself, as long as any row goes on; the
        # test's dimensions are the first ones of every carry.
        rows = replace(goes_on, zero=False)
        carry, found, test = run([lattice.join(state, rows) for state in starts])
        if any(s.kind != "split" or s.place != rows.place for s in (*carry, *test.results)):
            return "its number of iterations depends on rows of the batch"
    elif goes_on.kind != "whole":
        return "its number of iterations depends on rows of the batch"
    return _decide([*tested, *consts, *carry], carry, (test, found))


def _cond(eqn: JaxprEqn, states: States, context: Context) -> Outcome | str:
    if states[0].kind != "whole":
        return "its branch depends on the whole batch"
    branches = eqn.params["branches"]
    forwards = tuple(forward(branch.jaxpr, states[1:], context) for branch in branches)
    by_result = zip(*(branch.results for branch in forwards), strict=True)
    return _decide(states, [functools.reduce(lattice.join, each) for each in by_result], forwards)


def _mapped(eqn: JaxprEqn, states: States) -> Outcome | str:
    """A scan over the batch itself: each microbatch scans its own rows.

    Exact if an iteration depends on no other one, or only adds to a carry that it does not read.
    """
    scan = ScanParts.of(eqn)
    consts, starts, stacks = scan.operands(states)
    places = {state.place for state in stacks if state.kind != "whole"}
    place = places.pop() if len(places) == 1 else None
    if place is None or place[0] != 0 or any(state.kind != "whole" for state in consts):
        return equations.MIXES
    _, carries, _ = scan.operands(scan.body.invars)
    for k, (state, var) in enumerate(zip(starts, carries, strict=True)):
        if state.kind == "split" or not _only_adds(scan.body, var, k):
            return "each of its iterations depends on the one before"
    sums: list[Form] = ["sum"] * scan.num_carry
    forms = (*(None,) * scan.num_consts, *sums, *(place,) * len(stacks))
    num_stacks = len(eqn.outvars) - scan.num_carry
    results = [*[lattice.partial("sum")] * len(sums), *[lattice.split(place)] * num_stacks]
    return Decision("mapped", forms, (*sums, *(place,) * num_stacks)), results


def _only_adds(body: Jaxpr, carry: Var, result: int) -> bool:
    """Whether a carry goes through the body in one chain of additions, and nothing else."""
    current, out = carry, body.outvars[result]
    chain = {current}
    for eqn in body.eqns:
        read = [k for k, atom in enumerate(eqn.invars) if isinstance(atom, Var) and atom in chain]
        if not read:
            continue
        adds = eqn.primitive.name in ADDS or (eqn.primitive.name == "sub" and read == [0])
        if not adds or len(read) != 1 or eqn.invars[read[0]] is not current:
            return False
        current = eqn.outvars[0]
        chain.add(current)
    others = variables(atom for k, atom in enumerate(body.outvars) if k != result)
    return out is current and chain.isdisjoint(others)
