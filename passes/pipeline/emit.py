"""From a schedule and the pieces of every stage to one list of instructions per mesh.

Every list has three parts: the prologue pieces in the order of their dependencies, the schedule's
tasks, and the epilogue pieces, which may go back and forth between meshes in rounds (a global
norm). Around the runs stand

- a `Send` right after the last run that writes what it sends (for an input: at the start). All
  that goes from there to one mesh is packed; what exists once a step and what exists per
  microbatch, or belongs to another microbatch, is packed apart, so that the transfers of all
  microbatches are alike;
- the `Recv` right before the first run that reads anything of it, at the end for mere outputs;
- a `Reshard` right before the first reader, where another stage of the same mesh wants the value;
- a `Free` right after the last use of what is neither an output nor an input that the caller
  keeps.

What nobody reads is not sent. A transfer of a value that has itself been received starts from where
the value was made, and takes it after its last write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.base.errors import ScheduleError
from autopar.passes.pipeline.instructions import (
    Accumulate,
    Buffer,
    Buffers,
    Free,
    Instruction,
    Piece,
    PipelineProgram,
    Recv,
    Reshard,
    Run,
    Send,
    Value,
    ValueTransfer,
    buffer_names,
)
from autopar.passes.pipeline.order import dispatch_order
from autopar.passes.pipeline.validate import LOOP_KINDS, validate
from autopar.passes.pipeline.verify import verify
from autopar.passes.schedules.schedule import Schedule


def emit(
    schedule: Schedule,
    values: Sequence[Value],
    pieces: Sequence[Piece],
    transfers: Sequence[ValueTransfer],
    *,
    inputs: Sequence[int],
    outputs: Sequence[int],
    donated: Sequence[int] = (),
) -> PipelineProgram:
    """One list of instructions per mesh that runs `pieces` in the order of `schedule`.

    Args:
      schedule: the order of the tasks. A task whose stage has no piece of its kind is skipped; a W
        piece runs right after its B where the schedule does not split the backward pass.
      values: everything that the pieces read and write.
      pieces: at most one F, B and W per stage, and any number of prologue and epilogue pieces.
      transfers: which values other stages receive.
      inputs: numbers of the values that the caller gives.
      outputs: numbers of the values that the caller takes.
      donated: numbers of the inputs that the caller gives up.

    Returns:
      A program that `verify` has passed.

    Raises:
      ScheduleError: the pieces do not fit together, depend on each other in a cycle, or read what
        is never written; or the schedule's order makes meshes wait for each other (which are
        named).
    """
    numbers = map(tuple, (inputs, outputs, donated))
    empty: tuple[tuple[Instruction, ...], ...] = ((),) * schedule.num_meshes
    program = PipelineProgram(schedule, tuple(values), tuple(pieces), empty, (), *numbers)
    validate(program, transfers)
    origins = origins_of(transfers)
    runs = _runs(program, origins)
    before, after = _communication(program, origins, runs)
    lists: list[tuple[Instruction, ...]] = []
    for mesh, mesh_runs in enumerate(runs):
        instructions = list(after[mesh, -1])
        for position, run in enumerate(mesh_runs):
            instructions += [*before[mesh, position], run, *after[mesh, position]]
        instructions += before[mesh, len(mesh_runs)]
        given, gone, taken = (
            set(program.buffers_on(mesh, numbers)) for numbers in (inputs, donated, outputs)
        )
        lists.append(_release(instructions, kept=(given - gone) | taken, given=given))
    order = dispatch_order(lists, buffer_names(program.values))
    program = replace(program, meshes=tuple(lists), order=order)
    verify(program)
    return program


def origins_of(transfers: Sequence[ValueTransfer]) -> dict[int, int]:
    """For every value that is received, the one from which its transfer starts."""
    source = {transfer.target: transfer.source for transfer in transfers}
    origins = {}
    for target in source:
        number, steps = target, 0
        while number in source:
            number, steps = source[number], steps + 1
            if steps > len(source):
                raise ScheduleError(f"Value {target} is transferred in a circle from itself.")
        origins[target] = number
    return origins


def _runs(program: PipelineProgram, origins: Mapping[int, int]) -> list[list[Run]]:
    """For every mesh: its prologue, its tasks and its epilogue."""
    schedule = program.schedule
    home = schedule.mesh_of_stage
    prologue, epilogue = (_in_order(program, origins, kind) for kind in ("prologue", "epilogue"))
    loop = {(p.stage, p.kind): p for p in program.pieces if p.kind in LOOP_KINDS}
    lists = []
    for mesh, tasks in enumerate(schedule.tasks):
        runs = [_run(program, p, None) for p in prologue if home[p.stage] == mesh]
        for kind, stage, microbatch in tasks:
            with_w = kind == "B" and not schedule.splits_backward
            here = [loop.get((stage, k)) for k in ((kind, "W") if with_w else (kind,))]
            runs += [_run(program, piece, microbatch) for piece in here if piece is not None]
        runs += [_run(program, p, None) for p in epilogue if home[p.stage] == mesh]
        lists.append(runs)
    return lists


def _run(program: PipelineProgram, piece: Piece, microbatch: int | None) -> Run:
    def named(numbers: Sequence[int]) -> Buffers:
        if microbatch is None:
            return tuple(buffer for number in numbers for buffer in program.buffers_of(number))
        return tuple(Buffer(n, microbatch if is_own(n) else None) for n in numbers)

    def is_own(number: int) -> bool:
        # What the loop writes and does not read is its microbatch's part of a sum.
        is_part = number in piece.writes and number not in piece.reads
        return program.value_of[number].per_microbatch or is_part

    buffers = map(named, (piece.reads, piece.writes, piece.donates))
    return Run(piece.name, piece.stage, piece.kind, microbatch, *buffers)


def _in_order(program: PipelineProgram, origins: Mapping[int, int], kind: str) -> list[Piece]:
    """The prologue or epilogue pieces of all meshes, each after those whose values it reads."""
    pieces = [piece for piece in program.pieces if piece.kind == kind]
    writer = {number: i for i, piece in enumerate(pieces) for number in piece.writes}
    needs = [
        {writer[n] for n in (origins.get(n, n) for n in piece.reads) if n in writer} - {i}
        for i, piece in enumerate(pieces)
    ]
    left, ordered = dict(enumerate(pieces)), []
    while left:
        first = next((i for i in left if needs[i].isdisjoint(left)), None)
        if first is None:
            stuck = ", ".join(piece.name for piece in left.values())
            raise ScheduleError(f"The {kind} pieces {stuck} need each other's values in a cycle.")
        ordered.append(left.pop(first))
    return ordered


_Around = Mapping[tuple[int, int], list[Instruction]]  # (mesh, position among its runs)


def _communication(
    program: PipelineProgram, origins: Mapping[int, int], runs: Sequence[Sequence[Run]]
) -> tuple[_Around, _Around]:
    """What stands before and after each run (-1 is the start, one past the last is the end)."""
    written: dict[Buffer, int] = {}
    first_read: dict[Buffer, int] = {}
    before: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
    after: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
    # A sum over microbatches is sent once its last part has been added.
    late: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
    for mesh, mesh_runs in enumerate(runs):
        taken = program.buffers_on(mesh, program.outputs)
        first_read.update(dict.fromkeys(taken, len(mesh_runs)))
        for position, run in reversed(list(enumerate(mesh_runs))):
            first_read.update(dict.fromkeys(run.reads, position))
        for position, run in enumerate(mesh_runs):
            for buffer in run.writes:
                if buffer.microbatch is None or program.value_of[buffer.value].per_microbatch:
                    written[buffer] = position
                else:
                    total = Buffer(buffer.value, None)
                    written[total] = position
                    late[mesh, position].append(Accumulate(total, buffer))
    packed: dict[tuple[int, int, int, int], dict[Buffer, list[Buffer]]] = {}
    for number, origin in sorted(origins.items()):
        for target, source in zip(*map(program.buffers_of, (number, origin)), strict=True):
            if target not in first_read:
                continue
            mesh, home = program.mesh_of(number), program.mesh_of(origin)
            if mesh == home:
                if written.get(source, -1) >= first_read[target]:
                    raise ScheduleError(
                        f"Value {number} ({program.value_of[number].label}) is read on mesh {mesh} "
                        f"before value {origin}, from which it is made, has its last write."
                    )
                before[mesh, first_read[target]].append(Reshard(source, target))
                continue
            microbatch = -1 if source.microbatch is None else source.microbatch
            key = (home, written.get(source, -1), mesh, microbatch)
            packed.setdefault(key, {}).setdefault(source, []).append(target)
    for tag, (key, targets_of) in enumerate(sorted(packed.items())):
        home, position, mesh, microbatch = key
        sources = tuple(sorted(targets_of))
        firsts = tuple(targets_of[source][0] for source in sources)
        (after if microbatch >= 0 else late)[home, position].append(Send(tag, mesh, sources))
        reader = min(first_read[t] for targets in targets_of.values() for t in targets)
        # Resharding of what has just arrived must follow it, and it may be there already.
        arrival: list[Instruction] = [Recv(tag, home, firsts)]
        for first, source in zip(firsts, sources, strict=True):
            arrival += [Reshard(first, other) for other in targets_of[source][1:]]
        before[mesh, reader][:0] = arrival
    for where, instructions in late.items():
        after[where] += instructions
    return before, after


def _release(
    instructions: Sequence[Instruction], *, kept: set[Buffer], given: set[Buffer]
) -> tuple[Instruction, ...]:
    """Puts a `Free` after every last use, and lets runs donate what nothing else needs.

    What is resharded on its mesh may be the same memory under another name.
    """
    last_use: dict[Buffer, int] = dict.fromkeys(given, -1)
    for index, instruction in enumerate(instructions):
        last_use.update(dict.fromkeys((*instruction.reads, *instruction.writes), index))
    ending: dict[int, list[Buffer]] = defaultdict(list)
    for buffer, index in last_use.items():
        if buffer not in kept:
            ending[index].append(buffer)
    same: dict[Buffer, set[Buffer]] = {}
    for instruction in instructions:
        if isinstance(instruction, Reshard):
            pair = (instruction.source, instruction.target)
            together = set(pair).union(*(same.get(buffer, ()) for buffer in pair))
            same.update(dict.fromkeys(together, together))

    def is_alone(buffer: Buffer, index: int) -> bool:
        others = same.get(buffer, set()) - {buffer}
        return others.isdisjoint(kept) and all(last_use[other] < index for other in others)

    released: list[Instruction] = []
    if ending[-1]:
        released.append(Free(tuple(sorted(ending[-1], key=_sort_key))))
    for index, instruction in enumerate(instructions):
        gone = set(ending[index])
        if isinstance(instruction, Run):
            free = (b for b in instruction.donates if b in instruction.writes or b in gone)
            donates = tuple(b for b in free if is_alone(b, index))
            gone -= set(donates) - set(instruction.writes)
            instruction = replace(instruction, donates=donates)
        released.append(instruction)
        if gone:
            released.append(Free(tuple(sorted(gone, key=_sort_key))))
    return tuple(released)


def _sort_key(buffer: Buffer) -> tuple[int, int]:
    return buffer.value, -1 if buffer.microbatch is None else buffer.microbatch
