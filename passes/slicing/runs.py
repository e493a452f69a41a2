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
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom, Graph
from autopar.passes.graph.microbatched import LoopPhase, Microbatched, in_phases
from autopar.passes.graph.scans import ScanParts
from autopar.passes.primitives.factor_rule import FactorRule
from autopar.passes.primitives.shardings import is_key
from autopar.passes.slicing.anatomy import Anatomy, holds
from autopar.passes.slicing.layer_scans import Origins
from autopar.passes.slicing.run_builder import RunBuilder, ends
from autopar.passes.slicing.run_rules import Runs, Sizes, Value, with_size
from autopar.passes.slicing.stage_graphs import LeafRows


@dataclass(frozen=True)
class Source:
    """What an equation of the new body comes from: an old one, and the iteration it begins with."""

    equation: int
    iteration: int = 0


@dataclass(frozen=True)
class CutProgram:
    """A program with its scans over layers cut.

    Args:
      step: the program.
      sources: for every equation of the loop's body, the old equation that it comes from.
      inputs: for every leaf of the old program (constants too), the new leaves that hold its rows.
      outputs: the same for its outputs.
    """

    step: Microbatched
    sources: tuple[Source, ...]
    inputs: tuple[tuple[LeafRows, ...], ...]
    outputs: tuple[tuple[LeafRows, ...], ...]


def cut_scans(
    parts: Anatomy, rules: Mapping[JaxprEqn, FactorRule], sizes: Mapping[int, Sizes]
) -> CutProgram:
    """Cut scans of the loop's body.

    Args:
      parts: the program.
      rules: the factor rules of its equations.
      sizes: numbers of the body's equations that are cut, each with the iterations of every run.
    """
    seeds: dict[int, tuple[int, Sizes]] = {}
    while True:  # until every leaf that is wanted in runs is read in runs
        cutter = _Cutter(parts, rules, sizes, seeds)
        cutter.run()
        missing = {leaf: how for leaf, how in cutter.wanted.items() if leaf not in seeds}
        if not missing:
            return cutter.result()
        seeds.update(missing)


