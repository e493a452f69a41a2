"""A bound from below of the memory of every plan for one mesh, for any number of microbatches.

At every equation, what must be there is counted with the bytes that a device has if all devices
share it evenly: the state, the results of products and loops until their last use, and what is made
of them and lives long. What a loop over microbatches holds is read from the splitter's analysis
(`loop_memory`). So numbers of microbatches that cannot fit are passed over without building a
program or solving it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend.core import Literal, Var
from numpy.typing import NDArray

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.base.units import format_bytes, format_microbatches
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Atom, Graph
from autopar.passes.graph.primitives import CONTROL_FLOW, HEAVY
from autopar.passes.microbatch import Analysis
from autopar.passes.planner.loop_memory import LoopMemory, away_variables, handed_on
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.sharding.batch_dims import batch_dims
from autopar.passes.sharding.compiler_rules import CompilerRules, rules_of
from autopar.passes.sharding.host_leaves import may_leave
from autopar.passes.sharding.peak_memory import FUSION_REACH
from autopar.passes.sharding.scopes import value_bytes
from autopar.passes.slicing.anatomy import bytes_of, held_leaves

_Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class LeastMemory:
    """What a traced step must hold; nothing where it splits into several loops, or not at all.

    Args:
      graph: the step.
      analysis: of it, by numbers of microbatches: how it is split.
      device: on which kind of device.
      away: numbers of leaves that may lie in the hosts' memory.
      known: numbers of microbatches that are analysed already.
      whole: bytes over all devices, by equation: alive and without rows of the batch.
      rows: the same, with rows of the batch.
    """

    graph: Graph
    analysis: Callable[[int], Analysis]
    device: str
    away: Collection[int]
    known: Collection[int]
    whole: _Bytes
    rows: _Bytes
    _loops: dict[int, LoopMemory | None] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        graph: Graph,
        rules: Rules,
        device: str,
        analysis: Callable[[int], Analysis],
        away: Collection[int] = (),
        known: Collection[int] = (),
    ) -> LeastMemory:
        """Counts what a traced step must hold on that kind of device."""
        whole, rows = _count(graph, rules, rules_of(device), away)
        return cls(graph, analysis, device, away, known, whole, rows)

    def bytes(self, num_microbatches: int, num_devices: int) -> int:
        """What at least one device holds at the worst moment of a step."""
        if num_microbatches == 1:
            return self.guess(1) // num_devices
        loop = self.loop(num_microbatches)
        return 0 if loop is None else loop.bytes(num_microbatches) // num_devices

    def at_any_time(self, num_microbatches: int) -> int:
        """What all devices hold together at some time, however few rows there are; 0: not known.

        Of the whole batch, what is made of weights alone and may be computed again is there too.
        """
        if num_microbatches == 1:
            return int(self.whole.max(initial=0))
        loop = self.loop(num_microbatches)
        return 0 if loop is None else loop.at_any_time

    def guess(self, num_microbatches: int) -> int:
        """About what all devices hold: no bound, but for one microbatch, and quicker."""
        return int((self.whole + self.rows // num_microbatches).max(initial=0))

    def loop(self, num_microbatches: int) -> LoopMemory | None:
        """The loop over so many microbatches; None where there are several, or the step is refused.

        Also of more microbatches, where that is known to be the same loop: to analyse takes longer.
        """
        for more in (*self._loops, *self.known):
            if more % num_microbatches == 0:
                loop = self._looked_at(more)
                if loop is not None and loop.for_fewer:
                    return loop
        return self._looked_at(num_microbatches)

    def _looked_at(self, count: int) -> LoopMemory | None:
        if count not in self._loops:
            found, compiler = self.analysis(count), rules_of(self.device)
            self._loops[count] = LoopMemory.of(self.graph, found, compiler, self.away)
        return self._loops[count]


def too_few(
    memory: LeastMemory,
    counts: Sequence[int],
    num_devices: int,
    limit: int,
    report: Callable[[str], None],
) -> list[int]:
    """The first of these numbers of microbatches with which no plan for one mesh can fit.

    The last is never one of them: of that, a plan says what is missing.
    """
    found: list[int] = []
    likely = (count for count in counts if memory.guess(count) <= limit * num_devices)
    first = next(likely, counts[-1])
    if first > 1 and len(counts) > 1:  # it is split next, so it is analysed anyway
        memory.loop(first)
    for count in counts[:-1]:
        least = memory.bytes(count, num_devices)
        if least <= limit:
            break
        need, missing = format_bytes(least), format_bytes(least - limit)
        what = format_microbatches(count)
        report(f"{what} cannot fit: at least {need} a device, {missing} too much")
        found.append(count)
    return found


def state_on_devices(graph: Graph, options: Options, cluster: Cluster) -> int:
    """Bytes of the state's arrays that must be on devices between steps."""
    away = may_leave(graph, options.offload, cluster)
    return sum(bytes_of(v) for v, number in held_leaves(graph).items() if number not in away)


