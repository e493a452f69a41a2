"""A plan as a picture: how tensors are cut, what fills the memory, what moves, what was tried."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from autopar.base.units import format_bytes, format_mesh, format_microbatches, format_seconds
from autopar.plans.plan import Plan
from autopar.plans.summaries import (
    describe_cluster,
    group_collectives,
    input_categories,
    memory_limit,
)
from autopar.report.bars import draw_candidates, draw_communication, heading
from autopar.report.palette import INK, PARTS, QUIET
from autopar.report.pipeline_plots import plot_pipeline
from autopar.report.tiles import draw_tiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_plan(plan: Plan) -> Figure:
    """A picture of a plan, for `figure.savefig` or a notebook.

    A pipelined plan shows its stages, what crosses between them and the simulated step first.

    On the left are the parameters, other state and the batch as tiles, cut as the plan cuts them,
    with the part that device 0 holds in a darker colour. On the right are memory, communication and
    the alternatives that were considered.
    """
    from matplotlib.figure import Figure

    if plan.pipeline is not None:
        return plot_pipeline(plan)
    figure = Figure(figsize=(16, 9.6), facecolor="white")
    _draw_title(figure, plan)
    draw_tiles(figure.add_axes((0.025, 0.02, 0.61, 0.835)), plan)
    left, width = 0.755, 0.225
    _draw_memory(figure.add_axes((left, 0.76, width, 0.055)), plan)
    groups = group_collectives(plan.stages[0].collectives)
    draw_communication(
        figure.add_axes((left, 0.355, width, 0.265)), groups, "Communication in a step"
    )
    draw_candidates(figure.add_axes((left, 0.04, width, 0.24)), plan)
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


def _draw_memory(axes: Axes, plan: Plan) -> None:
    parts = _memory_parts(plan)
    limit = memory_limit(plan)
    total = sum(size for _, size in parts)
    heading(axes, "Memory of a device", above=22)
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
