"""A plan as a picture: how tensors are cut, what fills the memory, what moves, what was tried.

Several stages are shown first, with the simulated step.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from autopar.base.plan_records import PlanRecord
from autopar.base.units import format_bytes, format_mesh, format_microbatches, format_seconds
from autopar.passes.pipeline.timeline import Timeline
from autopar.report import bars, drawn_steps, gantt, summaries
from autopar.report.gantt import LEFT, RIGHT, WIDTH, place
from autopar.report.palette import INK, QUIET
from autopar.report.stage_cards import cards_height, draw_cards
from autopar.report.tensor_tiles import draw_tiles, tiles_height

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from autopar.report.picture import Picture

# Inches.
_EDGE, _TITLE, _MEMORY = 0.4, 1.15, 1.2
_ROW_OF_TILES, _BAR, _AROUND_BARS = 1.7, 0.385, 0.8


def plot_plan(plan: PlanRecord) -> Picture:
    """A picture of a plan, for `figure.savefig` or a notebook.

    A pipelined plan shows its stages, what crosses between them and the simulated step first.

    On the left are the parameters, other state and the batch as tiles, cut as the plan cuts them,
    with the part that device 0 holds in a darker colour. On the right are memory, communication and
    the alternatives that were considered.
    """
    return _plot_one_mesh(plan) if len(plan.stages) == 1 else _plot_stages(plan)


def save_plot(plan: PlanRecord, path: str | os.PathLike[str]) -> None:
    """Writes the picture of a plan; the file's ending (`.png`, `.svg`, `.pdf`) is its format."""
    plot_plan(plan).save(path)


def _plot_one_mesh(plan: PlanRecord) -> Picture:
    figure = _figure(9.6)
    _draw_title(figure, plan)
    draw_tiles(figure.add_axes((0.025, 0.02, 0.61, 0.835)), plan)
    left, width = 0.755, 0.225
    bars.draw_memory_parts(figure.add_axes((left, 0.76, width, 0.055)), plan)
    groups = summaries.group_collectives(plan.stages)
    bars.draw_communication(
        figure.add_axes((left, 0.355, width, 0.265)), groups, "Communication in a step"
    )
    bars.draw_candidates(figure.add_axes((left, 0.04, width, 0.24)), plan)
    return figure


def _plot_stages(plan: PlanRecord) -> Picture:
    timeline = drawn_steps.simulated(plan)
    cards = cards_height(plan)
    rows = 0.9 if isinstance(timeline, str) else gantt.rows_height(timeline) + _MEMORY + 1.45
    sums = [sum(item.seconds * item.times for item in s.collectives) for s in plan.stages]
    number = sums.index(max(sums))  # the first stage of those that communicate most
    collectives = summaries.group_collectives([plan.stages[number]])
    sent = summaries.group_transfers(plan.pipeline.transfers, len(plan.stages))
    tried = [item for item in plan.candidates if item.step_seconds]
    num_bars = [min(max(len(shown), 1), bars.MAX_BARS) for shown in (sent, collectives, tried)]
    below = max(tiles_height(plan) * _ROW_OF_TILES, sum(_BAR * n + _AROUND_BARS for n in num_bars))
    figure = _figure(_TITLE + cards + rows + below + 0.5)
    _draw_title(figure, plan)
    draw_cards(place(figure, _EDGE, _TITLE, WIDTH - 2 * _EDGE, cards), plan)
    _draw_step(figure, timeline, _TITLE + cards + 0.5)
    top = _TITLE + cards + rows + 0.4
    draw_tiles(place(figure, _EDGE, top, 9.75, below), plan, height=below / _ROW_OF_TILES)
    places = []
    for num_rows in num_bars:
        places.append(place(figure, 12.1, top, 3.55, _BAR * num_rows))
        top += _BAR * num_rows + _AROUND_BARS
    bars.draw_transfers(places[0], sent, rows=num_bars[0])
    title = f"Communication in a step of stage {number}"
    bars.draw_communication(places[1], collectives, title, rows=num_bars[1])
    bars.draw_candidates(places[2], plan, rows=num_bars[2])
    return figure


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
