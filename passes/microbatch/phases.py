"""The three phases of a microbatched step: prologue, loop and epilogue.

The backward sweep over the whole program: an equation is evaluated before the loop if the loop
needs its whole result, in the loop if it works on rows of a microbatch, and after it otherwise.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import DropVar, JaxprEqn, Var

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import equation_key, variables
from autopar.passes.graph.primitives import CHEAP, ELEMENTWISE, PULLED, RESHAPES
from autopar.passes.microbatch.batch_states import WHOLE, Form, Place
from autopar.passes.microbatch.compared_rows import compared_rows
from autopar.passes.microbatch.equations import Context, Decision, is_control_flow
from autopar.passes.microbatch.liveness import (
    ABSENT,
    Demand,
    PhaseStep,
    asked,
    barrier_steps,
    given_form,
    loop_step,
    regenerated,
    whole_step,
)
from autopar.passes.microbatch.propagate import Bodies, Forward


@dataclass(frozen=True)
class Phases:
    """What is evaluated when, and what passes between the phases.

    `sliced` values enter the loop row by row, `accumulated` ones leave it combined by their
    monoid, `collected` ones as the stack of all microbatches' rows. `same` names, for values that
    are made twice of what is whole, the one that is kept.
    """

    prologue: tuple[PhaseStep, ...]
    loop: tuple[PhaseStep, ...]
    epilogue: tuple[PhaseStep, ...]
    sliced: tuple[tuple[Var, Place], ...]
    accumulated: tuple[tuple[Var, str], ...]
    collected: tuple[tuple[Var, Place], ...]
    same: Mapping[Var, Var] = field(default_factory=dict)


MADE_INSIDE = frozenset(("transpose",))
"""What products take in any order: it is not made for them, unless it is kept."""
TAKE_ANY_ORDER = frozenset(("dot_general", *MADE_INSIDE))
"""Who reads it without its being made; a gather does not."""


@dataclass
class _Sweep:
    """The state of the backward sweep. Steps are gathered last to first."""

    forward: Forward
    context: Context
    pulled: frozenset[int]
    same: Mapping[Var, Var]
    masks: frozenset[Var]
    compared: frozenset[Var]
    # WHOLE here means: before the loop.
    loop_demand: Demand = field(default_factory=lambda: Demand(set))
    late_demand: set[Var] = field(default_factory=set)
    early_demand: set[Var] = field(default_factory=set)
    made_for: set[Var] = field(default_factory=set)  # what a step of the loop reads as it is made
    written_for: set[Var] = field(default_factory=set)  # what one reads that is no elementwise one
    prologue: list[PhaseStep] = field(default_factory=list)
    loop: list[PhaseStep] = field(default_factory=list)
    epilogue: list[PhaseStep] = field(default_factory=list)
    sliced: dict[tuple[Var, Place], None] = field(default_factory=dict)
    accumulated: dict[Var, str] = field(default_factory=dict)
    collected: dict[Var, Place] = field(default_factory=dict)

    def kept(self, var: Var) -> Var:
        return self.same.get(var, var)

    # Placing steps.

    def before(self, step: PhaseStep) -> None:
        self.prologue.append(step)
        for var, _ in step.reads:
            self.loop_demand[self.kept(var)].add(WHOLE)
            self.early_demand.add(self.kept(var))

    def within(self, steps: list[PhaseStep]) -> None:
        for step in steps:
            name = step.eqn.primitive.name
            for var, form in ((self.kept(var), form) for var, form in step.reads):
                if name not in TAKE_ANY_ORDER:
                    self.made_for.add(var)
                if name not in ELEMENTWISE | RESHAPES:
                    self.written_for.add(var)
                state = self.forward.states[var]
                # A partial result of a whole value is taken from the whole one.
                whole = isinstance(form, str) and state.kind == "whole" and form != state.form
                self.loop_demand[var].add(WHOLE if whole else form)
        self.loop += steps

    def after(self, step: PhaseStep) -> None:
        self.epilogue.append(step)
        self.late_demand.update(self.kept(var) for var, _ in step.reads)

    def leave(self, var: Var, form: Form) -> None:
        """`var` leaves the loop: its rows are collected, its partial results are combined."""
        if isinstance(form, tuple):
            self.collected[var] = form
        elif form is not None:
            self.accumulated[var] = form

    def slice(self, var: Var, forms: set[Form]) -> None:
        for form in sorted(form for form in forms if isinstance(form, tuple)):
            self.sliced[var, form] = None

    # One equation.

    def visit(self, index: int, eqn: JaxprEqn, decision: Decision) -> None:
        forms = asked(eqn, self.loop_demand)
        late = [var in self.late_demand for var in eqn.outvars]
        if not any(forms) and not any(late):
            if eqn.effects:  # nobody asks for it, but its effect must happen, and happen once
                place = self.after if decision.mode == "late" else self.before
                place(whole_step(eqn))
        elif is_barrier(eqn):
            self._barrier(eqn, forms, late)
        elif decision.mode == "whole":
            self._whole(eqn, forms)
        elif decision.mode == "early":
            self._before_and_sliced(eqn, forms)
        elif decision.mode == "late" or (
            decision.mode == "linear" and not any(forms) and index not in self.pulled
        ):
            self.after(whole_step(eqn))
        else:
            self._in_loop(eqn, decision, forms, late)

    def _before_and_sliced(self, eqn: JaxprEqn, forms: list[set[Form]]) -> None:
        self.before(whole_step(eqn))
        for var, asked_for in zip(eqn.outvars, forms, strict=True):
            self.slice(var, asked_for)

    def _whole(self, eqn: JaxprEqn, forms: list[set[Form]]) -> None:
        if eqn.effects:
            self._before_and_sliced(eqn, forms)
        elif any(forms):
            rows, left = regenerated(eqn, forms, self.context)
            if left and self._is_made_inside(eqn, forms):
                rows, left = [whole_step(eqn)], False
            self.within(rows)
            if left:
                self._before_and_sliced(eqn, forms)
            elif any(var in self.late_demand for var in eqn.outvars):
                self.after(whole_step(eqn))
        else:
            self.after(whole_step(eqn))

    def _is_made_inside(self, eqn: JaxprEqn, forms: list[set[Form]]) -> bool:
        """Whether each microbatch makes a whole value of its own, which costs it next to nothing.

        Before the loop it would be held through it: the zeros to which a gradient's rows are added
        beside their copy, a table of tied embeddings in two orders. A causal mask that is there
        before the loop is an array that XLA:GPU writes for all heads of a layer, where it fuses
        what the loop itself makes of positions into its readers.
        """
        alone = self.early_demand.isdisjoint(eqn.outvars)
        whole = all(asked_for <= {WHOLE} for asked_for in forms)
        constant = not variables(eqn.invars) and not is_control_flow(eqn)
        is_order = eqn.primitive.name in MADE_INSIDE and self.made_for.isdisjoint(eqn.outvars)
        is_mask = self.masks.issuperset(eqn.outvars) and self.written_for.isdisjoint(eqn.outvars)
        return alone and whole and (constant or is_order or is_mask)

    def _in_loop(
        self, eqn: JaxprEqn, decision: Decision, forms: list[set[Form]], late: list[bool]
    ) -> None:
        """Results in their loop form; what else is asked for is evaluated before or after."""
        own = decision.result_forms
        inner = decision.inner
        kinds = [state.kind for state in inner.results] if isinstance(inner, Bodies) else []
        kept: list[Form] = []
        before, after = [], []
        for k, (var, asked_for) in enumerate(zip(eqn.outvars, forms, strict=True)):
            kind = kinds[k] if kinds else "split"
            in_loop = kind in ("split", "partial") and var not in self.compared
            form = own[k]
            if kind == "whole":
                # What a body computes alike for every microbatch is had outside of the loop,
                # unless it is asked for its rows.
                form = given_form(eqn, k, WHOLE, asked_for)
                in_loop = form is not WHOLE
            early = bool(asked_for - {form}) if in_loop else bool(asked_for)
            wanted_late = late[k] and not early
            if wanted_late and kind == "late" and self.forward.states[var].early:
                early, wanted_late = True, False
            leaves = in_loop and wanted_late and kind != "whole"
            if leaves:
                self.leave(var, form)
            if early:
                self.slice(var, asked_for - {form} if in_loop else asked_for)
            kept.append(form if in_loop and (form in asked_for or leaves) else ABSENT)
            before.append(early)
            after.append(wanted_late and not leaves)
        if any(before):
            self.before(self._outside(eqn, decision, before, kinds))
        if any(after):
            self.after(self._outside(eqn, decision, after, kinds))
        if any(form != ABSENT for form in kept):
            self.within([loop_step(eqn, decision, kept, self.context)])

    def _outside(
        self, eqn: JaxprEqn, decision: Decision, keep: list[bool], kinds: list[Any]
    ) -> PhaseStep:
        """The evaluation outside of the loop: whole, or only the part of a body that is whole."""
        forms = tuple(WHOLE if kept else ABSENT for kept in keep)
        if kinds and all(kind == "whole" for kind, kept in zip(kinds, keep, strict=True) if kept):
            return loop_step(eqn, decision, forms, self.context)
        return replace(whole_step(eqn), result_forms=forms)

    def _barrier(self, eqn: JaxprEqn, forms: list[set[Form]], late: list[bool]) -> None:
        within: list[set[Form]] = []
        for var, asked_for in zip(eqn.outvars, forms, strict=True):
            rows = asked_for - {WHOLE}
            if WHOLE in asked_for:
                own = self.forward.states[var].form
                self.slice(var, rows - {own})
                rows &= {own}
            within.append(rows)
        for step in barrier_steps(eqn, [asked_for & {WHOLE} for asked_for in forms]):
            self.before(step)
        after = [{WHOLE} - asked_for if late[k] else set() for k, asked_for in enumerate(forms)]
        for step in barrier_steps(eqn, after):
            self.after(step)
        self.within(barrier_steps(eqn, within))


def find_phases(forward: Forward, context: Context) -> Phases:
    """Assign every equation that a result needs to its phases."""
    same, special = _same(forward), (_masks(forward), compared_rows(forward))
    sweep = _Sweep(forward, context, _pulled(forward), same, *special)
    jaxpr = forward.jaxpr
    sweep.late_demand.update(map(sweep.kept, variables(jaxpr.outvars)))
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        sweep.visit(index, jaxpr.eqns[index], forward.decisions[index])
    for var in (*jaxpr.invars, *jaxpr.constvars):
        sweep.slice(var, sweep.loop_demand[var])
    return Phases(
        prologue=tuple(reversed(sweep.prologue)),
        loop=tuple(reversed(sweep.loop)),
        epilogue=tuple(reversed(sweep.epilogue)),
        sliced=tuple(sweep.sliced),
        accumulated=tuple(sweep.accumulated.items()),
        collected=tuple(sweep.collected.items()),
        same=same,
    )


def _same(forward: Forward) -> dict[Var, Var]:
    """For what a rematerialized part computes again of whole values, the first value that is equal.

    What is whole is there for all microbatches, before the loop: computed twice, it would be kept
    twice, and the loop's barriers have nothing to say about it.
    """
    same: dict[Var, Var] = {}
    known: dict[Any, JaxprEqn] = {}
    for eqn, decision in zip(forward.jaxpr.eqns, forward.decisions, strict=True):
        pairs = list(zip(eqn.outvars, eqn.invars, strict=False))
        if not is_barrier(eqn):
            if decision.mode != "whole" or eqn.effects:
                continue
            key = equation_key(eqn, same)
            first = eqn if key is None else known.setdefault(key, eqn)
            pairs = [] if first is eqn else list(zip(eqn.outvars, first.outvars, strict=True))
        for var, other in pairs:
            is_kept = isinstance(other, Var) and not isinstance(other, DropVar)
            if is_kept and forward.state(other).kind == "whole":
                same[var] = same.get(other, other)
    return same


def _masks(forward: Forward) -> frozenset[Var]:
    """What is made of nothing but positions and numbers, element by element, with little work."""
    found: set[Var] = set()
    for eqn, decision in zip(forward.jaxpr.eqns, forward.decisions, strict=True):
        name = eqn.primitive.name
        light = name in CHEAP & (ELEMENTWISE | RESHAPES) and not eqn.effects
        made_of_those = decision.mode == "whole" and found.issuperset(variables(eqn.invars))
        if made_of_those and (light or name == "iota"):
            found.update(eqn.outvars)
    return frozenset(found)


# Where a linear equation on sums is evaluated: after the loop, unless its result takes fewer bytes
# in the loop's carry than its operands would.


def _pulled(forward: Forward) -> frozenset[int]:
    """The linear equations that are evaluated on partial sums in the loop.

    A value's cost is the least number of bytes that the carry needs for it; a value that is used
    twice is in the carry anyway and costs its other users nothing.
    """
    jaxpr = forward.jaxpr
    atoms = itertools.chain(*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars)
    uses = Counter(variables(atoms))
    cost: dict[Var, int] = {}
    better: dict[Var, list[int]] = {}  # equations to pull so that a value has that cost
    pulled: set[int] = set()
    for index, (eqn, decision) in enumerate(zip(jaxpr.eqns, forward.decisions, strict=True)):
        if decision.mode != "linear":
            for var in eqn.outvars:
                if forward.states[var].kind == "partial":
                    cost[var], better[var] = _bytes(var), []
            continue
        operands = {v for v in variables(eqn.invars) if forward.states[v].kind == "partial"}
        if len(eqn.outvars) != 1 or eqn.primitive.name not in PULLED:
            cost.update((var, 0) for var in eqn.outvars)
            better.update((var, []) for var in eqn.outvars)
            continue
        (var,) = eqn.outvars
        once = all(uses[atom] == 1 for atom in operands)
        theirs = sum(cost[atom] for atom in operands) if once else 0
        ours = _bytes(var)
        chain = [index, *(i for atom in operands for i in better[atom])]
        pull = once and ours < theirs
        cost[var], better[var] = (ours, []) if pull else (theirs, chain)
        if pull:
            pulled.update(chain)
    return frozenset(pulled)


def _bytes(var: Var) -> int:
    return int(var.aval.size) * max(4, int(var.aval.dtype.itemsize))
