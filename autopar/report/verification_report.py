"""`Verification`: what a compiler made of a plan, as tables, to save and to read."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from autopar.base.compiled_records import ProgramFinding, ProgramMemory
from autopar.base.errors import PlanMismatchError
from autopar.base.new_files import place_for
from autopar.base.records import dump_json
from autopar.base.units import format_bytes, format_seconds
from autopar.base.user_code import shortens
from autopar.base.verification_records import CollectiveCheck, PieceCheck, VerificationRecord
from autopar.report.rich_parts import add_row, as_text, captioned, new_table

_WORDS = 600  # letters of a compiler's words in a report


class Verification(VerificationRecord):
    """A plan held against the compiler of a target; `print` shows it.

    Its fields are those of `VerificationRecord`: `stages` with the memory planned and compiled,
    `pieces` with what the compiler says of each, `collectives`, and `verdict` in a few words.
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as JSON."""
        place_for(path).write_text(dump_json(self.to_dict()), encoding="utf-8")

    @classmethod
    @shortens
    def load(cls, path: str | os.PathLike[str]) -> Verification:
        """Reads a file that `save` wrote.

        Raises:
          PlanMismatchError: the file is no verification.
          OSError: the file cannot be read.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise PlanMismatchError(
                "The file is not a verification.",
                where=os.fspath(path),
                why=f"{error}.",
                hint="give a file that Verification.save wrote.",
            ) from None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"{self.plan}\non {self.target}, by {self.compiler.splitlines()[0]}")
        yield _memory_table(self)
        yield _piece_table(self)
        yield from _buffer_tables(self)
        if self.collectives:
            yield _collective_table(self)
        if self.times:
            yield _time_table(self)
        for x in self.pieces:
            for change in x.finding.changes if x.finding and not x.same_as else ():
                yield Text(f"{x.piece}: {change}")
        if self.plain:
            yield Text(_told_of_plain(self, self.plain))
        for piece, words in self.failures.items():
            yield Text(f"{piece} failed: {words[:_WORDS]}\n", style="red")
        for piece, lines in self.warnings.items():
            for line in lines:
                yield Text(f"{piece}: {line[:_WORDS]}\n")
        if self.note:
            yield Text(self.note)
        yield Text(f"Verdict: {self.verdict}.", style="bold" if self.holds else "bold red")

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"<Verification on {self.target}: {self.verdict}>"


def _told_of_plain(made: VerificationRecord, plain: ProgramFinding) -> str:
    """The plain function beside the plan's program."""
    name = "Plain jax.jit with the plan's shardings of arguments and results"
    if plain.memory is None:
        return f"{name} was not compiled: {plain.failure[:_WORDS]}"
    own = made.pieces[0].finding
    sent = f"sends {format_bytes(plain.traffic)} a step"
    told = f"{name} needs {format_bytes(plain.memory.total)} of a device and {sent}"
    if own is None or own.memory is None:
        return f"{told}."
    return f"{told}; the plan {format_bytes(own.memory.total)} and {format_bytes(own.traffic)}."


def _size(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)


def _memory_table(made: VerificationRecord) -> Any:
    right = ("mesh", "planned", "compiled", "planned / compiled", "of the device")
    table = new_table("Memory of a device", "stage", *right, "verdict", right=right)
    for stage in made.stages:
        limit, found = stage.limit_bytes, stage.compiled_bytes
        add_row(
            table,
            str(stage.stage),
            str(stage.mesh),
            _size(stage.planned_bytes),
            _size(found),
            "-" if stage.ratio is None else f"{stage.ratio:.2f}",
            "-" if not limit or found is None else f"{found / limit:.0%}",
            stage.verdict,
            style="" if stage.verdict == "holds" else "red",
        )
    return table


