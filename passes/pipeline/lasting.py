"""What outlives the instructions that follow: on that, a process can wait for an earlier one."""

from __future__ import annotations

from autopar.passes.pipeline.instructions import Accumulate, Buffer, PipelineProgram, Reshard, Run


def lasting_writes(program: PipelineProgram) -> dict[tuple[int, int], list[Buffer]]:
    """By (mesh, index), what an instruction writes that no later run takes over (and deletes)."""
    found: dict[tuple[int, int], list[Buffer]] = {}
    for mesh, instructions in enumerate(program.meshes):
        taken: set[Buffer] = set()
        for index in reversed(range(len(instructions))):
            instruction = instructions[index]
            lasting = [b for b in instruction.writes if b not in taken]
            if lasting:
                found[mesh, index] = lasting
            # One array may have two names after these.
            if isinstance(instruction, Accumulate | Reshard) and instruction.target in taken:
                taken.update(instruction.reads)
            elif isinstance(instruction, Run):
                taken.update(instruction.donates)
    return found
