"""The transfer function of one plain equation: from its operands' states to its results'.

An equation is evaluated in the loop if one factor of its rule is cut by every operand that is
split, or if it is linear in operands that are partial sums. Whatever is not proven to be either
waits for the whole batch: before the loop if that can be had there, otherwise after it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jax.extend.core import JaxprEqn

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.primitives import COMBINES, CONTROL_FLOW
from autopar.passes.microbatch import batch_states as lattice
from autopar.passes.microbatch.batch_states import WHOLE, BatchState, Cut, Form, Occurrences, Place
from autopar.passes.primitives.factor_rule import MONOIDS, FactorRule
from autopar.passes.primitives.linearity import linear_operands
from autopar.passes.primitives.shardings import random_implementation

Mode = Literal["whole", "cut", "linear", "each", "early", "late", "inner", "mapped"]


States = Sequence[BatchState]


class Decision(NamedTuple):
    """How one equation is evaluated.

    `whole`: all operands are whole. `cut`: on slices. `linear`: on partial sums. `each`: every
    operand for itself (a barrier). `early`: on the whole batch before the loop. `late`: on the
    whole batch after it. `inner`: control flow whose bodies run on slices. `mapped`: a scan over
    the batch. The forms are those in the loop. `reason` says why an equation is early or late,
    `failed` how its bodies were evaluated, if that is why.
    """

    mode: Mode
    operand_forms: tuple[Form, ...] = ()
    result_forms: tuple[Form, ...] = ()
    reason: str = ""
    inner: Any = None
    failed: Any = None


Outcome = tuple[Decision, list[BatchState]]  # of an equation, with its results' states

ALL_WHOLE = Decision("whole")
MEETS = "it combines rows of the batch with a value that only the whole batch determines"
MIXES = "it mixes the rows of the batch"
NONLINEAR = "it is not linear in a sum over the batch"


@dataclass(frozen=True)
class Context:
    """What the analysis of every equation refers to.

    `inside` is true in the body of a scan, while or cond, where no sum can be completed.
    """

    rules: Mapping[JaxprEqn, FactorRule]
    parts: int
    batch_sizes: tuple[int, ...]
    inside: bool = False
    occurrences: dict[int, Occurrences] = field(default_factory=dict)

    def rule(self, eqn: JaxprEqn) -> Occurrences:
        rule = self.rules[eqn]
        if id(rule) not in self.occurrences:
            self.occurrences[id(rule)] = Occurrences(rule)
        return self.occurrences[id(rule)]


def transfer(eqn: JaxprEqn, states: States, context: Context) -> Outcome:
    """How a plain equation is evaluated on operands in these states, and its results' states."""
    kinds = {state.kind for state in states}
    if kinds <= {"whole"}:
        return ALL_WHOLE, all_whole(eqn, states)
    if is_barrier(eqn):
        forms = tuple(state.form for state in states)
        return Decision("each", forms, forms), list(states)
    if eqn.effects:
        return unsplit(eqn, states, context, "its effect happens once, on the whole batch")
    if "late" in kinds:
        return unsplit(eqn, states, context, MEETS)
    found = (_cut if "split" in kinds else _linear)(eqn, states, context)
    return unsplit(eqn, states, context, found) if isinstance(found, str) else found


def all_whole(eqn: JaxprEqn, states: States) -> list[BatchState]:
    """The states of an equation's results where all operands are whole."""
    state = lattice.whole(
        zero=bool(states) and lattice.keeps_zero(eqn, states),
        batch=any(state.batch for state in states),
        params=any(state.params for state in states),
        blurred=any(state.blurred for state in states),
    )
    return [state] * len(eqn.outvars)


def _cut(eqn: JaxprEqn, states: States, context: Context) -> Outcome | str:
    rule = context.rule(eqn)
    # Which factor does each split operand cut? Those that can be had whole need not agree.
    wanted: dict[int, Cut | None] = {}
    for k, state in enumerate(states):
        if state.kind == "split":
            target = rule.factor(rule.rule.operands[k], state.place, context.parts)
            if target is not None and rule.rule.factors[target[0]].kind == "replicated":
                target = None
            wanted[k] = target
    strict = {target for k, target in wanted.items() if context.inside or not states[k].early}
    if not strict:
        counts = Counter(target for target in wanted.values() if target is not None)
        strict = {target for target, _ in counts.most_common(1)}
    cut = strict.pop() if len(strict) == 1 else None
    if cut is None:
        return MIXES
    factor, major = cut
    operand_forms = rule.places(rule.operands, factor, major)
    places = rule.places(rule.results, factor, major)
    if operand_forms is None or places is None:
        return MIXES
    for k, form in enumerate(operand_forms):
        if states[k].kind == "partial":
            return MEETS
        if context.inside and k in wanted and form != states[k].place:
            return MIXES
    kind = rule.rule.factors[factor].kind
    params = any(state.params for state in states)
    if kind == "pass":
        if None in places:
            return MIXES
        results = [lattice.split(place, params) for place in places if place is not None]
        return Decision("cut", tuple(operand_forms), tuple(places)), results
    # A microbatch could contribute the rows of a gather that it has: nothing would be reduced.
    is_gather = eqn.primitive.name == "gather"
    if kind not in MONOIDS or is_gather:
        return MIXES
    # A sum that comes from the batch alone can be had before the loop as well.
    late = context.inside or params
    reduced = lattice.partial(kind, params) if late else lattice.whole(batch=True)
    results = [reduced if place is None else lattice.split(place, params) for place in places]
    return Decision("cut", tuple(operand_forms), tuple(place or kind for place in places)), results