def _piece_table(made: VerificationRecord) -> Any:
    """Two rows of each piece that is compiled: as it was planned, and what became of it."""
    right = ("runs", "arguments", "results", "aliased", "inside", "together", "compiled in")
    table = new_table("What the compiler made of pieces", "piece", *right, "", right=right)
    for x in made.pieces:
        if x.same_as:
            add_row(table, x.piece, str(x.runs), *["-"] * 6, f"same as {x.same_as}")
            continue
        add_row(table, f"{x.piece} planned", str(x.runs), *_by_kind(x.planned), "", "")
        name = f"{x.piece} compiled"
        memory = None if x.finding is None else x.finding.memory
        if x.finding is None or memory is None:
            said = "failed" if x.finding else "missing"
            add_row(table, name, "", *["-"] * 6, said)
            continue
        seconds = "" if x.known else format_seconds(x.finding.seconds)
        said = "known before" if x.known else ""
        add_row(table, name, "", *_by_kind(memory), seconds, said)
    return table


def _by_kind(memory: ProgramMemory) -> list[str]:
    kinds = memory.arguments, memory.outputs, memory.aliased, memory.temporaries, memory.total
    return [format_bytes(size) for size in kinds]


def _buffer_tables(made: VerificationRecord) -> Iterator[Any]:
    """What there is at the worst moment: of the largest piece, and as planned."""
    found = [x for x in made.pieces if x.finding and x.finding.buffers]
    if found:
        largest = max(found, key=_weight)
        title = f"Largest temporaries of {largest.piece} at its worst moment"
        right = ("together", "number")
        table = new_table(title, *right, "buffer", "made by", "line", right=right)
        assert largest.finding is not None
        for x in largest.finding.buffers:
            size = format_bytes(x.bytes * x.count)
            add_row(table, size, str(x.count), x.shape, x.operation, x.source)
        yield table
    for stage in made.stages:
        if found and stage.planned_buffers:
            right = ("together", "number")
            table = new_table("Largest values planned to be there", *right, "value", right=right)
            for planned in stage.planned_buffers[:12]:
                size = format_bytes(planned.bytes * planned.count)
                add_row(table, size, str(planned.count), planned.label)
            yield table


def _time_table(made: VerificationRecord) -> Any:
    right = ("kernels", "planned", "compiler's", "planned / compiler's")
    table = new_table("Time of a step by two models", "kind", *right, "", right=right)
    for x in made.times:
        add_row(
            table,
            x.kind,
            str(x.kernels or "-"),
            format_seconds(x.planned_seconds),
            format_seconds(x.compiler_seconds),
            "-" if x.ratio is None else f"{x.ratio:.2f}",
            x.verdict,
            style="yellow" if x.verdict else "",
        )
    told = "Nothing was run. The compiler's: its estimates of what it made"
    if made.target.startswith("tpu:"):
        told += ", without products and what is fused to them, a loop's trips once"
    return captioned(table, f"{told}.")


def _weight(piece: PieceCheck) -> tuple[bool, int]:
    """What failed and left buffers did not fit."""
    finding = piece.finding
    assert finding is not None
    return bool(finding.failure), finding.memory.total if finding.memory else 0


def _collective_table(made: VerificationRecord) -> Any:
    right = ("times", "planned", "compiled")
    table = new_table("Collectives", "stage", "task", "kind", "axes", *right, "", right=right)
    agreeing: defaultdict[tuple[int, str], list[CollectiveCheck]] = defaultdict(list)
    for x in made.collectives:
        agreeing[x.stage, x.task].append(x)
    for (stage, task), checks in agreeing.items():
        for x in checks:
            add_row(
                table,
                str(stage),
                task,
                x.kind,
                " ".join(x.axes),
                str(x.times),
                _size(x.planned_bytes),
                _size(x.compiled_bytes),
                x.verdict,
                style="" if x.agrees else "red",
            )
    told = "Bytes of one run of all of a kind; times a step."
    if made.changed_by:
        told += " Changed: the compiler was given what was planned, and its pass made other ones."
    return captioned(table, told)
