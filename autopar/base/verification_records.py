"""What a plan promised beside what a compiler made of it, as plain data."""

from __future__ import annotations

import dataclasses

from autopar.base.compiled_records import ProgramFinding, ProgramMemory, sent_bytes
from autopar.base.records import Record

TOLERANCE = 0.05
"""By what share a device may need more than planned before a verdict says so."""

SMALL_BYTES = 8 << 20
"""What nobody counts: compilers round up, and a TPU's has some megabytes of its own."""


@dataclasses.dataclass(frozen=True)
class PieceCheck(Record):
    """One compiled piece of a plan ("step": a plan of one piece).

    Args:
      piece: its name: "F0" is the forward task of stage 0; one that is compiled once more because
        it donates other values has a number behind it.
      stage: that runs it.
      task: "prologue", "F", "B", "W" or "epilogue".
      runs: how often in a step.
      planned: bytes per device that it was planned to take, to return, to return in the memory of
        what it takes, and to need beside these.
      same_as: another piece that is the same program, and was compiled for both; "" else.
      known: its finding was kept from an earlier verification.
      finding: what the compiler made of it; None: it was not compiled (interrupted).
    """

    piece: str
    stage: int
    task: str
    runs: int
    planned: ProgramMemory
    same_as: str = ""
    known: bool = False
    finding: ProgramFinding | None = None

    @property
    def failure(self) -> str:
        """Why there is nothing of it; "" where there is."""
        if self.finding is None:
            return "not compiled"
        return self.finding.failure


@dataclasses.dataclass(frozen=True)
class PlannedBuffer(Record):
    """So many values of so many bytes each, in words."""

    bytes: int
    label: str
    count: int