class _Cutter(RunBuilder):
    def __init__(
        self,
        parts: Anatomy,
        rules: Mapping[JaxprEqn, FactorRule],
        sizes: Mapping[int, Sizes],
        seeds: Mapping[int, tuple[int, Sizes]],
    ):
        super().__init__(Origins(parts), rules)
        self.parts, self.seeds = parts, dict(seeds)
        self.sizes = {id(parts.body.eqns[index]): tuple(runs) for index, runs in sizes.items()}
        self.numbers = {id(eqn): index for index, eqn in enumerate(parts.body.eqns)}
        self.source = Source(-1)
        self.sources: list[Source] = []
        self.carries: dict[int, tuple[int, Sizes]] = {}  # of the loop, that are in runs
        self.loop = parts.loop

    # The program as a whole.

    def run(self) -> None:
        graph = self.parts.graph
        self.invars: list[Var] = []
        self.inputs: list[tuple[LeafRows, ...]] = []
        for number, (var, label) in enumerate(zip(graph.jaxpr.invars, graph.inputs, strict=True)):
            first = len(self.invars)
            if number not in self.seeds:
                self.env[var] = var
                self.invars.append(var)
                self.inputs.append((LeafRows(first),))
                continue
            assert label.role == "state"
            axis, sizes = self.seeds[number]
            runs = self.fresh(var.aval, axis, sizes)
            self.env[var] = runs
            self.invars += runs.atoms
            self.inputs.append(
                tuple(
                    LeafRows(first + place, axis, start, stop)
                    for place, (start, stop) in enumerate(ends(sizes))
                )
            )
        self.evaluate(graph.jaxpr.eqns)
        self.outvars: list[Atom] = []
        self.outputs: list[tuple[LeafRows, ...]] = []
        for atom, output in zip(graph.jaxpr.outvars, graph.outputs, strict=True):
            first = len(self.outvars)
            value = self.read(atom)
            alias = output.alias
            if alias is not None and isinstance(value, Runs) and self.may_split(alias):
                self.wanted.setdefault(alias, (value.axis, value.sizes))
            if alias is None or alias not in self.seeds:
                self.outvars.append(self.join(value))
                self.outputs.append((LeafRows(first),))
                continue
            axis, sizes = self.seeds[alias]
            self.outvars += self.split(value, axis, sizes)
            self.outputs.append(
                tuple(
                    LeafRows(first + place, axis, start, stop)
                    for place, (start, stop) in enumerate(ends(sizes))
                )
            )

    def may_split(self, leaf: int) -> bool:
        graph = self.parts.graph
        var = graph.jaxpr.invars[leaf]
        return holds(graph.inputs[leaf], var.aval) and not is_key(var.aval)

    def result(self) -> CutProgram:
        graph = self.parts.graph
        jaxpr = jax_compat.replace_jaxpr(
            graph.jaxpr,
            invars=self.invars,
            outvars=self.outvars,
            eqns=self.eqns,
            effects=graph.jaxpr.effects,
        )
        inputs = [
            dataclasses.replace(label, path=label.path + _suffix(rows), alias=None)
            for label, group in zip(graph.inputs, self.inputs, strict=True)
            for rows in group
        ]
        outputs = [
            dataclasses.replace(label, path=label.path + _suffix(rows), alias=None)
            for label, group in zip(graph.outputs, self.outputs, strict=True)
            for rows in group
        ]
        for label, group in zip(graph.outputs, self.outputs, strict=True):
            if label.alias is None:
                continue
            for out, into in zip(group, self.inputs[label.alias], strict=True):
                outputs[out.number] = dataclasses.replace(outputs[out.number], alias=into.number)
                if graph.inputs[label.alias].alias is not None:
                    inputs[into.number] = dataclasses.replace(inputs[into.number], alias=out.number)
        return CutProgram(
            in_phases(Graph(jaxpr, tuple(inputs), tuple(outputs), graph.constants), [self.loop]),
            tuple(self.sources),
            tuple(self.inputs),
            tuple(self.outputs),
        )

    def append(self, eqn: JaxprEqn) -> None:
        super().append(eqn)
        if self.inside:
            self.sources.append(self.source)

    inside = False

    # Equations.

    def evaluate(self, eqns: Sequence[JaxprEqn]) -> None:
        for eqn in eqns:
            if self.inside and id(eqn) in self.numbers:
                self.source = Source(self.numbers[id(eqn)])
            self.current = eqn
            self.equation(eqn)

    def equation(self, eqn: JaxprEqn) -> None:
        operands = [self.read(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if eqn is self.parts.loop.scan:
            self.microbatches(eqn, operands)
            return
        if name == "scan":
            sizes = self.sizes.get(id(eqn)) or _sizes_of_slices(eqn, operands)
            if sizes is not None and not eqn.effects:
                self.scan(eqn, operands, sizes)
                return
        if any(isinstance(value, Runs) for value in operands) and not eqn.effects:
            if name == "optimization_barrier":
                self.barrier(eqn, operands)
                return
            if name == "cond":
                self.cond(eqn, operands)
                return
            results = self.by_rule(eqn, operands)
            if results is not None:
                self.env.update(zip(eqn.outvars, results, strict=True))
                return
        self.whole(eqn, operands)

    def whole(self, eqn: JaxprEqn, operands: Sequence[Value]) -> None:
        """An equation as it is."""
        atoms = [self.join(value) for value in operands]
        same = all(new is old for new, old in zip(atoms, eqn.invars, strict=True))
        self.append(eqn if same else eqn.replace(invars=atoms))
        self.env.update((var, var) for var in eqn.outvars)

    def barrier(self, eqn: JaxprEqn, operands: Sequence[Value]) -> None:
        flat = [atom for value in operands for atom in _atoms(value)]
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
        consts, carry, slices = parts.operands(operands)
        consts, carry = [self.join(v) for v in consts], [self.join(v) for v in carry]
        slices = [self.want_all(v, 0, sizes) for v in slices]
        totals, stacks = parts.results(eqn.outvars)
        stacked: list[list[Atom]] = [[] for _ in stacks]
        places = range(len(sizes))
        starts = [start for start, _ in ends(sizes)]
        outer = self.source
        for place in reversed(places) if eqn.params["reverse"] else places:
            self.source = Source(outer.equation, starts[place])
            xs = [self.run_of(value, sizes, place) for value in slices]
            carried = [jax_compat.new_var(v.aval) for v in totals]
            made = [jax_compat.new_var(with_size(v.aval, 0, sizes[place])) for v in stacks]
            self.append(
                eqn.replace(
                    invars=[*consts, *carry, *xs],
                    outvars=[*carried, *made],
                    params={**eqn.params, "length": sizes[place]},
                )
            )
            carry = list(carried)
            for group, var in zip(stacked, made, strict=True):
                group.append(var)
        self.source = outer
        self.env.update(zip(totals, carry, strict=True))
        for var, group in zip(stacks, stacked, strict=True):
            atoms = reversed(group) if eqn.params["reverse"] else group
            self.env[var] = Runs(0, sizes, tuple(atoms))

    def want_all(self, value: Value, axis: int, sizes: Sizes) -> Value:
        """A value that will be read in runs: its leaf is wanted so."""
        if isinstance(value, Runs):
            same = (value.axis, value.sizes) == (axis, sizes)
            return value if same else self.join(value)
        self.want(value, axis, sizes)
        return value

    def run_of(self, value: Value, sizes: Sizes, place: int) -> Atom:
        if isinstance(value, Runs):
            return value.atoms[place]
        return self.slice(value, 0, *ends(sizes)[place])

    def cond(self, eqn: JaxprEqn, operands: Sequence[Value]) -> None:
        """Branches whose operands and results are in runs."""
        branches = [closed.jaxpr for closed in eqn.params["branches"]]
        if any(branch.constvars for branch in branches):
            self.whole(eqn, operands)
            return
        wanted: dict[int, tuple[int, Sizes]] = {}
        while True:
            made = [self.branch(branch, operands[1:], wanted) for branch in branches]
            found = {
                place: (value.axis, value.sizes)
                for _, _, values in made
                for place, value in enumerate(values)
                if isinstance(value, Runs) and place not in wanted
            }
            if not found:
                break
            wanted.update(found)
        closed = tuple(
            ClosedJaxpr(
                jax_compat.replace_jaxpr(
                    branch,
                    invars=invars,
                    outvars=[atom for value in values for atom in _atoms(value)],
                    eqns=eqns,
                ),
                (),
            )
            for branch, (invars, eqns, values) in zip(branches, made, strict=True)
        )
        outvars: list[Var] = []
        for place, var in enumerate(eqn.outvars):
            if place in wanted:
                runs = self.fresh(var.aval, *wanted[place])
                self.env[var] = runs
                outvars += runs.atoms
            else:
                self.env[var] = var
                outvars.append(var)
        self.append(
            eqn.replace(
                invars=[
                    self.join(operands[0]),
                    *(atom for value in operands[1:] for atom in _atoms(value)),
                ],
                outvars=outvars,
                params={**eqn.params, "branches": closed},
            )
        )

    def branch(
        self, jaxpr: Jaxpr, operands: Sequence[Value], wanted: Mapping[int, tuple[int, Sizes]]
    ) -> tuple[list[Var], list[JaxprEqn], list[Value]]:
        """A branch's variables and equations, and its results, those of `wanted` in runs."""
        with self.nested():
            invars = self.bind_inputs(jaxpr.invars, operands)
            self.evaluate(jaxpr.eqns)
            values: list[Value] = []
            for place, atom in enumerate(jaxpr.outvars):
                value = self.read(atom)
                if place in wanted:
                    axis, sizes = wanted[place]
                    value = Runs(axis, sizes, self.split(value, axis, sizes))
                values.append(value)
            return invars, self.eqns, values

    def bind_inputs(self, variables: Sequence[Var], values: Sequence[Value]) -> list[Var]:
        """New variables of a body for what it is given, in runs where that is."""
        invars: list[Var] = []
        for var, value in zip(variables, values, strict=True):
            if isinstance(value, Runs):
                runs = self.fresh(var.aval, value.axis, value.sizes)
                self.env[var] = runs
                invars += runs.atoms
            else:
                self.env[var] = var
                invars.append(var)
        return invars

    def nested(self) -> _Nested:
        return _Nested(self)

    # The loop over microbatches.

    def microbatches(self, eqn: JaxprEqn, operands: Sequence[Value]) -> None:
        parts, body = ScanParts.of(eqn), self.parts.body
        consts, starts, stacks = parts.operands(operands)
        slices = [self.join(v) for v in stacks]
        while True:
            carry: list[Value] = []
            for number, value in enumerate(starts):
                if number in self.carries:
                    axis, sizes = self.carries[number]
                    carry.append(Runs(axis, sizes, self.split(value, axis, sizes)))
                else:
                    carry.append(self.join(value))
            given = [*consts, *carry, *slices]
            with self.nested():
                self.inside, self.sources = True, []
                invars = self.bind_inputs(body.invars, given)
                self.evaluate(body.eqns)
                results = [self.read(atom) for atom in body.outvars]
                found = {
                    number: (value.axis, value.sizes)
                    for number, value in enumerate(parts.results(results)[0])
                    if isinstance(value, Runs) and number not in self.carries
                }
                if not found:
                    outs: list[Atom] = []
                    for number, value in enumerate(results):
                        if number in self.carries:
                            outs += self.split(value, *self.carries[number])
                        else:
                            outs += _atoms(value)
                    eqns = self.eqns
            if not found:
                break
            self.carries.update(found)
        outvars: list[Var] = []
        for number, (var, value) in enumerate(zip(eqn.outvars, results, strict=True)):
            if number in self.carries:
                runs = self.fresh(var.aval, *self.carries[number])
            elif isinstance(value, Runs):
                runs = self.fresh(var.aval, value.axis + 1, value.sizes)
            else:
                self.env[var] = var
                outvars.append(var)
                continue
            self.env[var] = runs
            outvars += runs.atoms
        inner = jax_compat.replace_jaxpr(
            body, invars=invars, outvars=outs, eqns=eqns, effects=body.effects
        )
        flat = [[atom for value in group for atom in _atoms(value)]
                for group in (consts, carry, slices)]  # fmt: skip
        made = eqn.replace(
            invars=[atom for group in flat for atom in group],
            outvars=outvars,
            params=jax_compat.scan_params(
                eqn.params, ClosedJaxpr(inner, ()), len(flat[0]), len(flat[1])
            ),
        )
        self.append(made)
        self.loop = LoopPhase(made)


class _Nested:
    """Equations go to a new list; what was known outside is known again afterwards."""

    def __init__(self, cutter: _Cutter):
        self.cutter = cutter

    def __enter__(self) -> None:
        cutter = self.cutter
        self.saved = (cutter.eqns, cutter.known, cutter.current, cutter.inside)
        cutter.eqns, cutter.known, cutter.inside = [], {}, False

    def __exit__(self, *error: object) -> None:
        cutter = self.cutter
        cutter.eqns, cutter.known, cutter.current, cutter.inside = self.saved


def _sizes_of_slices(eqn: JaxprEqn, operands: Sequence[Value]) -> Sizes | None:
    """The runs in which some slices of a scan are."""
    *_, slices = ScanParts.of(eqn).operands(operands)
    for value in slices:
        if isinstance(value, Runs) and value.axis == 0:
            return value.sizes
    return None


def _atoms(value: Value) -> tuple[Atom, ...]:
    return value.atoms if isinstance(value, Runs) else (value,)


def _suffix(rows: LeafRows) -> str:
    if rows.stop is None:
        return ""
    return "[" + ":, " * rows.axis + f"{rows.start}:{rows.stop}]"
