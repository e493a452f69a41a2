"""Every equation's stage: forward ones by layers, backward and epilogue ones by minimum cuts.

Bytes moved are minimised, subject to: backward values flow to lower stages; heavy backward
equations are where their primal is; a state leaf that forward equations read is at home on the
lowest stage that reads it. Values of the loop cost their bytes once per microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from jax.extend.core import Literal, Var

from autopar.passes.graph.graph import makers_of, readers_of
from autopar.passes.slicing import mincut
from autopar.passes.slicing.accumulators import Terms, absorbed_by
from autopar.passes.slicing.anatomy import Anatomy, bytes_of, held_leaves
from autopar.passes.slicing.mincut import CutValue, Node
from autopar.passes.slicing.primals import find_primals


@dataclass(frozen=True)
class Placement:
    """Stages of the equations (by number in body or epilogue) and leaves that are on one stage.

    Free and absorbed equations are not. For every accumulator, `terms` has the stage of each of its
    terms, and `totals` that of its total; `homes` has state leaves, by input number.
    """

    body: Mapping[int, int]
    terms: tuple[tuple[int, ...], ...]
    totals: tuple[int, ...]
    epilogue: Mapping[int, int]
    homes: Mapping[int, int]


def place(
    parts: Anatomy, terms: tuple[Terms, ...], stage_of: Mapping[int, int], num_stages: int
) -> Placement:
    """Place every equation, accumulator and state leaf; `stage_of` has the forward equations."""
    absorbed = absorbed_by(terms)
    forward = {index: stage for index, stage in stage_of.items() if index not in absorbed}
    p = _PlacementProblem(parts, terms, forward)
    where = mincut.place(p.nodes, p.values, p.fixed, p.preferred, num_stages)

    def stages_of(kind: str) -> dict[int, int]:
        return {node[1]: stage for node, stage in where.items() if node[0] == kind}

    return Placement(
        body=forward | stages_of("body"),
        terms=tuple(
            tuple(where["term", n, place] for place in range(len(item.terms)))
            for n, item in enumerate(terms)
        ),
        totals=tuple(where["total", n] for n in range(len(terms))),
        epilogue=stages_of("epilogue"),
        homes=stages_of("leaf"),
    )


class _PlacementProblem:
    """The nodes and values of the minimum cuts."""

    def __init__(
        self, parts: Anatomy, terms: tuple[Terms, ...], forward: Mapping[int, int]
    ) -> None:
        self.parts, self.terms, self.forward = parts, terms, forward
        self.values: list[CutValue] = []
        self.fixed: dict[Node, int] = {}
        self.held = held_leaves(parts.graph)
        self.late = parts.backward - absorbed_by(terms).keys()
        self.after = [i for i, eqn in enumerate(parts.step.epilogue) if not parts.is_free(eqn)]
        self.nodes: list[Node] = [("body", index) for index in sorted(self.late)]
        for number, item in enumerate(terms):
            self.nodes += [("term", number, place) for place in range(len(item.terms))]
            self.nodes.append(("total", number))
        self.nodes += [("epilogue", index) for index in self.after]
        self.nodes += [("leaf", number) for number in self.held.values()]
        self.preferred: dict[Node, int] = {
            ("body", index): forward[primal]
            for index, primal in find_primals(parts).items()
            if index in self.late and primal in forward
        }
        self.inside, self.made_inside = readers_of(parts.body.eqns), makers_of(parts.body.eqns)
        after = set(self.after)
        self.outside: dict[Var, list[Node]] = {
            var: [("epilogue", index) for index in indices if index in after]
            for var, indices in readers_of(parts.step.epilogue).items()
        }
        self._loop_values()
        self._step_values()
        self._leaf_values()
        self._totals_at_home()

    def _late_readers(self, var: Var) -> list[Node]:
        return [("body", index) for index in self.inside.get(var, ()) if index in self.late]

    def _stages_reading(self, var: Var) -> set[int]:
        readers = self.inside.get(var, ())
        return {self.forward[index] for index in readers if index in self.forward}

    def _loop_values(self) -> None:
        """Values that the loop's body makes."""
        term_nodes: dict[Var, list[Node]] = defaultdict(list)
        for number, item in enumerate(self.terms):
            for place, atom in enumerate(item.terms):
                if not isinstance(atom, Literal):
                    term_nodes[atom].append(("term", number, place))
        for var, index in self.made_inside.items():
            late = tuple(self._late_readers(var))
            cost = bytes_of(var) * self.parts.loop.num_microbatches
            if index in self.forward:
                here = self.forward[index]
                if late:
                    has = {here, *self._stages_reading(var)}
                    self.values.append(CutValue(cost, late, stages=tuple(sorted(has))))
                self.fixed.update((node, here) for node in term_nodes.get(var, ()))
            elif index in self.late:
                maker: Node = ("body", index)
                if late:
                    self.values.append(CutValue(cost, late, maker, downward=True))
                for node in term_nodes.get(var, ()):
                    self.values.append(CutValue(0, (node,), maker, tied=True))

    def _step_values(self) -> None:
        """Values outside of the loop: totals, stacks, and what the epilogue makes."""
        parts = self.parts
        graph, readers = parts.graph, self.outside
        # An output that replaces a leaf belongs at that leaf's home.
        for atom, label in zip(graph.jaxpr.outvars, graph.outputs, strict=True):
            if isinstance(atom, Literal) or label.alias is None:
                continue
            if graph.jaxpr.invars[label.alias] in self.held and atom not in self.held:
                readers.setdefault(atom, []).append(("leaf", label.alias))
        makers: dict[Var, Node] = {
            var: ("epilogue", index)
            for index in self.after
            for var in parts.step.epilogue[index].outvars
        }
        for number, item in enumerate(self.terms):
            total: Node = ("total", number)
            cost = bytes_of(item.carried.carry)
            for place in range(len(item.terms)):
                self.values.append(CutValue(cost, (total,), ("term", number, place)))
            makers[item.carried.total] = total
        for atom, var in parts.loop.stacks:
            at = None if isinstance(atom, Literal) else self.made_inside.get(atom)
            late = tuple(readers.get(var, ()))
            if not late or at is None:
                continue
            if at in self.forward:
                self.values.append(CutValue(bytes_of(var), late, stages=(self.forward[at],)))
            elif at in self.late:
                makers[var] = ("body", at)
        for var, maker in makers.items():
            others = tuple(node for node in readers.get(var, ()) if node != maker)
            if others:
                self.values.append(CutValue(bytes_of(var), others, maker))

    def _leaf_values(self) -> None:
        """State leaves: those that forward equations read are at home where they are read."""
        used: dict[int, set[int]] = defaultdict(set)
        late: dict[int, set[Node]] = defaultdict(set)
        leaves = self.parts.leaves
        for var in self.inside:
            for number in leaves.get(var, ()):
                used[number] |= self._stages_reading(var)
                late[number].update(self._late_readers(var))
        for var, nodes in self.outside.items():
            for number in leaves.get(var, ()):
                late[number].update(node for node in nodes if node[0] == "epilogue")
        for var, number in self.held.items():
            others, stages = tuple(sorted(late[number])), tuple(sorted(used[number]))
            maker: Node = ("leaf", number)
            if stages:
                self.fixed[maker] = stages[0]
            if others:
                known = None if stages else maker
                self.values.append(CutValue(bytes_of(var), others, known, stages))

    def _totals_at_home(self) -> None:
        """A sum whose terms come from several stages is needed where the leaf is that it updates.

        Cuts count how many boundaries a value crosses and would rather have it in the middle.
        """
        eqns = self.parts.step.epilogue
        for number, item in enumerate(self.terms):
            if len(item.terms) < 2:
                continue
            reached: set[Node] = set()
            stack = [item.carried.total]
            while stack:
                for node in set(self.outside.get(stack.pop(), ())) - reached:
                    reached.add(node)
                    stack += eqns[node[1]].outvars if node[0] == "epilogue" else []
            homes = {self.fixed[node] for node in reached if node in self.fixed}
            if len(homes) == 1:
                self.preferred["total", number] = homes.pop()
