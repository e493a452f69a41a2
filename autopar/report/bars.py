"""Bars with their values: what is communicated, and which plans were considered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.base.plan_records import Candidate
from autopar.base.units import format_bytes, format_microbatches, format_seconds
from autopar.plans.plan import Plan
from autopar.plans.summaries import CollectiveGroup, memory_limit
from autopar.report.palette import GREY, INK, KINDS, MINE, QUIET

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BARS = 6


def heading(axes: Axes, text: str, *, above: float) -> None:
    """Writes a heading so many points above axes."""
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


def draw_communication(
    axes: Axes, groups: Sequence[CollectiveGroup], title: str, *, rows: int = MAX_BARS
) -> None:
    """Draws collectives that were added up, by their seconds where these are known."""
    shown = groups[:MAX_BARS]
    by_seconds = any(group.seconds for group in groups)
    heading(axes, title, above=10)
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
    draw_bars(axes, sizes, labels, values, [KINDS[g.kind] for g in shown], rows=rows)
    if len(groups) > len(shown):
        footnote(axes, f"and {len(groups) - len(shown)} smaller")


def draw_candidates(axes: Axes, plan: Plan, *, rows: int = MAX_BARS) -> None:
    """Draws the plans that were considered, by their seconds, the chosen one first."""
    possible = [(item.step_seconds, item) for item in plan.candidates if item.step_seconds]
    possible = sorted(possible, key=lambda pair: (not pair[1].chosen, pair[0]))
    shown = [item for _, item in possible[:MAX_BARS]]
    if not shown:
        axes.axis("off")
        return
    heading(axes, "Considered", above=10)
    draw_bars(
        axes,
        [seconds for seconds, _ in possible[:MAX_BARS]],
        [_candidate_label(item, plan) for item in shown],
        [_candidate_value(item, memory_limit(plan)) for item in shown],
        [MINE if item.chosen else GREY for item in shown],
        rows=rows,
    )
    slower, impossible = len(possible) - len(shown), len(plan.candidates) - len(possible)
    notes = [f"{slower} slower"] if slower else []
    notes += [f"{impossible} not possible"] if impossible else []
    if notes:
        footnote(axes, "and " + ", ".join(notes))


def _candidate_label(item: Candidate, plan: Plan) -> str:
    mesh = "x".join(map(str, item.logical_mesh))
    parts = format_microbatches(item.num_microbatches)
    if plan.pipeline is not None and item.note:
        stages = ", ".join(item.note.split(", ")[:2])
        return f"{item.method} {mesh}, {parts}\n{stages}"
    return f"{item.method} {mesh}\n{parts}"


def _candidate_value(item: Candidate, limit: int | None) -> str:
    parts = [] if item.step_seconds is None else [format_seconds(item.step_seconds)]
    if item.peak_bytes_per_device is not None:
        parts.append(format_bytes(item.peak_bytes_per_device))
        if limit is not None and item.peak_bytes_per_device > limit:
            parts.append("too large")
    return ", ".join([*parts, "chosen"] if item.chosen else parts)


def draw_bars(
    axes: Axes,
    sizes: Sequence[float],
    labels: Sequence[str],
    values: Sequence[str],
    colors: Sequence[str],
    *,
    rows: int = MAX_BARS,
) -> None:
    """Horizontal bars with their values written beside them, or inside where they are long.

    There is room for so many `rows`.
    """
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
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)


def footnote(axes: Axes, text: str) -> None:
    """Writes a quiet line below axes."""
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
