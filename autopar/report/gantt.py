"""A timeline as a picture: a row for each mesh, and the memory of its devices below."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from autopar.base.errors import OptionError
from autopar.base.units import format_bytes, format_seconds
from autopar.passes.pipeline.timeline import Timeline
from autopar.report.palette import INK, MESHES, QUIET, WAITING
from autopar.report.summaries import format_stages
from autopar.report.task_spans import TASKS, Span, shown_tasks, task_spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from autopar.report.picture import Picture
WIDTH, LEFT, RIGHT = 16.0, 1.0, 0.85  # of a figure and its margins, in inches
_MEMORY_HEIGHT = 1.3
_MAX_HIGH_ROWS = 8


class HasTimeline(Protocol):
    """A `Profile` or a `Simulation`."""

    @property
    def timeline(self) -> Timeline:
        """When every instruction ran."""


def plot_timeline(timeline: Timeline | HasTimeline, title: str = "") -> Picture:
    """A picture of when every mesh does what, and of the bytes that are alive on it.

    Args:
      timeline: a simulated one or a measured one: what `plan.simulate()` or `step.profile(...)`
        returns, or its `timeline`.
      title: above it; by default the schedule and how long the step takes.

    Raises:
      OptionError: it has no timeline.
    """
    from autopar.report.picture import Picture

    timeline = timeline_of(timeline)
    rows, across = rows_height(timeline), WIDTH - LEFT - RIGHT
    figure = Picture(figsize=(WIDTH, rows + _MEMORY_HEIGHT + 1.6), facecolor="white")
    title = title or f"{timeline.program.schedule.name}: {step_caption(timeline)}"
    draw_timeline(place(figure, LEFT, 0.5, across, rows), timeline, title)
    draw_memory(place(figure, LEFT, 0.5 + rows + 0.8, across, _MEMORY_HEIGHT), timeline)
    return figure


def save_timeline(
    timeline: Timeline | HasTimeline, path: str | os.PathLike[str], title: str = ""
) -> None:
    """Writes the picture of a timeline; the file's ending (`.png`, `.svg`) is its format."""
    plot_timeline(timeline, title).save(path)


def timeline_of(given: Timeline | HasTimeline) -> Timeline:
    """A timeline, or that of what has one.

    Raises:
      OptionError: it has none.
    """
    found = getattr(given, "timeline", given)
    if not isinstance(found, Timeline):
        raise OptionError(
            f"{given!r} has no timeline.",
            where="plot_timeline",
            hint="pass what plan.simulate() or step.profile(...) returns.",
        )
    return found


def rows_height(timeline: Timeline) -> float:
    """Inches for the rows of the meshes."""
    number = len(timeline.busy)
    return number * (0.42 if number <= _MAX_HIGH_ROWS else 0.26)


def step_caption(timeline: Timeline) -> str:
    """`609 ms a step, 28% bubble`."""
    return f"{format_seconds(timeline.step_seconds)} a step, {timeline.bubble_fraction:.0%} bubble"


