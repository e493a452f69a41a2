"""The tasks of a timeline as every picture of it shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.report.palette import TASK_COLORS

if TYPE_CHECKING:
    from autopar.passes.pipeline.timeline import Timeline


@dataclass(frozen=True)
class TaskLook:
    """How one kind of task looks: `color` in pictures, the others in a terminal.

    `fill` is what fills it, so that it is seen without colours too; `style` is that of text on it.
    """

    name: str
    color: str
    style: str
    fill: str
    fill_style: str

    @property
    def short_name(self) -> str:
        """One word, for the heading of a column."""
        return "weights" if self.name == "weight gradients" else self.name


TASKS = {
    "F": TaskLook("forward", TASK_COLORS[0], "bold white on blue", "━", "blue on blue"),
    "B": TaskLook("backward", TASK_COLORS[1], "bold black on yellow", "═", "yellow on yellow"),
    "W": TaskLook("weight gradients", TASK_COLORS[2], "bold black on green", "─", "green on green"),
    "once": TaskLook("once a step", TASK_COLORS[3], "black on magenta", "▒", "magenta on magenta"),
    "move": TaskLook("moving data", TASK_COLORS[4], "black on cyan", "░", "cyan on cyan"),
}
"""By kind, in the order of legends. "once": prologue and epilogue; "move": what is no task."""


@dataclass(frozen=True)
class Span:
    """A task or another instruction of one mesh from `start` to `end`, in seconds."""

    mesh: int
    stage: int
    kind: str
    microbatch: int | None
    start: float
    end: float


def shown_tasks(spans: Iterable[Span]) -> list[tuple[TaskLook, str]]:
    """What a legend has of a timeline: how tasks look, and what is to be said of them beside.

    The last stage may run a microbatch forward and backward in one program.
    """
    stages: dict[str, set[int]] = {}
    for span in spans:
        stages.setdefault(span.kind, set()).add(span.stage)
    both = stages.get("B", set()) - stages.get("F", set())
    notes = {"B": " (last stage: both)"} if both and "F" in stages else {}
    return [(look, notes.get(kind, "")) for kind, look in TASKS.items() if kind in stages]


def task_spans(timeline: Timeline) -> list[Span]:
    """What occupies the meshes of a timeline, in the order of its events."""
    from autopar.passes.pipeline.instructions import Run

    spans = []
    for event in timeline.events:
        instruction = timeline.instruction(event)
        if event.seconds <= 0:
            continue
        if isinstance(instruction, Run):
            kind = str(instruction.kind) if instruction.kind in TASKS else "once"
            stage, microbatch = instruction.stage, instruction.microbatch
        else:
            kind, stage, microbatch = "move", -1, None
        spans.append(Span(event.mesh, stage, kind, microbatch, event.start, event.end))
    return spans
