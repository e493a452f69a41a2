"""One step planned for several clusters, side by side: what `autopar.scaling` returns."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from autopar.base.cluster import Cluster
from autopar.base.errors import AutoparError
from autopar.base.plan_records import PlanRecord
from autopar.base.units import format_bytes, format_count, format_mesh, format_seconds
from autopar.report.palette import GREY, INK, MINE, QUIET
from autopar.report.rich_parts import add_row, as_text, captioned, new_table
from autopar.report.summaries import memory_limit
from autopar.report.throughput import Throughput, throughput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from autopar.report.picture import Picture

_WHY = 70  # letters of a reason in a table


@dataclass(frozen=True)
class ScaledStep:
    """A step on one of the clusters.

    Args:
      cluster: the devices.
      plan: the best plan for them, or None.
      error: why there is none.
    """

    cluster: Cluster
    plan: PlanRecord | None
    error: AutoparError | None = None

    @property
    def is_feasible(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not None

    @property
    def step_seconds(self) -> float | None:
        """That the plan expects."""
        return None if self.plan is None else self.plan.estimates.step_seconds

    @property
    def peak_bytes_per_device(self) -> int | None:
        """At the worst moment of a step."""
        return None if self.plan is None else self.plan.estimates.peak_bytes_per_device

    @property
    def throughput(self) -> Throughput | None:
        """Tokens and examples a second, utilization, cost."""
        return None if self.plan is None else throughput(self.plan)

    @property
    def reason(self) -> str:
        """Why there is no plan, in one line."""
        if self.error is None:
            return ""
        least = getattr(self.error, "least_bytes", None)
        needs = f" At least {format_bytes(least)} a device would do." if least else ""
        return f"{str(self.error).splitlines()[0]}{needs}"


@dataclass(frozen=True)
class Scaling:
    """A step with its batch, planned anew for each of several clusters.

    The batch is the same for all of them (strong scaling). `rows` are in the order in which the
    clusters were given; it prints as a table, and `plot` makes a picture. If it was `interrupted`,
    the last row is the best that had been found, and the clusters after it are not there.
    """

    rows: tuple[ScaledStep, ...]
    interrupted: bool = False

    @property
    def efficiencies(self) -> tuple[float | None, ...]:
        """Steps a second of each device, over that of the fewest devices that have a plan."""
        feasible = [row for row in self.rows if row.is_feasible]
        if not feasible:
            return (None,) * len(self.rows)
        base = min(feasible, key=lambda row: row.cluster.num_devices)

        def work(row: ScaledStep) -> float:
            return row.cluster.num_devices * (row.step_seconds or 0.0)

        return tuple(work(base) / work(row) if work(row) else None for row in self.rows)

    def plot(self) -> Picture:
        """A picture: steps a second against devices beside the ideal, and memory of a device."""
        from autopar.report.picture import Picture

        figure = Picture(figsize=(12, 4.6), facecolor="white", layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_speed(left, self)
        _draw_peaks(right, self)
        return figure

    def save_plot(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture; the file's ending (`.png`, `.svg`, `.pdf`) is its format."""
        self.plot().save(path)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rate, unit = _rate(self.rows)
        names = {row.cluster.name for row in self.rows}
        title = f"A step on {names.copy().pop() if len(names) == 1 else 'several clusters'}"
        right = ("devices", "step", unit, "of ideal", "MFU", "peak")
        table = new_table(title, "nodes", *right, "plan", right=right)
        for column in table.columns[:-1]:
            column.no_wrap = True
        for row, efficiency in zip(self.rows, self.efficiencies, strict=True):
            devices, cluster = str(row.cluster.num_devices), row.cluster
            nodes = f"{cluster.num_nodes} x {cluster.devices_per_node}"
            name = nodes if len(names) == 1 else f"{nodes} {cluster.name}"
            if row.plan is None:
                add_row(table, name, devices, *"-----", Text("no plan", "red"))
                continue
            done = throughput(row.plan)
            add_row(
                table,
                name,
                devices,
                format_seconds(row.plan.estimates.step_seconds),
                format_count(rate(done)),
                "-" if efficiency is None else f"{efficiency:.0%}",
                f"{done.model_flops_utilization:.1%}" if done.model_flops else "-",
                format_bytes(row.plan.estimates.peak_bytes_per_device),
                _in_words(row.plan),
            )
        notes = [
            f"no plan for {r.cluster.num_devices} devices: {r.reason}" for r in self.rows if r.error
        ]
        notes += [
            f"{row.cluster.num_devices} devices, confirmed: {row.plan.confirmed}"
            for row in self.rows
            if row.plan is not None and row.plan.confirmed is not None
        ]
        if self.interrupted:
            notes.append("interrupted: the last row is what was found, others were not planned for")
        ideal = "of ideal: a device's steps a second, over those with the fewest devices that do"
        yield captioned(table, "\n".join([*notes, ideal]))

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__


