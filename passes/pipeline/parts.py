"""A step in pieces before it is put into an order, and values that are used alike as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from autopar.passes.pipeline.emit import emit
from autopar.passes.pipeline.instructions import Piece, PipelineProgram, Value, ValueTransfer
from autopar.passes.schedules.schedule import Schedule


@dataclass(frozen=True)
class PipelineParts:
    """All that a list of instructions is made of but the order of the tasks.

    Args:
      values: everything that the pieces read and write.
      pieces: at most one F, B and W per stage, and any number of prologue and epilogue pieces.
      transfers: which values other stages receive.
      inputs: numbers of the values that the caller gives.
      outputs: numbers of the values that the caller takes.
      donated: numbers of the inputs that the caller gives up.
    """

    values: tuple[Value, ...]
    pieces: tuple[Piece, ...]
    transfers: tuple[ValueTransfer, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...] = ()

    def program(self, schedule: Schedule) -> PipelineProgram:
        """The instructions in the order of a schedule (see `emit`)."""
        return emit(
            schedule,
            self.values,
            self.pieces,
            self.transfers,
            inputs=self.inputs,
            outputs=self.outputs,
            donated=self.donated,
        )


def bundled(parts: PipelineParts, schedule: Schedule) -> PipelineParts:
    """The same step with the values that are always used together as one of all their bytes.

    A stage's parameters are one value then, and its gradients another, so that instructions name a
    few values instead of hundreds; they stand where they stood, and take the same time and memory.
    A mesh of several stages hands values on one after the other: those are left alone.
    """
    uses: dict[int, list[Hashable]] = {v.number: [v.stage, v.per_microbatch] for v in parts.values}
    for index, piece in enumerate(parts.pieces):
        for how, numbers in enumerate((piece.reads, piece.writes, piece.donates)):
            for number in numbers:
                uses[number].append((index, how))
    for how, numbers in enumerate((parts.inputs, parts.outputs, parts.donated)):
        for number in numbers:
            uses[number].append(how)
    if schedule.num_stages > schedule.num_meshes:
        for transfer in parts.transfers:
            for number in (transfer.source, transfer.target):
                uses[number].append(("alone", number))
    kinds = _numbered({number: tuple(use) for number, use in uses.items()})
    # Values that are sent are alike if what they become elsewhere is, of as many times their bytes.
    size = {value.number: value.bytes_per_device for value in parts.values}
    while True:
        around = defaultdict[int, list[tuple[object, ...]]](list)
        for source, target in ((t.source, t.target) for t in parts.transfers):
            ratio = Fraction(size[source], size[target] or 1)
            around[source].append(("to", kinds[target], ratio))
            around[target].append(("from", kinds[source], ratio))
        refined = _numbered({n: (kind, *sorted(around[n])) for n, kind in kinds.items()})
        if len(set(refined.values())) == len(set(kinds.values())):
            break
        kinds = refined
    first: dict[int, Value] = {}
    for value in parts.values:
        known = first.get(kinds[value.number])
        total = value.bytes_per_device + (known.bytes_per_device if known else 0)
        first[kinds[value.number]] = replace(known or value, bytes_per_device=total)

    def together(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(first[kinds[number]].number for number in numbers))

    ends = (
        tuple(first[kinds[number]].number for number in (transfer.source, transfer.target))
        for transfer in parts.transfers
    )
    return PipelineParts(
        values=tuple(first.values()),
        pieces=tuple(
            replace(
                piece,
                reads=together(piece.reads),
                writes=together(piece.writes),
                donates=together(piece.donates),
            )
            for piece in parts.pieces
        ),
        transfers=tuple(ValueTransfer(*pair) for pair in dict.fromkeys(ends)),
        inputs=together(parts.inputs),
        outputs=together(parts.outputs),
        donated=together(parts.donated),
    )


def _numbered(keys: Mapping[int, Hashable]) -> dict[int, int]:
    """Equal keys by a number, in the order in which they come."""
    numbers: dict[Hashable, int] = {}
    return {item: numbers.setdefault(key, len(numbers)) for item, key in keys.items()}
