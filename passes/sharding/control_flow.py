"""Loops and branches in the integer program: what enters, what leaves, how long it is there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax.extend import core as jex_core
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Atom, inner_jaxprs, user_source
from autopar.passes.graph.microbatched import LoopPhase, Task
from autopar.passes.graph.primitives import CONTROL_FLOW
from autopar.passes.graph.scans import ScanParts
from autopar.passes.sharding.layout import stacked
from autopar.passes.sharding.scopes import (
    Assigned,
    Entry,
    LiveRange,
    Replicated,
    Scope,
    ScopeValue,
    aval_shape,
    is_constant,
)
from autopar.passes.sharding.strategy_graph import BodyTimes, StrategyGraphBuilder
from autopar.passes.sharding.sums import accumulating, whole_inside

RARELY = 1 / 64
"""How often a branch is counted to run that is not the longest on one device.

A step takes what its longest branch takes. The others are laid out well too, and hardly count.
"""


class ControlFlowBuilder(StrategyGraphBuilder):
    """What a walk does where it meets a loop or a branch.

    `loops` are those over the microbatches, by identity of their scans; `passed` are the stacks
    that pass between stages; `state_nodes` decide leaves of the state, and sums; `sliced` are
    stacks as the last loop slices them, by identity of what they are outside of it.
    """

    loops: dict[int, LoopPhase]
    passed: set[Var]
    state_nodes: set[int]
    sliced: dict[int, Assigned]

    def walk(
        self, scope: Scope, env: dict[Var, ScopeValue], tasks: Sequence[Task] = ()
    ) -> dict[Task, int]:
        """Add a scope's equations, and what they make to `env`; when each of the tasks begins."""
        raise NotImplementedError

    def read(self, env: Mapping[Var, ScopeValue], atom: Atom) -> ScopeValue:
        return Replicated() if isinstance(atom, jex_core.Literal) else env[atom]

    def scan(
        self, scope: Scope, eqn: JaxprEqn, values: list[ScopeValue]
    ) -> tuple[Entry, list[ScopeValue]]:
        """A loop: its body once, with a boundary node for all that enters it and leaves it."""
        walked = _LoopWalk(self, scope, eqn, values)
        results = walked.run()
        boundaries = tuple(walked.boundaries)
        completions = tuple(
            value.node if isinstance(value, Assigned) and value.node not in boundaries else None
            for value in results
        )
        return Entry("scan", eqn, None, None, (), (walked.inner,), boundaries, completions), results

    def cond(
        self, scope: Scope, eqn: JaxprEqn, values: list[ScopeValue]
    ) -> tuple[Entry, list[ScopeValue]]:
        label = f"cond {eqn.source_info.name_stack}".strip()
        inner: list[Scope] = []
        outs: list[list[ScopeValue]] = []
        sliced = self.sliced  # what a branch brings into a layout stays in it
        bodies = inner_jaxprs(eqn)
        longest = max(range(len(bodies)), key=lambda number: self.alone(bodies[number]))
        for number, body in enumerate(bodies):
            env: dict[Var, ScopeValue] = dict(zip(body.invars, values[1:], strict=True))
            share = 1 if number == longest else RARELY
            within = Scope(body, share * scope.times, scope.microbatch)
            self.sliced = {**sliced}
            self.walk(within, env)
            self.sliced = sliced
            inner.append(within)
            outs.append([self.read(env, atom) for atom in body.outvars])
        boundaries: list[int | None] = []
        results: list[ScopeValue] = []
        for position, var in enumerate(eqn.outvars):
            if math.prod(aval_shape(var)) <= 1:
                boundaries.append(None)
                results.append(Replicated())
                continue
            source = next((v for o in outs if isinstance(v := o[position], Assigned)), None)
            layouts = self.restriction.boundary_layouts(var, self.mesh, True)
            node = self.boundary(f"{label} result", user_source(eqn), layouts, scope.times)
            if source is not None and source.node in self.state_nodes:
                self.state_nodes.add(node)
            for within, branch_values in zip(inner, outs, strict=True):
                self.link(branch_values[position], layouts, node, within.times)
            boundaries.append(node)
            results.append(self.assigned(node, layouts, var))
        return Entry("cond", eqn, scopes=tuple(inner), boundaries=tuple(boundaries)), results

    def alone(self, body: Jaxpr) -> float:
        """What a body takes on one device: a loop's all trips, of branches the longest."""
        total = 0.0
        for eqn in body.eqns:
            if eqn.primitive.name in CONTROL_FLOW:
                inner = [self.alone(body) for body in inner_jaxprs(eqn)]
                trips = eqn.params.get("length", 1)
                total += max(inner) if eqn.primitive.name == "cond" else trips * sum(inner)
            elif eqn.outvars and not is_barrier(eqn):
                total += self.pricing.start(eqn) + self.pricing.compute(eqn, self.rules[eqn])
        return total