def _rate(rows: tuple[ScaledStep, ...]) -> tuple[Callable[[Throughput], float], str]:
    """What is counted: tokens, or examples, or steps where a batch has neither."""
    done = [throughput(row.plan) for row in rows if row.plan is not None]
    if done and all(x.tokens for x in done):
        return lambda x: x.tokens_per_second or 0.0, "tokens/s"
    if done and all(x.examples for x in done):
        return lambda x: x.examples_per_second or 0.0, "examples/s"
    return lambda x: 1 / x.step_seconds if x.step_seconds else 0.0, "steps/s"


def _in_words(plan: PlanRecord) -> str:
    meshes = list(dict.fromkeys(format_mesh(s.logical_mesh, s.axis_names) for s in plan.stages))
    stages = f"{len(plan.stages)} stages of " if plan.is_pipeline else ""
    count = plan.num_microbatches
    parts = f", {count} microbatches" if count > 1 else ""
    return f"{plan.method}: {stages}{' or '.join(meshes[:2])}{parts}"


def _draw_speed(axes: Axes, scaling: Scaling) -> None:
    rate, unit = _rate(scaling.rows)
    points = sorted(
        (row.cluster.num_devices, rate(throughput(row.plan)), efficiency or 0.0)
        for row, efficiency in zip(scaling.rows, scaling.efficiencies, strict=True)
        if row.plan is not None
    )
    _dress(axes, f"Throughput, {unit}")
    axes.set_xlabel("devices", color=QUIET, fontsize=10)
    if not points:
        axes.text(0.5, 0.5, "no plan on any cluster", transform=axes.transAxes, ha="center")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    devices, rates, _ = zip(*points, strict=True)
    ideal = [rates[0] * count / devices[0] for count in devices]
    axes.plot(devices, ideal, "--", color=GREY, lw=1.4, label="ideal")
    axes.plot(devices, rates, "o-", color=MINE, lw=2, label="planned")
    for count, value, efficiency in points:
        style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9.5, "color": INK}
        axes.annotate(f"{efficiency:.0%}", (count, value), (7, -13), **style)
    missing = sorted({r.cluster.num_devices for r in scaling.rows if r.plan is None})
    if missing:
        lowest = [min(rates)] * len(missing)
        axes.plot(missing, lowest, "x", color="#b3261e", ms=8, label="no plan")
    ticks = sorted({*devices, *missing})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks(rates, [format_count(value) for value in rates])
    axes.minorticks_off()
    axes.margins(0.08)
    axes.legend(frameon=False, fontsize=10, labelcolor=INK)


def _draw_peaks(axes: Axes, scaling: Scaling) -> None:
    _dress(axes, "Memory of a device")
    places = range(len(scaling.rows))
    labels = [f"{row.cluster.num_devices}" for row in scaling.rows]
    for place, row in zip(places, scaling.rows, strict=True):
        if row.plan is None:
            style: dict[str, Any] = {"va": "center", "fontsize": 9, "color": "#b3261e"}
            axes.text(0, place, f" no plan: {_needs(row)}", **style)
            continue
        peak, limit = row.plan.estimates.peak_bytes_per_device, memory_limit(row.plan)
        if limit:
            axes.barh(place, limit, color="#e4e8ec", height=0.62)
        axes.barh(place, peak, color=MINE, height=0.62)
        text = f" {format_bytes(peak)}" + (f" of {format_bytes(limit)}" if limit else "")
        is_long = bool(limit) and peak > 0.6 * (limit or 1)
        ink, x, side = ("white", peak, "right") if is_long else (INK, peak, "left")
        axes.text(x, place, f"{text} ", color=ink, ha=side, va="center", fontsize=9.5)
    axes.set_yticks(list(places), labels)
    axes.set_ylabel("devices", color=QUIET, fontsize=10)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xticks([])


def _needs(row: ScaledStep) -> str:
    """A reason that fits beside the bars."""
    least = getattr(row.error, "least_bytes", None)
    text = f"needs {format_bytes(least)} a device" if least else row.reason
    return text if len(text) < _WHY else f"{text[: _WHY - 2]}.."


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12.5, weight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(length=0, labelsize=10, labelcolor=INK)
