"""A step in phases: what runs once a step, and the loops over its microbatches.

`microbatch.split` makes a `Microbatched`, slicing makes one for every stage, and sharding lowers
each as it is: no pass has to find out again which of a program's scans is the loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom, Graph, readers_of, with_jaxpr
from autopar.passes.graph.scans import ScanParts

Task = Literal["F", "B", "W"]
"""Forward, backward, and weight gradients, for which no other stage waits."""

InFlight = Mapping[tuple[Task, Task], int]
"""How many microbatches are, at once, between the start of a task and the end of a later one."""


@dataclass(frozen=True)
class WholePhase:
    """Equations that run once a step."""

    eqns: tuple[JaxprEqn, ...]


@dataclass(frozen=True)
class Carried:
    """A value that a loop carries.

    `carry` is the body's variable for what has been accumulated so far, `start` what it is before
    the loop, `result` what the body makes of it, `total` the variable after the loop.
    """

    carry: Var
    start: Atom
    result: Atom
    total: Var


@dataclass(frozen=True)
class Accumulator(Carried):
    """A carried value, and the numbers of the body's equations that read it, directly or not."""

    combine: tuple[int, ...]


@dataclass(frozen=True)
class LoopPhase:
    """A scan over the microbatches.

    `tasks` say for every equation of its body what it belongs to, first all F, then B, then W;
    empty until a stage is made of it. Of the stacks in `passed` (variables outside of the loop)
    there is only what belongs to a few microbatches at a time: other stages send or take them so.
    The body reads the `stored` ones of its constants as they are stored outside of the loop.
    """

    scan: JaxprEqn
    tasks: tuple[Task, ...] = ()
    passed: frozenset[Var] = frozenset()
    stored: frozenset[Var] = frozenset()

    @property
    def num_microbatches(self) -> int:
        """How often the loop runs."""
        return int(self.scan.params["length"])

    @cached_property
    def parts(self) -> ScanParts:
        """What is constant in the loop, and what it carries."""
        return ScanParts.of(self.scan)

    @property
    def body(self) -> Jaxpr:
        """What one microbatch runs."""
        return self.parts.body

    @cached_property
    def consts(self) -> Mapping[Var, Atom]:
        """The body's variables for what is the same in every microbatch, with the values outside.

        Where the body has several variables for one value, each has it.
        """
        inner, *_ = self.parts.operands(self.body.invars)
        outer, *_ = self.parts.operands(self.scan.invars)
        return dict(zip(inner, outer, strict=True))

    @cached_property
    def slices(self) -> Mapping[Var, Atom]:
        """The body's variables for one microbatch's slice, with the stacked values outside."""
        *_, inner = self.parts.operands(self.body.invars)
        *_, outer = self.parts.operands(self.scan.invars)
        return dict(zip(inner, outer, strict=True))

    @cached_property
    def accumulators(self) -> tuple[Accumulator, ...]:
        """What it carries."""
        _, carries, _ = self.parts.operands(self.body.invars)
        _, starts, _ = self.parts.operands(self.scan.invars)
        carried, _ = self.parts.results(self.body.outvars)
        totals, _ = self.parts.results(self.scan.outvars)
        readers = readers_of(self.body.eqns)
        return tuple(
            Accumulator(carry, start, result, total, _combining(self.body, readers, carry))
            for carry, start, result, total in zip(carries, starts, carried, totals, strict=True)
        )

    @cached_property
    def combining(self) -> frozenset[int]:
        """Numbers of the body's equations that add to accumulators."""
        return frozenset(index for item in self.accumulators for index in item.combine)

    @cached_property
    def stacks(self) -> tuple[tuple[Atom, Var], ...]:
        """What leaves the body for every microbatch, each with the stack after the loop."""
        _, inner = self.parts.results(self.body.outvars)
        _, outer = self.parts.results(self.scan.outvars)
        return tuple(zip(inner, outer, strict=True))


Phase = WholePhase | LoopPhase