def _count(
    graph: Graph, rules: Rules, compiler: CompilerRules, away: Collection[int]
) -> tuple[_Bytes, _Bytes]:
    """Bytes of a step on the whole batch, by equation: without rows, and with."""
    jaxpr, dims = graph.jaxpr, batch_dims(graph, rules)
    eqns, end = jaxpr.eqns, len(jaxpr.eqns)
    same: dict[Var, Var] = {}  # what passes a barrier is the same buffer

    def root(atom: Atom) -> Var:
        return same.get(atom, atom)

    def has_rows(atoms: list[Var]) -> bool:
        return any(dims.get(atom) for atom in atoms)

    made_at: dict[Var, int] = dict.fromkeys(jaxpr.invars, 0)
    first, last = dict(made_at), dict.fromkeys(jaxpr.invars, -1)
    last_in_loop: dict[Var, int] = {}
    solid: set[Var] = set()  # products, loops' results, and what is made of them
    written: set[Var] = set(jaxpr.invars)
    gone = away_variables(graph, away)  # what is not counted
    steps = np.zeros(end + 1, np.int64)  # equations so far that are not made from little
    in_loop = np.zeros(end, np.bool_)
    for time, eqn in enumerate(eqns):
        reads = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        in_loop[time] = has_rows(reads) or has_rows(eqn.outvars)
        for atom in reads:
            last[root(atom)] = time
            if in_loop[time]:
                last_in_loop[root(atom)] = time
        steps[time + 1] = steps[time]
        if is_barrier(eqn):
            pairs = zip(eqn.outvars, eqn.invars, strict=True)
            same.update((var, root(x)) for var, x in pairs if not isinstance(x, Literal))
            continue
        heavy = eqn.primitive.name in HEAVY or eqn.primitive.name in CONTROL_FLOW
        if heavy or any(root(atom) in solid for atom in reads):
            steps[time + 1] += 1
            solid.update(eqn.outvars)
        old = handed_on(eqn)
        for var in eqn.outvars:
            first[var], made_at[var] = time, int(steps[time])
            if heavy and var not in old:
                written.add(var)
        gone |= old
    kept = (v for v, x in zip(jaxpr.invars, graph.inputs, strict=True) if not x.donated)
    outputs = (root(atom) for atom in jaxpr.outvars if not isinstance(atom, Literal))
    last.update(dict.fromkeys((*kept, *outputs), end))
    whole, rows = np.zeros(end + 1, np.int64), np.zeros(end + 1, np.int64)
    inputs = set(jaxpr.invars)
    for var, stop in last.items():
        if var in gone:
            continue
        lives_long = var in solid and steps[stop] - made_at[var] > FUSION_REACH
        lives_long = lives_long and not compiler.fuses_anywhere  # then readers may make it again
        if var not in written and not lives_long:
            continue
        if var in inputs:
            stop = last_in_loop.get(var, stop)  # what a loop has read for the last time may go
        size = value_bytes(var)
        table = rows if dims.get(var) else whole
        table[first[var]] += size
        if stop < end:
            table[stop + 1] -= size
    return whole.cumsum()[:end], rows.cumsum()[:end]
