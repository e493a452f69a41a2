"""What a device needs of memory for a whole step, by what its compiler says of the pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.base.compiled_records import ProgramMemory
from autopar.passes.pipeline.buffer_memory import LiveBytes, input_bytes, live_bytes
from autopar.passes.pipeline.instructions import Instruction, PipelineProgram, Run
from autopar.runtime.compiled_pieces import CompiledPieces
from autopar.runtime.stage_programs import donated_numbers, variants_of

Key = tuple[str, tuple[int, ...]]
"""A piece, and the values that are donated to it."""


def compiled_peaks(
    program: PipelineProgram, memory: Mapping[Key, ProgramMemory | None]
) -> list[int | None]:
    """By mesh, what one device needs; None where a piece was not compiled.

    While a piece runs, that is what its compiler says, and all that it does not take as it was
    planned.
    """
    rows = zip(program.meshes, live_bytes(program), input_bytes(program), strict=True)
    return [_compiled_peak(program, memory, *row) for row in rows]


def _compiled_peak(
    program: PipelineProgram,
    memory: Mapping[Key, ProgramMemory | None],
    instructions: Sequence[Instruction],
    row: Sequence[LiveBytes],
    before: int,
) -> int | None:
    peak = before
    for instruction, live in zip(instructions, row, strict=True):
        needed = live.during
        if isinstance(instruction, Run):
            compiled = memory.get((instruction.piece, donated_numbers(instruction)))
            if compiled is None:
                return None
            taken = sum(program.value_of[b.value].bytes_per_device for b in instruction.reads)
            needed = before - taken + compiled.total
        peak, before = max(peak, needed), live.after
    return peak


def memory_of_pieces(program: PipelineProgram, compiled: Any) -> dict[Key, ProgramMemory | None]:
    """What the compiler says of a loaded step's pieces; None where it says nothing.

    Args:
      program: what its meshes run.
      compiled: its pieces, or the one program that it is.
    """
    if isinstance(compiled, CompiledPieces):
        programs = dict(compiled.variants)
    else:
        names = dict.fromkeys(x.piece for x in program.meshes[0] if isinstance(x, Run))
        programs = dict.fromkeys(variants_of(program, names), compiled)
    said = {key: x.memory_analysis() for key, x in programs.items()}
    return {key: ProgramMemory.of(x) if x else None for key, x in said.items()}
