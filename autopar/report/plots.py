"""A plan as a picture: how tensors are cut, what fills the memory, what moves, what was tried."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..plans import Candidate, Plan
from ..summaries import (
    describe_cluster,
    format_mesh,
    format_microbatches,
    group_collectives,
    input_categories,
    memory_limit,
)
from ..units import format_bytes, format_seconds
from .palette import GREY, INK, KINDS, MINE, PARTS, QUIET
from .tiles import draw_tiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_BARS = 6


def plot_plan(plan: Plan) -> Figure:
    """A picture of a plan, for `figure.savefig` or a notebook.

    On the left are the parameters, other state and the batch as tiles, cut as the plan cuts them,
    with the part that device 0 holds in a darker colour. On the right are memory, communication and
    the alternatives that were considered.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 9.6), facecolor="white")
    _draw_title(figure, plan)
    draw_tiles(figure.add_axes((0.025, 0.02, 0.61, 0.835)), plan)
    left, width = 0.755, 0.225
    _draw_memory(figure.add_axes((left, 0.76, width, 0.055)), plan)
    _draw_communication(figure.add_axes((left, 0.355, width, 0.265)), plan)
    _draw_candidates(figure.add_axes((left, 0.04, width, 0.24)), plan)
    return figure


def save_plot(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes the picture of a plan; the file's ending (`.png`, `.svg`, `.pdf`) is its format."""
    plot_plan(plan).savefig(path, dpi=110)


def _draw_title(figure: Figure, plan: Plan) -> None:
    estimates = plan.estimates
    stage = plan.stages[0]
    mesh = format_mesh(stage.logical_mesh, stage.axis_names)
    parts = format_microbatches(plan.num_microbatches)
    title = f"{plan.method} on {describe_cluster(plan.cluster)}, mesh {mesh}, {parts}"
    step = (
        f"about {format_seconds(estimates.step_seconds)} a step "
        f"({format_seconds(estimates.communication_seconds)} of communication) "
        f"and {format_bytes(estimates.peak_bytes_per_device)} on each device"
    )
    figure.text(0.025, 0.957, title, fontsize=18, weight="bold", color=INK, va="center")
    figure.text(0.025, 0.918, step, fontsize=12.5, color=QUIET, va="center")


def _heading(axes: Axes, text: str, *, above: float) -> None:
    axes.annotate(
        text,
        (0, 1),
        (0, above),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=12.5,
        weight="bold",
        color=INK,
        annotation_clip=False,
    )


def _draw_memory(axes: Axes, plan: Plan) -> None:
    parts = _memory_parts(plan)
    limit = memory_limit(plan)
    total = sum(size for _, size in parts)
    _heading(axes, "Memory of a device", above=22)
    left = 0.0
    for (name, size), color in zip(parts, PARTS, strict=False):
        label = f"{name}  {format_bytes(size)}"
        axes.barh(0, size, left=left, color=color, height=1, label=label, edgecolor="white")
        left += size
    axes.set_ylim(-0.5, 0.5)
    axes.set_xlim(0, max(total * 1.02, 1))
    axes.axis("off")
    caption = f"{format_bytes(plan.estimates.peak_bytes_per_device)} at the peak"
    if limit:
        share = plan.estimates.peak_bytes_per_device / limit
        caption += f", {f'{share:.1%}' if share >= 0.001 else 'little'} of {format_bytes(limit)}"
    axes.annotate(
        caption,
        (0, 1),
        (0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=10,
        color=QUIET,
        annotation_clip=False,
    )
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.01, -0.08),
        ncols=2,
        frameon=False,
        fontsize=9,
        handlelength=1,
        columnspacing=1.2,
        labelcolor=INK,
    )


def _memory_parts(plan: Plan) -> list[tuple[str, int]]:
    """What fills a device at the peak: parts of the state, other inputs, and what is computed."""
    categories = input_categories(plan)
    sizes: dict[str, int] = {}
    for tensor in plan.inputs:
        name = categories[tensor.path]
        sizes[name] = sizes.get(name, 0) + tensor.bytes_per_device
    peak = max(plan.estimates.peak_bytes_per_device, sum(sizes.values()))
    parts = sorted(sizes.items(), key=lambda item: -item[1])
    large = [(name, size) for name, size in parts[:5] if size > 0.001 * peak]
    small = sum(sizes.values()) - sum(size for _, size in large)
    rest = [("other inputs", small), ("computed values", peak - sum(sizes.values()))]
    return [*large, *((name, size) for name, size in rest if size)]