@dataclasses.dataclass(frozen=True)
class StageCheck(Record):
    """The memory of one device of a stage at its worst moment.

    `compiled_bytes` are None where a piece of its mesh was not compiled; `limit_bytes` are what the
    target's device has, None where nobody knows. `planned_buffers` are the largest values that were
    planned to be there, in words; of a pipeline's stages none.
    """

    stage: int
    mesh: int
    planned_bytes: int
    compiled_bytes: int | None
    limit_bytes: int | None
    planned_buffers: tuple[PlannedBuffer, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Planned over compiled."""
        return self.planned_bytes / self.compiled_bytes if self.compiled_bytes else None

    @property
    def verdict(self) -> str:
        """In a few words."""
        if self.compiled_bytes is None:
            return "not compiled"
        if self.limit_bytes is not None and self.compiled_bytes > self.limit_bytes:
            return "does not fit"
        if self.compiled_bytes - self.planned_bytes > max(
            TOLERANCE * self.planned_bytes, SMALL_BYTES
        ):
            return "needs more than planned"
        return "holds"


@dataclasses.dataclass(frozen=True)
class CollectiveCheck(Record):
    """Collectives of one kind over the same axes, in one kind of task of a stage.

    Bytes are those of one run of all of them; they run `times` in a step, more than once in a loop
    over layers or microbatches, or for every microbatch of a pipeline. `sources` are the lines that
    the plan has for them, and `changed_by` the compiler's passes that account for every byte that
    is not as planned; none where something remains that no pass explains.
    """

    stage: int
    task: str
    kind: str
    axes: tuple[str, ...]
    times: int
    planned_bytes: int
    compiled_bytes: int
    sources: tuple[str, ...] = ()
    changed_by: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the compiler kept what was planned, or its passes say what they changed."""
        return self.planned_bytes == self.compiled_bytes or bool(self.changed_by)

    @property
    def more_traffic(self) -> int:
        """How many bytes more than planned a step sends by it."""
        return sent_bytes(self.kind, self.compiled_bytes - self.planned_bytes, self.times)

    @property
    def planned_traffic(self) -> int:
        """The bytes that a step was planned to send by it."""
        return sent_bytes(self.kind, self.planned_bytes, self.times)

    @property
    def verdict(self) -> str:
        """In a few words; "" where all is as planned."""
        if self.planned_bytes == self.compiled_bytes:
            return ""
        if self.changed_by:
            return f"changed by {', '.join(self.changed_by)}"
        return f"differs {' '.join(self.sources[:3])}".strip()


FAR_APART = 1.5
"""From what ratio on two estimates of one time are said to differ."""


@dataclasses.dataclass(frozen=True)
class TimeCheck(Record):
    """What a step's kernels of one kind take, as planned and as the compiler estimates it.

    Nothing was run: these are two models. `unknown` of the `kernels` have no estimate of the
    compiler's; 0 kernels: it has one number for all.
    """

    kind: str
    planned_seconds: float
    compiler_seconds: float
    kernels: int = 0
    unknown: int = 0

    @property
    def ratio(self) -> float | None:
        """Planned over the compiler's; None where it knows less than nine of ten kernels."""
        if 10 * self.unknown > self.kernels or not self.compiler_seconds:
            return None
        return self.planned_seconds / self.compiler_seconds

    @property
    def verdict(self) -> str:
        """In a few words; "" where they are not far apart."""
        if self.ratio is None:
            return f"no estimate of {self.unknown}"
        if 1 / FAR_APART <= self.ratio <= FAR_APART:
            return ""
        if self.ratio > 1:
            return f"planned {self.ratio:.1f} times as long"
        return f"planned {1 / self.ratio:.1f} times as short" if self.ratio else "not planned"


@dataclasses.dataclass(frozen=True)
class VerificationRecord(Record):
    """The fields of a `Verification`, and its JSON form.

    Args:
      target: what it was compiled for.
      compiler: what that target's compiler calls itself.
      autopar_version, jax_version: that compiled.
      program_hash, decisions_hash: of the plan.
      plan: the plan in one line.
      pieces: every compiled piece.
      stages: the memory of every stage.
      collectives: those that are planned or compiled, by stage and task.
      interrupted: Ctrl-C came before everything was compiled.
      times: of plans for one mesh, what kernels take, as planned and as the compiler estimates.
      planned_for: the devices that the plan is for, if their kind is another than the target's: the
        planned memory is then by the rules of the target's compiler.
      plain: what the compiler made of the plain function, partitioned by XLA with the plan's
        shardings of arguments and results, where that was asked for; it is no part of the verdict.
    """

    target: str
    compiler: str
    autopar_version: str
    jax_version: str
    program_hash: str
    decisions_hash: str
    plan: str
    pieces: tuple[PieceCheck, ...]
    stages: tuple[StageCheck, ...]
    collectives: tuple[CollectiveCheck, ...]
    interrupted: bool = False
    times: tuple[TimeCheck, ...] = ()
    planned_for: str = ""
    plain: ProgramFinding | None = None

    @property
    def failures(self) -> dict[str, str]:
        """The compiler's words by piece, of those that failed."""
        return {x.piece: x.failure for x in self.pieces if x.finding is not None and x.failure}

    @property
    def warnings(self) -> dict[str, tuple[str, ...]]:
        """What JAX and the compiler said, by piece."""
        told = {x.piece: x.finding.warnings for x in self.pieces if x.finding is not None}
        return {piece: lines for piece, lines in told.items() if lines}

    @property
    def differences(self) -> tuple[CollectiveCheck, ...]:
        """The collectives that are not as planned, and no pass of the compiler says why."""
        return tuple(x for x in self.collectives if not x.agrees)

    @property
    def more_traffic(self) -> float:
        """What the compiler's passes send beside what was planned, as a share of that."""
        planned = sum(x.planned_traffic for x in self.collectives)
        more = sum(x.more_traffic for x in self.collectives if x.changed_by)
        return more / planned if planned else float(more > SMALL_BYTES)

    @property
    def changed_by(self) -> tuple[str, ...]:
        """The compiler's passes that changed collectives."""
        return tuple(dict.fromkeys(name for x in self.collectives for name in x.changed_by))

    @property
    def note(self) -> str:
        """What could not be as on the target's own machines; "" where all is."""
        told = []
        if self.planned_for:
            told.append(
                f"The plan is for {self.planned_for}: planned memory is here by the rules of the "
                "target's compiler."
            )
        if self.target.startswith("gpu:"):
            told.append(
                "No GPU was there to tune kernels on: they are those that XLA takes by default."
            )
        return " ".join(told)

    @property
    def compile_seconds(self) -> float:
        """Of all that was compiled now, one after the other."""
        return sum(
            x.finding.seconds for x in self.pieces if x.finding and not x.known and not x.same_as
        )

    @property
    def verdict(self) -> str:
        """In a few words: "holds", or what does not."""
        wrong = [x.verdict for x in self.stages if x.verdict not in ("holds", "not compiled")]
        if self.failures:
            wrong.append("the compiler failed")
        if self.interrupted:
            wrong.append("interrupted")
        if self.differences:
            wrong.append("other collectives than planned")
        if self.more_traffic > TOLERANCE:
            passes = ", ".join(self.changed_by)
            wrong.append(f"collectives send {self.more_traffic:.0%} more, by {passes}")
        return ", ".join(dict.fromkeys(wrong)) or "holds"

    @property
    def holds(self) -> bool:
        """Whether the compiler keeps every promise of the plan."""
        return self.verdict == "holds"
