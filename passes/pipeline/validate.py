"""What `emit` can make instructions of: values, pieces and transfers that fit together.

These are requirements on the passes before it and on a user's own pieces; a violation names the
piece and the value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from autopar.base.errors import ScheduleError
from autopar.passes.pipeline.instructions import Piece, PipelineProgram, Value, ValueTransfer

LOOP_KINDS = ("F", "B", "W")


def validate(program: PipelineProgram, transfers: Sequence[ValueTransfer]) -> None:
    """Refuse values, pieces and transfers that contradict each other or the schedule.

    Args:
      program: without instructions so far.
      transfers: which values other stages receive.

    Raises:
      ScheduleError: names the piece, transfer or value, and what is wrong with it.
    """
    schedule, values = program.schedule, program.value_of
    if len(values) < len(program.values):
        raise ScheduleError("Two values have the same number.")
    for value in program.values:
        if not 0 <= value.stage < schedule.num_stages:
            _refuse(value, f"is on stage {value.stage} of {schedule.num_stages}")
    for what in ("inputs", "outputs", "donated"):
        numbers: tuple[int, ...] = getattr(program, what)
        if not set(numbers) <= set(values) or len(set(numbers)) < len(numbers):
            raise ScheduleError(f"The numbers in {what} are unknown or repeated: {numbers}.")
    if not set(program.donated) <= set(program.inputs):
        raise ScheduleError("Only inputs can be donated.", where=f"donated={program.donated}")
    _validate_pieces(program)
    _validate_writers(program)
    _validate_transfers(program, transfers)


def _validate_pieces(program: PipelineProgram) -> None:
    schedule, values, pieces = program.schedule, program.value_of, program.pieces
    for name, count in Counter(piece.name for piece in pieces).items():
        if count > 1:
            raise ScheduleError(f"{count} pieces have the name {name!r}.")
    for (stage, kind), count in Counter((p.stage, p.kind) for p in pieces).items():
        if count > 1 and kind in LOOP_KINDS:
            raise ScheduleError(f"Stage {stage} has {count} pieces of kind {kind}; it runs one.")
    for piece in pieces:
        where = f"piece {piece.name!r}"
        if not 0 <= piece.stage < schedule.num_stages:
            raise ScheduleError(
                f"Stage {piece.stage} does not exist.",
                where=where,
                why=f"the schedule has {schedule.num_stages} stages.",
            )
        if piece.kind in ("B", "W") and schedule.forward_only:
            raise ScheduleError(
                f"Schedule {schedule.name!r} has no backward pass, but the program has one.",
                where=where,
                hint="use a training schedule such as '1f1b'.",
            )
        for number in (*piece.reads, *piece.writes, *piece.donates):
            if number not in values:
                raise ScheduleError(f"There is no value {number}.", where=where)
            value = values[number]
            if value.stage != piece.stage:
                user = f"a piece of stage {piece.stage} uses it without a transfer"
                _refuse(value, f"is on stage {value.stage}, and {user}", where)
        if not set(piece.donates) <= set(piece.reads):
            raise ScheduleError("A piece can donate only what it reads.", where=where)


def _validate_writers(program: PipelineProgram) -> None:
    """A value is written once; one of the whole step once before, once after, and by the loop."""
    values, pieces, inputs = program.value_of, program.pieces, program.inputs
    writers: dict[int, list[Piece]] = {number: [] for number in values}
    for piece in pieces:
        for number in piece.writes:
            writers[number].append(piece)
    for number, writing in writers.items():
        value = values[number]
        names = ", ".join(repr(piece.name) for piece in writing)
        if value.per_microbatch and len(writing) + (number in inputs) > 1:
            _refuse(value, "exists per microbatch and is written more than once", names)
        for kind in ("prologue", "epilogue"):
            if sum(piece.kind == kind for piece in writing) > 1:
                _refuse(value, f"is written by two {kind} pieces", names)
        if writing and number in inputs and number not in program.donated:
            _refuse(value, "is an input that the caller keeps, and is overwritten", names)
        looping = [piece for piece in writing if piece.kind in LOOP_KINDS]
        if looping and not value.per_microbatch:
            added = [piece for piece in looping if number not in piece.reads]
            if added and len(added) < len(looping):
                _refuse(value, "is updated in place by one piece and added to by another", names)
            for piece in pieces:
                if piece.kind in LOOP_KINDS and number in piece.reads and piece not in looping:
                    what = f"changes with every microbatch (by {names}), and another piece reads it"
                    _refuse(value, f"{what} in between", f"piece {piece.name!r}")


def _validate_transfers(program: PipelineProgram, transfers: Sequence[ValueTransfer]) -> None:
    values = program.value_of
    written = Counter(number for piece in program.pieces for number in set(piece.writes))
    written.update(program.inputs)
    written.update(transfer.target for transfer in transfers)
    for transfer in transfers:
        where = f"the transfer of {transfer.source} to {transfer.target}"
        for number in (transfer.source, transfer.target):
            if number not in values:
                raise ScheduleError(f"There is no value {number}.", where=where)
        source, target = values[transfer.source], values[transfer.target]
        if source.stage == target.stage:
            _refuse(target, "is on the stage from which it would be transferred", where)
        if source.per_microbatch != target.per_microbatch:
            _refuse(target, "exists per microbatch where its source does not, or vice versa", where)
        if written[transfer.target] > 1:
            _refuse(target, "is received and also an input, written or received again", where)


def _refuse(value: Value, what: str, where: str | None = None) -> NoReturn:
    raise ScheduleError(f"Value {value.number} ({value.label}) {what}.", where=where)
