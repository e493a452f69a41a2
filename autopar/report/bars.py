"""Bars with their values: memory, what is communicated, and which plans were considered."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autopar.base.plan_records import Candidate, PlanRecord
from autopar.base.units import format_bytes, format_seconds
from autopar.report.candidate_labels import label_candidates
from autopar.report.palette import DARK, GREY, INK, KINDS, MINE, PARTS, QUIET, WAITING
from autopar.report.path_folding import short_path, shortened
from autopar.report.state_parts import input_categories
from autopar.report.summaries import CollectiveGroup, TransferGroup, memory_limit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BARS = 6
MUCH = 0.1
"""The share of a device's memory from which on a bar of what fills it shows what is left."""

_Bar = tuple[float, str, str, str]
"""Its length, its label, the value that is written beside it, and its colour."""


def _write(
    axes: Axes, text: str, corner: tuple[int, int], offset: tuple[int, float], **style: Any
) -> None:
    """Writes text so many points from a corner of axes."""
    style |= {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(text, corner, offset, **style)


def _heading(axes: Axes, text: str, *, above: float) -> None:
    _write(axes, text, (0, 1), (0, above), fontsize=12.5, weight="bold", color=INK)


def _footnote(axes: Axes, text: str) -> None:
    _write(axes, text, (0, 0), (4, -6), fontsize=9, color=QUIET, va="top")


def draw_communication(axes: Axes, groups: Sequence[CollectiveGroup], title: str) -> None:
    """Draws collectives that were added up, by their seconds where these are known."""
    by_seconds = any(group.seconds for group in groups)
    bars = []
    for group in groups:
        count, size = f"{group.count} x", format_bytes(group.bytes)
        seconds = format_seconds(group.seconds)
        value = f"{seconds}, {count}, {size}" if by_seconds else f"{size}, {count}"
        label = f"{group.purpose}\n{group.kind} {','.join(group.axes)} {group.dtype}".rstrip()
        length = group.seconds if by_seconds else float(group.bytes)
        bars.append((length, label, value, KINDS[group.kind]))
    _draw_largest(axes, title, bars, "none")


def draw_transfers(axes: Axes, groups: Sequence[TransferGroup]) -> None:
    """Draws what crosses between stages, by its bytes."""
    bars = []
    for group in sorted(groups, key=lambda group: -group.bytes):
        label = f"{shortened(short_path(group.what), 24)}\n{group.routes}"
        value = f"{format_bytes(group.bytes)}, {group.count} x"
        bars.append((float(group.bytes), label, value, MINE))
    _draw_largest(axes, "Sent between stages in a step", bars, "nothing")


def _draw_largest(axes: Axes, title: str, bars: Sequence[_Bar], nothing: str) -> None:
    """Draws the first bars, with a title and the number of the others."""
    _heading(axes, title, above=10)
    if not bars:
        axes.axis("off")
        axes.text(0, 0.9, nothing, fontsize=11, color=QUIET, transform=axes.transAxes, va="top")
        return
    _draw_bars(axes, bars[:MAX_BARS])
    if len(bars) > MAX_BARS:
        _footnote(axes, f"and {len(bars) - MAX_BARS} smaller")


def draw_candidates(axes: Axes, plan: PlanRecord, *, width: int) -> None:
    """Draws the plans that were considered, by their seconds, the chosen one first.

    A line of a label has room for `width` letters. What all bars have in common is said once.
    """
    possible = [(item.step_seconds, item) for item in plan.candidates if item.step_seconds]
    possible = sorted(possible, key=lambda pair: (not pair[1].chosen, pair[0]))
    if not possible:
        axes.axis("off")
        return
    limit = memory_limit(plan)
    shown = possible[:MAX_BARS]
    common, labels = label_candidates([item for _, item in shown], width)
    bars = []
    for (seconds, item), label in zip(shown, labels, strict=True):
        bars.append((seconds, label, _candidate_value(item, limit), MINE if item.chosen else GREY))
    _heading(axes, "Considered", above=22 if common else 10)
    if common:
        _write(axes, common, (0, 1), (0, 6), fontsize=10, color=QUIET)
    _draw_bars(axes, bars)
    slower, impossible = len(possible) - len(bars), len(plan.candidates) - len(possible)
    notes = [f"{slower} slower"] if slower else []
    notes += [f"{impossible} not possible"] if impossible else []
    if notes:
        _footnote(axes, "and " + ", ".join(notes))


def _candidate_value(item: Candidate, limit: int | None) -> str:
    parts = [] if item.step_seconds is None else [format_seconds(item.step_seconds)]
    if item.peak_bytes_per_device is not None:
        parts.append(format_bytes(item.peak_bytes_per_device))
        if limit is not None and item.peak_bytes_per_device > limit:
            parts.append("too large")
    return ", ".join([*parts, "chosen"] if item.chosen else parts)


def memory_key_rows(plan: PlanRecord) -> int:
    """How many rows of names are below the bar of what fills a device."""
    return math.ceil((len(_memory_parts(plan)) + 1) / 2)


def draw_memory_parts(axes: Axes, plan: PlanRecord) -> None:
    """Draws what fills a device at the peak, side by side, and what is left where much is full."""
    parts = _memory_parts(plan)
    limit = memory_limit(plan)
    total = sum(size for _, size in parts)
    whole = limit if limit and total >= MUCH * limit else total
    _heading(axes, "Memory of a device", above=22)
    left = 0.0
    for (name, size), color in zip(parts, PARTS, strict=False):
        label = f"{name}  {format_bytes(size)}"
        axes.barh(0, size, left=left, color=color, height=1, label=label, edgecolor="white")
        left += size
    if whole > total:
        axes.barh(0, whole - total, left=total, color=WAITING, height=1, label="free")
    axes.set_ylim(-0.5, 0.5)
    axes.set_xlim(0, max(whole * 1.02, 1))
    axes.axis("off")
    caption = f"{format_bytes(plan.estimates.peak_bytes_per_device)} at the peak"
    if limit:
        share = plan.estimates.peak_bytes_per_device / limit
        caption += f", {f'{share:.1%}' if share >= 0.001 else 'little'} of {format_bytes(limit)}"
    _write(axes, caption, (0, 1), (0, 6), fontsize=10, color=QUIET)
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


def _memory_parts(plan: PlanRecord) -> list[tuple[str, int]]:
    """What fills a device at the peak: parts of the state, other inputs, and what is computed."""
    categories = input_categories(plan)
    sizes: Counter[str] = Counter()
    for tensor in plan.inputs:
        sizes[categories[tensor.path]] += tensor.device_bytes
    peak = max(plan.estimates.peak_bytes_per_device, sum(sizes.values()))
    parts = sorted(sizes.items(), key=lambda item: -item[1])
    large = [(name, size) for name, size in parts[:5] if size > 0.001 * peak]
    small = sum(sizes.values()) - sum(size for _, size in large)
    rest = [("other inputs", small), ("computed values", peak - sum(sizes.values()))]
    return [*large, *((name, size) for name, size in rest if size)]


def _draw_bars(axes: Axes, bars: Sequence[_Bar]) -> None:
    """Horizontal bars with their values written beside them, or inside where they are long."""
    sizes, labels, _, colors = zip(*bars, strict=True)
    longest = max(max(sizes), 1e-300)
    axes.barh(range(len(bars)), sizes, color=colors, height=0.62)
    for position, (size, _, value, color) in enumerate(bars):
        is_long = size > 0.5 * longest
        x = size - 0.012 * longest if is_long else size + 0.012 * longest
        side, ink = "right" if is_long else "left", "white" if is_long and color in DARK else INK
        axes.text(x, position, value, ha=side, va="center", fontsize=9, color=ink)
    axes.set_yticks(range(len(bars)), labels, fontsize=9, color=INK)
    axes.set_xlim(0, longest)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
