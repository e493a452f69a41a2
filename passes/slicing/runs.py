"""Scans over layers cut between iterations, and with them every value that is stacked by layer.

The program is evaluated symbolically once more. Where a value has the layers in one of its
dimensions it is held as `Runs`: one variable for each run of layers. Equations that work on every
layer alike become one equation per run, by their factor rules; a sum over all layers becomes a sum
of the runs' sums; what must see the whole value sees the runs concatenated. State leaves that are
stacked by layer become one leaf per run, with the optimizer's moments and averages of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from autopar.arrays.typed_keys import is_key
from autopar.passes.graph import jax_compat
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Atom, Input, Output
from autopar.passes.graph.microbatched import LoopPhase, Microbatched, in_phases
from autopar.passes.graph.scans import ScanParts
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.slicing.anatomy import Anatomy, held_leaves
from autopar.passes.slicing.layer_scans import Origins
from autopar.passes.slicing.run_builder import RunBuilder, ends
from autopar.passes.slicing.run_rules import How, Runs, Sizes, Value, atoms_of, with_size
from autopar.passes.slicing.stage_graphs import LeafRows, Rows

# What an equation of the new body comes from: an old one, and the iteration it begins with.
Source: TypeAlias = tuple[int, int]


class CutProgram(NamedTuple):
    """A program with its scans over layers cut.

    `sources`: of every equation of the loop's body. `inputs`: for every leaf of the old program
    (constants too), the new leaves that hold its rows; `outputs`: the same for its outputs.
    """

    step: Microbatched
    sources: Sequence[Source]
    inputs: Rows
    outputs: Rows


def cut_scans(parts: Anatomy, rules: Rules, sizes: Mapping[int, Sizes]) -> CutProgram:
    """Cut scans of the loop's body.

    Args:
      parts: the program.
      rules: the factor rules of its equations.
      sizes: numbers of the body's equations that are cut, each with the iterations of every run.
    """
    seeds: dict[int, How] = {}
    while True:  # until every leaf that is wanted in runs is read in runs
        cutter = _Cutter(parts, rules, sizes, seeds)
        made = cutter.program()
        missing = {leaf: how for leaf, how in cutter.wanted.items() if leaf not in seeds}
        if not missing:
            return made
        seeds.update(missing)


class _Cutter(RunBuilder):
    """Evaluates a program; `sizes` are the scans to cut, `seeds` the leaves that are in runs."""

    def __init__(
        self, parts: Anatomy, rules: Rules, sizes: Mapping[int, Sizes], seeds: Mapping[int, How]
    ) -> None:
        super().__init__(Origins(parts), rules)
        self.parts, self.seeds = parts, seeds
        self.sizes = {id(parts.body.eqns[index]): tuple(runs) for index, runs in sizes.items()}
        self.numbers = {id(eqn): index for index, eqn in enumerate(parts.body.eqns)}
        self.source: Source = (-1, 0)
        self.sources: list[Source] = []
        self.inside = False  # the loop's body, but not a body in it
        self.loop = parts.loop

    def program(self) -> CutProgram:
        """The new program."""
        graph = self.parts.graph
        invars: list[Atom] = []
        inputs: list[tuple[LeafRows, ...]] = []
        for number, var in enumerate(graph.jaxpr.invars):
            inputs.append(_rows(len(invars), self.seeds.get(number)))
            invars += self.define(var, self.seeds.get(number))
        self.evaluate(graph.jaxpr.eqns)
        outvars: list[Atom] = []
        outputs: list[tuple[LeafRows, ...]] = []
        held = held_leaves(graph)
        for atom, output in zip(graph.jaxpr.outvars, graph.outputs, strict=True):
            value, how = self.read(atom), None
            if output.alias is not None:
                how, leaf = self.seeds.get(output.alias), graph.jaxpr.invars[output.alias]
                if isinstance(value, Runs) and leaf in held and not is_key(leaf.aval.dtype):
                    self.wanted.setdefault(output.alias, value.how)
            outputs.append(_rows(len(outvars), how))
            outvars += [self.join(value)] if how is None else self.split(value, *how)
        jaxpr = jax_compat.replace_jaxpr(
            graph.jaxpr, invars=invars, outvars=outvars, eqns=self.eqns, effects=graph.jaxpr.effects
        )
        new_inputs = _labelled(graph.inputs, inputs, outputs)
        new_outputs = _labelled(graph.outputs, outputs, inputs)
        graph = dataclasses.replace(graph, jaxpr=jaxpr, inputs=new_inputs, outputs=new_outputs)
        step = in_phases(graph, [self.loop])
        return CutProgram(step, self.sources, tuple(inputs), tuple(outputs))

    def append(self, eqn: JaxprEqn) -> None:
        super().append(eqn)
        if self.inside:
            self.sources.append(self.source)

    def evaluate(self, eqns: Sequence[JaxprEqn]) -> None:
        """Equations, one after the other."""
        for eqn in eqns:
            if self.inside and id(eqn) in self.numbers:
                self.source = (self.numbers[id(eqn)], 0)
            self.current = eqn
            self.equation(eqn, [self.read(atom) for atom in eqn.invars])

    def equation(self, eqn: JaxprEqn, operands: Sequence[Value]) -> None:
        """One equation, cut if an operand is in runs, or it is a scan over layers."""
        name = eqn.primitive.name
        if eqn is self.parts.loop.scan:
            return self.microbatches(eqn, operands)
        if name == "scan" and not eqn.effects:
            *_, slices = ScanParts.of(eqn).operands(operands)
            cuts = (v.sizes for v in slices if isinstance(v, Runs) and v.axis == 0)
            sizes = self.sizes.get(id(eqn)) or next(cuts, None)  # the runs of some slices
            if sizes is not None:
                return self.scan(eqn, operands, sizes)
        if any(isinstance(value, Runs) for value in operands) and not eqn.effects:
            if is_barrier(eqn):
                return self.barrier(eqn, operands)
            if name == "cond" and not any(b.jaxpr.constvars for b in eqn.params["branches"]):
                return self.cond(eqn, operands)
            results = None if name == "cond" else self.by_rule(eqn, operands)
            if results is not None:
                return self.env.update(zip(eqn.outvars, results, strict=True))
        atoms = [self.join(value) for value in operands]
        same = all(new is old for new, old in zip(atoms, eqn.invars, strict=True))
        self.append(eqn if same else eqn.replace(invars=atoms))
        self.env.update((var, var) for var in eqn.outvars)

    def barrier(self, eqn: JaxprEqn, operands: Sequence[Value]) -> None:
        """One barrier for all runs."""
        flat = [atom for value in operands for atom in atoms_of(value)]
        outvars = [jax_compat.new_var(atom.aval) for atom in flat]
        self.append(eqn.replace(invars=flat, outvars=outvars))
        left = iter(outvars)
        for var, value in zip(eqn.outvars, operands, strict=True):
            if isinstance(value, Runs):
                atoms = tuple(itertools.islice(left, len(value.atoms)))
                self.env[var] = dataclasses.replace(value, atoms=atoms)
            else:
                self.env[var] = next(left)

    def scan(self, eqn: JaxprEqn, operands: Sequence[Value], sizes: Sizes) -> None:
        """One scan per run of iterations, from carry to carry."""
        parts = ScanParts.of(eqn)
        read, starts, sliced = parts.operands(operands)
        consts, carry = [self.join(v) for v in read], [self.join(v) for v in starts]
        slices = list(sliced)
        for number, value in enumerate(slices):
            if not isinstance(value, Runs):
                self.want(value, 0, sizes)
            elif value.how != (0, sizes):
                slices[number] = self.join(value)
        totals, stacks = parts.results(eqn.outvars)
        runs: dict[int, list[Var]] = {}
        outer = self.source
        places = list(enumerate(ends(sizes)))
        for place, (start, stop) in reversed(places) if eqn.params["reverse"] else places:
            self.source = (outer[0], start)
            xs = [
                value.atoms[place] if isinstance(value, Runs) else self.slice(value, 0, start, stop)
                for value in slices
            ]
            carried = [jax_compat.new_var(v.aval) for v in totals]
            runs[place] = [jax_compat.new_var(with_size(v.aval, 0, stop - start)) for v in stacks]
            invars, outvars = [*consts, *carry, *xs], [*carried, *runs[place]]
            params = {**eqn.params, "length": stop - start}
            self.append(eqn.replace(invars=invars, outvars=outvars, params=params))
            carry = [*carried]
        self.source = outer
        self.env.update(zip(totals, carry, strict=True))
        for number, var in enumerate(stacks):
            self.env[var] = Runs(0, sizes, tuple(runs[place][number] for place, _ in places))

    def cond(self, eqn: JaxprEqn, operands: Sequence[Value]) -> None:
        """Branches whose operands and results are in runs."""
        branches = [closed.jaxpr for closed in eqn.params["branches"]]
        wanted: dict[int, How] = {}
        while True:
            made = [self.body(branch, operands[1:], wanted, is_loop=False) for branch in branches]
            more = {n: how for x in made for n, how in x.runs().items() if n not in wanted}
            if not more:
                break
            wanted |= more
        outvars = [v for n, var in enumerate(eqn.outvars) for v in self.define(var, wanted.get(n))]
        condition, *others = operands
        invars = [self.join(condition), *(v for x in others for v in atoms_of(x))]
        new = tuple(ClosedJaxpr(m.of(old), ()) for m, old in zip(made, branches, strict=True))
        params = {**eqn.params, "branches": new}
        self.append(eqn.replace(invars=invars, outvars=outvars, params=params))

    def body(
        self, jaxpr: Jaxpr, operands: Sequence[Value], wanted: Mapping[int, How], is_loop: bool
    ) -> _Body:
        """A body that is given these values, and whose results in `wanted` are in runs.

        What was known outside is known again afterwards.
        """
        saved = self.eqns, self.known, self.current, self.inside
        self.eqns, self.known, self.inside = [], {}, is_loop
        if is_loop:
            self.sources = []
        invars = [
            v
            for var, value in zip(jaxpr.invars, operands, strict=True)
            for v in self.define(var, value.how if isinstance(value, Runs) else None)
        ]
        self.evaluate(jaxpr.eqns)
        results: list[Value] = []
        for place, atom in enumerate(jaxpr.outvars):
            value, how = self.read(atom), wanted.get(place)
            results.append(value if how is None else Runs(*how, self.split(value, *how)))
        made = _Body(invars, self.eqns, results)
        self.eqns, self.known, self.current, self.inside = saved
        return made

    def microbatches(self, eqn: JaxprEqn, operands: Sequence[Value]) -> None:
        """The loop over the microbatches, whose carries are in runs where its results are."""
        parts = ScanParts.of(eqn)
        consts, begin, sliced = parts.operands(operands)
        slices = [self.join(v) for v in sliced]
        carries: dict[int, How] = {}
        while True:
            starts: list[Value] = [
                Runs(*how, self.split(v, *how)) if (how := carries.get(n)) else self.join(v)
                for n, v in enumerate(begin)
            ]
            given = [*consts, *starts, *slices]
            made = self.body(self.parts.body, given, carries, is_loop=True)
            runs = {n: how for n, how in made.runs().items() if n < parts.num_carry}
            if runs.keys() <= carries.keys():
                break
            carries = runs | carries
        # What is stacked has the microbatches as its first dimension.
        hows = {n: (axis + (n >= parts.num_carry), size) for n, (axis, size) in made.runs().items()}
        outvars = [v for n, var in enumerate(eqn.outvars) for v in self.define(var, hows.get(n))]
        counts = (sum(len(atoms_of(v)) for v in values) for values in (consts, starts))
        closed = ClosedJaxpr(made.of(self.parts.body), ())
        scan = eqn.replace(
            invars=[atom for value in given for atom in atoms_of(value)],
            outvars=outvars,
            params=jax_compat.scan_params(eqn.params, closed, *counts),
        )
        self.append(scan)
        self.loop = LoopPhase(scan)


class _Body(NamedTuple):
    """What a body of control flow becomes."""

    invars: list[Atom]
    eqns: list[JaxprEqn]
    results: list[Value]

    def runs(self) -> dict[int, How]:
        """The results that are in runs."""
        return {n: value.how for n, value in enumerate(self.results) if isinstance(value, Runs)}

    def of(self, jaxpr: Jaxpr) -> Jaxpr:
        """The new body in the old one's place."""
        outvars = [atom for value in self.results for atom in atoms_of(value)]
        return jax_compat.replace_jaxpr(
            jaxpr, invars=self.invars, outvars=outvars, eqns=self.eqns, effects=jaxpr.effects
        )


def _rows(first: int, how: How | None) -> tuple[LeafRows, ...]:
    """The leaves, from `first`, that hold a leaf's rows."""
    if how is None:
        return (LeafRows(first),)
    axis, sizes = how
    return tuple(LeafRows(first + n, axis, *rows) for n, rows in enumerate(ends(sizes)))


_Label = TypeVar("_Label", Input, Output)


def _labelled(
    labels: Sequence[_Label],
    leaves: Sequence[Sequence[LeafRows]],
    others: Sequence[Sequence[LeafRows]],
) -> tuple[_Label, ...]:
    """The labels of the new leaves, of which runs replace each other as the old leaves do."""

    def suffix(rows: LeafRows) -> str:
        return "" if rows.stop is None else f"[{':, ' * rows.axis}{rows.start}:{rows.stop}]"

    made = []
    for label, group in zip(labels, leaves, strict=True):
        for place, rows in enumerate(group):
            alias = None if label.alias is None else others[label.alias][place].number
            made.append(dataclasses.replace(label, path=label.path + suffix(rows), alias=alias))
    return tuple(made)
