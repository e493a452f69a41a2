"""Nodes, priced edges, and strategies: what a walk over a program adds to the integer program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Primitive, Var

from autopar.passes.graph.microbatched import Task
from autopar.passes.graph.primitives import ADDS, HEAVY
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.linearity import linear_operands
from autopar.passes.sharding import strategies as st
from autopar.passes.sharding.compiler_rules import rules_of
from autopar.passes.sharding.layout import (
    Layout,
    in_host,
    num_parts,
    on_device,
    without_replicas,
)
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.restrict import Restriction
from autopar.passes.sharding.scope_memory import ScopeBuffers
from autopar.passes.sharding.scopes import (
    Assigned,
    Entry,
    LiveRange,
    Node,
    Recomputed,
    Scope,
    ScopeValue,
    aval_shape,
    dtype_bytes,
    itemsize,
)
from autopar.passes.sharding.strategy_tables import Layouts, StrategySides

MANY_OPTIONS = 16


@dataclass(frozen=True)
class BodyTimes:
    """When, in equations walked, a stage's loop begins and ends, and its later tasks begin."""

    start: int
    end: int
    tasks: Mapping[Task, int]

    def task_at(self, time: int) -> Task:
        """The task that runs at a point of time in the loop."""
        return max((at, task) for task, at in self.tasks.items() if at <= time)[1]


@dataclass
class StrategyGraph:
    """The integer program in the making: nodes, priced edges, and scopes for lowering to walk."""

    mesh: tuple[int, ...]
    nodes: list[Node] = field(default_factory=list)
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    scope: Scope | None = None
    inputs: tuple[int, ...] = ()  # the node of each input of the graph
    outputs: dict[int, int] = field(default_factory=dict)  # the nodes of pinned outputs
    values: list[Assigned] = field(default_factory=list)  # every value that a node decides
    time: int = 0  # equations walked
    body: BodyTimes | None = None  # of a stage's loop over the microbatches
    sum_dtypes: Mapping[Var, str] = field(default_factory=dict)  # where not their own

    def sum_ratio(self, var: Var) -> float:
        """Bytes of an element of a value as devices add it, over those that it has."""
        dtype = self.sum_dtypes.get(var)
        return dtype_bytes(jnp.dtype(dtype)) / itemsize(var.aval) if dtype else 1.0


