"""Numbers for what a stage's pieces pass on: at its boundary, at its loop's, and between pieces.

Every variable in a layout that one piece leaves for another gets a number; both sides of the
loop's boundary share theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from jax.extend.core import DropVar

from autopar.passes.graph.microbatched import Task
from autopar.passes.pieces.opened import Exchanged, OpenStage
from autopar.passes.pieces.pieces import Numbers, Port
from autopar.passes.pieces.rounds import AFTER_LOOP, FIRST, Level, Rounds
from autopar.passes.pieces.wiring import made_by, read_by
from autopar.passes.sharding.spmd_program import Instruction, ShardedValue, is_literal, writes

Tasks: TypeAlias = Mapping[Task, Sequence[Instruction]]


@dataclass
class Numbered:
    """The numbers of a stage's values, and what each round and each task leaves.

    Args:
      outputs: those of the graph's outputs; None where the body sends one.
      sent: the number of what a link takes, by the graph's output.
      outer: numbers of versions around the loop.
      stacked: of these, the versions that exist once per microbatch.
      inner: numbers of the body's versions, for tasks that do not make them.
    """

    stage: OpenStage
    numbers: Numbers
    inputs: list[int] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=dict)
    outer: dict[ShardedValue, int] = field(default_factory=dict)
    stacked: set[ShardedValue] = field(default_factory=set)
    inner: dict[ShardedValue, int] = field(default_factory=dict)
    left_by_round: dict[Level, list[Port]] = field(default_factory=lambda: defaultdict(list))
    left_by_task: dict[Task, list[Port]] = field(default_factory=lambda: defaultdict(list))

    def new(self, version: ShardedValue, per_microbatch: bool = False, label: str = "") -> int:
        """One more number."""
        mesh = self.stage.program.mesh
        return self.numbers.new(self.stage.number, version, mesh, per_microbatch, label)


def number_values(stage: OpenStage, rounds: Rounds, tasks: Tasks, numbers: Numbers) -> Numbered:
    """Number the values of a stage, whose loop's body falls into `tasks`."""
    known = Numbered(stage, numbers)
    _graph_inputs(known)
    for_loop, from_body = _loop_operands(known), _body_results(known)
    made_in = {v: level for level, group in rounds.items() for x in group for v in writes(x)}
    for level, group in rounds.items():
        for v in read_by(group):
            if made_in.get(v, level) != level and v not in known.outer:
                known.outer[v] = known.new(v)
    copies = _graph_outputs(known)
    outer_sent = [v for inside, v in stage.sent.values() if not inside]
    # A link that carries what every microbatch left carries it put together.
    whole = {v: known.new(v) for v in dict.fromkeys(outer_sent) if v in known.stacked}
    for position, (inside, v) in stage.sent.items():
        known.sent[position] = known.inner[v] if inside else whole.get(v, known.outer[v])
    copies += [Port(number, v) for v, number in whole.items()]
    left = known.left_by_round
    for earliest, ports in ((FIRST, for_loop), (AFTER_LOOP, copies)):
        for port in ports:
            level = FIRST if is_literal(port.version) else made_in.get(port.version, FIRST)
            left[max(earliest, level)].append(port)
    for v, level in made_in.items():
        if v in known.outer and (port := Port(known.outer[v], v)) not in left[level]:
            left[level].append(port)
    _between_tasks(known, tasks, from_body)
    return known


def _graph_inputs(known: Numbered) -> None:
    stage = known.stage
    block, labels = stage.program.block, stage.graph.graph.inputs
    for position, (planned, label) in enumerate(zip(block.inputs, labels, strict=True)):
        arriving = stage.received.get(position, Exchanged(False, planned))
        number = known.new(arriving.version, arriving.inside, label.path)
        known.inputs.append(number)
        (known.inner if arriving.inside else known.outer)[arriving.version] = number
        if arriving.inside and planned not in known.outer:
            known.outer[planned] = number
            known.stacked.add(planned)