def _draw_communication(axes: Axes, plan: Plan) -> None:
    groups = group_collectives(plan.stages[0].collectives)
    shown = groups[:_MAX_BARS]
    by_seconds = any(group.seconds for group in groups)
    _heading(axes, "Communication in a step", above=10)
    if not groups:
        axes.axis("off")
        axes.text(0, 0.9, "none", fontsize=11, color=QUIET, transform=axes.transAxes, va="top")
        return
    sizes = [group.seconds if by_seconds else float(group.bytes) for group in shown]
    labels = [f"{group.purpose}\n{group.kind} {','.join(group.axes)}" for group in shown]
    values = [
        f"{format_seconds(group.seconds)}, {group.count} x, {format_bytes(group.bytes)}"
        if by_seconds
        else f"{format_bytes(group.bytes)}, {group.count} x"
        for group in shown
    ]
    _draw_bars(axes, sizes, labels, values, [KINDS[group.kind] for group in shown])
    if len(groups) > len(shown):
        _footnote(axes, f"and {len(groups) - len(shown)} smaller")


def _draw_candidates(axes: Axes, plan: Plan) -> None:
    possible = [(item.step_seconds, item) for item in plan.candidates if item.step_seconds]
    possible = sorted(possible, key=lambda pair: (not pair[1].chosen, pair[0]))
    shown = [item for _, item in possible[:_MAX_BARS]]
    if not shown:
        axes.axis("off")
        return
    _heading(axes, "Considered", above=10)
    _draw_bars(
        axes,
        [seconds for seconds, _ in possible[:_MAX_BARS]],
        [_candidate_label(item) for item in shown],
        [_candidate_value(item) for item in shown],
        [MINE if item.chosen else GREY for item in shown],
    )
    slower, impossible = len(possible) - len(shown), len(plan.candidates) - len(possible)
    notes = [f"{slower} slower"] if slower else []
    notes += [f"{impossible} not possible"] if impossible else []
    if notes:
        _footnote(axes, "and " + ", ".join(notes))


def _candidate_label(item: Candidate) -> str:
    mesh = "x".join(map(str, item.logical_mesh))
    return f"{item.method} {mesh}\n{format_microbatches(item.num_microbatches)}"


def _candidate_value(item: Candidate) -> str:
    parts = [] if item.step_seconds is None else [format_seconds(item.step_seconds)]
    if item.peak_bytes_per_device is not None:
        parts.append(format_bytes(item.peak_bytes_per_device))
    return ", ".join([*parts, "chosen"] if item.chosen else parts)


def _draw_bars(
    axes: Axes,
    sizes: Sequence[float],
    labels: Sequence[str],
    values: Sequence[str],
    colors: Sequence[str],
) -> None:
    """Horizontal bars with their values written beside them, or inside where they are long."""
    positions = range(len(sizes))
    longest = max(max(sizes), 1e-300)
    axes.barh(positions, sizes, color=colors, height=0.62)
    for position, size, value in zip(positions, sizes, values, strict=True):
        is_long = size > 0.5 * longest
        axes.text(
            size - 0.012 * longest if is_long else size + 0.012 * longest,
            position,
            value,
            ha="right" if is_long else "left",
            va="center",
            fontsize=9,
            color="white" if is_long and colors[position] != GREY else INK,
        )
    axes.set_yticks(positions, labels, fontsize=9, color=INK)
    axes.set_xlim(0, longest)
    axes.set_ylim(_MAX_BARS - 0.5, -0.5)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)


def _footnote(axes: Axes, text: str) -> None:
    axes.annotate(
        text,
        (0, 0),
        (4, -6),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9,
        color=QUIET,
        va="top",
        annotation_clip=False,
    )
