"""Every equation's stage: forward ones by layers, backward and epilogue ones by minimum cuts.

Bytes moved are minimised, subject to: backward values flow to lower stages; heavy backward
equations are where their forward twin is; a state leaf that forward equations read is at home on
the lowest stage that reads it. Values of the loop cost their bytes once per microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jax.extend.core import DropVar, Literal, Var

from autopar.passes.graph.graph import Atom
from autopar.passes.slicing import mincut
from autopar.passes.slicing.accumulators import Terms, absorbed_by, terms_reading
from autopar.passes.slicing.anatomy import Anatomy, bytes_of, holds, leaves_of
from autopar.passes.slicing.mincut import CutValue, Node
from autopar.passes.slicing.primals import find_primals


@dataclass(frozen=True)
class Placement:
    """Where everything is.

    Args:
      body: stages of the body's equations that are on one stage (not free, not absorbed).
      terms: for every accumulator the stage of each of its terms.
      totals: for every accumulator the stage of its total.
      epilogue: stages of the epilogue's equations that are on one stage, by their number there.
      homes: stages of the state leaves that are on one stage, by input number.
    """

    body: Mapping[int, int]
    terms: tuple[tuple[int, ...], ...]
    totals: tuple[int, ...]
    epilogue: Mapping[int, int]
    homes: Mapping[int, int]


def place(
    parts: Anatomy, terms: tuple[Terms, ...], stage_of: Mapping[int, int], num_stages: int
) -> Placement:
    """Place every equation, accumulator and state leaf.

    Args:
      parts: the program.
      terms: its accumulators.
      stage_of: the stages of the body's forward equations.
      num_stages: how many there are.
    """
    absorbed = absorbed_by(terms)
    forward = {index: stage for index, stage in stage_of.items() if index not in absorbed}
    problem = _PlacementProblem(parts, terms, forward, set(absorbed))
    where = mincut.place(
        problem.nodes,
        problem.values,
        problem.fixed,
        problem.preferred,
        num_stages,
    )
    body = dict(forward)
    body.update((node[1], s) for node, s in where.items() if node[0] == "body")
    return Placement(
        body=body,
        terms=tuple(
            tuple(where["term", number, place] for place in range(len(item.terms)))
            for number, item in enumerate(terms)
        ),
        totals=tuple(where["total", number] for number in range(len(terms))),
        epilogue={node[1]: s for node, s in where.items() if node[0] == "epilogue"},
        homes={node[1]: s for node, s in where.items() if node[0] == "leaf"},
    )


class _PlacementProblem:
    """The nodes and values of the minimum cuts."""

    def __init__(
        self,
        parts: Anatomy,
        terms: tuple[Terms, ...],
        forward: Mapping[int, int],
        absorbed: set[int],
    ):
        self.parts = parts
        self.forward = forward
        self.nodes: list[Node] = []
        self.values: list[CutValue] = []
        self.fixed: dict[Node, int] = {}
        self.preferred: dict[Node, int] = {}
        self.leaves = leaves_of(parts)
        self.late = parts.backward - absorbed
        self.nodes += [("body", index) for index in sorted(self.late)]
        for number, item in enumerate(terms):
            self.nodes += [("term", number, place) for place in range(len(item.terms))]
            self.nodes.append(("total", number))
        self.behind = [
            (place, eqn) for place, eqn in enumerate(parts.step.epilogue) if not parts.is_free(eqn)
        ]
        self.nodes += [("epilogue", index) for index, _ in self.behind]
        jaxpr, labels = parts.graph.jaxpr, parts.graph.inputs
        self.held = {
            var: number
            for number, (var, label) in enumerate(zip(jaxpr.invars, labels, strict=True))
            if holds(label, var.aval)
        }
        self.nodes += [("leaf", number) for number in self.held.values()]
        twins = find_primals(parts)
        self.preferred.update(
            (("body", index), forward[twin])
            for index, twin in twins.items()
            if index not in absorbed and twin in forward
        )
        self._loop_values(terms)
        self._step_values(terms)

    def _loop_values(self, terms: tuple[Terms, ...]) -> None:
        """Values that the loop's body makes."""
        eqns, count = self.parts.body.eqns, self.parts.loop.num_microbatches
        reading = terms_reading(terms)
        readers: dict[Var, list[Node]] = {}
        used: dict[Var, set[int]] = {}
        for index in sorted(self.late):
            for var in _variables(eqns[index].invars):
                readers.setdefault(var, []).append(("body", index))
        for index, stage in self.forward.items():
            for var in _variables(eqns[index].invars):
                used.setdefault(var, set()).add(stage)
        for index, eqn in enumerate(eqns):
            if index not in self.forward and index not in self.late:
                continue
            for var in eqn.outvars:
                term_nodes: list[Node] = [("term", *which) for which in reading.get(var, ())]
                late = readers.get(var, [])
                cost = bytes_of(var) * count
                if index in self.forward:
                    here = self.forward[index]
                    if late:
                        has = tuple(sorted({here, *used.get(var, ())}))
                        self.values.append(CutValue(cost, tuple(late), stages=has))
                    for node in term_nodes:
                        self.fixed[node] = here
                else:
                    maker: Node = ("body", index)
                    if late:
                        self.values.append(CutValue(cost, tuple(late), maker, downward=True))
                    for node in term_nodes:
                        self.values.append(CutValue(0, (node,), maker, tied=True))

    def _step_values(self, terms: tuple[Terms, ...]) -> None:
        """Values outside of the loop: leaves, totals, stacks, and what the epilogue makes."""
        parts = self.parts
        readers: dict[Var, list[Node]] = {}
        for index, eqn in self.behind:
            for var in _variables(eqn.invars):
                readers.setdefault(var, []).append(("epilogue", index))
        self._returned(readers)
        makers: dict[Var, Node] = {
            var: ("epilogue", index) for index, eqn in self.behind for var in eqn.outvars
        }
        body_makers = {
            var: index for index, eqn in enumerate(parts.body.eqns) for var in eqn.outvars
        }
        for number, item in enumerate(terms):
            total: Node = ("total", number)
            cost = bytes_of(item.carried.carry)
            for place in range(len(item.terms)):
                self.values.append(CutValue(cost, (total,), ("term", number, place)))
            makers[item.carried.total] = total
        for atom, var in parts.loop.stacks:
            late = readers.get(var)
            at = None if isinstance(atom, Literal) else body_makers.get(atom)
            if not late or at is None or isinstance(var, DropVar):
                continue
            if at in self.forward:
                self.values.append(CutValue(bytes_of(var), tuple(late), stages=(self.forward[at],)))
            elif at in self.late:
                makers[var] = ("body", at)
        for var, maker in makers.items():
            others = tuple(node for node in readers.get(var, ()) if node != maker)
            if others:
                self.values.append(CutValue(bytes_of(var), others, maker))
        self._leaf_values(readers)
        self._totals_at_home(terms, readers)

    def _totals_at_home(self, terms: tuple[Terms, ...], readers: Mapping[Var, list[Node]]) -> None:
        """A sum whose terms come from several stages is needed where the leaf is that it updates.

        Cuts count how many boundaries a value crosses and would rather have it in the middle.
        """
        eqns = self.parts.step.epilogue
        for number, item in enumerate(terms):
            if len(item.terms) < 2:
                continue
            homes: set[int] = set()
            seen: set[Node] = set()
            stack = list(readers.get(item.carried.total, ()))
            while stack:
                node = stack.pop()
                if node in seen:
                    continue
                seen.add(node)
                if node[0] == "leaf":
                    homes |= {self.fixed[node]} if node in self.fixed else set()
                else:
                    for var in eqns[node[1]].outvars:
                        stack += readers.get(var, ())
            if len(homes) == 1:
                self.preferred["total", number] = homes.pop()

    def _leaf_values(self, readers: Mapping[Var, list[Node]]) -> None:
        """State leaves: those that forward equations read are at home where they are read."""
        parts = self.parts
        used: dict[int, set[int]] = {}
        for index, stage in self.forward.items():
            for var in _variables(parts.body.eqns[index].invars):
                for number in self.leaves.get(var, ()):
                    used.setdefault(number, set()).add(stage)
        late: dict[int, dict[Node, None]] = {}
        for index in sorted(self.late):
            for var in _variables(parts.body.eqns[index].invars):
                for number in self.leaves.get(var, ()):
                    late.setdefault(number, {})["body", index] = None
        for var, number in self.held.items():
            late.setdefault(number, {}).update((node, None) for node in readers.get(var, ()))
        for index, eqn in self.behind:
            for var in _variables(eqn.invars):
                if var not in self.held:
                    for number in self.leaves.get(var, ()):
                        late.setdefault(number, {})["epilogue", index] = None
        for var, number in self.held.items():
            node: Node = ("leaf", number)
            stages = used.get(number)
            if stages:
                self.fixed[node] = min(stages)
            others = tuple(late.get(number, ()))
            if others and stages:
                self.values.append(CutValue(bytes_of(var), others, stages=tuple(sorted(stages))))
            elif others:
                self.values.append(CutValue(bytes_of(var), others, node))

    def _returned(self, readers: dict[Var, list[Node]]) -> None:
        """An output that replaces a leaf belongs at that leaf's home."""
        graph = self.parts.graph
        for atom, label in zip(graph.jaxpr.outvars, graph.outputs, strict=True):
            if isinstance(atom, Literal) or label.alias is None:
                continue
            if graph.jaxpr.invars[label.alias] in self.held and atom not in self.held:
                readers.setdefault(atom, []).append(("leaf", label.alias))


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))