class StrategyGraphBuilder:
    """Adds nodes and edges; strategies, layouts and prices are found once each."""

    def __init__(
        self,
        rules: Rules,
        mesh: tuple[int, ...],
        pricing: Pricing,
        restriction: Restriction,
        buffers: ScopeBuffers | None = None,
    ):
        self.rules, self.mesh = rules, mesh
        self.pricing, self.restriction = pricing, restriction
        self.buffers = buffers or ScopeBuffers(rules_of(pricing.cluster.device.name))
        self.built = StrategyGraph(mesh, sum_dtypes=restriction.sum_dtypes)
        self.tables = pricing.tables
        self._shapes: dict[tuple[int, st.LinearSets], st.Shape] = {}
        self._linear: dict[tuple[int, Primitive, bool], st.LinearSets] = {}  # by the ids of rules
        self._matrices: dict[object, np.ndarray] = {}  # of edges: layers have them alike
        # By the ids of shapes, each with the shape itself, which so stays.
        self._canonical: dict[int, tuple[st.Shape, st.Shape]] = {}
        self._computed: dict[int, Recomputed] = {}  # by their ids
        self.last_long = 0  # when the last product or loop was walked
        # Nodes of weights and sums of gradients: what is moved from or to them can be hidden.
        self.in_background: set[int] = set()

    def assigned(
        self, node: int, layouts: tuple[Layout, ...], var: Var, fused: bool = False
    ) -> Assigned:
        """A value that `node` decides, alive from now on."""
        live = LiveRange(self.built.time, self.built.time, fused)
        ratio = self.built.sum_ratio(var)
        shape, layouts = aval_shape(var), self.interned(layouts)
        value = Assigned(node, layouts, shape, itemsize(var.aval), live, ratio)
        self.built.values.append(value)
        return value

    def walked(self, name: str) -> None:
        """Note that an equation of this primitive is done."""
        if name in HEAVY:
            self.last_long = self.built.time

    def enters_loop(self, value: ScopeValue, node: int, *, is_carry: bool, is_sum: bool) -> None:
        """Inside a loop weights are still weights, and what adds up gradients is not waited for."""
        weights = isinstance(value, Assigned) and value.node in self.in_background
        if is_sum or (weights and not is_carry):
            self.in_background.add(node)

    def stored(self, value: ScopeValue, var: Var) -> Assigned | None:
        """A value that a loop's body reads as it lies outside; None: it lies in no device."""
        if not isinstance(value, Assigned) or value.layouts[-1].in_host:
            return None
        inner = self.assigned(value.node, value.layouts, var)
        inner.live.same_as, value.live.last = value, self.built.time
        return inner

    def completed(self, value: Assigned, var: Var, label: str) -> Assigned:
        """A loop's sums, completed once for all who read them, or added to others before that."""
        if not any(layout.partial for layout in value.layouts):
            return value
        layouts = self.restriction.boundary_layouts(var, self.mesh, True)
        node = self.boundary(f"{label} sum", "", layouts, self.built.nodes[value.node].times)
        self.link(value, layouts, node, self.built.nodes[value.node].times)
        made = self.assigned(node, layouts, var)
        made.live.absent = value.live.absent
        return made

    def boundary(self, label: str, source: str, layouts: Sequence[Layout], times: float) -> int:
        """A node that decides the layout of one value that enters or leaves a scope."""
        layouts = tuple(layouts)
        count = len(layouts)
        self.built.nodes.append(Node(label, source, count, layouts, times, [0.0] * count))
        return len(self.built.nodes) - 1

    def receive(self, node: int, var: Var, times: float) -> None:
        """Price the replicas of what a stage is sent `times`: every tile arrives once."""
        shape, size = aval_shape(var), itemsize(var.aval)
        seconds = self.built.nodes[node].seconds
        for i, layout in enumerate(self.built.nodes[node].layouts):
            arriving = without_replicas(shape, layout, self.mesh)
            seconds[i] += times * self.pricing.reshard(arriving, layout, shape, size)

    def link(self, value: ScopeValue, wanted: Sequence[Layout], node: int, times: float) -> None:
        """Price that `node` reads `value` in layout `wanted[s]` when it takes strategy s."""
        if isinstance(value, Assigned):
            if value.live.entering and value.live.last < value.live.first:
                value.live.first = self.built.time
            value.live.last = self.built.time
            if value.layouts[-1].in_host:
                copied, value.live.copied = value.live.copied, self.built.time
                if copied > self.last_long:  # to a device, for a near reader
                    value = replace(value, layouts=self.interned([*map(on_device, value.layouts)]))
            self._link_assigned(value, self.interned(wanted), node, times)
        elif isinstance(value, Recomputed):
            self._link_recomputed(value, self.interned(wanted), node, times)

    def put_away(
        self, scope: Scope, eqn: JaxprEqn, value: Assigned
    ) -> tuple[Entry, list[ScopeValue]]:
        """A value that waits in the hosts' memory, in the parts that it has."""
        there = tuple(map(in_host, value.layouts))
        parts = [num_parts((a for axes in x.dims for a in axes), self.mesh) for x in there]
        found = tuple(
            st.Strategy((), (here,), (away,), division, (away,))
            for here, away, division in zip(value.layouts, there, parts, strict=True)
        )
        self.link(value, there, value.node, scope.times)
        made = self.assigned(value.node, self.interned(there), eqn.outvars[0])
        return Entry("grouped", eqn, None, value.node, found), [made]

    def brought_back(self, scope: Scope, value: Assigned, var: Var) -> Assigned:
        """A value on the devices, for all who read it from now on."""
        if not value.layouts[-1].in_host:
            return value
        here = self.interned([*map(on_device, value.layouts)])
        self.link(value, here, value.node, scope.times)
        return self.assigned(value.node, here, var)

    def _projected(self, value: Recomputed, position: int, wanted: Layouts) -> Layouts:
        """In which layouts an operand is read to compute a value again in those that are wanted."""
        return self.tables.projected(self._canonical_of(value.shape), position, wanted)

    def _link_recomputed(self, value: Recomputed, wanted: Layouts, node: int, times: float) -> None:
        """Price what a value is computed of, and computing it.

        Each is read in a layout once, however often; and computed where it is read first.
        """
        waiting, seen = [(value, wanted)], {(id(value), id(wanted))}
        while waiting:
            value, wanted = waiting.pop()
            if id(value) not in self._computed:
                self._computed[id(value)] = value
                self._compute_again(value, wanted, node, times)
            for position, operand in enumerate(value.operands):
                if operand is None:
                    continue
                read = self._projected(value, position, wanted)
                if (key := (id(operand), id(read))) in seen:
                    continue
                seen.add(key)
                if isinstance(operand, Recomputed):
                    waiting.append((operand, read))
                else:
                    self.link(operand, read, node, times)

    def _compute_again(self, value: Recomputed, wanted: Layouts, node: int, times: float) -> None:
        """Price that a value is computed in the layout that a node wants."""
        whole = times * self.pricing.compute(value.eqn, value.shape.rule)
        if not whole:
            return
        seconds = self.built.nodes[node].seconds
        divisions = self.tables.divisions(self._canonical_of(value.shape), wanted)
        for s, division in enumerate(divisions):
            seconds[s] += whole / division

    def _link_assigned(self, value: Assigned, wanted: Layouts, node: int, times: float) -> None:
        linear = self._linear_table(value, wanted)
        if linear is None:
            return
        overlap, size = self.pricing.cluster.overlap, math.prod(value.shape) * value.itemsize
        hidden = bool(overlap and {value.node, node} & self.in_background)
        key = (id(linear), size, times, hidden)
        matrix = self._matrices.get(key)
        if matrix is None:
            table = linear[..., 0] + linear[..., 1] * size
            matrix = self._matrices[key] = times * ((1 - overlap) * table if hidden else table)
        if value.node == node:
            seconds = self.built.nodes[node].seconds
            for s, more in enumerate(np.diagonal(matrix).tolist()):
                seconds[s] += more
        else:
            a, b = value.node, node
            if a > b:
                a, b, matrix = b, a, matrix.T
            known = self.built.edges.get((a, b))
            self.built.edges[a, b] = matrix if known is None else known + matrix

    def _linear_table(self, value: Assigned, wanted: Layouts) -> np.ndarray | None:
        """Seconds by the value's layout and the one that is wanted; None where all are free.

        They are `[..., 0]`, and for each byte of the value `[..., 1]`.
        """
        key, known = (id(value.layouts), id(wanted), value.sum_ratio), self.pricing.resharding
        if key not in known:
            rows, row_of = _unique(value.layouts)
            columns, column_of = _unique(wanted)
            ratio = value.sum_ratio
            linear = np.array([[self.pricing.linear(a, b, ratio) for b in columns] for a in rows])
            known[key] = linear[np.ix_(row_of, column_of)] if linear.any() else None
        return known[key]

    def interned(self, layouts: Sequence[Layout]) -> Layouts:
        """The one object for equal layouts."""
        return self.tables.interned(layouts)

    def sides(self, found: st.Strategies) -> StrategySides:
        """What strategies ask of operands and leave in results."""
        return self.tables.sides(found)

    def shape(self, eqn: JaxprEqn, rounding: bool) -> st.Shape:
        rule = self.rules[eqn]
        of_rule = (id(rule), eqn.primitive, rounding)
        linear = self._linear.get(of_rule)
        if linear is None:
            linear = tuple(sorted(linear_operands(eqn, rounding), key=sorted))
            self._linear[of_rule] = linear
        key = (id(rule), linear)
        if key not in self._shapes:
            self._shapes[key] = st.shape_of(rule, linear)
        return self._shapes[key]

    def _canonical_of(self, shape: st.Shape) -> st.Shape:
        if id(shape) not in self._canonical:
            self._canonical[id(shape)] = shape, self.tables.canonical(shape)
        return self._canonical[id(shape)][1]

    def follow(self, shape: st.Shape, lead: int, layouts: Layouts) -> st.Strategies:
        """The strategies that take operand `lead` as it lies, in each of some layouts."""
        return self.tables.follow(self._canonical_of(shape), lead, self.interned(layouts))

    def options(self, eqn: JaxprEqn, shape: st.Shape, heavy: bool) -> st.Strategies:
        """Strategies of an equation that opens a group, without duplicates."""
        allowed, must = self.restriction.allowed_factors(eqn, shape)
        scatter = self.restriction.may_scatter(eqn)
        # A gradient's parts are added first, and their sum is completed once for all its readers.
        adds = eqn.primitive.name in ADDS and self.restriction.adds_parts(eqn)
        tables, shape_out = self.tables, aval_shape(eqn.outvars[0])
        shape = self._canonical_of(shape)
        sizes = tuple(map(tables.divided, shape_out))
        key = (id(shape), sizes, heavy, allowed, scatter, adds, must)
        if key in tables.options:
            return tables.options[key]
        found: dict[object, st.Strategy] = {}
        in_part: set[object] = set()  # sums scattered along some of their axes only
        for choice in st.choices(shape, self.mesh, linear=not heavy):
            if allowed is not None and any(
                c >= 0 and may is not None and c not in may
                for c, may in zip(choice, allowed, strict=True)
            ):
                continue
            strategy = tables.strategy(shape, choice)
            found.setdefault((strategy.operands, strategy.results), strategy)
            reduces = any(c >= 0 and shape.rule.factors[c].kind != "pass" for c in choice)
            if reduces or (adds and strategy.results[0].partial):
                for reduced in st.completed(strategy, shape_out, self.mesh, scatter):
                    if (form := (reduced.operands, reduced.results)) not in found:
                        found[form] = reduced
                        left = strategy.results[0].used - reduced.results[0].used
                        if left and reduced.results[0].dims != strategy.results[0].dims:
                            in_part.add(form)
        options = tuple(found.values())
        if must:
            cut = [self._parts_along(must, option, adds) for option in options]
            options = tuple(o for o, parts in zip(options, cut, strict=True) if parts == max(cut))
        count = sum((option.operands, option.results) not in in_part for option in options)
        if heavy and count > MANY_OPTIONS:
            # On meshes of several axes, a heavy equation that divides its work less than it could
            # is kept only as the replicated strategy.
            most = max(option.division for option in options)
            options = tuple(o for o in options if o.division in (1, most))
        tables.options[key] = options
        return options

    def completing(self, eqn: JaxprEqn, option: st.Strategy) -> float:
        """Seconds of reducing what an equation leaves, at once."""
        return sum(
            self.pricing.reshard(
                a, b, aval_shape(var), itemsize(var.aval), self.built.sum_ratio(var)
            )
            for a, b, var in zip(option.left, option.results, eqn.outvars, strict=True)
        )

    def _parts_along(self, axes: frozenset[int], option: st.Strategy, adds: bool) -> int:
        """Into how many parts these axes cut an equation; a sum of parts counts as cut."""
        used = option.results[0].used if adds else frozenset()
        return num_parts((a for a in axes if option.choice[a] >= 0 or a in used), self.mesh)


def _unique(layouts: Sequence[Layout]) -> tuple[list[Layout], list[int]]:
    positions = {layout: i for i, layout in enumerate(dict.fromkeys(layouts))}
    return list(positions), [positions[layout] for layout in layouts]
