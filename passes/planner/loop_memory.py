"""A bound from below of the memory of every plan for one mesh whose step loops over microbatches.

What the loop carries is what the splitter says leaves it as sums: of a gradient that is a sum over
layers, or that is reduced to a scalar, it carries less than the step computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from numpy.typing import NDArray

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Graph
from autopar.passes.graph.primitives import CONTROL_FLOW, HEAVY
from autopar.passes.graph.scans import ScanParts
from autopar.passes.microbatch import Analysis
from autopar.passes.microbatch.batch_states import WHOLE, Form
from autopar.passes.sharding.compiler_rules import CompilerRules
from autopar.passes.sharding.peak_memory import FUSION_REACH
from autopar.passes.sharding.scopes import value_bytes

_Bytes = NDArray[np.int64]
_Value = tuple[Var, Form]


@dataclass(frozen=True)
class LoopMemory:
    """Bytes over all devices, by equation of a loop over microbatches.

    Args:
      whole: alive and the same for all microbatches: the state, and products before the loop.
      rows: alive and with rows of the batch; of all of them, so a microbatch has its share.
      carried: sums over the microbatches, which are there as long as the loop runs.
      for_fewer: whether the loop is the same with any divisor of its number of microbatches.
    """

    whole: _Bytes
    rows: _Bytes
    carried: int
    for_fewer: bool

    @classmethod
    def of(
        cls, graph: Graph, analysis: Analysis, compiler: CompilerRules, away: Collection[int] = ()
    ) -> LoopMemory | None:
        """Counts what the loop of a traced step must hold; None where it is not one loop.

        Not the leaves with the numbers `away`, which may lie in the hosts' memory.
        """
        if analysis.culprits or analysis.parts:
            return None
        gone = away_variables(analysis.graph, away)
        whole, rows = _alive_outside(analysis, gone), _alive_inside(analysis, compiler)
        sums = (var for var, _ in analysis.phases.accumulated if var not in gone)
        for_fewer = analysis.graph is graph and not _has_rows_outside(analysis)
        return cls(whole[0], whole[1] + rows, sum(map(_sum_bytes, sums)), for_fewer)

    def bytes(self, num_microbatches: int) -> int:
        """What all devices together hold at the worst moment of the loop."""
        return self.carried + int((self.whole + self.rows // num_microbatches).max(initial=0))

    @property
    def at_any_time(self) -> int:
        """What all devices together hold at some time, however few rows there are."""
        return self.carried + int(self.whole.max(initial=0))


def away_variables(graph: Graph, away: Collection[int]) -> set[Var]:
    """The leaves with these numbers, and the results that take their places."""
    jaxpr = graph.jaxpr
    results = (graph.inputs[i].alias for i in away)
    later = (jaxpr.outvars[i] for i in results if i is not None)
    return {jaxpr.invars[i] for i in away} | {atom for atom in later if isinstance(atom, Var)}


def handed_on(eqn: JaxprEqn) -> set[Var]:
    """The results of control flow that may be in the buffers of what it reads, or be the same."""
    if eqn.primitive.name not in CONTROL_FLOW:
        return set()
    stacks = ScanParts.of(eqn).results(eqn.outvars)[1] if eqn.primitive.name == "scan" else ()
    return set(eqn.outvars).difference(stacks)


def _sum_bytes(var: Var) -> int:
    """Bytes of a sum over the microbatches: the loop adds up in at least 32 bits."""
    size = value_bytes(var)
    dtype = var.aval.dtype
    return size * max(1, 4 // dtype.itemsize) if jnp.issubdtype(dtype, jnp.floating) else size


def _alive_outside(analysis: Analysis, gone: Collection[Var]) -> tuple[_Bytes, _Bytes]:
    """Bytes that are there before the loop, by its equations: whole ones, and rows of inputs.

    A leaf may go when the loop has read it for the last time; one that only equations before the
    loop read may be gone. Of what these make, products count, and only those that the loop reads
    as they are.
    """
    graph, phases = analysis.graph, analysis.phases
    end = len(phases.loop)
    inside = {pair for step in phases.loop for pair in step.makes}
    last: dict[Var, int] = {}
    needed: set[Var] = set()  # as they are
    for time, step in enumerate(phases.loop):
        for var, form in step.reads:
            if (var, form) not in inside:
                outer = phases.same.get(var, var)
                last[outer] = time
                if form is WHOLE or isinstance(form, str):
                    needed.add(outer)
    late = {phases.same.get(var, var) for step in phases.epilogue for var, _ in step.reads}
    late.update(atom for atom in graph.jaxpr.outvars if not isinstance(atom, Literal))
    whole, rows = np.zeros(end + 1, np.int64), np.zeros(end + 1, np.int64)
    for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True):
        if var in gone or not (var in last or var in late or not label.donated):
            continue
        table = whole if label.batch_axis is None else rows
        table[: last.get(var, end) + 1] += value_bytes(var)
    for step in phases.prologue:
        if step.eqn.primitive.name in HEAVY and not is_barrier(step.eqn):
            for var, _ in step.makes:
                if var in needed and not analysis.states[var].wide:
                    whole[: last[var] + 1] += value_bytes(var)
    return whole[:end], rows[:end]


def _alive_inside(analysis: Analysis, compiler: CompilerRules) -> _Bytes:
    """Bytes of rows that the loop computes, by its equations.

    Products and loops' results until their last use, and what is made of them and lives long.
    """
    steps = analysis.phases.loop
    same: dict[_Value, _Value] = {}  # what passes a barrier is the same buffer
    first: dict[_Value, int] = {}
    last: dict[_Value, int] = {}
    made_at: dict[_Value, int] = {}
    solid: set[_Value] = set()  # products, loops' results, and what is made of them
    written: set[_Value] = set()
    passed = np.zeros(len(steps) + 1, np.int64)  # equations so far that are not made from little
    for time, step in enumerate(steps):
        reads = [same.get(pair, pair) for pair in step.reads]
        last.update(dict.fromkeys(reads, time))
        passed[time + 1] = passed[time]
        name = step.eqn.primitive.name
        if is_barrier(step.eqn):  # it makes what it reads, each in the form in which it reads it
            ends = zip(step.eqn.invars, step.eqn.outvars, step.result_forms, strict=True)
            passing = (((a, form), (b, form)) for a, b, form in ends if isinstance(a, Var))
            same.update((there, same.get(here, here)) for here, there in passing)
            continue
        heavy = name in HEAVY or name in CONTROL_FLOW
        if heavy or not solid.isdisjoint(reads):
            passed[time + 1] += 1
            solid.update(step.makes)
        makes = [pair for pair in step.makes if pair[0] not in handed_on(step.eqn)]
        written.update(makes if heavy else ())
        for pair in makes:
            first[pair] = last[pair] = time
            made_at[pair] = int(passed[time])
    alive = np.zeros(len(steps) + 1, np.int64)
    for pair, start in first.items():
        stop, (var, form) = last[pair], pair
        lives_long = pair in solid and passed[stop] - made_at[pair] > FUSION_REACH
        lives_long = lives_long and not compiler.fuses_anywhere  # then readers may make it again
        if isinstance(form, tuple) and (pair in written or lives_long):
            alive[start] += value_bytes(var)
            alive[stop + 1] -= value_bytes(var)
    return alive.cumsum()[: len(steps)]


def _has_rows_outside(analysis: Analysis) -> bool:
    """Whether rows of the batch are seen before or after the loop.

    Where they are not, every equation that sees rows divides them among that many microbatches, and
    so among any divisor of it.
    """
    steps = itertools.chain(analysis.phases.prologue, analysis.phases.epilogue)
    seen = (var for step in steps for var, _ in (*step.reads, *step.makes))
    return any(analysis.states[var].wide for var in seen)
