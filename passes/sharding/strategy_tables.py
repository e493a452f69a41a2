"""Strategies on one mesh, found once for all programs that are planned on it.

What a strategy asks of operands and leaves in results depends on a rule, and on the sizes of its
loops only by what the mesh divides. So equations of all layers and optimizers share few lists of
strategies, and what it takes to turn their layouts into each other is known from other programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autopar.passes.sharding import strategies as st
from autopar.passes.sharding.layout import Layout

MESHES_KEPT = 64

Layouts = tuple[Layout, ...]
"""Of a value, for each strategy of a node."""


class StrategySides(NamedTuple):
    """Of a list of strategies: each operand's layouts, each result's, and what work is divided by.

    It holds the list, so that no other one has its id.
    """

    found: st.Strategies
    operands: tuple[Layouts, ...]
    results: tuple[Layouts, ...]
    divisions: tuple[int, ...]


class StrategyTables:
    """What was found of strategies and layouts on a mesh; equal layouts are one object.

    Lists of layouts and of strategies stay as long as this does: they are known by their ids.
    """

    def __init__(self, mesh: tuple[int, ...]) -> None:
        self.mesh, self.devices = mesh, math.prod(mesh)
        self.options: dict[object, st.Strategies] = {}
        self.resharding: dict[object, dict[tuple[int, int, float], np.ndarray | None]] = {}
        self._shapes: dict[st.Shape, st.Shape] = {}
        self._strategies: dict[tuple[int, st.Choice], st.Strategy] = {}
        self._follow: dict[tuple[int, int, int], st.Strategies] = {}
        self._following: dict[tuple[int, int], dict[Layout, st.Strategy]] = {}
        self._producing: dict[int, dict[Layout, st.Strategy]] = {}
        self._reads: dict[tuple[int, int, int], Layouts] = {}
        self._divisions: dict[tuple[int, int], tuple[int, ...]] = {}
        self._interned: dict[Layouts, Layouts] = {}
        self._ids = set[int]()
        self._sides: dict[int, StrategySides] = {}

    def divided(self, size: int) -> int:
        """A size of which the mesh divides as much as of this one."""
        if size == 1:
            return 1
        common = math.gcd(size, self.devices)
        return common if common > 1 else self.devices + 1

    def canonical(self, shape: st.Shape) -> st.Shape:
        """The one object for all shapes whose strategies are the same, loop by loop."""
        rule = shape.rule
        around = {outer for _, outers in shape.inside for outer in outers}  # cut whole or not
        factors = tuple(
            f if i in around else replace(f, size=self.divided(f.size))
            for i, f in enumerate(rule.factors)
        )
        found = replace(shape, rule=replace(rule, factors=factors))
        return self._shapes.setdefault(found, found)

    def interned(self, layouts: Sequence[Layout]) -> Layouts:
        """The one object for equal layouts."""
        if id(layouts) in self._ids and isinstance(layouts, tuple):
            return layouts
        made = tuple(layouts)
        known = self._interned.setdefault(made, made)
        self._ids.add(id(known))
        return known

    def sides(self, found: st.Strategies) -> StrategySides:
        """What strategies ask of operands and leave in results, found once for a list of them."""
        known = self._sides.get(id(found))
        if known is None:
            operands = zip(*(s.operands for s in found), strict=True)
            results = zip(*(s.results for s in found), strict=True)
            known = self._sides[id(found)] = StrategySides(
                found,
                tuple(map(self.interned, operands)),
                tuple(map(self.interned, results)),
                tuple(s.division for s in found),
            )
        return known

    def strategy(self, shape: st.Shape, choice: st.Choice) -> st.Strategy:
        """What a choice implies for a canonical shape."""
        key = (id(shape), choice)
        found = self._strategies.get(key)
        if found is None:
            found = self._strategies[key] = st.strategy(shape, choice, self.mesh)
        return found

    def follow(self, shape: st.Shape, lead: int, layouts: Layouts) -> st.Strategies:
        """The strategies that take operand `lead` as it lies, in each of some interned layouts."""
        key = (id(shape), lead, id(layouts))
        found = self._follow.get(key)
        if found is None:
            known = self._following.setdefault((id(shape), lead), {})
            for layout in layouts:
                if layout not in known:
                    choice = st.follow(shape, lead, layout, self.mesh)
                    known[layout] = self.strategy(shape, choice)
            found = self._follow[key] = tuple(known[layout] for layout in layouts)
        return found

    def produce(self, shape: st.Shape, layout: Layout) -> st.Strategy:
        """The strategy that leaves the first result of a canonical shape in a layout."""
        known = self._producing.setdefault(id(shape), {})
        if layout not in known:
            known[layout] = self.strategy(shape, st.produce(shape, 0, layout, self.mesh))
        return known[layout]

    def projected(self, shape: st.Shape, position: int, wanted: Layouts) -> Layouts:
        """In which layouts an operand is read to compute a result in those that are wanted."""
        key = (id(shape), position, id(wanted))
        found = self._reads.get(key)
        if found is None:
            reads = [self.produce(shape, layout).operands[position] for layout in wanted]
            found = self._reads[key] = self.interned(reads)
        return found

    def divisions(self, shape: st.Shape, wanted: Layouts) -> tuple[int, ...]:
        """In how many parts a result is computed, in each of the layouts that are wanted."""
        key = (id(shape), id(wanted))
        if key not in self._divisions:
            found = (self.produce(shape, layout).division for layout in wanted)
            self._divisions[key] = tuple(found)
        return self._divisions[key]


@lru_cache(maxsize=MESHES_KEPT)
def tables_of(mesh: tuple[int, ...]) -> StrategyTables:
    """The tables of a mesh."""
    return StrategyTables(mesh)
