"""Stages as cards: what each holds, on which devices, how full they get, what passes on."""

from __future__ import annotations

import itertools
import math
import textwrap
from typing import TYPE_CHECKING, Any

from autopar.base.plan_records import PlanRecord
from autopar.base.units import format_bytes, format_mesh, format_seconds
from autopar.report.palette import GREY, INK, MINE, OTHERS, QUIET, TASK_COLORS
from autopar.report.state_parts import stage_contents
from autopar.report.summaries import format_layers, memory_limit, task_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Coordinates are inches, from the upper left corner.
_CARDS_IN_ROW = 8
_MAX_ROWS = 3
_HEIGHT, _SPACE = 2.2, 0.3
_PADDING = 0.14


def cards_height(plan: PlanRecord) -> float:
    """Inches that the cards of a plan need."""
    rows = min(math.ceil(len(plan.stages) / _CARDS_IN_ROW), _MAX_ROWS)
    return rows * (_HEIGHT + _SPACE) - _SPACE


def draw_cards(axes: Axes, plan: PlanRecord) -> None:
    """Draws the stages in rows, with arrows for what crosses between neighbours."""
    from matplotlib.figure import Figure

    figure = axes.figure
    assert isinstance(figure, Figure)
    across = axes.get_position().width * figure.get_figwidth()
    axes.set_xlim(0, across)
    axes.set_ylim(cards_height(plan), 0)
    axes.axis("off")
    in_row = min(len(plan.stages), _CARDS_IN_ROW)
    gap = 0.95 if in_row <= 5 else 0.45
    width = (across - gap * (in_row - 1)) / in_row
    shown = min(len(plan.stages), _CARDS_IN_ROW * _MAX_ROWS)
    for stage in range(shown):
        row, column = divmod(stage, _CARDS_IN_ROW)
        left, top = column * (width + gap), row * (_HEIGHT + _SPACE)
        _draw_card(axes, plan, stage, left, top, width)
        if stage + 1 < shown and column + 1 < in_row:
            _draw_crossing(axes, plan, stage, left + width, top, gap)
    if shown < len(plan.stages):
        more = f"and {len(plan.stages) - shown} more stages"
        axes.text(across, cards_height(plan) + 0.2, more, ha="right", fontsize=9, color=QUIET)


def _draw_card(
    axes: Axes, plan: PlanRecord, number: int, left: float, top: float, width: float
) -> None:
    from matplotlib.patches import FancyBboxPatch

    stage = plan.stages[number]
    corner, size = (left + 0.03, top + 0.03), (width - 0.06, _HEIGHT - 0.06)
    style = "round,pad=0.03,rounding_size=0.08"
    box = FancyBboxPatch(corner, *size, boxstyle=style, facecolor="#fbfcfd", edgecolor=GREY)
    axes.add_patch(box)
    x, right = left + _PADDING, left + width - _PADDING
    small: dict[str, Any] = {"fontsize": 8.8, "va": "center"}
    axes.text(x, top + 0.24, f"Stage {number}", fontsize=12, weight="bold", color=INK, va="center")
    many = stage.layers[1] - stage.layers[0] > 1
    layers = f"layer{'s' if many else ''} {format_layers(stage.layers)}"
    narrow = width < 2.2
    if narrow:
        axes.text(x, top + 0.46, layers, color=QUIET, **small)
    else:
        axes.text(right, top + 0.24, layers, color=QUIET, ha="right", **small)
    for i, line in enumerate(_contents(plan, number, width)):
        axes.text(x, top + 0.5 + (0.2 if narrow else 0) + 0.18 * i, line, color=INK, **small)
    mesh = format_mesh(stage.logical_mesh, stage.axis_names)
    axes.text(x, top + 0.98, f"mesh {stage.mesh}:  {mesh}", color=QUIET, **small)
    _draw_devices(axes, stage.logical_mesh, x, top + 1.1, right - x)
    seconds = task_seconds(plan.pipeline)
    colors = zip("FBW", TASK_COLORS, strict=False)
    tasks = [(seconds[k][number], color) for k, color in colors if number in seconds.get(k, {})]
    _draw_shares(axes, tasks, x, top + 1.48, right - x)
    _draw_memory(axes, plan, stage.peak_bytes_per_device, x, top + 1.88, right - x)


