"""Programs of many stages with everything that real ones have, and what they must compute.

`model` describes a training step (or a forward pass) for any schedule: activations and gradients, a
skip connection over all stages, a parameter of the first stage that the last one needs as well, a
mask that a prologue makes from another prologue's value, sums by `Accumulate` and in place, and an
update that needs a norm over all stages. `execute` runs a program's instructions on numbers: what a
piece writes is a hash of what it reads; `evaluate` computes the same without any pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.passes.pipeline.instructions import (
    Accumulate,
    Buffer,
    Free,
    Piece,
    PieceKind,
    PipelineProgram,
    Recv,
    Reshard,
    Run,
    Send,
    Value,
    ValueTransfer,
)
from autopar.passes.pipeline.parts import PipelineParts
from autopar.passes.schedules.schedule import Schedule

PRIME = 2**61 - 1


@dataclass
class Model:
    """Values, pieces and transfers under construction."""

    values: list[Value] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    transfers: list[ValueTransfer] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    donated: list[int] = field(default_factory=list)

    def value(self, stage: int, label: str, size: int = 1, *, loop: bool = False) -> int:
        self.values.append(Value(len(self.values), stage, size, loop, f"{label}.{stage}"))
        return len(self.values) - 1

    def given(self, stage: int, label: str, size: int = 1, *, loop: bool = False) -> int:
        self.inputs.append(self.value(stage, label, size, loop=loop))
        return self.inputs[-1]

    def piece(
        self,
        kind: PieceKind,
        stage: int,
        reads: Sequence[int],
        writes: Sequence[int],
        donates: Sequence[int] = (),
        name: str = "",
    ) -> None:
        name = name or f"{kind}{stage}"
        self.pieces.append(Piece(name, stage, kind, tuple(reads), tuple(writes), tuple(donates)))

    def sent(self, source: int, stage: int, label: str) -> int:
        """`source` on another stage (or itself, where it is there already)."""
        origin = self.values[source]
        if origin.stage == stage:
            return source
        target = self.value(stage, label, origin.bytes_per_device, loop=origin.per_microbatch)
        self.transfers.append(ValueTransfer(source, target))
        return target

    @property
    def parts(self) -> PipelineParts:
        """What a list of instructions is made of."""
        return PipelineParts(
            tuple(self.values),
            tuple(self.pieces),
            tuple(self.transfers),
            tuple(self.inputs),
            tuple(self.outputs),
            tuple(self.donated),
        )

    def emit(self, schedule: Schedule) -> PipelineProgram:
        return self.parts.program(schedule)


def model(num_stages: int, *, backward: bool = True, weights: bool = True) -> Model:
    """A step of `num_stages` stages; with `weights`, its backward pass is in two pieces."""
    made = Model()
    last = num_stages - 1
    param = [made.given(s, "param", 100) for s in range(num_stages)]
    made.donated += param
    batch = made.given(0, "batch", 4, loop=True)
    made.donated.append(batch)
    labels = made.given(last, "labels", 2, loop=True)
    tied = made.sent(param[0], last, "tied")
    mask = made.value(0, "mask", 3)
    made.piece("prologue", 0, [], [mask], name="mask")
    rounded = made.value(last, "rounded", 3)
    made.piece("prologue", last, [made.sent(mask, last, "mask")], [rounded], name="rounded")
    returned = made.sent(rounded, 0, "returned")
    slices = made.value(0, "slices", 1, loop=True)
    made.piece("prologue", 0, [returned], [slices], name="slices")
    kept = [made.value(s, "kept", 20, loop=True) for s in range(num_stages)]
    loss = made.value(last, "loss")
    collected = made.value(last, "collected", 1, loop=True)
    flowing = made.sent(slices, 0, "unused")
    skip = -1
    for stage in range(num_stages):
        reads = [param[stage], made.sent(flowing, stage, "received")]
        reads += [batch] if stage == 0 else []
        writes = [kept[stage]]
        flowing = made.value(stage, "activation", 10, loop=True)
        writes += [flowing] if stage < last else []
        if stage == 0 and last > 0:
            skip = made.value(0, "skip", 5, loop=True)
            writes.append(skip)
        if stage == last:
            reads += [labels, tied, rounded]
            reads += [made.sent(skip, last, "skipped")] if last > 0 else []
            writes += [loss, collected]
        made.piece("F", stage, list(dict.fromkeys(reads)), writes, [reads[1]] if stage else [])
    made.outputs += [loss, collected]
    if not backward:
        return made
    sums = [made.value(s, "sum", 100) for s in range(num_stages)]
    gradient = -1
    tied_sum = made.value(last, "tied_sum", 100)
    for stage in reversed(range(num_stages)):
        reads = [param[stage], kept[stage]]
        reads += [made.sent(gradient, stage, "arrived")] if stage < last else [tied]
        gradient = made.value(stage, "gradient", 10, loop=True)
        writes = [gradient] if stage > 0 else []
        # The first stage adds by `Accumulate`, the others update a sum that begins as zeros.
        summing = [sums[stage]] if stage == 0 else []
        inside = [] if stage == 0 else [sums[stage]]
        if inside:
            made.piece("prologue", stage, [], inside, name=f"zeros{stage}")
        if stage == last:
            summing = [*summing, tied_sum]
        if weights:
            rest = made.value(stage, "rest", 7, loop=True)
            made.piece("B", stage, reads, [*writes, rest], [kept[stage]])
            made.piece("W", stage, [rest, *inside], [*summing, *inside], [rest, *inside])
        else:
            made.piece("B", stage, [*reads, *inside], [*writes, *summing, *inside], reads[1:])
    norms = []
    for stage in range(num_stages):
        norm = made.value(stage, "norm")
        own = [sums[0], made.sent(tied_sum, 0, "tied_sum")] if stage == 0 else [sums[stage]]
        made.piece("epilogue", stage, own, [norm], name=f"norm{stage}")
        norms.append(made.sent(norm, 0, f"norm{stage}"))
    whole = made.value(0, "whole")
    made.piece("epilogue", 0, norms, [whole], name="whole")
    for stage in range(num_stages):
        updated = made.value(stage, "updated", 100)
        reads = [param[stage], sums[stage], made.sent(whole, stage, "whole")]
        made.piece("epilogue", stage, reads, [updated], reads[:2], name=f"update{stage}")
        made.outputs.append(updated)
    made.outputs.append(made.sent(made.outputs[-num_stages], last, "tied_again"))
    made.outputs = list(dict.fromkeys(made.outputs))
    return made


def hashed(piece: Piece, microbatch: int | None, reads: Sequence[Any], number: int) -> int:
    return hash((piece.name, microbatch, tuple(reads), number)) % PRIME


def given_content(buffer: Buffer) -> int:
    return hash(("given", buffer.value, buffer.microbatch)) % PRIME


def execute(program: PipelineProgram) -> dict[Buffer, int]:
    """The outputs of a program, its instructions executed in the dispatch order."""
    contents: list[dict[Buffer, int]] = [{} for _ in program.meshes]
    pieces = {piece.name: piece for piece in program.pieces}
    flying: dict[int, list[int]] = {}
    for number in program.inputs:
        for buffer in program.buffers_of(number):
            contents[program.mesh_of(number)][buffer] = given_content(buffer)
    for mesh, index in program.order:
        here = contents[mesh]
        match program.meshes[mesh][index]:
            case Run() as run:
                piece = pieces[run.piece]
                in_place = set(run.reads) & set(run.writes)
                reads = [here[buffer] for buffer in run.reads if buffer not in in_place]
                old = {buffer: here[buffer] for buffer in in_place}
                for buffer in run.donates:
                    del here[buffer]
                for buffer in run.writes:
                    made = hashed(piece, run.microbatch, reads, buffer.value)
                    if run.microbatch is None and buffer.microbatch is not None:
                        made = (made + buffer.microbatch) % PRIME
                    here[buffer] = (old.get(buffer, 0) + made) % PRIME
            case Send(tag, _, buffers):
                flying[tag] = [here[buffer] for buffer in buffers]
            case Recv(tag, _, buffers):
                here.update(zip(buffers, flying.pop(tag), strict=True))
            case Reshard(source, target):
                here[target] = here[source]
            case Accumulate(target, addend):
                here[target] = (here.get(target, 0) + here[addend]) % PRIME
            case Free(buffers):
                for buffer in buffers:
                    del here[buffer]
    assert not flying
    return {
        buffer: contents[program.mesh_of(number)][buffer]
        for number in program.outputs
        for buffer in program.buffers_of(number)
    }


def evaluate(made: Model, num_microbatches: int) -> dict[Buffer, int]:
    """The outputs by the pieces' dependencies alone: one microbatch after the other, no meshes."""
    values: Mapping[int, Value] = {value.number: value for value in made.values}
    source = {transfer.target: transfer.source for transfer in made.transfers}
    contents: dict[Buffer, int] = {}

    def buffers(number: int) -> list[Buffer]:
        many = range(num_microbatches) if values[number].per_microbatch else [None]
        return [Buffer(number, i) for i in many]

    def content(number: int, microbatch: int | None) -> int:
        while number in source:
            number = source[number]
        return contents[Buffer(number, microbatch if values[number].per_microbatch else None)]

    def run(piece: Piece, microbatch: int | None) -> None:
        if microbatch is None:
            wanted = [b for n in piece.reads for b in buffers(n)]
            written = [b for n in piece.writes for b in buffers(n)]
        else:
            wanted = [Buffer(n, microbatch) for n in piece.reads]
            written = [
                Buffer(n, microbatch if values[n].per_microbatch else None) for n in piece.writes
            ]
        reads = [content(*b) for b in wanted if b.value not in piece.writes]
        for buffer in written:
            result = hashed(piece, microbatch, reads, buffer.value)
            if microbatch is None:
                contents[buffer] = (result + (buffer.microbatch or 0)) % PRIME
            elif buffer.microbatch is None:
                contents[buffer] = (contents.get(buffer, 0) + result) % PRIME
            else:
                contents[buffer] = result

    def settle(kind: str) -> None:
        waiting = [piece for piece in made.pieces if piece.kind == kind]
        while waiting:
            for piece in waiting:
                try:
                    run(piece, None)
                except KeyError:
                    continue
                waiting.remove(piece)
                break
            else:
                raise AssertionError(f"{kind} pieces wait for each other")

    for number in made.inputs:
        contents.update({buffer: given_content(buffer) for buffer in buffers(number)})
    settle("prologue")
    loop = {(piece.kind, piece.stage): piece for piece in made.pieces}
    stages = sorted({piece.stage for piece in made.pieces})
    for i in range(num_microbatches):
        for kind, order in (("F", stages), ("B", stages[::-1]), ("W", stages)):
            for stage in order:
                if (kind, stage) in loop:
                    run(loop[kind, stage], i)  # type: ignore[index]
    settle("epilogue")
    return {
        buffer: content(buffer.value, buffer.microbatch)
        for number in made.outputs
        for buffer in buffers(number)
    }
