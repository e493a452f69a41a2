"""A simulated step as rows of text: when every mesh does what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from autopar.base.units import format_seconds
from autopar.passes.pipeline.timeline import Timeline
from autopar.report.task_spans import TASKS, shown_tasks, task_spans


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
                (label.ljust(margin), "dim"), self._row(mesh, width), (f"  {idle:4.0%} idle", "dim")
            )
        seconds = format_seconds(timeline.step_seconds)
        yield Text(" " * margin + "0" + seconds.rjust(width - 1), "dim")
        yield from self._legend(margin, options.max_width)
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

    def _legend(self, margin: int, width: int) -> Iterator[Text]:
        parts = [
            Text.assemble((task.fill * 2, task.fill_style), (f" {task.short_name}{note}   ", "dim"))
            for task, note in shown_tasks(task_spans(self.timeline))
        ]
        line = Text(" " * margin)
        for part in [*parts, Text("·· waiting", "dim")]:
            if len(line) + len(part.plain.rstrip()) > width:
                yield line
                line = Text(" " * margin)
            line.append_text(part)
        yield line