def _contents(plan: PlanRecord, number: int, width: float) -> list[str]:
    """The state of a stage in at most two lines (one where cards are narrow)."""
    text = ", ".join(stage_contents(plan)[number])
    most = 1 if width < 2.2 else 2
    letters = int((width - 2 * _PADDING) / 0.075)
    return textwrap.wrap(text, letters, max_lines=most, placeholder=" ..") if text else []


def _draw_devices(
    axes: Axes, shape: tuple[int, ...], left: float, top: float, width: float
) -> None:
    """The devices of a mesh as squares, rows along the first axis where there are several."""
    from matplotlib.patches import Rectangle

    rows, columns = math.prod(shape[:-1]), shape[-1]
    size = min(width / columns, 0.2 if rows == 1 else 0.24 / rows)
    square = (0.84 * size, 0.84 * size)
    for row, column in itertools.product(range(rows), range(columns)):
        corner = (left + column * size, top + row * size)
        axes.add_patch(Rectangle(corner, *square, facecolor=OTHERS, edgecolor=MINE, lw=0.7))


def _draw_shares(
    axes: Axes, tasks: list[tuple[float, str]], left: float, top: float, width: float
) -> None:
    """The tasks of one microbatch side by side, each as long as it takes."""
    from matplotlib.patches import Rectangle

    total = sum(seconds for seconds, _ in tasks)
    for seconds, color in tasks:
        share = width * seconds / total if total else 0.0
        axes.add_patch(Rectangle((left, top), share, 0.2, facecolor=color, edgecolor="white"))
        label = format_seconds(seconds)
        if share > 0.085 * len(label):
            ink = "white" if color == TASK_COLORS[0] else INK
            style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 8.2}
            axes.text(left + share / 2, top + 0.1, label, color=ink, **style)
        left += share


def _draw_memory(
    axes: Axes, plan: PlanRecord, peak: int, left: float, top: float, width: float
) -> None:
    from matplotlib.patches import Rectangle

    limit = memory_limit(plan)
    most = max(limit or 0, *(stage.peak_bytes_per_device for stage in plan.stages), 1)
    axes.add_patch(Rectangle((left, top + 0.12), width, 0.09, facecolor="#e4e8ec"))
    axes.add_patch(Rectangle((left, top + 0.12), width * peak / most, 0.09, facecolor=INK))
    text = format_bytes(peak)
    if limit and width > 1.7:
        text += f" of {format_bytes(limit)} at the peak"
    axes.text(left, top, text, fontsize=8.8, va="center", color=INK)


def _draw_crossing(
    axes: Axes, plan: PlanRecord, number: int, left: float, top: float, gap: float
) -> None:
    """Arrows there and back, with the bytes that cross in a step, all microbatches together."""
    sizes = {1: 0, -1: 0}
    for item in plan.pipeline.transfers:
        if item.times > 1 and {item.source, item.target} == {number, number + 1}:
            sizes[item.target - item.source] += item.times * item.bytes
    for direction, size in sizes.items():
        if not size:
            continue
        y = top + _HEIGHT / 2 - 0.22 * direction
        ends = (left + 0.08, left + gap - 0.08)
        color = TASK_COLORS[0 if direction == 1 else 1]
        start, end = ends if direction == 1 else ends[::-1]
        arrow = {"arrowstyle": "-|>", "color": color, "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (end, y), (start, y), arrowprops=arrow)
        style: dict[str, Any] = {"ha": "center", "va": "center", "color": INK}
        style["fontsize"] = 9 if gap > 0.6 else 6.6
        axes.text(left + gap / 2, y - 0.14 * direction, format_bytes(size), **style)