class _LoopWalk:
    """One loop as it is walked: `boundaries` of constants, carries, slices and stacks, in order.

    A value that enters is there under one name: outside until the loop begins, then inside to its
    end. What is carried is there until it is read last, and from where it is written anew.
    """

    def __init__(
        self, walk: ControlFlowBuilder, scope: Scope, eqn: JaxprEqn, values: list[ScopeValue]
    ) -> None:
        self.walk, self.scope, self.eqn, self.values = walk, scope, eqn, values
        self.parts, self.loop = ScanParts.of(eqn), walk.loops.get(id(eqn))
        self.label = f"scan {eqn.source_info.name_stack}".strip()
        times = scope.times * eqn.params["length"]
        self.inner = Scope(self.parts.body, times, scope.microbatch or self.loop is not None)
        self.start, self.env = walk.built.time, dict[Var, ScopeValue]()
        self.boundaries = list[int | None]()
        self.throughout = list[Assigned]()  # what is there until the last trip
        self.carried = list[Assigned | None]()  # as they enter
        whole = [isinstance(value, Replicated) for value in values]
        self.whole = whole_inside(self.parts, whole)

    def run(self) -> list[ScopeValue]:
        """Walk it; what it results in."""
        parts, walk = self.parts, self.walk
        consts, carries, slices = parts.operands(
            list(zip(parts.body.invars, self.values, strict=True))
        )
        for var, value in consts:
            self._enter(var, value, "constant")
        for (var, value), is_sum in zip(carries, accumulating(self.eqn), strict=True):
            self._enter(var, value, "carry", is_sum)
        for var, value in slices:
            self._enter(var, value, "slice")
        tasks = () if self.loop is None else self.loop.tasks
        begins = walk.walk(self.inner, self.env, tasks)
        carried, rows = parts.results(list(zip(parts.body.outvars, self.eqn.outvars, strict=True)))
        carry_nodes = parts.operands(self.boundaries)[1]
        for (atom, _), node, before in zip(carried, carry_nodes, self.carried, strict=True):
            if node is not None:
                self._write_anew(walk.read(self.env, atom), node, before)
        stack_nodes = [self._stack(atom) for atom, _ in rows]
        self.boundaries += stack_nodes
        self._keep_until_now()
        if begins:
            walk.built.body = BodyTimes(self.start, walk.built.time, begins)
        walk.built.time += (
            2  # a moment for stacks that leave in another layout; carries leave after it
        )
        nodes = (*carry_nodes, *stack_nodes)
        results = [
            self._leave(var, node, is_stack=place >= len(carried))
            for place, ((_, var), node) in enumerate(zip((*carried, *rows), nodes, strict=True))
        ]
        walk.built.time += 1  # from now on stacks are there as they have left
        return results

    def _enter(self, var: Var, value: ScopeValue, what: str, is_sum: bool = False) -> None:
        walk, outer = self.walk, value if isinstance(value, Assigned) else None
        inner = self._entered(var, value, what, is_sum)
        self.env[var] = inner or Replicated()
        self.boundaries.append(None if inner is None else inner.node)
        if what == "carry":
            self.carried.append(inner)
        elif inner is None:
            return
        elif what == "slice" and outer is not None and outer.live.absent:
            inner.live.entering, inner.live.last = True, -1
        else:
            self.throughout.append(inner)
            is_own = outer is None or inner.node != outer.node
            if what == "slice" and is_own and not is_constant(value):
                self._brought(inner, outer)
            if outer is not None and (what == "slice" or inner.node == outer.node):
                self.throughout.append(outer)
                outer.live.fused = False  # XLA writes what a loop reads
            elif what == "constant":
                inner.live.same_as = outer
        assert walk.built.time == self.start, "nothing is walked while values enter"

    def _brought(self, inner: Assigned, outer: Assigned | None) -> None:
        """A stack as the loop slices it: its own buffer, but in the layout that it has outside.

        A loop before that slices it as well has most likely brought it into that layout.
        """
        walk, before = self.walk, self.walk.sliced.get(id(outer))
        layouts = walk.interned(tuple(map(stacked, inner.layouts)))
        shape = (self.eqn.params["length"], *inner.shape)
        since = None if before is None else before.live.last + 1
        live = LiveRange(self.start, self.start, fused=False, same_as=outer, since=since)
        stack = replace(inner, layouts=layouts, shape=shape, live=live)
        walk.built.values.append(stack)
        self.throughout.append(stack)
        if outer is not None:
            walk.sliced[id(outer)] = stack

    def _entered(self, var: Var, value: ScopeValue, what: str, is_sum: bool) -> Assigned | None:
        """A value in the loop; None where every device has it whole."""
        walk, times = self.walk, self.scope.times
        if self.loop and var in self.loop.stored and (as_it_lies := walk.stored(value, var)):
            return as_it_lies
        if math.prod(aval_shape(var)) <= 1 or var in self.whole:
            return None
        trips = self.eqn.params["length"] if what == "slice" else 1
        layouts = walk.restriction.boundary_layouts(var, walk.mesh, is_sum, trips)
        if is_sum:
            layouts = walk.restriction.accumulator_layouts(var, layouts)
        node = walk.boundary(f"{self.label} {what}", user_source(self.eqn), layouts, times)
        if what == "carry":
            walk.state_nodes.add(node)
        walk.enters_loop(value, node, is_carry=what == "carry", is_sum=is_sum)
        outside = tuple(map(stacked, layouts)) if what == "slice" else layouts
        if isinstance(value, Assigned):
            if what == "slice" and value.live.absent:
                walk.receive(node, var, self.inner.times)
            until = max(value.live.last, self.start - 1)
            walk.link(value, outside, node, times)
            if what != "slice":
                value.live.last = until
        else:
            walk.link(value, outside, node, times)
        return walk.assigned(node, layouts, var)

    def _write_anew(self, value: ScopeValue, node: int, before: Assigned | None) -> None:
        """What is carried into the next trip; what the last to read it makes takes its place."""
        walk = self.walk
        if isinstance(value, Assigned) and before is not None and value is not before:
            value.live.first += value.live.first == before.live.last
        walk.link(value, walk.built.nodes[node].layouts, node, self.inner.times)

    def _stack(self, atom: Atom) -> int | None:
        """The node of a stack of what the trips make; None of scalars."""
        walk, value = self.walk, self.walk.read(self.env, atom)
        if isinstance(value, Replicated) or math.prod(aval_shape(atom)) <= 1:
            return None
        trips = self.eqn.params["length"]
        layouts = walk.restriction.boundary_layouts(atom, walk.mesh, True, trips)
        source, times = user_source(self.eqn), self.scope.times
        node = walk.boundary(f"{self.label} stack", source, layouts, times)
        walk.link(value, layouts, node, self.inner.times)
        return node

    def _keep_until_now(self) -> None:
        """What the loop reads, and what it fills, is there until its last trip."""
        built, carried = self.walk.built, {id(value) for value in self.carried}
        for value in built.values:
            if value.live.first <= self.start < value.live.last and id(value) not in carried:
                value.live.last = built.time
        for value in self.throughout:
            value.live.last = built.time

    def _leave(self, var: Var, node: int | None, *, is_stack: bool) -> ScopeValue:
        walk = self.walk
        if node is None:
            return Replicated()
        layouts = walk.built.nodes[node].layouts
        made = walk.assigned(node, tuple(map(stacked, layouts)) if is_stack else layouts, var)
        if is_stack:  # it is allocated before the loop and filled by it
            made.live.first, made.live.absent = self.start, var in walk.passed
        whole = walk.completed(made, var, self.label)
        if is_stack and whole is not made:
            # Then both are there, but once where nothing is to be added.
            now, absent = walk.built.time, whole.live.absent
            live = LiveRange(now - 1, now, fused=False, absent=absent, same_as=made)
            walk.built.values.append(replace(whole, live=live))
            whole.live.first += 1
        return whole