def place(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes whose upper left corner is so many inches from that of the figure."""
    whole = figure.get_figheight()
    return figure.add_axes(
        (left / WIDTH, 1 - (top + height) / whole, width / WIDTH, height / whole)
    )


def draw_timeline(axes: Axes, timeline: Timeline, title: str) -> None:
    """Draws the rows of the meshes, with a title and a legend above them."""
    start, seconds = _start(timeline), timeline.step_seconds or 1.0
    spans = task_spans(timeline)
    num_meshes = len(timeline.busy)
    inch = seconds / (axes.get_position().width * WIDTH)
    for mesh in range(num_meshes):
        axes.broken_barh([(0, seconds)], (mesh - 0.41, 0.82), facecolor=WAITING)
        here = [span for span in spans if span.mesh == mesh]
        colors = [_color(span, timeline) for span in here]
        bars = [(span.start - start, span.end - span.start) for span in here]
        style: dict[str, Any] = {"facecolors": colors, "edgecolor": "white", "linewidth": 0.6}
        axes.broken_barh(bars, (mesh - 0.41, 0.82), **style)
        for span, color in zip(here, colors, strict=True):
            number = "" if span.microbatch is None else str(span.microbatch)
            if number and span.end - span.start > (0.085 * len(number) + 0.03) * inch:
                ink, middle = "white" if _is_dark(color) else INK, (span.start + span.end) / 2
                style = {"ha": "center", "va": "center_baseline", "fontsize": 8.0, "color": ink}
                axes.text(middle - start, mesh, number, **style)
        idle = f"{1 - timeline.busy[mesh] / seconds:.0%} idle"
        axes.text(seconds + 0.1 * inch, mesh, idle, va="center", fontsize=9, color=QUIET)
    axes.set_yticks(range(num_meshes), _labels(timeline), fontsize=9.5, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, seconds)
    axes.set_ylim(num_meshes - 0.5, -0.5)
    axes.spines[:].set_visible(False)
    _draw_ticks(axes, seconds)
    _draw_tasks(axes, spans, title)


def draw_memory(axes: Axes, timeline: Timeline) -> None:
    """Draws the bytes that are alive on each mesh's devices, over the same time."""
    start, seconds = _start(timeline), timeline.step_seconds or 1.0
    largest = max(timeline.peak_bytes, default=0)
    number = len(timeline.busy)
    for mesh, peak in enumerate(timeline.peak_bytes):
        label = str(mesh) if number > _MAX_HIGH_ROWS else f"mesh {mesh}"
        if number <= _MAX_HIGH_ROWS // 2:
            label += f": {format_bytes(peak)}"
        times, sizes = zip(*timeline.bytes_over_time(mesh), strict=True)
        x, y = [*(time - start for time in times), seconds], [*sizes, sizes[-1]]
        axes.step(x, y, where="post", color=MESHES[mesh % len(MESHES)], lw=1.3, label=label)
    axes.set_xlim(0, seconds)
    axes.set_ylim(0, (largest or 1) * 1.06)
    axes.set_yticks([0, largest / 2, largest], ["0", *map(format_bytes, (largest / 2, largest))])
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=QUIET)
    axes.grid(axis="y", color=WAITING)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    _draw_heading(axes, "Memory of a device", ncols=16)


def _start(timeline: Timeline) -> float:
    return min((event.start for event in timeline.events), default=0.0)


def _labels(timeline: Timeline) -> list[str]:
    """Names of the meshes, with their stages where there are several on one."""
    schedule = timeline.program.schedule
    meshes = range(len(timeline.busy))
    if schedule.num_stages == schedule.num_meshes:
        return [f"mesh {mesh}" for mesh in meshes]
    few = schedule.num_stages == 2 * schedule.num_meshes
    between = ": " if len(meshes) > _MAX_HIGH_ROWS else "\nstages " if few else "\n"
    stages = [format_stages(schedule.stages_of(mesh)) for mesh in meshes]
    return [f"mesh {mesh}{between}{stages[mesh]}" for mesh in meshes]


def _color(span: Span, timeline: Timeline) -> tuple[float, float, float]:
    """That of the kind of task, paler for the later stages (chunks) of one mesh."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(TASKS[span.kind].color)
    here = timeline.program.schedule.stages_of(span.mesh)
    pale = 0.55 * here.index(span.stage) / (len(here) - 1) if span.stage in here[1:] else 0.0
    return (red + (1 - red) * pale, green + (1 - green) * pale, blue + (1 - blue) * pale)


def _is_dark(color: Sequence[float]) -> bool:
    red, green, blue = color
    return 0.3 * red + 0.59 * green + 0.11 * blue < 0.6


def _draw_ticks(axes: Axes, seconds: float) -> None:
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]).tick_values(0, seconds)
    places = [tick for tick in found if 0 <= tick <= seconds]
    axes.set_xticks(places, [format_seconds(tick) if tick else "0" for tick in places])
    axes.tick_params(axis="x", length=3, labelsize=9, color=QUIET, labelcolor=QUIET)


def _draw_heading(axes: Axes, title: str, **legend: Any) -> None:
    """A title at the left, and a legend at the right of it."""
    axes.set_title(title, loc="left", fontsize=12.5, weight="bold", color=INK, pad=8)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.02),
        frameon=False,
        fontsize=9.5,
        handlelength=1.1,
        columnspacing=1.4,
        borderaxespad=0.1,
        labelcolor=INK,
        **legend,
    )


def _draw_tasks(axes: Axes, spans: Sequence[Span], title: str) -> None:
    from matplotlib.patches import Patch

    shown = shown_tasks(spans)
    handles = [Patch(facecolor=task.color, label=f"{task.name}{note}") for task, note in shown]
    handles.append(Patch(facecolor=WAITING, label="waiting"))
    _draw_heading(axes, title, handles=handles, ncols=len(handles))
