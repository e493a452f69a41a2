"""What each stage computes, reads, receives and sends, found backwards from the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from jax.extend.core import Literal, Var

from autopar.passes.graph.graph import Atom, makers_of, variables
from autopar.passes.slicing.placed import PlacedProgram


@dataclass
class Needs:
    """What one stage has, by the numbers of `PlacedProgram`."""

    body: set[int] = field(default_factory=set)
    outside: set[int] = field(default_factory=set)
    carries: set[int] = field(default_factory=set)
    entering: set[Var] = field(default_factory=set)
    stacked: set[int] = field(default_factory=set)
    leaves: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)


class Transfer(NamedTuple):
    """A variable that one stage sends to another; `inside`: of the loop's body."""

    var: Var
    source: int
    target: int
    inside: bool


class StageExchange(NamedTuple):
    """The needs of every stage, and what passes between stages: first what is of the body."""

    needs: Sequence[Needs]
    passed: Sequence[Transfer]


def find_exchange(program: PlacedProgram, num_stages: int) -> StageExchange:
    """Follow every result back to the inputs, through whatever stages it is made on."""
    search = _NeedsSearch(program, num_stages)
    search.run()
    body = [var for item in program.body for var in item.eqn.outvars]
    outside = [[*item.eqn.outvars] for item in program.outside]
    before, after = outside[: program.num_before], outside[program.num_before :]
    order = [*body, *search.inputs, *chain(*before), *search.totals, *search.stacks, *chain(*after)]
    place_of = {var: place for place, var in enumerate(order)}
    passed = [
        Transfer(var, source, target, place_of[var] < len(body))
        for (var, target), source in search.links.items()
    ]
    passed.sort(key=lambda p: (place_of[p.var], p.source, p.target))
    return StageExchange(search.needs, passed)


class _NeedsSearch:
    """A work list of variables that stages want.

    Attributes:
      links: for a variable and a stage that receives it, the stage that sends it.
      stage_of: stages of the variables that are on one stage; others are where they are read.
      homes: stages of state leaves. Small ones get theirs when it is known who wants them.
    """

    def __init__(self, program: PlacedProgram, num_stages: int) -> None:
        self.program, self.graph = program, program.parts.graph
        self.needs = [Needs() for _ in range(num_stages)]
        self.links: dict[tuple[Var, int], int] = {}
        self.inputs = {var: number for number, var in enumerate(self.graph.jaxpr.invars)}
        self.inside = makers_of(item.eqn for item in program.body)
        self.outside = makers_of(item.eqn for item in program.outside)
        self.carried = {carry.carry: i for i, carry in enumerate(program.carries)}
        self.totals = {carry.total: i for i, carry in enumerate(program.carries)}
        self.stacks = {var: i for i, (_, var) in enumerate(program.parts.loop.stacks)}
        self.homes = dict(program.homes)
        self.stage_of = {self.graph.jaxpr.invars[n]: stage for n, stage in self.homes.items()}
        for item in (*program.body, *program.outside):
            if item.stage is not None:
                self.stage_of.update(dict.fromkeys(item.eqn.outvars, item.stage))
        for carry in program.carries:
            self.stage_of.update(dict.fromkeys((carry.carry, carry.total), carry.stage))
        for atom, var in program.parts.loop.stacks:
            if not isinstance(atom, Literal) and atom in self.stage_of:
                self.stage_of[var] = self.stage_of[atom]
        self.asked: dict[int, set[int]] = defaultdict(set)  # small state leaves: who wants them
        self.work: list[tuple[int, Var]] = []
        self.done: set[tuple[int, Var]] = set()

    def run(self) -> None:
        graph = self.graph
        for index, item in enumerate(self.program.outside):
            if item.eqn.effects:
                assert item.stage is not None
                self.needs[item.stage].outside.add(index)
                self.want(item.stage, item.eqn.invars)
        later: list[tuple[int, int]] = []
        outputs = enumerate(zip(graph.jaxpr.outvars, graph.outputs, strict=True))
        for number, (atom, label) in outputs:
            if label.alias is None:
                self.output(self.origin(atom), number)
            elif label.alias in self.homes:
                self.output(self.homes[label.alias], number)
            else:
                later.append((number, label.alias))
        self.drain()
        # Small leaves of the state are at home on the lowest stage that wants them.
        for number, leaf in later:
            self.output(self.home(leaf), number)
            self.drain()
        for var, number in self.inputs.items():
            if graph.inputs[number].role == "state":
                home = self.home(number)
                self.needs[home].leaves.add(number)
                others = self.asked.get(number, set()) - {home}
                self.links.update({(var, stage): home for stage in others})

    def home(self, leaf: int) -> int:
        """The stage of a state leaf."""
        return self.homes.setdefault(leaf, min(self.asked[leaf], default=0))

    def output(self, stage: int, number: int) -> None:
        self.needs[stage].outputs.add(number)
        self.want(stage, [self.graph.jaxpr.outvars[number]])

    def origin(self, atom: Atom) -> int:
        """Where an output that replaces no leaf is cheapest: where what it is made from is."""
        seen: set[Var] = set()
        stack = variables([atom])
        while stack:
            var = stack.pop()
            if var in self.stage_of:
                return self.stage_of[var]
            if var in self.outside and var not in seen:
                seen.add(var)
                stack += variables(self.program.outside[self.outside[var]].eqn.invars)
        return 0

    def want(self, stage: int, atoms: Iterable[Atom]) -> None:
        new = [(stage, var) for var in variables(atoms) if (stage, var) not in self.done]
        self.done.update(new)
        self.work += new

    def drain(self) -> None:
        while self.work:
            stage, var = self.work.pop()
            source = self.stage_of.get(var, stage)
            if source == stage:
                self.want(stage, self.read_for(stage, var))
            else:
                self.links[var, stage] = source
                self.want(source, [var])

    def read_for(self, stage: int, var: Var) -> Iterable[Atom]:
        """What a stage needs for a variable that it has or makes, which is noted."""
        program, loop, needs = self.program, self.program.parts.loop, self.needs[stage]
        if var in self.inside:
            needs.body.add(self.inside[var])
            return program.body[self.inside[var]].eqn.invars
        if var in self.outside:
            needs.outside.add(self.outside[var])
            return program.outside[self.outside[var]].eqn.invars
        for entering in (loop.consts, loop.slices):
            if var in entering:
                needs.entering.add(var)
                return [entering[var]]
        if var in self.carried:
            needs.carries.add(self.carried[var])
        elif var in self.totals:
            needs.carries.add(self.totals[var])
            carry = program.carries[self.totals[var]]
            return [carry.start, carry.result]
        elif var in self.stacks:
            needs.stacked.add(self.stacks[var])
            return [loop.stacks[self.stacks[var]][0]]
        else:
            number = self.inputs[var]
            if self.graph.inputs[number].role == "state" and number not in program.homes:
                self.asked[number].add(stage)
            else:
                needs.leaves.add(number)
        return ()
