"""The checker of instruction lists: runs after `emit`, and on any list that somebody changed."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.base.errors import ScheduleError
from autopar.passes.pipeline.instructions import (
    Accumulate,
    Buffer,
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

    Proved are: `order` holds every instruction once, each mesh's in sequence and each `Recv` after
    its one `Send`; no buffer is read before it is written or after it is freed or donated; every
    buffer is freed or donated exactly once, except the outputs and the inputs that the caller
    keeps, which remain.

    Raises:
      ScheduleError: names the mesh, the instruction and the buffer.
    """
    names = buffer_names(program.values)
    kept = [number for number in program.inputs if number not in program.donated]
    alive, keeps, remains = (
        [set(program.buffers_on(mesh, numbers)) for mesh in range(len(program.meshes))]
        for numbers in (program.inputs, kept, program.outputs)
    )
    sends: dict[int, tuple[int, Send]] = {}
    received: set[int] = set()
    position = [0] * len(program.meshes)
    for mesh, index in program.order:
        if index != position[mesh] or index >= len(program.meshes[mesh]):
            raise ScheduleError(
                f"The dispatch order has instruction {index} of mesh {mesh} at the wrong place."
            )
        position[mesh] += 1
        instruction = program.meshes[mesh][index]
        wrong = _misplaced(instruction, alive[mesh], keeps[mesh], program, names)
        if not wrong and isinstance(instruction, Send):
            if instruction.tag in sends:
                wrong = f"Two Sends have the tag {instruction.tag}."
            sends[instruction.tag] = (mesh, instruction)
        elif not wrong and isinstance(instruction, Recv):
            wrong = _unmatched(sends.get(instruction.tag), mesh, instruction)
            if instruction.tag in received:
                wrong = f"ValueTransfer {instruction.tag} is received twice."
            received.add(instruction.tag)
        if wrong:
            raise ScheduleError(
                wrong,
                where=f"mesh {mesh}, instruction {index}: {instruction.text(names)}",
                why=_history(program.meshes[mesh], index, alive[mesh], names),
            )
        alive[mesh].difference_update(instruction.gone)
        alive[mesh].update(instruction.writes)
    for mesh, instructions in enumerate(program.meshes):
        if position[mesh] != len(instructions):
            raise ScheduleError(
                f"The dispatch order ends before instruction {position[mesh]} of mesh {mesh}."
            )
        absent = remains[mesh] - alive[mesh]
        if absent:
            raise ScheduleError(
                f"Output {_all(absent, names)} is not there at the end of mesh {mesh}.",
                hint="a piece, a transfer or the caller must provide it.",
            )
        leaked = alive[mesh] - remains[mesh] - keeps[mesh]
        if leaked:
            raise ScheduleError(f"{_all(leaked, names)} is never freed on mesh {mesh}.")
    if set(sends) != received:
        raise ScheduleError(f"No mesh receives the transfer {min(set(sends) - received)}.")


def _misplaced(
    instruction: Instruction,
    alive: set[Buffer],
    keeps: set[Buffer],
    program: PipelineProgram,
    names: Names,
) -> str | None:
    """What is wrong with executing `instruction` while these buffers are alive."""
    absent = set(instruction.reads) - alive
    if absent:
        return f"{_all(absent, names)} is read, but it is not there."
    gone = set(instruction.gone)
    if not gone <= alive or len(gone) < len(instruction.gone):
        return f"{_all(gone - alive or gone, names)} is freed, but it is not there."
    unknown = {buffer for buffer in instruction.writes if buffer.value not in program.value_of}
    if unknown:
        return f"{_all(unknown, names)} is not a value of the program."
    overwritten = alive.intersection(instruction.writes)
    if overwritten and not isinstance(instruction, Run | Accumulate):
        return f"{_all(overwritten, names)} is there already and is overwritten."
    taken = keeps & (overwritten | gone)
    if taken:
        return f"{_all(taken, names)} belongs to the caller and is taken."
    return None


def _unmatched(sent: tuple[int, Send] | None, mesh: int, recv: Recv) -> str | None:
    if sent is None:
        return "A Recv stands before its Send, or has none."
    home, send = sent
    if (home, send.to, len(send.buffers)) != (recv.source, mesh, len(recv.buffers)):
        return (
            f"A Recv does not fit its Send: mesh {home} sends {len(send.buffers)} buffers to mesh "
            f"{send.to} with this tag."
        )
    return None


def _history(
    instructions: Sequence[Instruction], index: int, alive: set[Buffer], names: Names
) -> str | None:
    """Where the first buffer that an instruction lacks has gone, or comes from too late."""
    instruction = instructions[index]
    lacks = [b for b in (*instruction.reads, *instruction.gone) if b not in alive]
    if not lacks:
        return None
    for earlier in reversed(instructions[:index]):
        if lacks[0] in earlier.gone:
            return f"it was gone after: {earlier.text(names)}"
    later = [x for x in instructions[index:] if lacks[0] in x.writes]
    if later:
        return f"it is only written by: {later[0].text(names)}"
    return "no piece of its stage writes it, no transfer brings it, and it is no input."


def _all(buffers: set[Buffer], names: Names) -> str:
    return ", ".join(sorted(map(names, buffers)))
