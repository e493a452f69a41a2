"""From a graph to the integer program's nodes and edges, by one walk over its equations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn, Var

from autopar.passes.graph.barriers import is_barrier, part_of_barrier
from autopar.passes.graph.graph import user_source
from autopar.passes.graph.host_values import is_put_away
from autopar.passes.graph.microbatched import Microbatched, Task
from autopar.passes.graph.primitives import CONTROL_FLOW, OPENS_GROUP, UNFUSED
from autopar.passes.graph.tested_loops import as_scan
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.group_tiling import GROUPED
from autopar.passes.primitives.own_rules import elementwise
from autopar.passes.sharding import strategies as st
from autopar.passes.sharding.control_flow import ControlFlowBuilder
from autopar.passes.sharding.layout import Layout, cuts_product, replicated, without_partial
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.restrict import Restriction
from autopar.passes.sharding.scope_memory import ScopeBuffers
from autopar.passes.sharding.scopes import (
    Assigned,
    Entry,
    Recomputed,
    Replicated,
    Scope,
    ScopeValue,
    aval_shape,
)
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.sharding.sums import starts_of_sums
from autopar.passes.sharding.unknown_trips import trip_seconds

SMALL_ELEMENTS = 64  # values computed from scalars alone stay replicated up to this size
# A result this many times larger than what it is made from is recomputed, not moved.
FREE_EXPANSION = 4
LONGEST_CHAIN = 32  # equations computed again, one after another, wherever the last one is read


def build(
    step: Microbatched,
    rules: Rules,
    mesh: tuple[int, ...],
    pricing: Pricing,
    restriction: Restriction,
    buffers: ScopeBuffers | None = None,
) -> StrategyGraph:
    """Nodes with their costs (seconds a step), and edges; meshes may share a step's `buffers`."""
    return _Walk(rules, mesh, pricing, restriction, buffers).run(step)


