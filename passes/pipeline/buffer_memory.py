"""The live bytes of every mesh at every instruction, known from the list alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from autopar.passes.pipeline.instructions import Accumulate, Buffer, PipelineProgram, Run


class LiveBytes(NamedTuple):
    """Bytes per device that are alive while an instruction executes, and after it."""

    during: int
    after: int


def input_bytes(program: PipelineProgram) -> tuple[int, ...]:
    """For every mesh, the bytes per device of the inputs, which are alive at the start."""
    return tuple(sum(sizes.values()) for sizes in _given(program))


def live_bytes(
    program: PipelineProgram, temporary_bytes: Mapping[str, int] | None = None
) -> tuple[tuple[LiveBytes, ...], ...]:
    """For every mesh and every instruction, the bytes per device that are alive.

    While a piece runs, all that it reads and writes is alive, except that what it writes takes the
    memory of what it donates as far as that goes. A sum begins as the first part: one array.

    Args:
      program: the instructions.
      temporary_bytes: by the piece's name, the bytes per device that it needs inside while it runs.
    """
    temporary = temporary_bytes or {}
    rows = []
    for alive, instructions in zip(_given(program), program.meshes, strict=True):
        row = []
        total = sum(alive.values())
        for instruction in instructions:
            before = total
            written = _sizes(program, instruction.writes)
            if isinstance(instruction, Accumulate):
                # It adds in place, or its target is the part itself.
                written = {}
                if instruction.target not in alive:
                    alive[instruction.target] = alive[instruction.addend]
                    alive[instruction.addend] = 0
            total -= sum(alive.pop(buffer, 0) for buffer in instruction.gone)
            total += sum(written.values())
            inside = temporary.get(instruction.piece, 0) if isinstance(instruction, Run) else 0
            during = max(before, total) + inside
            # The old version of what a run writes anew without donating it lives until the end.
            total -= sum(alive.pop(buffer, 0) for buffer in written)
            alive.update(written)
            row.append(LiveBytes(during, total))
        rows.append(tuple(row))
    return tuple(rows)


def _given(program: PipelineProgram) -> list[dict[Buffer, int]]:
    meshes = range(len(program.meshes))
    return [_sizes(program, program.buffers_on(mesh, program.inputs)) for mesh in meshes]


def _sizes(program: PipelineProgram, buffers: Iterable[Buffer]) -> dict[Buffer, int]:
    return {buffer: program.value_of[buffer.value].bytes_per_device for buffer in buffers}
