"""Pages of what is less than a plan: timelines, profiles, differences, clusters, and steps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

from autopar.base.cluster import Cluster
from autopar.base.errors import AutoparError
from autopar.base.plan_records import PlanRecord
from autopar.base.records import Differences
from autopar.base.units import format_bytes, format_seconds
from autopar.notebook.page import Cell, folded, page, table, text, tile, tiles
from autopar.notebook.plan_page import plan_parts, titles
from autopar.notebook.timeline_svg import memory_curves, timeline_rows
from autopar.passes.pipeline.timeline import Timeline, compared
from autopar.passes.pipeline.what_if import Simulation
from autopar.report.cluster_tables import cluster_rows
from autopar.report.drawn_steps import drawn

if TYPE_CHECKING:
    from autopar.passes.pipeline.timeline import Forecast

_SQUARES, _DETAILS = 128, 200


class MeasuredStep(Protocol):
    """A `Profile`."""

    timeline: Timeline
    expected: Timeline

    @property
    def deviation(self) -> float:
        """(measured - expected) / measured."""


class PlannedPage(Protocol):
    """A step that has a plan."""

    plan: PlanRecord


def timeline_page(timeline: Timeline) -> str:
    """When every mesh does what, and what it holds meanwhile."""
    forecast = timeline.forecast
    return page(f"Timeline: {forecast.name}", "", _tiles(forecast), *_timeline(timeline))


def simulation_page(simulation: Simulation) -> str:
    """The simulated step."""
    forecast, timeline = simulation.forecast, drawn(simulation)
    rows = [timeline] if isinstance(timeline, str) else _timeline(timeline)
    return page(f"Simulated step: {forecast.name}", "", _tiles(forecast), *rows)


def profile_page(profile: MeasuredStep) -> str:
    """The measured step above the one that is expected of what its instructions take alone."""
    measured, expected = profile.timeline, profile.expected
    header = tiles(
        _step_tile("measured step", measured),
        _step_tile("expected step", expected),
        tile("deviation", f"{profile.deviation:+.1%}", "of the measured step"),
    )
    columns = ("mesh", "instruction", "count", "expected", "measured", "difference")
    cells = ([str(cell) for cell in row] for row in compared(expected, measured))
    rows = [[f"mesh {mesh}", *others] for mesh, *others in cells]
    body = table(columns, rows, numbers=columns[2:])
    return page(
        f"Profile: {measured.program.schedule.name}",
        "",
        header,
        "<h4>Measured</h4>",
        timeline_rows(measured),
        "<h4>Expected</h4>",
        timeline_rows(expected),
        folded("By instruction", f"{len(rows)} rows", body),
    )


def differences_page(found: Differences) -> str:
    """What differs, causes first; all fields below."""
    if not found:
        return page("No differences", "")
    body = table(("what", ""), [_difference(line) for line in found], is_long=False)
    shown = found.details[:_DETAILS]
    details = table(("field", ""), [_difference(line) for line in shown])
    more = len(found.details) - len(shown)
    details += f'<div class="q">and {more} more, in .details</div>' if more else ""
    return page(
        "Differences",
        "this plan -> the other",
        body,
        folded("Every field", f"{len(found.details)} lines", details) if found.details else "",
    )


def cluster_page(cluster: Cluster) -> str:
    """The numbers that the planner knows of a cluster, and its nodes as boxes of devices."""
    shown = min(cluster.num_nodes, max(_SQUARES // cluster.devices_per_node, 1))
    square = '<span style="width:11px;height:11px;border-radius:2px;background:#0072b2"></span>'
    node = (
        '<span style="display:inline-flex;gap:2px;padding:3px;border:1px solid var(--line);'
        f'border-radius:4px">{square * min(cluster.devices_per_node, _SQUARES)}</span>'
    )
    more = f'<span class="q">and {cluster.num_nodes - shown} nodes more</span>'
    boxes = node * shown + (more if shown < cluster.num_nodes else "")
    rows = "".join(
        f'<div class="q">{text(name)}</div><div>{text(value)}</div>'
        for name, value in cluster_rows(cluster)
    )
    picture = f'<div style="display:flex;flex-wrap:wrap;gap:5px;margin:8px 0">{boxes}</div>'
    return page(f"Cluster: {cluster.name}", "", picture, f'<div class="lone">{rows}</div>')


def step_page(step: PlannedPage) -> str:
    """A compiled step: its plan."""
    title, how = titles(step.plan)
    name = getattr(step, "__name__", "") or "the step"
    return page(f"{name}, compiled. {title}", how, *plan_parts(step.plan))


def parallelized_page(step: PlannedPage) -> str:
    """A step that plans itself: the plan that ran last, or a line before it is called."""
    try:
        _ = step.plan
    except AutoparError:
        return page(repr(step), "It is planned when it is first called.")
    return step_page(step)


def _tiles(forecast: Forecast) -> str:
    peaks = forecast.peak_bytes
    return tiles(
        tile("step", format_seconds(forecast.step_seconds)),
        tile("waiting", f"{forecast.bubble_fraction:.1%}", "of all devices' time"),
        tile("memory of a device", format_bytes(max(peaks, default=0)), "on the fullest mesh"),
        tile("meshes", str(len(forecast.busy))),
    )


def _timeline(timeline: Timeline) -> list[str]:
    curves = memory_curves(timeline)
    return [timeline_rows(timeline), "<h4>Memory over the step, the most at the right</h4>", curves]


def _step_tile(name: str, timeline: Timeline) -> str:
    waiting = f"{timeline.bubble_fraction:.1%} waiting"
    return tile(name, format_seconds(timeline.step_seconds), waiting)


def _difference(line: str) -> tuple[Any, Any]:
    """`what: before -> after` with its parts told apart."""
    # A name may have a colon of its own inside its brackets: strategies[1: state].choice.
    ends = (match.start() for match in re.finditer(": ", line))
    end = next((n for n in ends if line.count("[", 0, n) == line.count("]", 0, n)), None)
    if end is None:
        return Cell(f"<i>{text(line)}</i>"), ""
    name, rest = line[:end], line[end + 2 :]
    before, arrow, after = rest.partition(" -> ")
    shown = text(rest.replace(" -> ", " → "))
    if arrow and " -> " not in after:
        shown = f"<del>{text(before)}</del> → <ins>{text(after)}</ins>"
    return Cell(f"<b>{text(name)}</b>"), Cell(shown)