class _Walk(ControlFlowBuilder):
    """What one walk over a program accumulates; `run` is the only entry."""

    def run(self, step: Microbatched) -> StrategyGraph:
        graph = step.graph
        self.loops = {id(loop.scan): loop for loop in step.loops}
        self.passed = {var for loop in step.loops for var in loop.passed}
        self.state_nodes: set[int] = set()
        self.sliced = dict[int, Assigned]()
        self._starts: set[Var] = set()  # what loops begin to add to
        jaxpr, built = graph.jaxpr, self.built
        env: dict[Var, ScopeValue] = {}
        inputs, held = list[int](), list[Assigned]()
        for index, (var, label) in enumerate(zip(jaxpr.invars, graph.inputs, strict=True)):
            layouts = self.restriction.input_layouts(index, self.mesh)
            node = self.boundary(label.path, "", layouts, times=1)
            inputs.append(node)
            if label.role == "state":
                self.state_nodes.add(node)
                self.in_background.add(node)
            small = label.role != "batch" and math.prod(aval_shape(var)) <= 1
            assigned = None if small else self.assigned(node, layouts, var)
            env[var] = assigned or Replicated()
            if assigned is not None:
                assigned.live.absent = var in self.passed
                held += () if label.donated else (assigned,)
        built.inputs = tuple(inputs)
        built.scope = Scope(jaxpr, times=1)
        self.walk(built.scope, env)
        pinned = self.restriction.pins.outputs
        for index, (atom, output) in enumerate(zip(jaxpr.outvars, graph.outputs, strict=True)):
            value = self.read(env, atom)
            if output.alias is not None:
                node = inputs[output.alias]
                self.link(value, built.nodes[node].layouts, node, 1)
            elif index in pinned:
                node = self.boundary(output.path, "", (pinned[index],), times=1)
                built.outputs[index] = node
                self.link(value, built.nodes[node].layouts, node, 1)
            elif isinstance(value, Assigned):
                wanted = tuple(map(without_partial, value.layouts))
                self.link(value, wanted, value.node, 1)
        for kept in held:  # the caller keeps what is not donated
            kept.live.last = built.time
        return built

    def walk(
        self, scope: Scope, env: dict[Var, ScopeValue], tasks: Sequence[Task] = ()
    ) -> dict[Task, int]:
        """Add a scope's equations, and what they make to `env`; when each of the tasks begins."""
        self._starts |= starts_of_sums(scope.jaxpr)
        begins, ends = dict[Task, int](), list[int]()
        for number, eqn in enumerate(scope.jaxpr.eqns):
            self.built.time += 1
            started = self.built.time
            if tasks:
                begins.setdefault(tasks[number], self.built.time)
            values = [self.read(env, atom) for atom in eqn.invars]
            name = eqn.primitive.name
            if name == "while" and (loop := as_scan(eqn)) is not None:
                name = "scan"
                entry, results = self.scan(scope, loop, values)
                entry = replace(entry, part_of=eqn)
            elif name == "scan":
                entry, results = self.scan(scope, eqn, values)
            elif name == "cond":
                entry, results = self.cond(scope, eqn, values)
            elif is_barrier(eqn):
                entry, results = self.barrier(scope, eqn, values), values
            else:
                entry, results = self.equation(scope, eqn, values)
            self.walked(name)
            scope.entries.append(entry)
            env.update(
                (var, value)
                for var, value in zip(eqn.outvars, results, strict=True)
                if not isinstance(var, jex_core.DropVar)
            )
            # What enters a loop has a value of its own there.
            ends.append(started - 1 if name == "scan" else self.built.time)
        self.buffers.settle(scope.jaxpr, env, ends)
        return begins

    def equation(
        self, scope: Scope, eqn: JaxprEqn, values: list[ScopeValue]
    ) -> tuple[Entry, list[ScopeValue]]:
        if eqn.effects or eqn.primitive.name in CONTROL_FLOW:
            return self.opaque(scope, eqn, values)
        if is_put_away(eqn) and isinstance(values[0], Assigned):
            return self.put_away(scope, eqn, values[0])
        shape = self.shape(eqn, self._adds_rounded(scope, eqn))
        sizes = [math.prod(aval_shape(v)) for v in eqn.outvars]
        all_small = all(isinstance(v, Replicated) for v in values) and max(sizes) <= SMALL_ELEMENTS
        is_small = all_small and self._starts.isdisjoint(eqn.outvars)
        layouts = self.restriction.constrained_layouts(eqn, is_small)
        if is_small and layouts is None:
            return Entry("replicated", eqn, shape), [Replicated() for _ in eqn.outvars]
        if layouts is not None:
            return self.constrained(scope, eqn, shape, values, layouts)
        if self._is_recomputed(eqn, shape, values, sizes):
            return Entry("recomputed", eqn, shape), [Recomputed.of(eqn, shape, values)]
        lead = self._lead(eqn, values)
        if lead is None:
            return self.opener(scope, eqn, shape, values)
        followed = values[lead]
        assert isinstance(followed, Assigned)
        found = self.follow(shape, lead, followed.layouts)
        return self._grouped(scope, eqn, shape, values, followed.node, found)

    def constrained(
        self,
        scope: Scope,
        eqn: JaxprEqn,
        shape: st.Shape,
        values: list[ScopeValue],
        layouts: tuple[Layout, ...],
    ) -> tuple[Entry, list[ScopeValue]]:
        """What the user prescribes: a group of its own, brought to one of these layouts."""
        found = tuple(st.as_it_lies(layout, self.mesh) for layout in layouts)
        label = f"{eqn.primitive.name} {eqn.source_info.name_stack}".strip()
        node = self.boundary(label, user_source(eqn), layouts, scope.times)
        self.built.nodes[node].choices = found
        return self._grouped(scope, eqn, shape, values, node, found)

    def _adds_rounded(self, scope: Scope, eqn: JaxprEqn) -> bool:
        """Whether sums over the batch may be rounded before they are complete.

        In a loop over microbatches they are: each microbatch rounds what it has.
        """
        return scope.microbatch and not any(map(self.restriction.batch_dims, eqn.outvars))

    def _is_recomputed(
        self, eqn: JaxprEqn, shape: st.Shape, values: list[ScopeValue], sizes: list[int]
    ) -> bool:
        if len(sizes) != 1 or eqn.primitive.name in OPENS_GROUP:
            return False
        if any(f.kind not in ("pass", "replicated") for f in shape.rule.factors):
            return False
        if max((v.depth for v in values if isinstance(v, Recomputed)), default=0) >= LONGEST_CHAIN:
            return False
        assigned = sum(math.prod(v.shape) for v in values if isinstance(v, Assigned))
        return FREE_EXPANSION * assigned <= sizes[0]

    def _lead(self, eqn: JaxprEqn, values: list[ScopeValue]) -> int | None:
        """The operand whose group this equation joins, or None if it opens a group.

        A state leaf's or an accumulator's group takes in what is joined with it; other joins of
        two groups open one, so that what comes from either may be moved.
        """
        if eqn.primitive.name in OPENS_GROUP:
            return None
        assigned = {i: v for i, v in enumerate(values) if isinstance(v, Assigned)}
        if not assigned:
            return None
        largest = max(math.prod(v.shape) for v in assigned.values())
        big = {
            i: v.node for i, v in assigned.items() if FREE_EXPANSION * math.prod(v.shape) > largest
        }
        anchored = {i: assigned[i] for i, node in big.items() if node in self.state_nodes}
        if anchored:
            if not self.restriction.adds_slices:
                return next(iter(anchored))
            return max(anchored, key=lambda i: self._most_parts(anchored[i]))
        return next(iter(big)) if len(set(big.values())) == 1 else None

    def _most_parts(self, value: Assigned) -> int:
        """Into how many parts a value may be cut."""
        return max(cuts_product(layout, self.mesh) for layout in value.layouts)

    def opener(
        self, scope: Scope, eqn: JaxprEqn, shape: st.Shape, values: list[ScopeValue]
    ) -> tuple[Entry, list[ScopeValue]]:
        options = self.options(eqn, shape, heavy=eqn.primitive.name in OPENS_GROUP)
        label = f"{eqn.primitive.name} {eqn.source_info.name_stack}".strip()
        node = self.boundary(label, user_source(eqn), [o.results[0] for o in options], scope.times)
        self.built.nodes[node].choices, seconds = options, self.built.nodes[node].seconds
        for s, option in enumerate(options):
            seconds[s] += scope.times * sum(self.pricing.exchange(eqn, *option[1:3]))
            if option.completed:
                seconds[s] += scope.times * self.completing(eqn, option)
        return self._grouped(scope, eqn, shape, values, node, options)

    def _grouped(
        self,
        scope: Scope,
        eqn: JaxprEqn,
        shape: st.Shape,
        values: list[ScopeValue],
        node: int,
        found: st.Strategies,
    ) -> tuple[Entry, list[ScopeValue]]:
        sides = self.sides(found)
        for position, value in enumerate(values):
            if isinstance(value, (Assigned, Recomputed)):
                self.link(value, sides.operands[position], node, scope.times)
        seconds = self.built.nodes[node].seconds
        if eqn.primitive.name in GROUPED:
            for s, strategy in enumerate(found):
                parts = self.pricing.row_parts(eqn, strategy.operands[0])
                whole = self.pricing.compute(eqn, shape.rule, parts) / strategy.division
                seconds[s] += scope.times * (self.pricing.start(eqn, parts) + whole)
        else:
            whole = scope.times * self.pricing.compute(eqn, shape.rule)
            start = scope.times * self.pricing.start(eqn)
            for s, division in enumerate(sides.divisions):
                seconds[s] += start + whole / division
        results: list[ScopeValue] = [
            self.assigned(node, made, v, eqn.primitive.name not in UNFUSED)
            for made, v in zip(sides.results, eqn.outvars, strict=True)
        ]
        if all(math.prod(aval_shape(v)) <= 1 for v in eqn.outvars):
            results = [Replicated() for _ in eqn.outvars]
        return Entry("grouped", eqn, shape, node, found), results

    def barrier(self, scope: Scope, eqn: JaxprEqn, values: list[ScopeValue]) -> Entry:
        """Every operand passes as it lies: its result is the same value, and the same buffer.

        What is recomputed where it is read has a barrier of its own there.
        """
        for place, value in enumerate(values):
            if isinstance(value, Recomputed):
                alone = part_of_barrier(eqn, [place])
                shape = st.shape_of(elementwise(alone), ())
                scope.entries.append(Entry("recomputed", alone, shape, part_of=eqn))
            elif isinstance(value, Assigned):
                values[place] = self.brought_back(scope, value, eqn.outvars[place])
                value.live.last = self.built.time
                value.live.fused = False  # XLA writes what a barrier reads
        others = [i for i, value in enumerate(values) if not isinstance(value, Recomputed)]
        return Entry("passed", part_of_barrier(eqn, others), part_of=eqn)

    def opaque(
        self, scope: Scope, eqn: JaxprEqn, values: list[ScopeValue]
    ) -> tuple[Entry, list[ScopeValue]]:
        """An equation that every device computes whole: its operands are gathered."""
        label = f"{eqn.primitive.name} {eqn.source_info.name_stack}".strip()
        node = self.boundary(label, user_source(eqn), [Layout(())], scope.times)
        if eqn.primitive.name == "while":
            own = trip_seconds(eqn, self.rules, self.pricing)
            self.built.nodes[node].seconds[0] += scope.times * own
        for value, atom in zip(values, eqn.invars, strict=True):
            self.link(value, [replicated(len(aval_shape(atom)))], node, scope.times)
        results: list[ScopeValue] = [
            Replicated()
            if math.prod(aval_shape(var)) <= 1
            else self.assigned(node, (replicated(len(aval_shape(var))),), var)
            for var in eqn.outvars
        ]
        return Entry("opaque", eqn, node=node), results