def _linear(eqn: JaxprEqn, states: States, context: Context) -> Outcome | str:
    """Partial operands, the others whole: linear equations keep a sum a sum."""
    positions = frozenset(k for k, state in enumerate(states) if state.kind == "partial")
    monoids = {states[k].monoid for k in positions}
    if len(monoids) != 1:
        return NONLINEAR
    (monoid,) = monoids
    assert monoid is not None
    jointly: frozenset[int] | None = None
    if monoid == "sum":
        # A sum that a body rounds cannot be completed first: what is added to it is rounded.
        sets = linear_operands(eqn, rounding=context.inside)
        jointly = next((set_ for set_ in sets if positions <= set_), None)
    elif COMBINES.get(eqn.primitive.name) == monoid:
        jointly = frozenset(range(len(states)))
    elif lattice.moves_elements(eqn):
        jointly = positions
    if jointly is None:
        return NONLINEAR
    forms: list[Form] = []
    for k, state in enumerate(states):
        if k not in jointly or (monoid == "sum" and state.zero):
            forms.append(WHOLE)
        elif k in positions or context.inside:  # A whole operand is counted in one microbatch.
            forms.append(monoid)
        else:
            return NONLINEAR
    params = any(state.params for state in states)
    results = [lattice.partial(monoid, params)] * len(eqn.outvars)
    return Decision("linear", tuple(forms), (monoid,) * len(results)), results


def unsplit(eqn: JaxprEqn, states: States, context: Context, reason: str) -> Outcome:
    """The equation needs the whole batch."""
    params = any(state.params for state in states)
    if not any(state.wide for state in states):  # The optimizer: sums and parameters.
        return Decision("late", reason=reason), [lattice.late(params=params)] * len(eqn.outvars)
    rule = None if is_control_flow(eqn) else context.rule(eqn)
    shapes = [var.aval.shape for var in eqn.outvars]
    places = [_row_place(rule, k, shape, states, context) for k, shape in enumerate(shapes)]
    if eqn.primitive.name == "gather" and places == [(None, False)]:
        # Rows that were taken by number: one for each example again, or few.
        places = [(guess_place(shapes[0], context)[0], False)]
    if not context.inside and all(state.early for state in states):
        return Decision("early", reason=reason), [early_state(*place) for place in places]
    results = [lattice.late(place, params, blurred) for place, blurred in places]
    return Decision("late", reason=reason), results


def early_state(place: Place | None, blurred: bool) -> BatchState:
    """A value had before the loop, with its rows at a place or somewhere unknown (`blurred`).

    Slices of a whole value are exact along any dimension, so its rows can be split again.
    """
    if place is not None:
        return lattice.split(place, params=False)
    return lattice.whole(batch=True, blurred=blurred)


def _row_place(
    rule: Occurrences | None, result: int, shape: Sequence[int], states: States, context: Context
) -> tuple[Place | None, bool]:
    """Where the rows of the batch are in the result of an equation that needs all of them.

    The place only decides what is sliced and what it costs, never whether the result is right.
    The second value says that they are somewhere unknown.
    """
    reduced = False
    for k, state in enumerate(states):
        if rule is None or state.place is None:
            continue
        target = rule.factor(rule.rule.operands[k], state.place, context.parts)
        if target is None:
            continue
        where = rule.results[result].get(target[0])
        if where is not None and where is not Occurrences.TWICE:
            return (where[0], where[1] * target[1]), False
        reduced |= where is None and rule.rule.factors[target[0]].kind != "replicated"
    return (None, False) if reduced else guess_place(shape, context)


def guess_place(shape: Sequence[int], context: Context) -> tuple[Place | None, bool]:
    """The dimension that has the size of the batch, or a multiple of it."""
    for exact in (True, False):
        for rows in context.batch_sizes:
            for dim, size in enumerate(shape):
                if size == rows if exact else size and size % rows == 0:
                    return (dim, size // context.parts), False
    return None, math.prod(shape) >= min(context.batch_sizes)


def is_control_flow(eqn: JaxprEqn) -> bool:
    """Whether an equation holds bodies, which are analysed in their turn."""
    return eqn.primitive.name in CONTROL_FLOW


def regenerate(
    eqn: JaxprEqn, result: int, place: Place, context: Context
) -> tuple[tuple[Form, ...], tuple[Form, ...]] | None:
    """Forms to evaluate an equation on whole operands for the rows of one microbatch only."""
    if is_control_flow(eqn) or eqn.effects or _draws_one_stream(eqn):
        return None
    rule = context.rule(eqn)
    target = rule.factor(rule.rule.results[result], place, context.parts)
    if target is None or rule.rule.factors[target[0]].kind != "pass":
        return None
    operand_forms = rule.places(rule.operands, *target)
    result_forms = rule.places(rule.results, *target)
    if operand_forms is None or result_forms is None or None in result_forms:
        return None
    return tuple(operand_forms), tuple(result_forms)


def _draws_one_stream(eqn: JaxprEqn) -> bool:
    """Whether rows of random bits can only be had by drawing all of them."""
    if eqn.primitive.name != "random_bits":
        return False
    partitionable = eqn.ctx.threefry_partitionable
    return not (partitionable and random_implementation(eqn.invars[0].aval) == "threefry2x32")
