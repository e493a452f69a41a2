"""The backward sweep: which equation is evaluated in which phase, and in which form.

Results ask for what they need, so nothing is computed that nobody reads. A whole value of which
only the rows of one microbatch are asked for is regenerated for these rows, by its rule run
backwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Atom
from autopar.passes.graph.scans import ScanParts, WhileParts
from autopar.passes.microbatch.batch_states import WHOLE, Form
from autopar.passes.microbatch.equations import Context, Decision, is_control_flow, regenerate
from autopar.passes.microbatch.propagate import Bodies, Forward, whole_bodies

ABSENT: Form = "absent"  # an operand or a result of control flow that nobody asks for


Demand = defaultdict[Var, set[Form]]  # in which forms values are asked for by what comes after


@dataclass(frozen=True)
class Body:
    """An inner jaxpr evaluated on slices: its steps, and the forms of its inputs and results."""

    jaxpr: Jaxpr
    steps: tuple[PhaseStep, ...]
    in_forms: tuple[Form, ...]
    out_forms: tuple[Form, ...]

    @property
    def reads(self) -> list[tuple[Var, Form]]:
        return _present(self.jaxpr.invars, self.in_forms)


@dataclass(frozen=True)
class PhaseStep:
    """One evaluation of one equation. `bodies` are those of control flow that runs on slices."""

    eqn: JaxprEqn
    operand_forms: tuple[Form, ...]
    result_forms: tuple[Form, ...]
    bodies: tuple[Body, ...] = ()

    @cached_property
    def reads(self) -> list[tuple[Var, Form]]:
        return _present(self.eqn.invars, self.operand_forms)

    @cached_property
    def makes(self) -> list[tuple[Var, Form]]:
        return _present(self.eqn.outvars, self.result_forms)


def _present(atoms: Iterable[Atom], forms: Iterable[Form]) -> list[tuple[Var, Form]]:
    pairs = zip(atoms, forms, strict=True)
    return [(atom, form) for atom, form in pairs if form != ABSENT and isinstance(atom, Var)]


def whole_step(eqn: JaxprEqn) -> PhaseStep:
    """The equation as it is."""
    return PhaseStep(eqn, (WHOLE,) * len(eqn.invars), (WHOLE,) * len(eqn.outvars))


def asked(eqn: JaxprEqn, demand: Demand) -> list[set[Form]]:
    """The forms in which each result is asked for."""
    return [demand.get(var, set()) for var in eqn.outvars]


def demand_body(forward: Forward, out_forms: Sequence[Form], context: Context) -> Body:
    """The steps of an inner jaxpr that give its results in these forms."""
    jaxpr = forward.jaxpr
    demand = Demand(set)
    for var, form in _present(jaxpr.outvars, out_forms):
        demand[var].add(form)
    steps: list[PhaseStep] = []
    for eqn, decision in zip(reversed(jaxpr.eqns), reversed(forward.decisions), strict=True):
        forms = asked(eqn, demand)
        found = _body_steps(eqn, decision, forms, context) if any(forms) else []
        for var, form in (pair for step in found for pair in step.reads):
            demand[var].add(form)
        steps += found
    in_forms = tuple(one_form(demand[var], forward.state(var).form) for var in jaxpr.invars)
    return Body(jaxpr, tuple(reversed(steps)), in_forms, tuple(out_forms))


def one_form(asked_for: set[Form], own: Form) -> Form:
    """The form in which to pass a value that is asked for in some forms."""
    if not asked_for:
        return ABSENT
    if own is not WHOLE:
        assert asked_for == {own}, (asked_for, own)
        return own
    if len(asked_for) == 1:
        (form,) = asked_for
        if isinstance(form, tuple):
            return form
    return WHOLE


def _body_steps(
    eqn: JaxprEqn, decision: Decision, forms: Sequence[set[Form]], context: Context
) -> list[PhaseStep]:
    """Steps (later ones first) that give an equation's results inside a body."""
    assert decision.mode not in ("early", "late"), decision
    if is_barrier(eqn):
        return barrier_steps(eqn, forms)
    if decision.mode == "whole":
        rows, left = regenerated(eqn, forms, context)
        return [whole_step(eqn), *rows] if left else rows
    return [loop_step(eqn, decision, _given(eqn, decision.result_forms, forms), context)]


def _given(eqn: JaxprEqn, own: Sequence[Form], forms: Sequence[set[Form]]) -> list[Form]:
    pairs = enumerate(zip(own, forms, strict=True))
    return [given_form(eqn, k, form, asked) if asked else ABSENT for k, (form, asked) in pairs]


def regenerated(
    eqn: JaxprEqn, forms: Sequence[set[Form]], context: Context
) -> tuple[list[PhaseStep], bool]:
    """Steps for the rows that are asked of an equation on whole operands.

    The second value says whether the whole results are needed, to be used or to be sliced.
    """
    if any(not isinstance(form, tuple) for asked_for in forms for form in asked_for):
        return [], True
    if is_control_flow(eqn):
        kept = _given(eqn, (WHOLE,) * len(forms), forms)
        if WHOLE in kept or eqn.effects:
            return [], True
        return [_INNER_STEPS[eqn.primitive.name](eqn, whole_bodies(eqn), kept, context)], False
    steps: dict[tuple[Form, ...], PhaseStep] = {}
    for k, asked_for in enumerate(forms):
        for place in sorted(form for form in asked_for if isinstance(form, tuple)):
            found = regenerate(eqn, k, place, context)
            if found is None:
                return [], True
            steps[found[1]] = PhaseStep(eqn, *found)
    return list(steps.values()), False