@dataclass(frozen=True)
class Microbatched:
    """A program whose loops over microbatches are known.

    `phases` hold the graph's equations in order. A program that is not split is one `WholePhase`.
    Stages are cut from programs of one loop.
    """

    graph: Graph
    phases: tuple[Phase, ...]

    @cached_property
    def loops(self) -> tuple[LoopPhase, ...]:
        """The loops over the microbatches, in order."""
        return tuple(phase for phase in self.phases if isinstance(phase, LoopPhase))

    @property
    def loop(self) -> LoopPhase | None:
        """The (first) loop over the microbatches, if the program has one."""
        return self.loops[0] if self.loops else None

    @property
    def prologue(self) -> tuple[JaxprEqn, ...]:
        """What runs before the (first) loop; without one, all."""
        first = self.phases[0]
        return first.eqns if isinstance(first, WholePhase) else ()

    @property
    def epilogue(self) -> tuple[JaxprEqn, ...]:
        """What runs after the (last) loop."""
        last = self.phases[-1]
        return last.eqns if self.loop is not None and isinstance(last, WholePhase) else ()

    def is_read_early(self, number: int) -> bool:
        """Whether an input is read before the (last) loop ends; without a loop, at all."""
        value = self.graph.jaxpr.invars[number]
        after = set(map(id, self.epilogue))
        early = (eqn for eqn in self.graph.jaxpr.eqns if id(eqn) not in after)
        return any(value is x for eqn in early for x in eqn.invars)

    def is_made_late(self, number: int) -> bool:
        """Whether an output is there after a loop only."""
        value = self.graph.jaxpr.outvars[number]
        late = (loop.scan for loop in self.loops), self.epilogue
        return any(value is x for eqn in itertools.chain(*late) for x in eqn.outvars)

    def with_eqns(self, eqns: Iterable[JaxprEqn]) -> Microbatched:
        """The same program with other equations outside of its loops, which are among them."""
        loops = [phase for phase in self.phases if isinstance(phase, LoopPhase)]
        return in_phases(with_jaxpr(self.graph, self.graph.jaxpr.replace(eqns=list(eqns))), loops)

    def with_scan(self, scan: JaxprEqn, tasks: tuple[Task, ...] | None = None) -> Microbatched:
        """The same program with another equation for its loop; its equations' tasks, if new."""
        loop = self.loop
        assert loop is not None
        tasks = loop.tasks if tasks is None else tasks
        eqns = [scan if eqn is loop.scan else eqn for eqn in self.graph.jaxpr.eqns]
        graph = with_jaxpr(self.graph, self.graph.jaxpr.replace(eqns=eqns))
        return in_phases(graph, [replace(loop, scan=scan, tasks=tasks)])


def in_phases(graph: Graph, loops: Iterable[LoopPhase] = ()) -> Microbatched:
    """A program whose loops over microbatches are these scans; any that it lacks are left out."""
    by_scan = {id(loop.scan): loop for loop in loops}
    phases: list[Phase] = []
    eqns: list[JaxprEqn] = []
    for eqn in graph.jaxpr.eqns:
        if id(eqn) in by_scan:
            phases += [WholePhase(tuple(eqns)), by_scan[id(eqn)]]
            eqns = []
        else:
            eqns.append(eqn)
    return Microbatched(graph, (*phases, WholePhase(tuple(eqns))))


def scan_like(
    scan: JaxprEqn,
    consts: Sequence[tuple[Var, Atom]],
    carries: Sequence[Carried],
    slices: Sequence[tuple[Var, Atom]],
    stacks: Sequence[tuple[Atom, Var]],
    eqns: Sequence[JaxprEqn],
) -> JaxprEqn:
    """A scan like another one, made of other parts.

    Args:
      scan: gives the length, the direction, and where it is from.
      consts: variables of the body, each with the value outside, as `slices`.
      carries: what it carries.
      slices: variables of the body, each with the stacked value outside.
      stacks: what leaves the body in every iteration, each with the stack outside.
      eqns: of the body.
    """
    effects = jex_core.no_effects.union(*(eqn.effects for eqn in eqns))
    body = jax_compat.replace_jaxpr(
        scan.params["jaxpr"].jaxpr,
        invars=[*(v for v, _ in consts), *(c.carry for c in carries), *(v for v, _ in slices)],
        outvars=[*(c.result for c in carries), *(atom for atom, _ in stacks)],
        eqns=list(eqns),
        effects=effects,
    )
    closed = ClosedJaxpr(body, ())
    return scan.replace(
        invars=[*(x for _, x in consts), *(c.start for c in carries), *(x for _, x in slices)],
        outvars=[*(c.total for c in carries), *(var for _, var in stacks)],
        params=jax_compat.scan_params(scan.params, closed, len(consts), len(carries)),
        effects=effects,
    )


def stacked(var: Var, length: int) -> Var:
    """A new variable for the stack of a variable of a scan's body."""
    aval = var.aval
    weak = bool(getattr(aval, "weak_type", False))
    return jax_compat.new_var(jax_compat.array_type((length, *aval.shape), aval.dtype, weak))


def _combining(body: Jaxpr, readers: Mapping[Var, list[int]], carry: Var) -> tuple[int, ...]:
    found: set[int] = set()
    stack = [carry]
    while stack:
        for index in readers.get(stack.pop(), ()):
            if index not in found:
                found.add(index)
                stack += body.eqns[index].outvars
    return tuple(sorted(found))
