"""One stage's lowered program taken apart: its loop's body into tasks, the rest into rounds.

What is before the loop or behind it may need values of other stages that themselves need this
stage's: so both parts fall into rounds, between which values arrive. Every variable in a layout
that one piece leaves for another gets a number; both sides of the loop's boundary share theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import DropVar

from autopar.passes.graph import jax_compat
from autopar.passes.graph.microbatched import Task
from autopar.passes.pieces.pieces import Numbers, Port, StagePiece
from autopar.passes.pieces.residuals import before_readers, computed_again
from autopar.passes.pieces.wiring import (
    entered,
    has_effect,
    needed,
    ordered,
    unstacked,
    without_effects,
)
from autopar.passes.pipeline.instructions import PieceKind
from autopar.passes.sharding.layout import Layout, divides, without_partial
from autopar.passes.sharding.peak_memory import version_bytes
from autopar.passes.sharding.reshard import reshard_steps
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import (
    Compute,
    Instruction,
    Loop,
    Program,
    Reshard,
    Version,
    is_literal,
    reads,
    writes,
)
from autopar.passes.slicing.stage_graphs import Link, StageGraph

TASKS: tuple[Task, ...] = ("F", "B", "W")
Level = tuple[int, int]  # before (0) or behind (1) the loop, and the round there
Levels = dict[Version, Level]
FIRST: Level = (0, 0)
BEFORE: Level = (-1, 0)
KINDS: tuple[PieceKind, PieceKind] = ("prologue", "epilogue")


class StageCutter:
    """One stage being taken apart."""

    def __init__(
        self,
        number: int,
        stage: StageGraph,
        program: Program,
        flexible: frozenset[int],
        *,
        remat: bool = False,
    ):
        self.number, self.stage, self.program = number, stage, program
        self.flexible, self.remat = flexible, remat
        self.mesh = program.mesh
        outer = list(program.block.instructions)
        self.loop: Loop | None = None
        self.place = len(outer)
        if stage.loop is not None:
            eqn = stage.loop.scan
            self.place = next(
                i for i, x in enumerate(outer) if isinstance(x, Loop) and x.eqn is eqn
            )
            loop = outer[self.place]
            assert isinstance(loop, Loop)
            self.loop = loop
        self.before, self.behind = outer[: self.place], outer[self.place + 1 :]
        self.body: list[Instruction] = list(self.loop.body.instructions) if self.loop else []
        self.stacks = self._stacks()
        # What links change: body outputs by graph output, received versions by graph input.
        self.sends: dict[int, tuple[str, Version]] = {}
        self.arrives: dict[int, tuple[str, Version]] = {}
        self.received: dict[int, int] = {}
        self.input_values: tuple[int, ...] = ()
        self.output_values: tuple[int | None, ...] = ()
        self.pieces: list[StagePiece] = []

    def counts(self) -> tuple[int, int]:
        """How many constants and carries the loop has."""
        assert self.loop is not None
        return jax_compat.scan_counts(self.loop.eqn.params)

    def _stacks(self) -> dict[Version, Version]:
        """For stacks that leave the loop, the body's version that they are made of."""
        if self.loop is None:
            return {}
        _, num_carry = self.counts()
        pairs = zip(self.loop.results, self.loop.body.outputs, strict=True)
        return {
            outer: inner
            for outer, inner in list(pairs)[num_carry:]
            if not isinstance(outer.atom, DropVar)
        }

    # -- links -----------------------------------------------------------------------------------

    def send(self, link: Link) -> Layout:
        """The layout in which a value is sent: complete, and made by the body if per microbatch."""
        wanted = self.program.block.outputs[link.source_output]
        if not link.per_microbatch:
            self.sends[link.source_output] = ("outer", wanted)
            return wanted.layout
        made = {v: x for x in self.behind for v in writes(x)}
        version = wanted
        while version not in self.stacks:
            step = made[version]
            assert isinstance(step, Reshard), f"what is sent is computed behind the loop: {link}"
            version = step.source
        inner = self.stacks[version]
        target = Version(inner.atom, without_partial(unstacked(wanted.layout)))
        self._reshard_in_body(inner, target, "activation")
        self.sends[link.source_output] = ("inner", target)
        return target.layout

    def _reshard_in_body(self, source: Version, target: Version, purpose: str) -> None:
        known = {v for x in self.body for v in writes(x)}
        assert self.loop is not None
        if target == source or target in known or target in self.loop.body.inputs:
            return
        steps = reshard_steps(source.layout, target.layout, self.mesh)
        self.body.append(Reshard(source, target, steps, purpose, ""))

    def receive(self, link: Link, sent: Layout) -> None:
        """Take a value over in a layout that sends every tile once; the rest happens here."""
        position = link.target_input
        version = self.program.block.inputs[position]
        if not link.per_microbatch:
            arriving = Version(version.atom, self._arriving(version, sent))
            if arriving != version:
                self.before = entered(self.before, arriving, version, self.mesh, "state")
                self.behind = [x for x in self.behind if arriving not in writes(x)]
            self.arrives[position] = ("outer", arriving)
            return
        inner = self._slice_of(version)
        arriving = Version(inner.atom, self._arriving(inner, sent))
        if arriving != inner:
            self.body = entered(self.body, arriving, inner, self.mesh, "activation")
        self.arrives[position] = ("inner", arriving)

    def _slice_of(self, stack: Version) -> Version:
        """The body's version of a received stack, which nothing but the loop reads."""
        assert self.loop is not None
        num_consts, num_carry = self.counts()
        targets = {v.target: v.source for v in self.before if isinstance(v, Reshard)}
        for outer, inner in list(zip(self.loop.operands, self.loop.body.inputs, strict=True))[
            num_consts + num_carry :
        ]:
            source = outer
            while source != stack and source in targets:
                source = targets[source]
            if source == stack:
                return inner
        raise AssertionError(f"the loop does not read what is received: {stack}")

    def _arriving(self, version: Version, sent: Layout) -> Layout:
        """The sender's cuts where the meshes are alike, else ours; replicas are made here."""
        shape = aval_shape(version.atom)
        if len(sent.dims) == len(shape) and self._fits(sent) and divides(shape, sent, self.mesh):
            base = sent
        else:
            base = without_partial(version.layout)
        dims = [list(axes) for axes in base.dims]
        for axis in range(len(self.mesh)):
            if self.mesh[axis] == 1 or axis in base.used:
                continue
            for d in range(len(dims)):
                trial = [list(axes) for axes in dims]
                trial[d] = sorted([*trial[d], axis])
                layout = Layout(tuple(map(tuple, trial)))
                if shape[d] > 1 and divides(shape, layout, self.mesh):
                    dims = trial
                    break
        return Layout(tuple(map(tuple, dims)))

    def _fits(self, sent: Layout) -> bool:
        return all(axis < len(self.mesh) for axes in sent.dims for axis in axes)

    # -- values ------------------------------------------------------------------------------------

    def finish(self, levels: Levels, numbers: Numbers) -> None:
        """Number the values and make the pieces."""
        self.cut_body()
        self._number_inputs(numbers)
        self._link_loop(numbers)
        groups = self._outer_groups(levels)
        self._number_outer(groups, numbers)
        self._make_outer(groups, 0)
        self._make_body(numbers)
        self._make_outer(groups, 1)

    def _number_inputs(self, numbers: Numbers) -> None:
        found = []
        self.known: dict[Version, int] = {}  # outer versions
        self.stacked: set[Version] = set()  # outer versions that exist per microbatch
        self.inner: dict[Version, int] = {}  # body versions
        for position, version in enumerate(self.program.block.inputs):
            label = self.stage.graph.inputs[position].path
            if position not in self.arrives:
                number = numbers.new(self.number, version, self.mesh, False, label)
                self.known[version] = number
            else:
                where, arriving = self.arrives[position]
                inside = where == "inner"
                number = numbers.new(self.number, arriving, self.mesh, inside, label)
                (self.inner if inside else self.known)[arriving] = number
                if inside and version not in self.known:
                    self.known[version] = number
                    self.stacked.add(version)
                self.received[position] = number
            found.append(number)
        self.input_values = tuple(found)

    def cut_body(self) -> None:
        """A task for every instruction of the body."""
        self.task_of: dict[int, int] = {}
        if self.loop is None:
            return
        outputs = {v for v in self.loop.body.outputs if not is_literal(v)}
        outputs.update(v for w, v in self.sends.values() if w == "inner")
        self.body = needed(ordered(self.body, self.loop.body.inputs), outputs)
        eqn_tasks = {
            id(eqn): TASKS.index(task)
            for eqn, task in zip(
                self.loop.eqn.params["jaxpr"].jaxpr.eqns, self.stage.tasks, strict=True
            )
        }
        earliest: dict[Version, int] = dict.fromkeys(self.loop.body.inputs, 0)
        early: list[int] = []
        for instruction in self.body:
            at = max((earliest.get(v, 0) for v in reads(instruction)), default=0)
            if not isinstance(instruction, Reshard):
                at = max(at, eqn_tasks[id(instruction.eqn)])
            early.append(at)
            earliest.update((v, at) for v in writes(instruction))
        latest: dict[Version, int] = {}
        for instruction, at in zip(reversed(self.body), reversed(early), strict=True):
            chosen = at
            movable = isinstance(instruction, Reshard) or (
                isinstance(instruction, Compute)
                and id(instruction.eqn) in self.flexible
                and not instruction.eqn.effects
            )
            wanted = [latest[v] for v in writes(instruction) if v in latest]
            if movable and wanted and not any(v in outputs for v in writes(instruction)):
                chosen = max(at, min(wanted))
            self.task_of[id(instruction)] = chosen
            for v in reads(instruction):
                latest[v] = min(latest.get(v, chosen), chosen)

    def _link_loop(self, numbers: Numbers) -> None:
        """Values on both sides of the loop's boundary have one number."""
        self.loop_inputs: list[Port] = []  # what the prologue has to provide, beside known values
        if self.loop is None:
            return
        num_consts, num_carry = self.counts()
        body = self.loop.body
        arrived = {self._slice_of(self.program.block.inputs[p]) for p, (w, _) in
                   self.arrives.items() if w == "inner"}  # fmt: skip
        for i, (outer, inner) in enumerate(zip(self.loop.operands, body.inputs, strict=True)):
            if i < num_consts:
                if not is_literal(outer) and outer in self.known:
                    self.inner[inner] = self.known[outer]
                else:
                    number = numbers.new(self.number, inner, self.mesh, False, "")
                    self.inner[inner] = number
                    if is_literal(outer):
                        self.loop_inputs.append(Port(number, outer))
                    else:
                        self.known[outer] = number
                        self.loop_inputs.append(Port(number, outer))
            elif i < num_consts + num_carry:
                number = numbers.new(self.number, inner, self.mesh, False, "accumulator")
                self.inner[inner] = number
                self.loop_inputs.append(Port(number, outer))
            elif inner not in arrived:
                number = numbers.new(self.number, inner, self.mesh, True, "")
                self.inner[inner] = number
                self.loop_inputs.append(Port(number, outer, stacked=True))
        made = {v: x for x in self.body for v in writes(x)}
        self.body_outputs: list[tuple[int, Version]] = []  # numbers that the body writes
        for i, (outer, inner) in enumerate(zip(self.loop.results, body.outputs, strict=True)):
            if i < num_carry:
                number = self.inner[body.inputs[num_consts + i]]
                if is_literal(inner) or inner != body.inputs[num_consts + i]:
                    self.body_outputs.append((number, inner))
                if not isinstance(outer.atom, DropVar):
                    self.known[outer] = number
            elif not isinstance(outer.atom, DropVar) and self._is_read_outside(outer):
                is_made = not is_literal(inner) and inner in made
                number = self.inner.get(inner, -1) if is_made else -1
                if number < 0:
                    number = numbers.new(self.number, inner, self.mesh, True, "")
                    if is_made:
                        self.inner[inner] = number
                    self.body_outputs.append((number, inner))
                self.known[outer] = number
                self.stacked.add(outer)
        for where, version in self.sends.values():
            if where == "inner" and version not in self.inner:
                number = numbers.new(self.number, version, self.mesh, True, "activation")
                self.inner[version] = number
                self.body_outputs.append((number, version))
            elif where == "inner" and version not in made:
                raise AssertionError("a stage sends on what it received")

    def _is_read_outside(self, version: Version) -> bool:
        live = [v for o, v in enumerate(self.program.block.outputs) if o not in self.sends]
        live += [v for w, v in self.sends.values() if w == "outer"]
        if any(not is_literal(v) and v == version for v in live):
            return True
        return any(version in reads(x) for x in needed(self.behind, live))

    def sent(self, link: Link, numbers: Numbers) -> int:
        """The number of the value that a link carries."""
        where, version = self.sends[link.source_output]
        where = "whole" if where == "outer" and version in self.whole else where
        number = {"inner": self.inner, "outer": self.known, "whole": self.whole}[where][version]
        value = numbers.values[number]
        if not value.label:
            numbers.values[number] = replace(value, label=link.label)
        return number

    # -- around the loop ---------------------------------------------------------------------------

    def _outer_groups(self, levels: Levels) -> dict[Level, list[Instruction]]:
        wanted = [v for o, v in enumerate(self.program.block.outputs) if o not in self.sends]
        wanted += [v for w, v in self.sends.values() if w == "outer"]
        behind = needed(self.behind, wanted)
        wanted += [v for x in behind for v in reads(x)]
        wanted += [port.version for port in self.loop_inputs]
        before = needed(self.before, wanted)
        groups: dict[Level, list[Instruction]] = defaultdict(list)
        for phase, part in ((0, before), (1, behind)):
            for instruction in part:
                operands = [levels.get(v, FIRST) for v in reads(instruction)]
                groups[max([(phase, 0), *operands])].append(instruction)
        return groups

    def _number_outer(self, groups: dict[Level, list[Instruction]], numbers: Numbers) -> None:
        """Numbers for what one round makes and another reads, or the caller or a link takes."""
        self.made_in: dict[Version, Level] = {}
        for key, group in groups.items():
            for instruction in group:
                self.made_in.update((v, key) for v in writes(instruction))
        crossing: dict[Version, None] = {}
        for key, group in groups.items():
            for instruction in group:
                for v in reads(instruction):
                    if not is_literal(v) and self.made_in.get(v, key) != key:
                        crossing[v] = None
        self.literal_results: list[Port] = []
        self.copies: list[Port] = []
        for v in crossing:
            if v not in self.known:
                self.known[v] = numbers.new(self.number, v, self.mesh, False, "")
        found: list[int | None] = []
        for position, v in enumerate(self.program.block.outputs):
            if self.sends.get(position, ("outer", v))[0] == "inner":
                found.append(None)
            elif is_literal(v):
                number = numbers.new(self.number, v, self.mesh, False, "")
                self.literal_results.append(Port(number, v))
                found.append(number)
            elif v in self.known and self.known[v] in found:  # two results are the same value
                number = numbers.new(self.number, v, self.mesh, False, "")
                self.copies.append(Port(number, v))
                found.append(number)
            else:
                if v not in self.known:
                    self.known[v] = numbers.new(self.number, v, self.mesh, False, "")
                found.append(self.known[v])
        self.output_values = tuple(found)
        # A link that carries what every microbatch left carries it put together.
        self.whole: dict[Version, int] = {}
        for where, v in self.sends.values():
            if where == "outer" and v in self.stacked and v not in self.whole:
                self.whole[v] = numbers.new(self.number, v, self.mesh, False, "")
                self.copies.append(Port(self.whole[v], v))

    def _make_outer(self, groups: dict[Level, list[Instruction]], phase: int) -> None:
        ports: dict[Level, list[Port]] = defaultdict(list)
        if phase == 0:
            for port in self.loop_inputs:
                literal = is_literal(port.version)
                ports[FIRST if literal else self.made_in.get(port.version, FIRST)].append(port)
        else:
            ports[1, 0] += self.literal_results
            for port in self.copies:
                ports[max((1, 0), self.made_in.get(port.version, FIRST))].append(port)
        for v, level in self.made_in.items():
            if level[0] == phase and v in self.known:
                port = Port(self.known[v], v)
                if port not in ports[level]:
                    ports[level].append(port)
        kind = KINDS[phase]
        for level in sorted({key for key in groups if key[0] == phase} | set(ports)):
            group, outputs = groups.get(level, []), ports[level]
            inputs: dict[Version, Port] = {}
            local = {v for x in group for v in writes(x)}
            for v in _entering(group, outputs):
                if v not in local:
                    inputs[v] = Port(self.known[v], v, v in self.stacked)
            self._add(f"{kind} {self.number}.{level[1]}", kind, inputs.values(), outputs, group)

    def _add(
        self,
        name: str,
        kind: PieceKind,
        inputs: Iterable[Port],
        outputs: Sequence[Port],
        instructions: Sequence[Instruction],
    ) -> None:
        inputs = tuple(inputs)
        if not outputs and not any(map(has_effect, instructions)):
            return
        # Compilers that schedule result by result (XLA on CPUs) do first what comes first.
        when = {v: time for time, x in enumerate(instructions) for v in writes(x)}
        outputs = sorted(
            outputs, key=lambda o: -1 if is_literal(o.version) else when.get(o.version, -1)
        )
        self.pieces.append(
            StagePiece(
                name,
                self.number,
                kind,
                inputs,
                tuple(outputs),
                tuple(instructions),
                _donated(inputs, outputs),
            )
        )

    # -- the loop's body ---------------------------------------------------------------------------

    def tasks(self) -> tuple[dict[int, list[Instruction]], dict[Version, int]]:
        """The instructions of each task, and for what they write, the task to take it from.

        That is for tasks that do not make it themselves.
        """
        by_task: dict[int, list[Instruction]] = defaultdict(list)
        for instruction in self.body:
            by_task[self.task_of[id(instruction)]].append(instruction)
        maker = {v: self.task_of[id(x)] for x in self.body for v in writes(x)}
        later = [task for task in sorted(by_task) if task > 0]
        if not later or 0 not in by_task:
            return by_task, maker
        forward, first = by_task[0], later[0]
        read = [{v for x in by_task[task] for v in reads(x)} for task in later]
        left = [{v for v in found if maker.get(v) == 0} for found in read]
        if self.remat:
            # What F sends, collects and accumulates stays F's; effects happen once.
            again = needed(without_effects(forward), set().union(*left))
            by_task[first] = [*again, *by_task[first]]
            maker.update((v, first) for x in again for v in writes(x))
            return by_task, maker
        assert self.loop is not None
        num_consts, num_carry = self.counts()
        inputs = self.loop.body.inputs
        again = computed_again(
            forward,
            left[0],
            lambda v: version_bytes(v, self.mesh),
            held={
                *inputs[:num_consts],
                *set().union(*read).difference(maker),
                *set().union(*left[1:]),
            },
            changing={
                *inputs[num_consts : num_consts + num_carry],
                *(v for v in self.loop.body.outputs[:num_carry] if not is_literal(v)),
            },
        )
        by_task[first] = before_readers(again, by_task[first])
        return by_task, maker

    def _make_body(self, numbers: Numbers) -> None:
        if self.loop is None:
            return
        maker = {v: self.task_of[id(x)] for x in self.body for v in writes(x)}
        by_task, found_in = self.tasks()
        kept: dict[Version, int] = {}  # what one task leaves for another
        # A value that enters the body and leaves it as it is leaves with the first task.
        first = min(by_task, default=0)
        leaving: dict[int, dict[Version, list[int]]] = defaultdict(lambda: defaultdict(list))
        constant: list[Port] = []
        for number, version in self.body_outputs:
            if is_literal(version):
                constant.append(Port(number, version))
            else:
                leaving[maker.get(version, first)][version].append(number)
        for _, group in sorted(by_task.items()):
            local = {v for x in group for v in writes(x)}
            for v in dict.fromkeys(v for x in group for v in reads(x)):
                if v not in maker or v in local:
                    continue
                if not leaving[found_in[v]][v]:
                    number = numbers.new(self.number, v, self.mesh, True, "residual")
                    leaving[found_in[v]][v].append(number)
                kept[v] = leaving[found_in[v]][v][0]
        tasks = {*by_task, *(t for t, w in leaving.items() if w), *([first] if constant else [])}
        for task in sorted(tasks):
            group = by_task.get(task, [])
            outputs = [Port(n, v) for v, found in leaving[task].items() for n in found]
            if task == first:
                outputs += constant
            group = needed(group, [port.version for port in outputs])
            local = {v for x in group for v in writes(x)}
            inputs: dict[Version, Port] = {}
            for v in _entering(group, outputs):
                if v not in local:
                    inputs[v] = Port(kept[v] if v in kept else self.inner[v], v)
            kind = TASKS[task]
            self._add(f"{kind}{self.number}", kind, inputs.values(), outputs, group)


def _entering(group: Sequence[Instruction], outputs: Sequence[Port]) -> list[Version]:
    """What instructions read, and what goes out as it came in."""
    return [
        *(v for x in group for v in reads(x)),
        *(port.version for port in outputs if not is_literal(port.version)),
    ]


def _donated(inputs: Sequence[Port], outputs: Sequence[Port]) -> tuple[int, ...]:
    """Inputs in whose place an output of the same shape, dtype and layout can be written."""

    def form(port: Port) -> Any:
        aval = port.version.atom.aval
        return aval.shape, str(aval.dtype), port.version.layout

    free: dict[Any, int] = defaultdict(int)
    numbers = {port.value for port in inputs}
    same = {port.value for port in outputs if port.value in numbers}
    for port in outputs:
        if not port.stacked and port.value not in same:
            free[form(port)] += 1
    found = list(same)
    for port in inputs:
        if port.stacked or port.value in same:
            continue
        if free[form(port)] > 0:
            free[form(port)] -= 1
            found.append(port.value)
    return tuple(sorted(found))
