"""The parts of a pipelined plan that other plans lack, for a terminal: stages, routes, timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from autopar.base.errors import AutoparError
from autopar.base.plan_records import PipelinePlan
from autopar.base.units import format_bytes, format_seconds
from autopar.plans.plan import Plan
from autopar.plans.stage_summaries import format_layers, group_transfers, stage_contents
from autopar.report.task_spans import TASKS, task_spans

if TYPE_CHECKING:
    from autopar.passes.pipeline.timeline import Timeline

_MAX_NAMES = 3


def table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table as all of a plan's tables look; `right` names columns of numbers."""
    made = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    for column in columns:
        side = "right" if column in right else "left"
        made.add_column(column, justify=side, overflow="fold")  # type: ignore[arg-type]
    return made


def stages_table(plan: Plan, styles: Mapping[str, str]) -> Table:
    """A row for each stage: what it holds, on which mesh, how long it takes, how full it gets.

    Args:
      plan: one with a pipeline.
      styles: of the names of mesh axes.
    """
    assert plan.pipeline is not None
    seconds = task_seconds(plan.pipeline)
    kinds = [kind for kind in TASKS if kind in seconds and kind in "FBW"]
    headings = [TASKS[kind].short_name for kind in kinds]
    right = ("stage", *headings, "peak")
    made = table("Stages", "stage", "layers", "state", "mesh", *headings, "peak", right=right)
    made.collapse_padding = True
    for column in made.columns:
        column.no_wrap = column.header != "state"
    contents = stage_contents(plan)
    for number, stage in enumerate(plan.stages):
        mesh = Text.assemble((f"{stage.mesh} ", "dim"))
        for name, size in zip(stage.axis_names, stage.logical_mesh, strict=True):
            mesh.append(" ").append(f"{name}={size}", styles[name])
        names = list(contents[number][:_MAX_NAMES])
        if more := len(contents[number]) - len(names):
            names.append(f"{more} more")
        made.add_row(
            str(number),
            format_layers(stage.layers),
            ", ".join(names),
            mesh,
            *(format_seconds(seconds[kind].get(number, 0.0)) for kind in kinds),
            format_bytes(stage.peak_bytes_per_device),
        )
    tasks = f"{', '.join(headings)}: of one microbatch; " if kinds else ""
    made.caption = f"{tasks}peak: of a device's memory\n"
    made.caption_justify = "left"
    return made


def task_seconds(pipeline: PipelinePlan) -> dict[str, dict[int, float]]:
    """By the kind of task and the stage, the seconds that are expected of a task."""
    found: dict[str, dict[int, float]] = {}
    for piece in pipeline.model.pieces if pipeline.model else ():
        of_stage = found.setdefault(piece.when, {})
        parts = (piece.compute_seconds, piece.latency_seconds)
        total = sum((*parts, piece.activation_seconds, piece.other_seconds))
        of_stage[piece.stage] = of_stage.get(piece.stage, 0.0) + total
    return found


def transfers_table(plan: Plan) -> RenderableType:
    """A row for each kind of value that crosses between stages."""
    assert plan.pipeline is not None
    groups = group_transfers(plan.pipeline.transfers, len(plan.stages))
    if not groups:
        return Text("\nNothing is sent between stages.", "bold")
    right = ("a step", "bytes")
    made = table("Sent between stages", "from and to", "what", "value", *right, right=right)
    for previous, group in zip((None, *groups), groups, strict=False):
        if previous is not None and previous.per_microbatch != group.per_microbatch:
            made.add_section()
        made.add_row(
            group.routes, group.what, group.value, f"{group.count} x", format_bytes(group.bytes)
        )
    return made


def simulated(plan: Plan) -> Timeline | str:
    """The timeline of a pipelined plan's step, or why the plan does not give it."""
    try:
        return plan.simulate().timeline
    except AutoparError as error:
        return str(error).splitlines()[0]


@dataclass(frozen=True)
class TimelineRows:
    """A timeline as wide as the terminal: a row for each mesh, microbatches by number."""

    timeline: Timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        timeline = self.timeline
        labels = [f"  mesh {mesh}  " for mesh in range(len(timeline.busy))]
        margin, end = max(map(len, labels)), "  100% idle"
        width = max(options.max_width - margin - len(end), 20)
        yield Text("A step, simulated", "bold")
        yield Text()
        for mesh, label in enumerate(labels):
            idle = 1 - timeline.busy[mesh] / (timeline.step_seconds or 1.0)
            yield Text.assemble(
                (label.ljust(margin), "dim"),
                self._row(mesh, width),
                (f"  {idle:4.0%} idle", "dim"),
            )
        seconds = format_seconds(timeline.step_seconds)
        yield Text(" " * margin + "0" + seconds.rjust(width - 1), "dim")
        yield self._legend(margin)
        yield Text()

    def _row(self, mesh: int, width: int) -> Text:
        """Cells of equal time, each given to the task that fills most of it."""
        scale = width / (self.timeline.step_seconds or 1.0)
        start = min((event.start for event in self.timeline.events), default=0.0)
        row = Text("·" * width)
        row.stylize("bright_black")
        cells = list(row.plain)
        for span in task_spans(self.timeline):
            if span.mesh != mesh:
                continue
            left = round((span.start - start) * scale)
            right = min(round((span.end - start) * scale), width)
            task = TASKS[span.kind]
            number = "" if span.microbatch is None else str(span.microbatch)
            if len(number) > right - left:
                number = ""
            cells[left:right] = number.ljust(right - left, task.fill)
            row.stylize(task.fill_style, left, right)
            row.stylize(task.style, left, left + len(number))
        row.plain = "".join(cells)
        return row

    def _legend(self, margin: int) -> Text:
        legend = Text(" " * margin)
        kinds = {span.kind for span in task_spans(self.timeline)}
        for kind, task in TASKS.items():
            if kind in kinds:
                legend.append(task.fill * 2, task.fill_style).append(
                    f" {task.short_name}   ", "dim"
                )
        return legend.append("·· waiting", "dim")
