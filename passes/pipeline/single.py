"""A step of one stage as a program of one instruction, so that it has a timeline too."""

from __future__ import annotations

from autopar.passes.pipeline.emit import emit
from autopar.passes.pipeline.instructions import Piece, PipelineProgram, Value
from autopar.passes.schedules.schedule import Schedule


def single_program(
    name: str, kept_bytes: int, donated_bytes: int, output_bytes: int
) -> PipelineProgram:
    """One mesh that runs one piece.

    Args:
      name: of the piece.
      kept_bytes: per device, of the arguments that the caller keeps.
      donated_bytes: per device, of those that the caller gives up.
      output_bytes: per device, of the results.

    >>> print(single_program("step", 64, 128, 132))
    one stage, 1 stages on 1 meshes, 1 microbatches
    mesh 0, 192 B of inputs per device:
      0  run        step: (kept, donated) -> (results) donates donated
    """
    values = [
        Value(0, 0, kept_bytes, False, "kept"),
        Value(1, 0, donated_bytes, False, "donated"),
        Value(2, 0, output_bytes, False, "results"),
    ]
    piece = Piece(name, 0, "prologue", reads=(0, 1), writes=(2,), donates=(1,))
    schedule = Schedule("one stage", 1, 1, (0,), ((),))
    return emit(schedule, values, [piece], [], inputs=(0, 1), outputs=(2,), donated=(1,))
