"""A plan as a picture: how tensors are cut, what fills the memory, what moves, what was tried.

Several stages are shown first, with the simulated step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from autopar.base.plan_records import PlanRecord
from autopar.base.units import format_bytes, format_mesh, format_microbatches, format_seconds
from autopar.passes.pipeline.timeline import Timeline
from autopar.report import bars, drawn_steps, gantt, summaries
from autopar.report.gantt import LEFT, RIGHT, WIDTH, place
from autopar.report.palette import INK, QUIET
from autopar.report.stage_cards import cards_height, draw_cards
from autopar.report.tensor_tiles import draw_tiles, tiles_height

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from autopar.report.picture import Picture

# Inches.
_EDGE, _TITLE, _MEMORY = 0.4, 1.15, 1.2
_ROW_OF_TILES, _LEGEND, _BAR = 1.7, 0.4, 0.385
_TILES_WIDTH, _BARS_LEFT, _BARS_WIDTH = 9.75, 12.1, 3.55
_LABEL_WIDTH, _LETTERS = 1.9, 26  # of what is on the left of bars


class _Panel(NamedTuple):
    """Bars under a title: what draws them, with inches of them, above them and below them."""

    draw: Callable[[Axes], None]
    height: float
    above: float = 0.4
    below: float = 0.4

    @property
    def total(self) -> float:
        return self.above + self.height + self.below


class _Details(NamedTuple):
    """Tiles, bars on their right, and what was considered, which stands below either of them."""

    plan: PlanRecord
    bars: list[_Panel]
    considered: list[_Panel]

    @property
    def columns(self) -> tuple[float, float]:
        """Inches of the tiles and of the bars, each with its title or legend."""
        tiles = _LEGEND + tiles_height(self.plan) * _ROW_OF_TILES
        return tiles, sum(panel.total for panel in self.bars)

    @property
    def is_below_tiles(self) -> bool:
        """Whether less stays empty if what was considered stands below the tiles."""
        tiles, side = self.columns
        more = sum(panel.total for panel in self.considered)
        return _empty(tiles + more, side) < _empty(tiles, side + more)

    @property
    def height(self) -> float:
        tiles, side = self.columns
        more = sum(panel.total for panel in self.considered)
        return max(tiles + more, side) if self.is_below_tiles else max(tiles, side + more)


def _empty(tiles: float, side: float) -> float:
    """Square inches that stay empty below columns of these heights."""
    height, across = max(tiles, side), WIDTH - 2 * _EDGE
    return _TILES_WIDTH * (height - tiles) + (across - _TILES_WIDTH) * (height - side)


def plot_plan(plan: PlanRecord) -> Picture:
    """A picture of a plan, for `figure.savefig` or a notebook.

    A pipelined plan shows its stages, what crosses between them and the simulated step first.

    On the left are the parameters, other state and the batch as tiles, cut as the plan cuts them,
    with the part that device 0 holds in a darker colour. On the right are memory and communication.
    The alternatives that were considered are where there is more room.
    """
    return _plot_one_mesh(plan) if len(plan.stages) == 1 else _plot_stages(plan)


def save_plot(plan: PlanRecord, path: str | os.PathLike[str]) -> None:
    """Writes the picture of a plan; the file's ending (`.png`, `.svg`, `.pdf`) is its format."""
    plot_plan(plan).save(path)


def _plot_one_mesh(plan: PlanRecord) -> Picture:
    groups = summaries.group_collectives(plan.stages)
    names = 0.2 * bars.memory_key_rows(plan)
    details = _details(
        plan,
        _Panel(lambda axes: bars.draw_memory_parts(axes, plan), 0.5, above=0.55, below=names + 0.3),
        _bars_panel(
            lambda axes: bars.draw_communication(axes, groups, "Communication in a step"), groups
        ),
    )
    figure = _figure(_TITLE + details.height + 0.1)
    _draw_title(figure, plan)
    _draw_details(figure, details, _TITLE)
    return figure


