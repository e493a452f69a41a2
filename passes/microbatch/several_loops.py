"""A step whose loss needs the whole batch in the middle: cut where its first loop ends.

A contrastive loss compares every row with all others; SAM takes a second gradient where the first
one leads to. What one loop gives (sums, and the rows that meet others) are inputs of the rest,
which is split in its turn: what needs these rows alone is evaluated on the whole batch between the
loops, and what else the rest reads of the first loop is evaluated again, microbatch by microbatch,
or kept. For a contrastive loss this is GradCache (Gao et al. 2021), here for any program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Var

from autopar.passes.graph import graph as graphs
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom, Graph, Input, Output, read_atom, variables
from autopar.passes.graph.microbatched import LoopPhase, Microbatched, in_phases
from autopar.passes.graph.primitives import CONTROL_FLOW, HEAVY
from autopar.passes.microbatch.propagate import Forward
from autopar.passes.primitives.factor_rule import FactorRule, Rules
from autopar.passes.primitives.populate import populate


@dataclasses.dataclass(frozen=True)
class CutStep:
    """A step in two: `first` gives the `kept` values, the last inputs of `rest` are these.

    `rules` are those of both.
    """

    first: Graph
    rest: Graph
    kept: tuple[Var, ...]
    rules: Rules

    @property
    def held(self) -> tuple[Var, ...]:
        """The rest's variables for the kept values."""
        return tuple(self.rest.jaxpr.invars[len(self.first.jaxpr.invars) :])


def cut_step(graph: Graph, rules: Rules, kept: Sequence[Var]) -> CutStep:
    """Cut a step at these values: nothing in the rest is made from what they are made from.

    What the rest needs otherwise of the equations before them, it evaluates for itself.
    """
    jaxpr = graph.jaxpr
    pure = [eqn for eqn in jaxpr.eqns if not eqn.effects]  # an effect happens once, in the rest
    first = jax_compat.replace_jaxpr(jaxpr, eqns=pure, outvars=list(kept))
    held = [jax_compat.new_var(var.aval) for var in kept]
    env: dict[Var, Atom] = dict(zip(kept, held, strict=True))
    eqns, known = [], dict[int, tuple[JaxprEqn, JaxprEqn]]()
    for eqn in jaxpr.eqns:
        invars = [read_atom(env, atom) for atom in eqn.invars]
        is_same = all(a is b for a, b in zip(invars, eqn.invars, strict=True))
        eqns.append(eqn if is_same else eqn.replace(invars=invars))
        known[id(eqns[-1])] = (eqns[-1], eqn)
    rest = jax_compat.replace_jaxpr(
        jaxpr,
        invars=[*jaxpr.invars, *held],
        eqns=eqns,
        outvars=[read_atom(env, atom) for atom in jaxpr.outvars],
    )
    labels = [Input(f"kept[{number}]", "state", None) for number in range(len(kept))]
    inputs = tuple(dataclasses.replace(label, alias=None) for label in graph.inputs)
    outputs = tuple(Output(label.path) for label in labels)
    first, rest = graphs.eliminate_dead_code(first), graphs.eliminate_dead_code(rest)
    return CutStep(
        Graph(first, inputs, outputs, graph.constants),
        Graph(rest, (*graph.inputs, *labels), graph.outputs, graph.constants),
        tuple(kept),
        _RulesOfCut(rules, known, (first, rest)),
    )


class _RulesOfCut(Mapping[JaxprEqn, FactorRule]):
    """The rules of equations, also for those that stand for them with other operands.

    What dead code left of barriers and loops has rules of its own.
    """

    def __init__(
        self,
        rules: Rules,
        known: Mapping[int, tuple[JaxprEqn, JaxprEqn]],
        jaxprs: Sequence[Jaxpr],
    ):
        self._rules, self._known = rules, known
        there = {*known, *map(id, rules)}
        eqns = (eqn for jaxpr in jaxprs for eqn in graphs.walk(jaxpr))
        is_new = any(id(e) not in there and e.primitive.name not in CONTROL_FLOW for e in eqns)
        found: Rules = populate(jaxprs) if is_new else {}
        self._new = {id(eqn): (eqn, rule) for eqn, rule in found.items() if id(eqn) not in there}

    def __getitem__(self, eqn: JaxprEqn) -> FactorRule:
        if id(eqn) in self._new:
            return self._new[id(eqn)][1]
        return self._rules[self._known.get(id(eqn), (eqn, eqn))[1]]

    def __iter__(self) -> Iterator[JaxprEqn]:
        yield from self._rules
        yield from (eqn for eqn, _ in self._known.values())
        yield from (eqn for eqn, _ in self._new.values())

    def __len__(self) -> int:
        return len(self._rules) + len(self._known) + len(self._new)


