"""What `emit` can make instructions of: values, pieces and transfers that fit together.

These are requirements on the passes before it and on a user's own pieces; a violation names the
piece and the value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NoReturn

from autopar.base.errors import ScheduleError
from autopar.passes.pipeline.instructions import Piece, Value, ValueTransfer
from autopar.passes.schedules.schedule import Schedule

LOOP_KINDS = ("F", "B", "W")


def validate(
    schedule: Schedule,
    values: Mapping[int, Value],
    pieces: Sequence[Piece],
    transfers: Sequence[ValueTransfer],
    inputs: Sequence[int],
    outputs: Sequence[int],
    donated: Sequence[int],
) -> None:
    """Refuse values, pieces and transfers that contradict each other or the schedule.

    Raises:
      ScheduleError: names the piece, transfer or value, and what is wrong with it.
    """
    for value in values.values():
        if not 0 <= value.stage < schedule.num_stages:
            _refuse(value, f"is on stage {value.stage} of {schedule.num_stages}")
    for what, numbers in (("inputs", inputs), ("outputs", outputs), ("donated", donated)):
        unknown = sorted(set(numbers) - set(values))
        if unknown or len(set(numbers)) < len(numbers):
            raise ScheduleError(f"The numbers in {what} are unknown or repeated: {tuple(numbers)}.")
    if not set(donated) <= set(inputs):
        raise ScheduleError("Only inputs can be donated.", where=f"donated={tuple(donated)}")
    _validate_pieces(schedule, values, pieces)
    _validate_writers(values, pieces, inputs, donated)
    _validate_transfers(values, pieces, transfers, inputs)


def _validate_pieces(
    schedule: Schedule, values: Mapping[int, Value], pieces: Sequence[Piece]
) -> None:
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
            if values[number].stage != piece.stage:
                _refuse(
                    values[number],
                    f"is on stage {values[number].stage}, and a piece of stage {piece.stage} "
                    "uses it without a transfer",
                    where,
                )
        if not set(piece.donates) <= set(piece.reads):
            raise ScheduleError("A piece can donate only what it reads.", where=where)


def _validate_writers(
    values: Mapping[int, Value],
    pieces: Sequence[Piece],
    inputs: Sequence[int],
    donated: Sequence[int],
) -> None:
    """A value is written once; one of the whole step once before, once after, and by the loop."""
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
        if writing and number in inputs and number not in donated:
            _refuse(value, "is an input that the caller keeps, and is overwritten", names)
        looping = [piece for piece in writing if piece.kind in LOOP_KINDS]
        if looping and not value.per_microbatch:
            added = [piece for piece in looping if number not in piece.reads]
            if added and len(added) < len(looping):
                _refuse(value, "is updated in place by one piece and added to by another", names)
            for piece in pieces:
                if piece.kind in LOOP_KINDS and number in piece.reads and piece not in looping:
                    _refuse(
                        value,
                        f"changes with every microbatch (by {names}), and another piece reads it "
                        "in between",
                        f"piece {piece.name!r}",
                    )


def _validate_transfers(
    values: Mapping[int, Value],
    pieces: Sequence[Piece],
    transfers: Sequence[ValueTransfer],
    inputs: Sequence[int],
) -> None:
    written = Counter(number for piece in pieces for number in set(piece.writes))
    written.update(inputs)
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