def _loop_operands(known: Numbered) -> list[Port]:
    """What has to be provided for the loop, beside what has a number already."""
    edge, ports = known.stage.edge, []
    for outer, inner in edge.constants:
        if not is_literal(outer) and outer in known.outer:
            known.inner[inner] = known.outer[outer]
            continue
        known.inner[inner] = known.new(inner)
        ports.append(Port(known.inner[inner], outer))
        if not is_literal(outer):
            known.outer[outer] = known.inner[inner]
    stacks = known.stage.stacked_inputs
    for pairs, stacked, label in ((edge.carry, False, "accumulator"), (stacks, True, "")):
        for outer, inner in pairs:
            known.inner[inner] = known.new(inner, stacked, label)
            ports.append(Port(known.inner[inner], outer, stacked))
    return ports


def _body_results(known: Numbered) -> list[Port]:
    """What the body leaves for the pieces after the loop, for its next turn, and for links."""
    stage, ports = known.stage, []
    edge, made = stage.edge, made_by(stage.body)
    for (_, before), (outer, inner) in zip(edge.carry, edge.carry_results, strict=True):
        if is_literal(inner) or inner != before:
            ports.append(Port(known.inner[before], inner))
        if not isinstance(outer.atom, DropVar):
            known.outer[outer] = known.inner[before]
    read = {v for v in stage.outer_outputs if not is_literal(v)}.union(read_by(stage.after))
    for outer, inner in edge.stacks:
        if outer not in read:
            continue
        is_made = not is_literal(inner) and inner in made
        number = known.inner.get(inner) if is_made else None
        if number is None:
            number = known.new(inner, per_microbatch=True)
            ports.append(Port(number, inner))
        if is_made:
            known.inner[inner] = number
        known.outer[outer] = number
        known.stacked.add(outer)
    for inside, version in stage.sent.values():
        if inside and version not in known.inner:
            known.inner[version] = known.new(version, per_microbatch=True, label="activation")
            ports.append(Port(known.inner[version], version))
        else:
            assert not inside or version in made, "a stage sends on what it received"
    return ports


def _graph_outputs(known: Numbered) -> list[Port]:
    """Number the outputs; returns the constants and the copies that some of them need."""
    constants, copies = list[Port](), list[Port]()
    for position, v in enumerate(known.stage.program.block.outputs):
        if position in known.stage.sent and known.stage.sent[position].inside:
            known.outputs.append(None)
            continue
        number = None if is_literal(v) else known.outer.get(v)
        if number is None:
            number = known.new(v)
            if is_literal(v):
                constants.append(Port(number, v))
            else:
                known.outer[v] = number
        elif number in known.outputs:  # two results are the same value
            number = known.new(v)
            copies.append(Port(number, v))
        known.outputs.append(number)
    return [*constants, *copies]


def _between_tasks(known: Numbered, tasks: Tasks, results: Sequence[Port]) -> None:
    """What each task leaves, and the numbers under which others read what they do not make.

    Of a version that two tasks make (B computes again what F made), the first leaves it for links
    and for the pieces after the loop, and the last for tasks that do not make it.
    """
    makers: dict[ShardedValue, list[Task]] = defaultdict(list)
    for task, group in tasks.items():
        for v in made_by(group):
            makers[v].append(task)
    first: Task = next(iter(tasks), "F")  # what enters the body and leaves it, leaves with that
    left, numbers = known.left_by_task, dict[tuple[Task, ShardedValue], int]()
    for port in sorted(results, key=lambda port: is_literal(port.version)):
        is_made = not is_literal(port.version) and port.version in makers
        task = makers[port.version][0] if is_made else first
        left[task].append(port)
        if not is_literal(port.version):
            numbers.setdefault((task, port.version), port.value)
    kept: dict[ShardedValue, int] = {}
    for reader, group in tasks.items():
        for v in read_by(group):
            if v in makers and reader not in makers[v] and v not in kept:
                giver = makers[v][-1]
                if (giver, v) not in numbers:
                    numbers[giver, v] = known.new(v, per_microbatch=True, label="residual")
                    left[giver].append(Port(numbers[giver, v], v))
                kept[v] = numbers[giver, v]
    known.inner |= kept
