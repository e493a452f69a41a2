"""What each stage computes, reads, receives and sends, found backwards from the results."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal as Choice

from jax.extend.core import Literal, Var

from autopar.passes.graph.graph import Atom
from autopar.passes.slicing.anatomy import holds
from autopar.passes.slicing.placed import PlacedProgram

Space = Choice["inside", "outside"]


@dataclass
class Needs:
    """What one stage has, by the numbers of `PlacedProgram`; dictionaries serve as ordered sets."""

    body: set[int] = field(default_factory=set)
    outside: set[int] = field(default_factory=set)
    carries: set[int] = field(default_factory=set)
    consts: set[Var] = field(default_factory=set)
    slices: set[Var] = field(default_factory=set)
    stacked: set[int] = field(default_factory=set)
    leaves: set[int] = field(default_factory=set)
    outputs: dict[int, None] = field(default_factory=dict)


@dataclass(frozen=True)
class Transfer:
    """A variable that one stage sends to another."""

    space: Space
    var: Var
    source: int
    target: int


@dataclass(frozen=True)
class StageExchange:
    """The needs of every stage, and what passes between stages, in a fixed order."""

    needs: tuple[Needs, ...]
    passed: tuple[Transfer, ...]


def find_exchange(program: PlacedProgram, num_stages: int) -> StageExchange:
    """Follow every result back to the inputs, through whatever stages it is made on."""
    search = _NeedsSearch(program, num_stages)
    search.run()
    passed = [
        Transfer(space, var, source, target)
        for (space, var, target), source in search.links.items()
    ]
    order = {var: place for place, var in enumerate(search.order())}
    passed.sort(key=lambda p: (p.space, order[p.var], p.source, p.target))
    return StageExchange(tuple(search.needs), tuple(passed))


class _NeedsSearch:
    def __init__(self, program: PlacedProgram, num_stages: int):
        self.program = program
        parts = program.parts
        jaxpr = parts.graph.jaxpr
        self.needs = [Needs() for _ in range(num_stages)]
        self.links: dict[tuple[Space, Var, int], int] = {}
        self.inputs = {var: number for number, var in enumerate(jaxpr.invars)}
        self.labels = parts.graph.inputs
        self.inside = {v: i for i, item in enumerate(program.body) for v in item.eqn.outvars}
        self.outside = {v: i for i, item in enumerate(program.outside) for v in item.eqn.outvars}
        self.carried = {carry.carry: i for i, carry in enumerate(program.carries)}
        self.totals = {carry.total: i for i, carry in enumerate(program.carries)}
        self.stacks = {var: i for i, (_, var) in enumerate(parts.loop.stacks)}
        self.homes = dict(program.homes)
        self.asked: dict[int, set[int]] = defaultdict(set)  # small state leaves: who wants them
        self.work: list[tuple[Space, int, Atom]] = []
        self.done: set[tuple[Space, int, Var]] = set()

    def order(self) -> list[Var]:
        """All variables, in the order of the program."""
        program = self.program
        return [
            *program.parts.graph.jaxpr.invars,
            *(v for item in program.body for v in item.eqn.outvars),
            *(v for item in program.outside[: program.num_before] for v in item.eqn.outvars),
            *self.totals,
            *self.stacks,
            *(v for item in program.outside[program.num_before :] for v in item.eqn.outvars),
        ]

    def run(self) -> None:
        graph = self.program.parts.graph
        for index, item in enumerate(self.program.outside):
            if item.eqn.effects:
                assert item.stage is not None
                self.equation("outside", item.stage, index)
        later = []
        for number, (atom, label) in enumerate(
            zip(graph.jaxpr.outvars, graph.outputs, strict=True)
        ):
            if label.alias is not None and label.alias not in self.homes:
                later.append(number)
                continue
            stage = self.output_stage(atom) if label.alias is None else self.homes[label.alias]
            self.output(stage, number, atom)
        self.drain()
        # Small leaves of the state are at home on the lowest stage that wants them.
        for number in later:
            leaf = graph.outputs[number].alias
            assert leaf is not None
            self.settle(leaf)
            self.output(self.homes[leaf], number, graph.jaxpr.outvars[number])
            self.drain()
        for number, leaf_label in enumerate(graph.inputs):
            if leaf_label.role == "state":
                self.settle(number)
                self.needs[self.homes[number]].leaves.add(number)
        for number, stages in sorted(self.asked.items()):
            for stage in sorted(stages - {self.homes[number]}):
                var = graph.jaxpr.invars[number]
                self.links["outside", var, stage] = self.homes[number]

    def settle(self, leaf: int) -> None:
        self.homes.setdefault(leaf, min(self.asked[leaf], default=0))

    def output(self, stage: int, number: int, atom: Atom) -> None:
        self.needs[stage].outputs[number] = None
        self.want("outside", stage, atom)

    def output_stage(self, atom: Atom) -> int:
        """Where an output that replaces no leaf is cheapest: where what it is made from is."""
        seen: set[Var] = set()
        stack = [atom]
        while stack:
            atom = stack.pop()
            if isinstance(atom, Literal) or atom in seen:
                continue
            seen.add(atom)
            if atom in self.inputs:
                if self.inputs[atom] in self.homes:
                    return self.homes[self.inputs[atom]]
            elif atom in self.totals:
                return self.program.carries[self.totals[atom]].stage
            elif atom in self.stacks:
                stage = self.inside_stage(self.program.parts.loop.stacks[self.stacks[atom]][0])
                if stage is not None:
                    return stage
            else:
                item = self.program.outside[self.outside[atom]]
                if item.stage is not None:
                    return item.stage
                stack += item.eqn.invars
        return 0

    def inside_stage(self, atom: Atom) -> int | None:
        """The stage of a variable of the loop's body, None if it is copied."""
        if isinstance(atom, Literal):
            return None
        if atom in self.carried:
            return self.program.carries[self.carried[atom]].stage
        return self.program.body[self.inside[atom]].stage if atom in self.inside else None

    # The work list.

    def want(self, space: Space, stage: int, atom: Atom) -> None:
        if not isinstance(atom, Literal) and (space, stage, atom) not in self.done:
            self.done.add((space, stage, atom))
            self.work.append((space, stage, atom))

    def drain(self) -> None:
        while self.work:
            space, stage, var = self.work.pop()
            if space == "inside":
                self.visit_inside(stage, var)
            else:
                self.visit_outside(stage, var)

    def visit_inside(self, stage: int, var: Var) -> None:
        parts, needs = self.program.parts, self.needs[stage]
        if var in parts.loop.consts:
            needs.consts.add(var)
            self.want("outside", stage, parts.loop.consts[var])
        elif var in parts.loop.slices:
            needs.slices.add(var)
            self.want("outside", stage, parts.loop.slices[var])
        elif var in self.carried:
            needs.carries.add(self.carried[var])
        else:
            index = self.inside[var]
            source = self.program.body[index].stage
            if source is None or source == stage:
                self.equation("inside", stage, index)
            else:
                self.link("inside", var, source, stage)

    def visit_outside(self, stage: int, var: Var) -> None:
        needs = self.needs[stage]
        if var in self.inputs:
            self.input(stage, self.inputs[var])
        elif var in self.totals:
            carry = self.program.carries[self.totals[var]]
            if carry.stage != stage:
                self.link("outside", var, carry.stage, stage)
                return
            needs.carries.add(self.totals[var])
            self.want("outside", stage, carry.start)
            self.want("inside", stage, carry.result)
        elif var in self.stacks:
            atom = self.program.parts.loop.stacks[self.stacks[var]][0]
            source = self.inside_stage(atom)
            if source is not None and source != stage:
                self.link("outside", var, source, stage)
                return
            needs.stacked.add(self.stacks[var])
            self.want("inside", stage, atom)
        else:
            index = self.outside[var]
            source = self.program.outside[index].stage
            if source is None or source == stage:
                self.equation("outside", stage, index)
            else:
                self.link("outside", var, source, stage)

    def input(self, stage: int, number: int) -> None:
        label = self.labels[number]
        var = self.program.parts.graph.jaxpr.invars[number]
        if label.role != "state":
            self.needs[stage].leaves.add(number)
        elif holds(label, var.aval):
            if self.homes[number] != stage:
                self.link("outside", var, self.homes[number], stage)
            else:
                self.needs[stage].leaves.add(number)
        else:
            self.asked[number].add(stage)

    def equation(self, space: Space, stage: int, index: int) -> None:
        item = (self.program.body if space == "inside" else self.program.outside)[index]
        numbers = self.needs[stage].body if space == "inside" else self.needs[stage].outside
        if index not in numbers:
            numbers.add(index)
            for atom in item.eqn.invars:
                self.want(space, stage, atom)

    def link(self, space: Space, var: Var, source: int, target: int) -> None:
        self.links[space, var, target] = source
        self.want(space, source, var)