def _plot_stages(plan: PlanRecord) -> Picture:
    timeline = drawn_steps.simulated(plan)
    cards = cards_height(plan)
    rows = 0.9 if isinstance(timeline, str) else gantt.rows_height(timeline) + _MEMORY + 1.45
    sums = [sum(item.seconds * item.times for item in s.collectives) for s in plan.stages]
    number = sums.index(max(sums))  # the first stage of those that communicate most
    collectives = summaries.group_collectives([plan.stages[number]])
    sent = summaries.group_transfers(plan.pipeline.transfers, len(plan.stages))
    title = f"Communication in a step of stage {number}"
    details = _details(
        plan,
        _bars_panel(lambda axes: bars.draw_transfers(axes, sent), sent),
        _bars_panel(lambda axes: bars.draw_communication(axes, collectives, title), collectives),
    )
    figure = _figure(_TITLE + cards + rows + details.height + 0.1)
    _draw_title(figure, plan)
    draw_cards(place(figure, _EDGE, _TITLE, WIDTH - 2 * _EDGE, cards), plan)
    _draw_step(figure, timeline, _TITLE + cards + 0.5)
    _draw_details(figure, details, _TITLE + cards + rows)
    return figure


def _details(plan: PlanRecord, *panels: _Panel) -> _Details:
    """Tiles, these bars, and what was considered, if anything was."""
    tried = [item for item in plan.candidates if item.step_seconds]
    considered = _bars_panel(lambda axes: bars.draw_candidates(axes, plan, width=_LETTERS), tried)
    return _Details(plan, list(panels), [considered._replace(above=0.6)] if tried else [])


def _bars_panel(draw: Callable[[Axes], None], shown: Sequence[object]) -> _Panel:
    return _Panel(draw, _BAR * min(max(len(shown), 1), bars.MAX_BARS))


def _draw_details(figure: Figure, details: _Details, top: float) -> None:
    """Draws them from so many inches below the figure's top on."""
    tiles, _ = details.columns
    corner = top + _LEGEND
    draw_tiles(place(figure, _EDGE, corner, _TILES_WIDTH, tiles - _LEGEND), details.plan)
    side = details.bars if details.is_below_tiles else [*details.bars, *details.considered]
    below = details.considered if details.is_below_tiles else []
    left = _EDGE + _LABEL_WIDTH
    _draw_panels(figure, side, _BARS_LEFT, top, _BARS_WIDTH)
    _draw_panels(figure, below, left, top + tiles, _TILES_WIDTH - _LABEL_WIDTH)


def _draw_panels(
    figure: Figure, panels: Sequence[_Panel], left: float, top: float, width: float
) -> None:
    for panel in panels:
        panel.draw(place(figure, left, top + panel.above, width, panel.height))
        top += panel.total


def _figure(height: float) -> Picture:
    from autopar.report.picture import Picture

    return Picture(figsize=(WIDTH, height), facecolor="white")


def _draw_step(figure: Figure, timeline: Timeline | str, top: float) -> None:
    """The simulated step and its memory, or why there is none."""
    if isinstance(timeline, str):
        axes = place(figure, _EDGE, top, WIDTH - 2 * _EDGE, 0.1)
        axes.axis("off")
        axes.text(0, 0, f"A step, simulated: {timeline}", fontsize=10, color=QUIET)
        return
    across, height = WIDTH - LEFT - RIGHT, gantt.rows_height(timeline)
    title = f"A step as it is simulated: {gantt.step_caption(timeline)}"
    gantt.draw_timeline(place(figure, LEFT, top, across, height), timeline, title)
    gantt.draw_memory(place(figure, LEFT, top + height + 0.75, across, _MEMORY), timeline)


def _draw_title(figure: Figure, plan: PlanRecord) -> None:
    estimates = plan.estimates
    where = f"{plan.method} on {summaries.describe_cluster(plan.cluster)}"
    parts = format_microbatches(plan.num_microbatches)
    seconds = f"about {format_seconds(estimates.step_seconds)} a step"
    size = format_bytes(estimates.peak_bytes_per_device)
    if not plan.is_pipeline:
        stage = plan.stages[0]
        title = f"{where}, mesh {format_mesh(stage.logical_mesh, stage.axis_names)}, {parts}"
        communication = format_seconds(estimates.communication_seconds)
        step = f"{seconds} ({communication} of communication) and {size} on each device"
    else:
        stages = summaries.describe_pipeline(plan.pipeline, len(plan.stages)).split(",")[0]
        title = f"{where}: {stages}, {parts}"
        schedule = plan.pipeline.schedule
        step = f"schedule {schedule}, {seconds}, and {size} on the fullest devices"
    x, height = _EDGE / WIDTH, figure.get_figheight()
    figure.text(x, 1 - 0.42 / height, title, fontsize=18, weight="bold", color=INK, va="center")
    figure.text(x, 1 - 0.79 / height, step, fontsize=12.5, color=QUIET, va="center")
