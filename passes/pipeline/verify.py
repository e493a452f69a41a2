"""The checker of instruction lists: runs after `emit`, and on any list that somebody changed."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ScheduleError
from autopar.passes.pipeline.instructions import (
    Accumulate,
    Buffer,
    Free,
    Instruction,
    Names,
    PipelineProgram,
    Recv,
    Run,
    Send,
    buffer_names,
)


def verify(program: PipelineProgram) -> None:
    """Prove that a program can run: in its dispatch order, every buffer is there when it is used.

    Proved are: `order` holds every instruction once, each mesh's in sequence and each `Recv` behind
    its one `Send`; no buffer is read before it is written or after it is freed or donated; every
    buffer is freed or donated exactly once, except the outputs and the inputs that the caller
    keeps, which remain.

    Raises:
      ScheduleError: names the mesh, the instruction and the buffer.
    """
    names = buffer_names(program.values)
    known = {value.number for value in program.values}
    alive: list[set[Buffer]] = [set() for _ in program.meshes]
    keeps: list[set[Buffer]] = [set() for _ in program.meshes]
    remains: list[set[Buffer]] = [set() for _ in program.meshes]
    for number in program.inputs:
        buffers, mesh = program.buffers_of(number), program.mesh_of(number)
        alive[mesh].update(buffers)
        if number not in program.donated:
            keeps[mesh].update(buffers)
    for number in program.outputs:
        remains[program.mesh_of(number)].update(program.buffers_of(number))
    sent: dict[int, tuple[int, Send]] = {}
    position = [0] * len(program.meshes)
    for mesh, index in program.order:
        if index != position[mesh] or index >= len(program.meshes[mesh]):
            raise ScheduleError(
                f"The dispatch order has instruction {index} of mesh {mesh} at the wrong place."
            )
        position[mesh] += 1
        instruction = program.meshes[mesh][index]
        where = f"mesh {mesh}, instruction {index}: {instruction.text(names)}"
        for buffer in (*instruction.reads, *instruction.writes):
            if buffer.value not in known:
                raise ScheduleError(f"There is no value {buffer.value}.", where=where)
        for buffer in instruction.reads:
            if buffer not in alive[mesh]:
                raise ScheduleError(
                    f"{names(buffer)} is read, but it is not there.",
                    where=where,
                    why=_history(program.meshes[mesh], index, buffer),
                    hint="a piece, a transfer or the caller must provide it before this point.",
                )
        if isinstance(instruction, Send):
            if instruction.tag in sent:
                raise ScheduleError(f"Two Sends have the tag {instruction.tag}.", where=where)
            sent[instruction.tag] = (mesh, instruction)
        elif isinstance(instruction, Recv):
            _match(sent.pop(instruction.tag, None), mesh, instruction, where)
        gone: Sequence[Buffer] = ()
        if isinstance(instruction, Free):
            gone = instruction.buffers
        elif isinstance(instruction, Run):
            gone = instruction.donates
        overwritten = set(instruction.writes) & alive[mesh] - set(gone)
        if not isinstance(instruction, Run | Accumulate) and overwritten:
            raise ScheduleError(
                f"{_all(overwritten, names)} is overwritten by a {type(instruction).__name__}.",
                where=where,
            )
        for buffer in gone:
            if buffer not in alive[mesh]:
                raise ScheduleError(f"{names(buffer)} is freed, but not there.", where=where)
            alive[mesh].remove(buffer)
        if overwritten & keeps[mesh] or keeps[mesh] & set(gone):
            lost = _all(keeps[mesh] & (overwritten | set(gone)), names)
            raise ScheduleError(f"{lost} belongs to the caller and is taken.", where=where)
        alive[mesh].update(instruction.writes)
    for mesh, instructions in enumerate(program.meshes):
        if position[mesh] != len(instructions):
            raise ScheduleError(
                f"The dispatch order ends before instruction {position[mesh]} of mesh {mesh}."
            )
        absent = remains[mesh] - alive[mesh]
        if absent:
            raise ScheduleError(
                f"Output {_all(absent, names)} is not there at the end of mesh {mesh}."
            )
        leaked = alive[mesh] - remains[mesh] - keeps[mesh]
        if leaked:
            raise ScheduleError(f"{_all(leaked, names)} is never freed on mesh {mesh}.")
    if sent:
        raise ScheduleError(f"No mesh receives the transfer {min(sent)}.")


def _match(sent: tuple[int, Send] | None, mesh: int, recv: Recv, where: str) -> None:
    if sent is None:
        raise ScheduleError("A Recv stands before its Send, or has none.", where=where)
    home, send = sent
    if (home, send.to, len(send.buffers)) != (recv.source, mesh, len(recv.buffers)):
        raise ScheduleError(
            "A Recv does not fit its Send.",
            where=where,
            why=f"mesh {home} sends {len(send.buffers)} buffers to mesh {send.to} with this tag.",
        )


def _history(instructions: Sequence[Instruction], index: int, buffer: Buffer) -> str:
    for instruction in reversed(instructions[:index]):
        freed = isinstance(instruction, Free) and buffer in instruction.buffers
        if freed or (isinstance(instruction, Run) and buffer in instruction.donates):
            return f"it was gone after: {instruction}"
    later = [x for x in instructions[index:] if buffer in x.writes]
    return f"it is written later, by: {later[0]}" if later else "nothing on this mesh writes it."


def _all(buffers: set[Buffer], names: Names) -> str:
    return ", ".join(sorted(map(names, buffers)))
