"""A schedule's timeline, from stages that compute nothing but wait for each other as a model's."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.passes.pipeline.emit import emit
from autopar.passes.pipeline.instructions import Piece, PieceKind, Value, ValueTransfer
from autopar.passes.pipeline.simulate import simulate
from autopar.passes.pipeline.timeline import Timeline
from autopar.passes.schedules.schedule import Schedule

Seconds = Sequence[float] | float


def simulate_schedule(
    schedule: Schedule,
    T_F: Seconds,
    T_B: Seconds = 0.0,
    T_W: Seconds = 0.0,
    latency: float = 0.0,
) -> Timeline:
    """The timeline of a schedule alone, run as the instructions of stages that compute nothing.

    Args:
      schedule: any schedule.
      T_F: seconds of the forward pass of each stage, or of every stage.
      T_B: seconds of the backward pass, or of its first part.
      T_W: seconds of the weight gradients where they are a second part. Where the schedule does not
        split the backward pass, B takes T_B + T_W.
      latency: seconds from a task's end until the next stage, on another mesh, has its result.

    Returns:
      A timeline in which one microbatch in flight on one stage counts as one byte, so `peak_bytes`
      are the most microbatches in flight on each mesh.

    >>> from autopar.passes.schedules.make import make_schedule
    >>> print(simulate_schedule(make_schedule("1f1b", 2, 4), 1.0, 2.0))
    1f1b: 15 s a step, 20.0% bubble
    mesh  busy  span   idle  peak memory
       0  12 s  15 s  20.0%          2 B
       1  12 s  12 s  20.0%          1 B
    """

    def of_stages(seconds: Seconds) -> list[float]:
        return [seconds] * schedule.num_stages if isinstance(seconds, int | float) else [*seconds]

    per_stage = {"F": of_stages(T_F), "B": of_stages(T_B), "W": of_stages(T_W)}
    if not schedule.splits_backward:
        per_stage["B"] = [b + w for b, w in zip(per_stage["B"], per_stage["W"], strict=True)]
    values, pieces, transfers = _bare(schedule)
    program = emit(schedule, values, pieces, transfers, inputs=(), outputs=())
    return simulate(program, lambda run: per_stage[run.kind][run.stage], latency)


def _bare(schedule: Schedule) -> tuple[list[Value], list[Piece], list[ValueTransfer]]:
    """Stages that compute nothing but depend on each other as those of a model do."""
    values: list[Value] = []
    pieces: list[Piece] = []
    transfers: list[ValueTransfer] = []
    last = schedule.num_stages - 1
    kept: list[int] = []
    sent = -1

    def value(stage: int, label: str, size: int = 0) -> int:
        values.append(Value(len(values), stage, size, True, f"{label}{stage}"))
        return len(values) - 1

    def piece(kind: PieceKind, stage: int, reads: list[int], writes: list[int]) -> None:
        pieces.append(Piece(f"{kind}{stage}", stage, kind, tuple(reads), tuple(writes)))

    for stage in range(schedule.num_stages):
        arrives = [value(stage, "received")] if stage > 0 else []
        leaves = [value(stage, "activation")] if stage < last else []
        kept.append(value(stage, "kept", 1))
        piece("F", stage, arrives, [*leaves, kept[stage]])
        transfers += [ValueTransfer(sent, target) for target in arrives]
        sent = leaves[0] if leaves else -1
    if schedule.forward_only:
        return values, pieces, transfers
    for stage in reversed(range(schedule.num_stages)):
        arrives = [value(stage, "arrived")] if stage < last else []
        leaves = [value(stage, "gradient")] if stage > 0 else []
        rest = [value(stage, "rest")] if schedule.splits_backward else []
        piece("B", stage, [kept[stage], *arrives], [*leaves, *rest])
        if rest:
            piece("W", stage, rest, [])
        transfers += [ValueTransfer(sent, target) for target in arrives]
        sent = leaves[0] if leaves else -1
    return values, pieces, transfers
