"""From a graph to the integer program's nodes and edges, by one walk over its equations."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Graph, user_source
from autopar.passes.graph.primitives import CONTROL_FLOW, OPENS_GROUP, UNFUSED
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.linearity import linear_operands
from autopar.passes.sharding import strategies as st
from autopar.passes.sharding.layout import Layout, replicated, without_partial
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.restrict import Restriction
from autopar.passes.sharding.scopes import (
    Entry,
    Flexible,
    Live,
    Node,
    Rigid,
    Scope,
    Small,
    Value,
    aval_shape,
    itemsize,
)
from autopar.passes.sharding.sums import accumulates, starts_of_sums

SMALL_ELEMENTS = 64  # values computed from scalars alone stay replicated up to this size
MANY_OPTIONS = 16
# A result this many times larger than what it is made from is recomputed, not moved.
FREE_EXPANSION = 4


@dataclass
class Built:
    """The integer program in the making: nodes, priced edges, and scopes for lowering to walk."""

    mesh: tuple[int, ...]
    nodes: list[Node] = field(default_factory=list)
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    scope: Scope | None = None
    inputs: tuple[int, ...] = ()  # the node of each input of the graph
    values: list[Rigid] = field(default_factory=list)  # every value that a node decides
    time: int = 0  # equations walked


def build(
    graph: Graph,
    rules: Rules,
    mesh: tuple[int, ...],
    pricing: Pricing,
    restriction: Restriction,
) -> Built:
    """Nodes with their strategies and costs (seconds a step), and edges with resharding costs."""
    return _Builder(graph, rules, mesh, pricing, restriction).run()


class _Builder:
    """Holds what one walk accumulates; `run` is the only entry."""

    def __init__(
        self,
        graph: Graph,
        rules: Rules,
        mesh: tuple[int, ...],
        pricing: Pricing,
        restriction: Restriction,
    ):
        self.graph, self.rules, self.mesh = graph, rules, mesh
        self.pricing, self.restriction = pricing, restriction
        self.built = Built(mesh)
        self._shapes: dict[Any, st.Shape] = {}
        self._follow: dict[Any, st.Strategy] = {}
        self._options: dict[Any, tuple[st.Strategy, ...]] = {}
        self._tables: dict[Any, np.ndarray] = {}
        self._ids: dict[tuple[Layout, ...], int] = {}
        self._state_nodes: set[int] = set()
        self._starts: set[Var] = set()  # what loops begin to add to

    # -- values ------------------------------------------------------------------------------

    def run(self) -> Built:
        jaxpr, built = self.graph.jaxpr, self.built
        env: dict[Var, Value] = {}
        inputs: list[int] = []
        held: list[Rigid] = []
        for index, (var, label) in enumerate(zip(jaxpr.invars, self.graph.inputs, strict=True)):
            layouts = self.restriction.input_layouts(index, self.mesh)
            node = self.boundary(label.path, "", layouts, times=1)
            inputs.append(node)
            if label.role == "state":
                self._state_nodes.add(node)
            small = label.role != "batch" and math.prod(aval_shape(var)) <= 1
            rigid = None if small else self.rigid(node, layouts, var, label.path)
            env[var] = rigid or Small()
            if rigid is not None and not label.donated:
                held.append(rigid)
        built.inputs = tuple(inputs)
        built.scope = Scope(jaxpr, times=1)
        self.walk(built.scope, env)
        for atom, output in zip(jaxpr.outvars, self.graph.outputs, strict=True):
            value = self.read(env, atom)
            if output.twin is not None:
                node = inputs[output.twin]
                self.link(value, built.nodes[node].layouts, node, 1)
            elif isinstance(value, Rigid):
                wanted = tuple(map(without_partial, value.layouts))
                self.link(value, wanted, value.node, 1)
        for kept in held:  # the caller keeps what is not donated
            kept.live.last = built.time
        return built

    def read(self, env: Mapping[Var, Value], atom: Any) -> Value:
        return Small() if isinstance(atom, jex_core.Literal) else env[atom]

    def rigid(
        self, node: int, layouts: tuple[Layout, ...], var: Any, name: str, fused: bool = False
    ) -> Rigid:
        """A value that `node` decides, alive from now on."""
        live = Live(name, self.built.time, self.built.time, fused)
        value = Rigid(node, layouts, aval_shape(var), itemsize(var.aval), live)
        self.built.values.append(value)
        return value

    def boundary(self, label: str, source: str, layouts: Sequence[Layout], times: int) -> int:
        """A node that decides the layout of one value that enters or leaves a scope."""
        layouts = tuple(layouts)
        node = Node(label, source, len(layouts), layouts, times, [0.0] * len(layouts))
        self.built.nodes.append(node)
        return len(self.built.nodes) - 1

    # -- costs -------------------------------------------------------------------------------

    def link(self, value: Value, wanted: Sequence[Layout], node: int, times: int) -> None:
        """Price that `node` reads `value` in layout `wanted[s]` when it takes strategy s."""
        if isinstance(value, Rigid):
            value.live.last = self.built.time
            self._link_rigid(value, tuple(wanted), node, times)
        elif isinstance(value, Flexible):
            for position, operand in enumerate(value.operands):
                if isinstance(operand, (Rigid, Flexible)):
                    reads = [self._project(value, position, layout) for layout in wanted]
                    self.link(operand, reads, node, times)

    def _project(self, value: Flexible, position: int, layout: Layout) -> Layout:
        choice = st.produce(value.shape, value.result, layout, self.mesh)
        return self.strategy(value.shape, choice).operands[position]

    def _link_rigid(self, value: Rigid, wanted: tuple[Layout, ...], node: int, times: int) -> None:
        table = self._table(value, wanted)
        if value.node == node:
            seconds = self.built.nodes[node].seconds
            for s in range(len(wanted)):
                seconds[s] += times * float(table[s, s])
        elif table.any():
            a, b = value.node, node
            matrix = times * table
            if a > b:
                a, b, matrix = b, a, matrix.T
            known = self.built.edges.get((a, b))
            self.built.edges[a, b] = matrix if known is None else known + matrix

    def _table(self, value: Rigid, wanted: tuple[Layout, ...]) -> np.ndarray:
        key = (self._id(value.layouts), self._id(wanted))
        tables = self._tables.get(key)
        if tables is None:
            rows, row_of = _unique(value.layouts)
            columns, column_of = _unique(wanted)
            linear = np.array([[self.pricing.linear(a, b) for b in columns] for a in rows])
            tables = self._tables[key] = linear[np.ix_(row_of, column_of)]
        return tables[..., 0] + tables[..., 1] * (math.prod(value.shape) * value.itemsize)

    def _id(self, layouts: tuple[Layout, ...]) -> int:
        return self._ids.setdefault(layouts, len(self._ids))

    # -- strategies --------------------------------------------------------------------------

    def shape(self, eqn: JaxprEqn) -> st.Shape:
        rule = self.rules[eqn]
        linear = tuple(sorted(linear_operands(eqn), key=sorted))
        key = (id(rule), linear)
        if key not in self._shapes:
            self._shapes[key] = st.shape_of(rule, linear)
        return self._shapes[key]

    def strategy(self, shape: st.Shape, choice: st.Choice) -> st.Strategy:
        key = (id(shape), choice)
        if key not in self._follow:
            self._follow[key] = st.strategy(shape, choice, self.mesh)
        return self._follow[key]

    def follow(self, shape: st.Shape, lead: int, layout: Layout) -> st.Strategy:
        key = (id(shape), lead, layout)
        if key not in self._follow:
            choice = st.follow(shape, lead, layout, self.mesh)
            self._follow[key] = self.strategy(shape, choice)
        return self._follow[key]

    def options(self, eqn: JaxprEqn, shape: st.Shape, heavy: bool) -> tuple[st.Strategy, ...]:
        """Strategies of an equation that opens a group, without duplicates."""
        allowed = self.restriction.allowed_factors(eqn, shape)
        scatter = self.restriction.may_scatter(eqn)
        key = (id(shape), heavy, allowed, scatter, self.restriction.must_divide(eqn))
        if key in self._options:
            return self._options[key]
        found: dict[Any, st.Strategy] = {}
        for choice in st.choices(shape, self.mesh, linear=not heavy):
            if allowed is not None and any(c >= 0 and c not in allowed for c in choice):
                continue
            strategy = self.strategy(shape, choice)
            found.setdefault((strategy.operands, strategy.results), strategy)
            if any(c >= 0 and shape.rule.factors[c].kind != "pass" for c in choice):
                shape_out = aval_shape(eqn.outvars[0])
                for reduced in st.completed(strategy, shape_out, self.mesh, scatter):
                    found.setdefault((reduced.operands, reduced.results), reduced)
        options = tuple(found.values())
        if self.restriction.must_divide(eqn):
            options = tuple(o for o in options if o.division > 1) or options
        if heavy and len(options) > MANY_OPTIONS:
            # On meshes of several axes, a heavy equation that divides its work less than it could
            # is kept only as the replicated strategy.
            most = max(option.division for option in options)
            options = tuple(o for o in options if o.division in (1, most))
        self._options[key] = options
        return options

    # -- equations ---------------------------------------------------------------------------

    def walk(self, scope: Scope, env: dict[Var, Value]) -> None:
        self._starts |= starts_of_sums(scope.jaxpr)
        for eqn in scope.jaxpr.eqns:
            self.built.time += 1
            values = [self.read(env, atom) for atom in eqn.invars]
            name = eqn.primitive.name
            if name == "scan":
                entry, results = self.scan(scope, eqn, values)
            elif name == "cond":
                entry, results = self.cond(scope, eqn, values)
            else:
                entry, results = self.equation(scope, eqn, values)
            scope.entries.append(entry)
            env.update(
                (var, value)
                for var, value in zip(eqn.outvars, results, strict=True)
                if not isinstance(var, jex_core.DropVar)
            )

    def equation(
        self, scope: Scope, eqn: JaxprEqn, values: list[Value]
    ) -> tuple[Entry, list[Value]]:
        if eqn.effects or eqn.primitive.name in CONTROL_FLOW:
            return self.opaque(scope, eqn, values)
        shape = self.shape(eqn)
        sizes = [math.prod(aval_shape(v)) for v in eqn.outvars]
        all_small = all(isinstance(v, Small) for v in values)
        is_start = any(var in self._starts for var in eqn.outvars)
        if all_small and max(sizes) <= SMALL_ELEMENTS and not is_start:
            return Entry("small", eqn, shape), [Small() for _ in eqn.outvars]
        if self._is_flexible(eqn, shape, values, sizes):
            value = Flexible(shape, 0, tuple(values))
            return Entry("flexible", eqn, shape), [value]
        lead = self._lead(eqn, values)
        if lead is not None:
            return self.follower(scope, eqn, shape, values, lead)
        return self.opener(scope, eqn, shape, values)

    def _is_flexible(
        self, eqn: JaxprEqn, shape: st.Shape, values: list[Value], sizes: list[int]
    ) -> bool:
        if len(sizes) != 1 or eqn.primitive.name in OPENS_GROUP:
            return False
        if any(f.kind not in ("pass", "replicated") for f in shape.rule.factors):
            return False
        rigid = sum(math.prod(v.shape) for v in values if isinstance(v, Rigid))
        return FREE_EXPANSION * rigid <= sizes[0]

    def _lead(self, eqn: JaxprEqn, values: list[Value]) -> int | None:
        """The operand whose group this equation joins, or None if it opens a group.

        A state leaf's or an accumulator's group takes in what is joined with it; other joins of
        two groups open one, so that what comes from either may be moved.
        """
        if eqn.primitive.name in OPENS_GROUP:
            return None
        rigid = {i: v for i, v in enumerate(values) if isinstance(v, Rigid)}
        if not rigid:
            return None
        largest = max(math.prod(v.shape) for v in rigid.values())
        big = {i: v.node for i, v in rigid.items() if FREE_EXPANSION * math.prod(v.shape) > largest}
        anchored = [i for i, node in big.items() if node in self._state_nodes]
        if anchored:
            return anchored[0]
        return next(iter(big)) if len(set(big.values())) == 1 else None

    def follower(
        self, scope: Scope, eqn: JaxprEqn, shape: st.Shape, values: list[Value], lead: int
    ) -> tuple[Entry, list[Value]]:
        value = values[lead]
        assert isinstance(value, Rigid)
        found = tuple(self.follow(shape, lead, layout) for layout in value.layouts)
        return self._grouped(scope, eqn, shape, values, value.node, found)

    def opener(
        self, scope: Scope, eqn: JaxprEqn, shape: st.Shape, values: list[Value]
    ) -> tuple[Entry, list[Value]]:
        options = self.options(eqn, shape, heavy=eqn.primitive.name in OPENS_GROUP)
        label = f"{eqn.primitive.name} {eqn.source_info.name_stack}".strip()
        node = self.boundary(label, user_source(eqn), [o.results[0] for o in options], scope.times)
        self.built.nodes[node].choices = options
        for s, option in enumerate(options):
            if option.completed:
                self.built.nodes[node].seconds[s] += scope.times * sum(
                    self.pricing.reshard(a, b, aval_shape(var), itemsize(var.aval))
                    for a, b, var in zip(option.left, option.results, eqn.outvars, strict=True)
                )
        return self._grouped(scope, eqn, shape, values, node, options)

    def _grouped(
        self,
        scope: Scope,
        eqn: JaxprEqn,
        shape: st.Shape,
        values: list[Value],
        node: int,
        found: tuple[st.Strategy, ...],
    ) -> tuple[Entry, list[Value]]:
        for position, value in enumerate(values):
            if isinstance(value, (Rigid, Flexible)):
                self.link(value, [s.operands[position] for s in found], node, scope.times)
        whole = scope.times * self.pricing.compute(eqn, shape.rule)
        seconds = self.built.nodes[node].seconds
        for s, strategy in enumerate(found):
            seconds[s] += whole / strategy.division
        fused = eqn.primitive.name not in UNFUSED
        results: list[Value] = [
            self.rigid(node, tuple(s.results[r] for s in found), v, "", fused)
            for r, v in enumerate(eqn.outvars)
        ]
        if all(math.prod(aval_shape(v)) <= 1 for v in eqn.outvars):
            results = [Small() for _ in eqn.outvars]
        return Entry("grouped", eqn, shape, node, found), results

    def opaque(self, scope: Scope, eqn: JaxprEqn, values: list[Value]) -> tuple[Entry, list[Value]]:
        """An equation that every device computes whole: its operands are gathered."""
        label = f"{eqn.primitive.name} {eqn.source_info.name_stack}".strip()
        node = self.boundary(label, user_source(eqn), [Layout(())], scope.times)
        for value, atom in zip(values, eqn.invars, strict=True):
            self.link(value, [replicated(len(aval_shape(atom)))], node, scope.times)
        results: list[Value] = []
        for var in eqn.outvars:
            shape = aval_shape(var)
            if math.prod(shape) <= 1:
                results.append(Small())
            else:
                results.append(self.rigid(node, (replicated(len(shape)),), var, ""))
        return Entry("opaque", eqn, node=node), results

    # -- control flow ------------------------------------------------------------------------

    def scan(self, scope: Scope, eqn: JaxprEqn, values: list[Value]) -> tuple[Entry, list[Value]]:
        body: Jaxpr = eqn.params["jaxpr"].jaxpr
        length = eqn.params["length"]
        num_consts, num_carry = jax_compat.scan_counts(eqn.params)
        inner = Scope(body, scope.times * length)
        env: dict[Var, Value] = {}
        label = f"scan {eqn.source_info.name_stack}".strip()
        boundaries: list[int | None] = []
        entered: list[Rigid] = []

        def enter(
            position: int, what: str, partial: bool, lift: Callable[[Layout], Layout]
        ) -> None:
            var, value = body.invars[position], values[position]
            shape = aval_shape(var)
            if math.prod(shape) <= 1 or isinstance(value, Small):
                env[var] = Small()
                boundaries.append(None)
                return
            layouts = self.restriction.boundary_layouts(var, value, self.mesh, partial)
            if partial:
                layouts = self.restriction.accumulator_layouts(var, layouts)
            node = self.boundary(f"{label} {what}", user_source(eqn), layouts, scope.times)
            if what == "carry":
                self._state_nodes.add(node)
            self.link(value, [lift(x) for x in layouts], node, scope.times)
            entered.append(self.rigid(node, layouts, var, ""))
            env[var] = entered[-1]
            boundaries.append(node)

        start = self.built.time
        for i in range(len(body.invars)):
            if i < num_consts:
                enter(i, "constant", False, lambda x: x)
            elif i < num_consts + num_carry:
                enter(i, "carry", accumulates(eqn, i - num_consts), lambda x: x)
            else:
                enter(i, "slice", False, stacked)
        self.walk(inner, env)
        results: list[Value] = []
        for i, (atom, var) in enumerate(zip(body.outvars, eqn.outvars, strict=True)):
            value = self.read(env, atom)
            if i < num_carry:
                node = boundaries[num_consts + i]
                if node is None:
                    results.append(Small())
                    continue
                layouts = self.built.nodes[node].layouts
                self.link(value, layouts, node, inner.times)
                results.append(self.completed(self.rigid(node, layouts, var, ""), var, label))
                continue
            if isinstance(value, Small) or math.prod(aval_shape(atom)) <= 1:
                boundaries.append(None)
                results.append(Small())
                continue
            layouts = self.restriction.boundary_layouts(atom, value, self.mesh, True)
            node = self.boundary(f"{label} stack", user_source(eqn), layouts, scope.times)
            self.link(value, layouts, node, inner.times)
            boundaries.append(node)
            stack = self.rigid(node, tuple(map(stacked, layouts)), var, "")
            stack.live.first = start  # it is allocated before the loop and filled by it
            results.append(self.completed(stack, var, label))
        for value in self.built.values:  # what a loop reads is alive until its last trip
            if value.live.first <= start < value.live.last:
                value.live.last = self.built.time
        for value in entered:
            value.live.last = self.built.time
        completions = tuple(
            value.node if isinstance(value, Rigid) and value.node not in boundaries else None
            for value in results
        )
        entry = Entry("scan", eqn, None, None, (), (inner,), tuple(boundaries), completions)
        return entry, results

    def completed(self, value: Rigid, var: Any, label: str) -> Rigid:
        """A loop's sums, completed once for all who read them, if they may leave it unreduced."""
        if not any(layout.partial for layout in value.layouts):
            return value
        layouts = self.restriction.boundary_layouts(var, value, self.mesh, False)
        node = self.boundary(f"{label} sum", "", layouts, self.built.nodes[value.node].times)
        self.link(value, layouts, node, self.built.nodes[value.node].times)
        return self.rigid(node, layouts, var, "")

    def cond(self, scope: Scope, eqn: JaxprEqn, values: list[Value]) -> tuple[Entry, list[Value]]:
        label = f"cond {eqn.source_info.name_stack}".strip()
        inner: list[Scope] = []
        outs: list[list[Value]] = []
        for branch in eqn.params["branches"]:
            body = branch.jaxpr
            env: dict[Var, Value] = dict(zip(body.invars, values[1:], strict=True))
            within = Scope(body, scope.times)
            self.walk(within, env)
            inner.append(within)
            outs.append([self.read(env, atom) for atom in body.outvars])
        boundaries: list[int | None] = []
        results: list[Value] = []
        for position, var in enumerate(eqn.outvars):
            shape = aval_shape(var)
            if math.prod(shape) <= 1:
                boundaries.append(None)
                results.append(Small())
                continue
            source = next((v for o in outs if isinstance(v := o[position], Rigid)), None)
            layouts = self.restriction.boundary_layouts(var, source, self.mesh, False)
            node = self.boundary(f"{label} result", user_source(eqn), layouts, scope.times)
            if source is not None and source.node in self._state_nodes:
                self._state_nodes.add(node)
            for branch_values in outs:
                self.link(branch_values[position], layouts, node, scope.times)
            boundaries.append(node)
            results.append(self.rigid(node, layouts, var, ""))
        return Entry("cond", eqn, scopes=tuple(inner), boundaries=tuple(boundaries)), results


def stacked(layout: Layout) -> Layout:
    """The layout of a stack of values along a new leading dimension."""
    return Layout(((), *layout.dims), layout.partial)


def _unique(layouts: Sequence[Layout]) -> tuple[list[Layout], list[int]]:
    positions: dict[Layout, int] = defaultdict(lambda: len(positions))
    index = [positions[layout] for layout in layouts]
    return list(positions), index
