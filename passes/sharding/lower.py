"""From an assignment of strategies to the program that every device runs.

Resharding is emitted where a version is first read and found again after that. Sums of partial
scalars stay partial until a nonlinear use, whatever group they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom
from autopar.passes.graph.microbatched import Microbatched
from autopar.passes.graph.scans import ScanParts
from autopar.passes.graph.tested_loops import GOES_ON
from autopar.passes.sharding import strategies as st
from autopar.passes.sharding.compiler_rules import rules_of
from autopar.passes.sharding.effects import check_effects
from autopar.passes.sharding.gathered_state import along_rows
from autopar.passes.sharding.layout import (
    Layout,
    on_device,
    replicated,
    stacked,
    without_partial,
)
from autopar.passes.sharding.leaf_by_leaf import is_long, leaf_by_leaf
from autopar.passes.sharding.lowering_context import (
    OTHER_FORMS,
    LoweringContext,
    passing_layout,
)
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.reshard import adding, reshard_steps
from autopar.passes.sharding.scopes import Entry, Scope, aval_shape, itemsize
from autopar.passes.sharding.spmd_program import (
    Block,
    Branch,
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    SpmdProgram,
)
from autopar.passes.sharding.strategy_graph import StrategyGraph


def lower(
    step: Microbatched,
    built: StrategyGraph,
    assignment: Sequence[int],
    pricing: Pricing,
    axis_names: tuple[str, ...],
    batch_dims: Mapping[Var, frozenset[int]],
) -> SpmdProgram:
    """The program in which every group of equations takes its assigned strategy."""
    assert built.scope is not None
    graph, loop = step.graph, step.loop
    tasks = {}
    if loop is not None and loop.tasks:
        tasks = {id(eqn): task for eqn, task in zip(loop.body.eqns, loop.tasks, strict=True)}
    jaxpr = graph.jaxpr
    context = LoweringContext(
        built, assignment, pricing, batch_dims, frozenset(jaxpr.invars), tasks
    )
    inputs = tuple(
        ShardedValue(var, built.nodes[node].layouts[assignment[node]])
        for var, node in zip(jaxpr.invars, built.inputs, strict=True)
    )
    lowering = _Lowering(context, None, inputs)
    lowering.stored = {
        atom: inputs[label.alias].layout
        for atom, label in zip(jaxpr.outvars, graph.outputs, strict=True)
        if isinstance(atom, Var) and label.alias is not None
        if inputs[label.alias].layout.in_host
    }
    # What is handed on as it is, to another stage for instance, is not waited for.
    handed_on = {
        index: lowering.get(atom, lowering.home(atom)).atom
        for index, (atom, label) in enumerate(zip(jaxpr.outvars, graph.outputs, strict=True))
        if label.alias is None and isinstance(atom, Var) and atom in lowering.versions
        if lowering.versions[atom][0].in_host
    }
    lowering.run(built.scope)
    outputs = []
    rules = rules_of(pricing.cluster.device.name)
    for index, (atom, label) in enumerate(zip(jaxpr.outvars, graph.outputs, strict=True)):
        if label.alias is not None:
            layout = inputs[label.alias].layout
        elif index in built.outputs:
            layout = context.layout(built.outputs[index])
        else:
            layout = without_partial(lowering.home(atom))
        if label.alias is not None and rules.turns_gathers and isinstance(atom, Var):
            lowering.cut_along_rows(atom, layout)
        outputs.append(lowering.get(handed_on.get(index, atom), layout))
    instructions = tuple(lowering.instructions)
    if lowering.copies or lowering.stored:
        instructions = leaf_by_leaf(instructions)
    block = Block(inputs, instructions, tuple(outputs))
    return SpmdProgram(built.mesh, axis_names, block, rules, pricing.cluster.overlap > 0)


class _Lowering:
    """One scope: the versions that exist so far and the instructions that made them."""

    def __init__(
        self, context: LoweringContext, parent: _Lowering | None, inputs: Sequence[ShardedValue]
    ):
        self.context, self.parent = context, parent
        self.instructions: list[Instruction] = []
        self.versions: dict[Var, list[Layout]] = {}
        self.unreduced: set[ShardedValue] = set()  # as they were made, before they were completed
        self.recomputed: dict[Var, Entry] = {}
        self.passed: dict[Var, Atom] = {}  # another form of a value -> that value
        self.aliases: dict[Var, Atom] = {}  # a branch's variable -> the outer atom
        self.captured: dict[ShardedValue, ShardedValue] = {}  # inner version -> outer version
        self.stored: dict[Atom, Layout] = {}  # what goes to the hosts' memory when it is made
        self.copies: dict[Var, tuple[Var, int]] = {}  # of what lies there: where it was copied
        self.stacked_small: set[Var] = set()
        for version in inputs:
            self.define(version)

    def define(self, version: ShardedValue) -> None:
        self.versions.setdefault(version.atom, []).append(version.layout)

    def home(self, atom: Atom) -> Layout:
        """The layout in which a value was made; a recomputed one counts as replicated.

        Of what lies in the hosts' memory, that of a copy on the devices.
        """
        if not isinstance(atom, jex_core.Literal):
            if atom in self.versions:
                return on_device(self.versions[atom][0])
            if atom in self.aliases:
                assert self.parent is not None
                return self.parent.home(self.aliases[atom])
        return replicated(len(aval_shape(atom)))

    def get(self, atom: Atom, layout: Layout) -> ShardedValue:
        """`atom` in `layout`: an existing version, or instructions that make it."""
        wanted = ShardedValue(atom, layout)
        if isinstance(atom, jex_core.Literal):
            return wanted
        if atom in self.aliases and atom not in self.versions:
            self._capture(atom, layout)
        known = self.versions.get(atom)
        if known is None:
            known = [self._produce(atom, layout)]
        if layout in known or wanted in self.unreduced:
            return wanted
        if known[0].in_host:
            return self.get(self._copied(atom, known[0]), layout)
        shape, size = aval_shape(atom), itemsize(atom.aval)
        pricing = self.context.pricing
        built = self.context.built
        ratio = built.sum_ratio(atom)
        source = min(known, key=lambda have: pricing.reshard(have, layout, shape, size, ratio))
        if atom in self.recomputed and pricing.reshard(source, layout, shape, size) > 0:
            source = self._produce(atom, layout)  # computed again: its price was that of none
            if source == layout:
                return wanted
        steps = reshard_steps(source, layout, built.mesh, pricing.reduce_scatter)
        purpose = self.context.purpose(atom, source, self.passed)
        sum_dtype = built.sum_dtypes.get(atom, "") if adding(steps) else ""
        version = ShardedValue(atom, source)
        self.instructions.append(Relayout(version, wanted, steps, purpose, "", sum_dtype))
        self.define(wanted)
        return wanted

    def cut_along_rows(self, atom: Var, layout: Layout) -> None:
        """Cut new state along its first dimension before it is gathered."""
        known, mesh = self.versions.get(atom, []), self.context.built.mesh
        rows = along_rows(known, layout, aval_shape(atom), itemsize(atom.aval), mesh)
        if rows is not None:
            self.get(atom, rows)
            known.sort(key=lambda have: have != rows)

    def _copied(self, atom: Var, layout: Layout) -> Var:
        """A value of the hosts' memory on the devices: copied again after products and loops."""
        known, place = self.copies.get(atom, (None, 0))
        if known is not None and not any(map(is_long, self.instructions[place:])):
            return known
        copy, lies = jax_compat.new_var(atom.aval), on_device(layout)
        self.copies[atom] = copy, len(self.instructions)
        self.passed[copy] = atom
        source, target = ShardedValue(atom, layout), ShardedValue(copy, lies)
        steps = reshard_steps(layout, lies, self.context.built.mesh)
        purpose = self.context.purpose(atom, layout, self.passed)
        self.instructions.append(Relayout(source, target, steps, purpose, ""))
        self.define(target)
        return copy

    def _produce(self, atom: Var, layout: Layout) -> Layout:
        """Compute a recomputed value as it is read."""
        entry = self.recomputed[atom]
        assert entry.shape is not None
        mesh = self.context.built.mesh
        choice = st.produce(entry.shape, 0, without_partial(layout), mesh)
        made = st.strategy(entry.shape, choice, mesh)
        self._compute(entry, made, movable=True)
        return made.results[0]

    def _capture(self, atom: Var, layout: Layout) -> None:
        """Bring an outer value into a branch, in the layout that it has outside."""
        assert self.parent is not None
        outer = self.aliases[atom]
        have = self.parent.home(outer)
        if outer in self.parent.recomputed and outer not in self.parent.versions:
            have = without_partial(layout)
        version = self.parent.get(outer, have)
        self.captured[ShardedValue(atom, have)] = version
        self.define(ShardedValue(atom, have))

    def run(self, scope: Scope) -> None:
        for entry in scope.entries:
            if entry.kind == "recomputed":
                self.recomputed[entry.eqn.outvars[0]] = entry
            elif entry.kind == "replicated":
                self._small(entry)
            elif entry.kind == "grouped":
                assert entry.node is not None
                chosen = entry.strategies[self.context.assignment[entry.node]]
                if any(layout.in_host for layout in chosen.results):
                    self._put_away(entry.eqn, chosen)
                else:
                    self._compute(entry, chosen)
            elif entry.kind == "opaque":
                self._opaque(entry)
            elif entry.kind == "passed":
                self._barrier(entry)
            elif entry.kind == "scan":
                self._scan(entry)
            else:
                self._cond(entry)

    def _put_away(self, eqn: JaxprEqn, chosen: st.Strategy) -> None:
        """A value waits in the hosts' memory."""
        source = self.get(eqn.invars[0], chosen.operands[0])
        target = ShardedValue(eqn.outvars[0], chosen.results[0])
        steps = reshard_steps(source.layout, target.layout, self.context.built.mesh)
        self.instructions.append(Relayout(source, target, steps, "activation", ""))
        self.define(target)

    def _compute(
        self, entry: Entry, chosen: st.Strategy, once: bool = False, movable: bool = False
    ) -> None:
        eqn, task = entry.eqn, self.context.task(entry.part_of or entry.eqn)
        operands = tuple(
            self.get(atom, layout) for atom, layout in zip(eqn.invars, chosen.operands, strict=True)
        )
        results = tuple(ShardedValue(v, x) for v, x in zip(eqn.outvars, chosen.left, strict=True))
        self.instructions.append(Compute(eqn, operands, results, once, task, movable))
        if eqn.primitive.name in OTHER_FORMS and not isinstance(eqn.outvars[0], jex_core.DropVar):
            self.passed[eqn.outvars[0]] = eqn.invars[0]
        self._define_results(results, chosen.results)

    def _define_results(self, made: Sequence[ShardedValue], layouts: Sequence[Layout]) -> None:
        """Bring each value to the layout that all who read it start from."""
        for version, layout in zip(made, layouts, strict=True):
            if isinstance(version.atom, jex_core.DropVar):
                continue
            self.define(version)
            if layout != version.layout:
                self.get(version.atom, layout)
                self.versions[version.atom].remove(version.layout)
                self.unreduced.add(version)
            if version.atom in self.stored:
                self.get(version.atom, self.stored[version.atom])

    def _small(self, entry: Entry) -> None:
        """Scalars: partial sums pass through what is linear in them, else they are completed."""
        eqn, shape = entry.eqn, entry.shape
        assert shape is not None
        homes = [self.home(atom) for atom in eqn.invars]
        partial = {i for i, layout in enumerate(homes) if layout.partial}
        sums = all(m == "sum" for i in partial for _, m in homes[i].partial)
        axes = tuple(sorted({a for i in partial for a, _ in homes[i].partial}))
        linear = next((s for s in shape.linear if partial and sums and partial <= s), frozenset())
        unreduced = tuple((a, "sum") for a in axes) if linear else ()
        mesh = self.context.built.mesh
        chosen = st.strategy(shape, (st.REPLICATE,) * len(mesh), mesh)
        operands = tuple(
            layout._replace(partial=unreduced) if i in linear else layout
            for i, layout in enumerate(chosen.operands)
        )
        results = tuple(layout._replace(partial=unreduced) for layout in chosen.results)
        self._compute(entry, chosen._replace(operands=operands, results=results, left=results))

    def _barrier(self, entry: Entry) -> None:
        eqn = entry.eqn
        passing = tuple(passing_layout(v, self.home(v), self.versions) for v in eqn.invars)
        if passing:  # all else is computed where it is read
            self._compute(entry, st.Strategy((), passing, passing, 1, passing))
        self.passed.update(zip(eqn.outvars, eqn.invars, strict=True))

    def _opaque(self, entry: Entry) -> None:
        eqn = entry.eqn
        check_effects(eqn, self.context.built.mesh)
        operands, results = (
            tuple(replicated(len(aval_shape(v))) for v in values)
            for values in (eqn.invars, eqn.outvars)
        )
        whole = st.Strategy((), operands, results, 1, results)
        self._compute(entry, whole, once=bool(eqn.effects))

    def _scan(self, entry: Entry) -> None:
        eqn, scan = entry.eqn, ScanParts.of(entry.eqn)
        num_inputs = len(scan.body.invars)
        inner = self._boundaries(scan.body.invars, entry.boundaries[:num_inputs])
        lowering = self._settle(entry, scan, inner)
        consts, carries, slices = scan.operands(inner)
        _, rows = scan.results(scan.body.outvars)
        stacks = [
            lowering.home(atom) if node is None else self.context.layout(node)
            for atom, node in zip(rows, entry.boundaries[num_inputs:], strict=True)
        ]
        outs = tuple(map(lowering.get, scan.body.outvars, (*carries, *stacks)))
        results = tuple(map(ShardedValue, eqn.outvars, (*carries, *map(stacked, stacks))))
        operands = tuple(map(self.get, eqn.invars, (*consts, *carries, *map(stacked, slices))))
        inputs = tuple(map(ShardedValue, scan.body.invars, inner))
        block = Block(inputs, tuple(lowering.instructions), outs)
        task = self.context.task(entry.part_of or eqn)
        self.instructions.append(Loop(eqn, operands, results, block, task))
        completed = [
            made.layout if node is None else self.context.layout(node)
            for made, node in zip(results, entry.completions, strict=True)
        ]
        self._define_results(results, completed)

    def _boundaries(self, variables: Sequence[Var], nodes: Sequence[int | None]) -> list[Layout]:
        """Layouts of what enters or leaves a body; what no node decides is replicated."""
        return [
            replicated(len(aval_shape(var))) if node is None else self.context.layout(node)
            for var, node in zip(variables, nodes, strict=True)
        ]

    def _settle(self, entry: Entry, scan: ScanParts, inner: list[Layout]) -> _Lowering:
        """Lower a body; small carries but `GOES_ON` stay partial where results are (in `inner`)."""
        positions = range(scan.num_consts, scan.num_consts + scan.num_carry)
        small = [position for position in positions if entry.boundaries[position] is None]
        fixed = {scan.num_consts + x for name, x in entry.eqn.params.items() if name == GOES_ON}
        while True:
            inputs = tuple(map(ShardedValue, scan.body.invars, inner))
            lowering = _Lowering(self.context, None, inputs)
            lowering.run(entry.scopes[0])
            changed = False
            for position in small:
                if position in fixed:
                    continue
                home = lowering.home(scan.body.outvars[position - scan.num_consts])
                wanted = tuple(p for p in home.partial if p[1] == "sum")
                have = inner[position].partial
                if wanted == have:
                    continue
                changed = True
                if have and not set(have) <= set(wanted):
                    fixed.add(position)
                    wanted = ()
                inner[position] = inner[position]._replace(partial=wanted)
            if not changed:
                return lowering

    def _cond(self, entry: Entry) -> None:
        eqn = entry.eqn
        index = self.get(eqn.invars[0], replicated(0))
        layouts = self._boundaries(eqn.outvars, entry.boundaries)
        lowered: list[tuple[_Lowering, tuple[ShardedValue, ...]]] = []
        for scope in entry.scopes:
            branch = _Lowering(self.context, self, ())
            branch.aliases.update(zip(scope.jaxpr.invars, eqn.invars[1:], strict=True))
            branch.run(scope)
            outs = tuple(
                branch.get(atom, layout)
                for atom, layout in zip(scope.jaxpr.outvars, layouts, strict=True)
            )
            lowered.append((branch, outs))
        operands: list[ShardedValue] = []
        blocks = []
        for branch, _ in lowered:
            operands += [v for v in branch.captured.values() if v not in operands]
        for branch, outs in lowered:
            inner_of: dict[ShardedValue, ShardedValue] = {}
            for inner, outer in branch.captured.items():
                inner_of.setdefault(outer, inner)
            inputs = tuple(inner_of.get(outer, outer) for outer in operands)
            duplicates = [
                Relayout(inner_of[outer], inner, (), "alias", "")
                for inner, outer in branch.captured.items()
                if inner_of[outer] != inner
            ]
            blocks.append(Block(inputs, (*duplicates, *branch.instructions), outs))
        results = tuple(ShardedValue(v, x) for v, x in zip(eqn.outvars, layouts, strict=True))
        task = self.context.task(eqn)
        self.instructions.append(Branch(eqn, index, tuple(operands), results, tuple(blocks), task))
        self._define_results(results, layouts)
