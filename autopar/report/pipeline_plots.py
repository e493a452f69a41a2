"""The picture of a pipelined plan: stages, the simulated step, tensors, communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.base.plan_records import StagePlan
from autopar.base.units import format_bytes, format_microbatches, format_seconds
from autopar.plans.plan import Plan
from autopar.plans.plan_text import describe_pipeline
from autopar.plans.stage_summaries import TransferGroup, group_transfers
from autopar.plans.summaries import describe_cluster, group_collectives, short_path
from autopar.report.bars import (
    MAX_BARS,
    draw_bars,
    draw_candidates,
    draw_communication,
    footnote,
    heading,
)
from autopar.report.gantt import (
    LEFT,
    RIGHT,
    WIDTH,
    draw_memory,
    draw_timeline,
    rows_height,
    step_caption,
)
from autopar.report.palette import INK, MINE, QUIET
from autopar.report.stage_cards import cards_height, draw_cards
from autopar.report.stage_tables import simulated
from autopar.report.tiles import draw_tiles, tiles_height

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches.
_EDGE, _TITLE, _MEMORY = 0.4, 1.15, 1.2
_ROW_OF_TILES, _BAR, _AROUND_BARS = 1.7, 0.385, 0.8


def plot_pipeline(plan: Plan) -> Figure:
    """A picture of a plan of several stages (see `plot_plan`)."""
    from matplotlib.figure import Figure

    timeline = simulated(plan)
    cards = cards_height(plan)
    rows = 0.9 if isinstance(timeline, str) else rows_height(timeline) + _MEMORY + 1.45
    number, stage = _busiest(plan.stages)
    collectives = group_collectives(stage.collectives)
    sent = group_transfers(plan.pipeline.transfers, len(plan.stages)) if plan.pipeline else ()
    tried = [item for item in plan.candidates if item.step_seconds]
    bars = [min(max(len(shown), 1), MAX_BARS) for shown in (sent, collectives, tried)]
    below = max(
        tiles_height(plan) * _ROW_OF_TILES, sum(_BAR * rows + _AROUND_BARS for rows in bars)
    )
    figure = Figure(figsize=(WIDTH, _TITLE + cards + rows + below + 0.5), facecolor="white")
    _draw_title(figure, plan)
    draw_cards(_place(figure, _EDGE, _TITLE, WIDTH - 2 * _EDGE, cards), plan)
    top = _TITLE + cards + 0.5
    if isinstance(timeline, str):
        axes = _place(figure, _EDGE, top, WIDTH - 2 * _EDGE, 0.1)
        axes.axis("off")
        axes.text(0, 0, f"No simulated step: {timeline}", fontsize=10, color=QUIET)
    else:
        across = WIDTH - LEFT - RIGHT
        height = rows_height(timeline)
        title = f"A step as it is simulated: {step_caption(timeline)}"
        draw_timeline(_place(figure, LEFT, top, across, height), timeline, title)
        draw_memory(_place(figure, LEFT, top + height + 0.75, across, _MEMORY), timeline)
    top = _TITLE + cards + rows
    tiles = _place(figure, _EDGE, top + 0.4, 9.75, below)
    draw_tiles(tiles, plan, height=below / _ROW_OF_TILES)
    top += 0.4
    places = []
    for num_rows in bars:
        places.append(_place(figure, 12.1, top, 3.55, _BAR * num_rows))
        top += _BAR * num_rows + _AROUND_BARS
    _draw_transfers(places[0], sent, rows=bars[0])
    title = f"Communication in a step of stage {number}"
    draw_communication(places[1], collectives, title, rows=bars[1])
    draw_candidates(places[2], plan, rows=bars[2])
    return figure


def _place(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes whose upper left corner is so many inches from that of the figure."""
    whole = figure.get_figheight()
    return figure.add_axes(
        (left / WIDTH, 1 - (top + height) / whole, width / WIDTH, height / whole)
    )


def _draw_title(figure: Figure, plan: Plan) -> None:
    assert plan.pipeline is not None
    stages = describe_pipeline(plan.pipeline, len(plan.stages))
    parts = format_microbatches(plan.num_microbatches)
    title = f"{plan.method} on {describe_cluster(plan.cluster)}: {stages.split(',')[0]}, {parts}"
    estimates = plan.estimates
    step = (
        f"schedule {plan.pipeline.schedule}, about {format_seconds(estimates.step_seconds)} a step,"
        f" and {format_bytes(estimates.peak_bytes_per_device)} on the fullest devices"
    )
    height = figure.get_figheight()
    x = _EDGE / WIDTH
    figure.text(x, 1 - 0.42 / height, title, fontsize=18, weight="bold", color=INK, va="center")
    figure.text(x, 1 - 0.79 / height, step, fontsize=12.5, color=QUIET, va="center")


def _busiest(stages: Sequence[StagePlan]) -> tuple[int, StagePlan]:
    """The first stage of those that communicate most."""

    def seconds(item: tuple[int, StagePlan]) -> float:
        return sum(each.seconds * each.times for each in item[1].collectives)

    return max(enumerate(stages), key=seconds)


def _draw_transfers(axes: Axes, groups: Sequence[TransferGroup], *, rows: int) -> None:
    heading(axes, "Sent between stages in a step", above=10)
    if not groups:
        axes.axis("off")
        axes.text(0, 0.9, "nothing", fontsize=11, color=QUIET, transform=axes.transAxes, va="top")
        return
    shown = sorted(groups, key=lambda group: -group.bytes)[:MAX_BARS]
    draw_bars(
        axes,
        [float(group.bytes) for group in shown],
        [f"{_last_names(group.what)}\n{group.routes}" for group in shown],
        [f"{format_bytes(group.bytes)}, {group.count} x" for group in shown],
        [MINE] * len(shown),
        rows=rows,
    )
    if len(groups) > len(shown):
        footnote(axes, f"and {len(groups) - len(shown)} smaller")


def _last_names(what: str, width: int = 24) -> str:
    """The end of a path that is too long for a label."""
    names = short_path(what).split("/")
    while len(names) > 1 and len("/".join(names)) > width:
        del names[0]
    return "/".join(names)
