"""Nodes, priced edges, and strategies: what a walk over a program adds to the integer program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from autopar.passes.graph.microbatched import Task
from autopar.passes.graph.primitives import ADDS
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.linearity import linear_operands
from autopar.passes.sharding import strategies as st
from autopar.passes.sharding.compiler_rules import rules_of
from autopar.passes.sharding.layout import Layout, num_parts
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.restrict import Restriction
from autopar.passes.sharding.scopes import (
    Assigned,
    LiveRange,
    Node,
    Recomputed,
    Scope,
    ScopeValue,
    aval_shape,
    dtype_bytes,
    itemsize,
)

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
        self, rules: Rules, mesh: tuple[int, ...], pricing: Pricing, restriction: Restriction
    ):
        self.rules, self.mesh = rules, mesh
        self.pricing, self.restriction = pricing, restriction
        self.compiler = rules_of(pricing.cluster.device.name)
        self.built = StrategyGraph(mesh, sum_dtypes=restriction.sum_dtypes)
        self._shapes: dict[tuple[int, st.LinearSets], st.Shape] = {}
        self._strategies: dict[tuple[int, st.Choice], st.Strategy] = {}
        self._follow: dict[tuple[int, int, Layout], st.Strategy] = {}
        self._options: dict[object, tuple[st.Strategy, ...]] = {}
        self._tables: dict[tuple[int, int, float], np.ndarray] = {}
        self._ids: dict[tuple[Layout, ...], int] = {}
        # Nodes of weights and sums of gradients: what is moved from or to them can be hidden.
        self.in_background: set[int] = set()

    def assigned(
        self, node: int, layouts: tuple[Layout, ...], var: Var, fused: bool = False
    ) -> Assigned:
        """A value that `node` decides, alive from now on."""
        live = LiveRange(self.built.time, self.built.time, fused)
        ratio = self.built.sum_ratio(var)
        value = Assigned(node, layouts, aval_shape(var), itemsize(var.aval), live, ratio)
        self.built.values.append(value)
        return value

    def enters_loop(self, value: ScopeValue, node: int, *, is_carry: bool, is_sum: bool) -> None:
        """Inside a loop weights are still weights, and what adds up gradients is not waited for."""
        weights = isinstance(value, Assigned) and value.node in self.in_background
        if is_sum or (weights and not is_carry):
            self.in_background.add(node)

    def boundary(self, label: str, source: str, layouts: Sequence[Layout], times: int) -> int:
        """A node that decides the layout of one value that enters or leaves a scope."""
        layouts = tuple(layouts)
        count = len(layouts)
        self.built.nodes.append(Node(label, source, count, layouts, times, [0.0] * count))
        return len(self.built.nodes) - 1

    def link(self, value: ScopeValue, wanted: Sequence[Layout], node: int, times: int) -> None:
        """Price that `node` reads `value` in layout `wanted[s]` when it takes strategy s."""
        if isinstance(value, Assigned):
            if value.live.entering and value.live.last < value.live.first:
                value.live.first = self.built.time
            value.live.last = self.built.time
            self._link_assigned(value, tuple(wanted), node, times)
        elif isinstance(value, Recomputed):
            for position, operand in enumerate(value.operands):
                if isinstance(operand, (Assigned, Recomputed)):
                    reads = [self._project(value, position, layout) for layout in wanted]
                    self.link(operand, reads, node, times)

    def _project(self, value: Recomputed, position: int, layout: Layout) -> Layout:
        choice = st.produce(value.shape, 0, layout, self.mesh)
        return self.strategy(value.shape, choice).operands[position]

    def _link_assigned(
        self, value: Assigned, wanted: tuple[Layout, ...], node: int, times: int
    ) -> None:
        table = self._table(value, wanted)
        if self.pricing.cluster.overlap and {value.node, node} & self.in_background:
            table = (1 - self.pricing.cluster.overlap) * table
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

    def _table(self, value: Assigned, wanted: tuple[Layout, ...]) -> np.ndarray:
        ratio = value.sum_ratio
        key = (self._id(value.layouts), self._id(wanted), ratio)
        tables = self._tables.get(key)
        if tables is None:
            rows, row_of = _unique(value.layouts)
            columns, column_of = _unique(wanted)
            linear = np.array([[self.pricing.linear(a, b, ratio) for b in columns] for a in rows])
            tables = self._tables[key] = linear[np.ix_(row_of, column_of)]
        return tables[..., 0] + tables[..., 1] * (math.prod(value.shape) * value.itemsize)

    def _id(self, layouts: tuple[Layout, ...]) -> int:
        return self._ids.setdefault(layouts, len(self._ids))

    def shape(self, eqn: JaxprEqn, rounding: bool) -> st.Shape:
        rule = self.rules[eqn]
        linear = tuple(sorted(linear_operands(eqn, rounding), key=sorted))
        key = (id(rule), linear)
        if key not in self._shapes:
            self._shapes[key] = st.shape_of(rule, linear)
        return self._shapes[key]

    def strategy(self, shape: st.Shape, choice: st.Choice) -> st.Strategy:
        key = (id(shape), choice)
        if key not in self._strategies:
            self._strategies[key] = st.strategy(shape, choice, self.mesh)
        return self._strategies[key]

    def follow(self, shape: st.Shape, lead: int, layout: Layout) -> st.Strategy:
        key = (id(shape), lead, layout)
        if key not in self._follow:
            choice = st.follow(shape, lead, layout, self.mesh)
            self._follow[key] = self.strategy(shape, choice)
        return self._follow[key]

    def options(self, eqn: JaxprEqn, shape: st.Shape, heavy: bool) -> tuple[st.Strategy, ...]:
        """Strategies of an equation that opens a group, without duplicates."""
        allowed, must = self.restriction.allowed_factors(eqn, shape)
        scatter = self.restriction.may_scatter(eqn)
        # A gradient's parts are added first, and their sum is completed once for all its readers.
        adds = eqn.primitive.name in ADDS and self.restriction.adds_parts(eqn)
        key = (id(shape), heavy, allowed, scatter, adds, must)
        if key in self._options:
            return self._options[key]
        found: dict[object, st.Strategy] = {}
        in_part: set[object] = set()  # sums scattered along some of their axes only
        for choice in st.choices(shape, self.mesh, linear=not heavy):
            if allowed is not None and any(
                c >= 0 and may is not None and c not in may
                for c, may in zip(choice, allowed, strict=True)
            ):
                continue
            strategy = self.strategy(shape, choice)
            found.setdefault((strategy.operands, strategy.results), strategy)
            reduces = any(c >= 0 and shape.rule.factors[c].kind != "pass" for c in choice)
            if reduces or (adds and strategy.results[0].partial):
                shape_out = aval_shape(eqn.outvars[0])
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
        self._options[key] = options
        return options

    def _parts_along(self, axes: frozenset[int], option: st.Strategy, adds: bool) -> int:
        """Into how many parts these axes cut an equation; a sum of parts counts as cut."""
        used = option.results[0].used if adds else frozenset()
        return num_parts((a for a in axes if option.choice[a] >= 0 or a in used), self.mesh)


def _unique(layouts: Sequence[Layout]) -> tuple[list[Layout], list[int]]:
    positions = {layout: i for i, layout in enumerate(dict.fromkeys(layouts))}
    return list(positions), [positions[layout] for layout in layouts]