def rows_for_the_middle(before: Forward, rest: Forward, cut: CutStep) -> list[Var]:
    """Values whose whole batch the rest needs, and of which the first loop can give all rows.

    These are what an equation of the rest mixes. What it mixes of its own has to wait for the end
    of its loop.
    """
    outer = dict(zip(cut.held, cut.kept, strict=True))
    found: dict[Var, None] = {}
    for eqn in rest.jaxpr.eqns:
        kinds = {rest.state(atom).kind for atom in eqn.invars}
        if kinds & {"late", "partial"} or all(rest.state(v).kind != "late" for v in eqn.outvars):
            continue
        rows = [outer.get(v, v) for v in variables(eqn.invars) if not rest.state(v).early]
        if all(v in before.states and before.states[v].kind == "split" for v in rows):
            found.update(dict.fromkeys(rows))
    return list(found)


def rows_to_keep(before: Forward, read: Iterable[Var]) -> list[Var]:
    """Of a loop's rows those from which later loops have what they `read` without heavy equations.

    Results of products and scans; what follows from them elementwise would take more memory.
    """
    makers = {var: eqn for eqn in before.jaxpr.eqns for var in eqn.outvars}
    found, waiting = dict[Var, None](), list(read)
    seen: set[Var] = set()
    while waiting:
        var = waiting.pop()
        if var in seen or before.states[var].kind != "split" or before.states[var].early:
            continue
        seen.add(var)
        if var in makers and makers[var].primitive.name in HEAVY:
            found[var] = None
        elif var in makers:
            waiting += variables(makers[var].invars)
    return list(found)


def rows_to_reuse(before: Forward, own: Sequence[Var], cut: CutStep) -> list[Var]:
    """Of the rows that the first loop computes for its own results, those that the rest needs.

    Without heavy equations of that loop the rest has what it needs of these: each value is kept, or
    what it is computed from, whichever has fewer bytes, one by one. The loop does nothing ahead for
    the rest: PPO keeps the advantages that it whitens, not the activations of the policy. If it
    computes all of its `own` rows anyway, these.
    """
    makers = {var: eqn for eqn in cut.first.jaxpr.eqns for var in eqn.outvars}
    if makers.keys() >= set(own):
        return list(own)
    wanted: dict[Var, None] = {}
    for eqn in cut.rest.jaxpr.eqns:
        if makers.keys().isdisjoint(eqn.outvars):
            wanted.update(dict.fromkeys(variables(eqn.invars)))
    wanted.update(dict.fromkeys(variables(cut.rest.jaxpr.outvars)))
    sizes: dict[Var, float] = {}  # bytes of what is kept for a row's value, or of its operands
    operands: dict[Var, list[Var]] = {}  # of what is computed again
    for eqn in cut.first.jaxpr.eqns:
        rows = [v for v in dict.fromkeys(variables(eqn.invars)) if v in sizes]
        again = sum(map(sizes.__getitem__, rows))
        is_heavy = eqn.primitive.name in HEAVY
        for var in eqn.outvars:
            state = before.states.get(var)
            if state is None or state.kind != "split" or state.early:
                continue
            own_bytes = var.aval.size * var.aval.dtype.itemsize
            if not is_heavy and again < own_bytes:
                operands[var] = rows
            sizes[var] = again if var in operands else own_bytes
    found, waiting = dict[Var, None](), [var for var in wanted if var in sizes]
    seen: set[Var] = set()
    while waiting:
        var = waiting.pop()
        if var not in seen:
            seen.add(var)
            waiting += operands.get(var, ())
            if var not in operands:
                found[var] = None
    return list(found)


def gives_with_effect(eqn: JaxprEqn) -> bool:
    """Whether an equation with an effect, which happens once, has results."""
    return bool(eqn.effects) and not all(isinstance(var, DropVar) for var in eqn.outvars)


def num_late(forward: Forward) -> int:
    """How many equations wait for the end of the loop."""
    return sum(decision.mode == "late" for decision in forward.decisions)


def one_after_the_other(
    graph: Graph, parts: Sequence[Microbatched], cuts: Sequence[CutStep]
) -> Microbatched:
    """The parts of a cut step as one program with several loops.

    What several of them evaluate once a step is evaluated once.
    """
    env: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []
    loops: list[JaxprEqn] = []
    results: list[Atom] = []
    for number, part in enumerate(parts):
        if number:
            env.update(zip(cuts[number - 1].held, results, strict=True))
        scans = {id(loop.scan) for loop in part.loops}
        for eqn in part.graph.jaxpr.eqns:
            outvars = [
                v if isinstance(v, DropVar) else jax_compat.new_var(v.aval) for v in eqn.outvars
            ]
            new = eqn.replace(invars=[read_atom(env, v) for v in eqn.invars], outvars=outvars)
            env.update(zip(eqn.outvars, outvars, strict=True))
            eqns.append(new)
            if id(eqn) in scans:
                loops.append(new)
        results = [read_atom(env, atom) for atom in part.graph.jaxpr.outvars]
    jaxpr = graphs.merge_equal_equations(graph.jaxpr.replace(eqns=eqns, outvars=results))
    jaxpr = graphs.eliminate_dead_code(jaxpr)
    made = {var for loop in loops for var in loop.outvars if not isinstance(var, DropVar)}
    scans_now = [eqn for eqn in jaxpr.eqns if not made.isdisjoint(eqn.outvars)]
    return in_phases(graphs.with_jaxpr(graph, jaxpr), map(LoopPhase, scans_now))