def barrier_steps(eqn: JaxprEqn, forms: Sequence[set[Form]]) -> list[PhaseStep]:
    """A barrier passes each operand on as it is: one step for all, more where forms differ."""
    left = [sorted(asked_for, key=str) for asked_for in forms]
    steps = []
    while any(left):
        now = tuple(rest.pop() if rest else ABSENT for rest in left)
        steps.append(PhaseStep(eqn, now, now))
    return steps


def given_form(eqn: JaxprEqn, result: int, own: Form, asked_for: set[Form]) -> Form:
    """The form in which an equation in the loop gives a result that is asked for in some forms.

    Of a whole result of a scan or a cond it can give just the rows of the microbatch.
    """
    if own is not WHOLE or not isinstance(form := one_form(asked_for, WHOLE), tuple):
        return own
    name = eqn.primitive.name
    if name == "scan":
        return form if result >= ScanParts.of(eqn).num_carry and form[0] > 0 else own
    return form if name == "cond" else own


def loop_step(
    eqn: JaxprEqn, decision: Decision, result_forms: Sequence[Form], context: Context
) -> PhaseStep:
    """The evaluation of an equation in the loop, for the results that are not absent."""
    if decision.mode != "inner":
        return PhaseStep(eqn, decision.operand_forms, decision.result_forms)
    return _INNER_STEPS[eqn.primitive.name](eqn, decision.inner, result_forms, context)


def _shifted(form: Form, by: int) -> Form:
    return (form[0] + by, form[1]) if isinstance(form, tuple) else form


def _carried(
    kept: Sequence[Form],
    forms: Sequence[Form],
    demand: Callable[[Sequence[Form]], tuple[Body, Sequence[Form]]],
) -> tuple[list[Form], Body]:
    """The carries that the kept results depend on, and the body that computes just these."""
    carry = [ABSENT if form == ABSENT else forms[k] for k, form in enumerate(kept)]
    while True:
        found, needed = demand(carry)
        more = [
            forms[k] if carry[k] == ABSENT and form != ABSENT else carry[k]
            for k, form in enumerate(needed)
        ]
        if more == carry:
            return carry, found
        carry = more


def _scan_step(
    eqn: JaxprEqn, bodies: Bodies, result_forms: Sequence[Form], context: Context
) -> PhaseStep:
    scan = ScanParts.of(eqn)
    (forward,) = bodies.forwards
    carry_forms = [state.form for state in scan.operands(bodies.operands)[1]]
    totals, stacks = scan.results(result_forms)
    rows = [_shifted(form, -1) for form in stacks]

    def demand(carry: Sequence[Form]) -> tuple[Body, Sequence[Form]]:
        body = demand_body(forward, [*carry, *rows], context)
        return body, scan.operands(body.in_forms)[1]

    carry, body = _carried(totals, carry_forms, demand)
    # The carry is passed as the fixpoint has it, whatever the body reads of it.
    consts, _, slices = scan.operands(body.in_forms)
    body = replace(body, in_forms=(*consts, *carry, *slices))
    operand_forms = (*consts, *carry, *(_shifted(form, 1) for form in slices))
    return PhaseStep(eqn, operand_forms, (*carry, *stacks), (body,))


def _while_step(
    eqn: JaxprEqn, bodies: Bodies, result_forms: Sequence[Form], context: Context
) -> PhaseStep:
    loop = WhileParts.of(eqn)
    test, forward = bodies.forwards
    carry_forms = [state.form for state in loop.operands(bodies.operands)[2]]
    condition = demand_body(test, [test.results[0].form], context)
    tested = condition.in_forms[loop.num_condition_consts :]

    def demand(carry: Sequence[Form]) -> tuple[Body, Sequence[Form]]:
        body = demand_body(forward, carry, context)
        needed = body.in_forms[loop.num_body_consts :]
        return body, [a if a != ABSENT else b for a, b in zip(needed, tested, strict=True)]

    carry, body = _carried(result_forms, carry_forms, demand)
    condition_consts = condition.in_forms[: loop.num_condition_consts]
    consts = body.in_forms[: loop.num_body_consts]
    condition = replace(condition, in_forms=(*condition_consts, *carry))
    body = replace(body, in_forms=(*consts, *carry))
    return PhaseStep(eqn, (*condition_consts, *consts, *carry), tuple(carry), (condition, body))


def _cond_step(
    eqn: JaxprEqn, bodies: Bodies, result_forms: Sequence[Form], context: Context
) -> PhaseStep:
    branches = [demand_body(forward, result_forms, context) for forward in bodies.forwards]
    by_operand = zip(*(body.in_forms for body in branches), strict=True)
    pairs = zip(by_operand, bodies.operands[1:], strict=True)
    merged = tuple(one_form(set(forms) - {ABSENT}, state.form) for forms, state in pairs)
    same = tuple(replace(body, in_forms=merged) for body in branches)
    return PhaseStep(eqn, (WHOLE, *merged), tuple(result_forms), same)


_INNER_STEPS = {"scan": _scan_step, "while": _while_step, "cond": _cond_step}
