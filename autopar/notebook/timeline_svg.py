"""A timeline as SVG: a row for each mesh, whose bars keep their height when the page gets narrow.

Long ones are folded: of many microbatches the beginning and the end are drawn, of many meshes the
first and the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.base.units import format_bytes, format_seconds
from autopar.notebook.page import attribute, key, row, rows, text
from autopar.passes.pipeline.timeline import Timeline
from autopar.report.palette import APART, IDLE
from autopar.report.summaries import format_stages
from autopar.report.task_spans import TASKS, Span, task_spans

_HEIGHT = 20
_MAX_ROWS, _FIRST_ROWS, _LAST_ROWS = 16, 8, 4
_MAX_MICROBATCHES = 24
_GAP = 0.07  # of the width, for what is left out
_LEAST_CUT = 0.2  # of the time; to leave less out is not worth it
_THINNEST = 0.0004  # of the width; what is thinner is drawn with its neighbour
_WIDTHS = ((0.045, ""), (0.026, "w3"), (0.015, "w2"))
"""How much of the width a bar must have for its number, and where that is shown no more."""


@dataclass(frozen=True)
class Clock:
    """Where a time is drawn, as a share of the width; `cut` is the time that is left out."""

    start: float
    seconds: float
    cut: tuple[float, float] | None = None

    def place(self, time: float) -> float:
        """The share of the width at which a time is."""
        time -= self.start
        if self.cut is None:
            return time / self.seconds
        first, last = self.cut
        scale = (1 - _GAP) / (self.seconds - (last - first))
        if time <= first:
            return time * scale
        if time >= last:
            return first * scale + _GAP + (time - last) * scale
        return first * scale + _GAP * (time - first) / (last - first)

    def is_left_out(self, span: Span) -> bool:
        """Whether it is within the time that is not drawn."""
        if self.cut is None:
            return False
        return self.cut[0] <= span.start - self.start and span.end - self.start <= self.cut[1]


def timeline_rows(timeline: Timeline) -> str:
    """The rows of a timeline with a clock below them and a legend, as HTML."""
    spans = task_spans(timeline)
    clock = _clock(timeline, spans)
    seconds = timeline.step_seconds or 1.0
    by_mesh: dict[int, list[Span]] = {}
    for span in spans:
        by_mesh.setdefault(span.mesh, []).append(span)
    meshes = range(len(timeline.busy))
    shown = set(meshes)
    if len(meshes) > _MAX_ROWS:
        shown = {*meshes[:_FIRST_ROWS], *meshes[-_LAST_ROWS:]}
    lines = []
    for mesh in meshes:
        if mesh in shown:
            idle = f"{1 - timeline.busy[mesh] / seconds:.0%} idle"
            drawn = _row(by_mesh.get(mesh, ()), clock, timeline)
            lines.append(_line(_label(timeline, mesh), drawn, idle))
        elif mesh - 1 in shown:
            more = f"{len(meshes) - len(shown)} meshes more"
            lines.append(_line("", f'<div class="q">{more}</div>', ""))
    lines.append(_line("", _ticks(clock), ""))
    kinds = {span.kind for span in spans}
    entries = [(task.name, APART[kind]) for kind, task in TASKS.items() if kind in kinds]
    return rows(lines) + key([*entries, ("waiting", IDLE)])


def memory_curves(timeline: Timeline) -> str:
    """A line for each mesh: what its devices hold over the same time, with the most of it."""
    clock = _clock(timeline, task_spans(timeline))
    largest = max(timeline.peak_bytes, default=0) or 1
    meshes = range(len(timeline.busy))
    if len(meshes) > _MAX_ROWS:
        meshes = range(_FIRST_ROWS)
    lines = []
    for mesh in meshes:
        points: list[str] = []
        for seconds, size in timeline.bytes_over_time(mesh):
            x, y = 1000 * clock.place(seconds), _HEIGHT * (1 - size / largest)
            if points:
                points.append(f"{x:.1f},{points[-1].partition(',')[2]}")
            points.append(f"{x:.1f},{y:.1f}")
        closed = " ".join([f"0,{_HEIGHT}", *points, f"1000,{_HEIGHT}"])
        drawn = (
            f'<svg height="{_HEIGHT}" viewBox="0 0 1000 {_HEIGHT}" preserveAspectRatio="none">'
            f'<polygon points="{closed}" fill="{APART["F"]}" opacity=".55"/></svg>'
        )
        lines.append(_line(f"mesh {mesh}", drawn, format_bytes(timeline.peak_bytes[mesh])))
    return rows(lines)


def _line(label: str, drawn: str, value: str) -> str:
    return row(f'<span class="q">{text(label)}</span>', drawn, f'<span class="q">{value}</span>')


def _label(timeline: Timeline, mesh: int) -> str:
    schedule = timeline.program.schedule
    if schedule.num_stages == schedule.num_meshes:
        return f"mesh {mesh}"
    return f"mesh {mesh}: stages {format_stages(schedule.stages_of(mesh))}"


def _clock(timeline: Timeline, spans: list[Span]) -> Clock:
    """The clock of a timeline, without the steady middle of many microbatches."""
    start = min((event.start for event in timeline.events), default=0.0)
    seconds = timeline.step_seconds or 1.0
    count = timeline.program.schedule.num_microbatches
    if count <= _MAX_MICROBATCHES:
        return Clock(start, seconds)
    kept = _MAX_MICROBATCHES // 2
    drawn = (kept - len(timeline.busy) // 2, count - kept // 2)
    first, last = ([s for s in spans if s.kind == "B" and s.microbatch == n] for n in drawn)
    if not first or not last:
        return Clock(start, seconds)
    left, right = max(span.end for span in first), min(span.start for span in last)
    cut = (left - start, right - start) if right - left >= _LEAST_CUT * seconds else None
    return Clock(start, seconds, cut)


def _row(spans: Iterable[Span], clock: Clock, timeline: Timeline) -> str:
    shapes = [f'<rect width="100%" height="{_HEIGHT}" fill="{IDLE}"/>']
    for span in _merged(spans, clock):
        left, right = clock.place(span.start), clock.place(span.end)
        where = f'x="{100 * left:.2f}%" width="{100 * max(right - left, _THINNEST):.2f}%"'
        shapes.append(
            f'<rect {where} height="{_HEIGHT}" fill="{APART[span.kind]}"{_pale(span, timeline)} '
            f'stroke="var(--bg)" stroke-width=".6"><title>{attribute(_words(span))}</title></rect>'
        )
        number = "" if span.microbatch is None else str(span.microbatch)
        least = 1 + 0.45 * max(len(number) - 1, 0)
        shown = (kind for width, kind in _WIDTHS if right - left >= width * least)
        if number and (kind := next(shown, None)) is not None:
            ink = "#fff" if span.kind == "F" else "#111"
            ink = "var(--ink)" if _pale(span, timeline) else ink
            middle = f'x="{50 * (left + right):.2f}%" y="{_HEIGHT - 6}"'
            style = f'text-anchor="middle" fill="{ink}" class="{kind}"'
            shapes.append(f"<text {middle} {style}>{number}</text>")
    if clock.cut is not None:
        shapes.append(_gap(clock, timeline))
    return f'<svg height="{_HEIGHT}" role="img">{"".join(shapes)}</svg>'


def _merged(spans: Iterable[Span], clock: Clock) -> Iterator[Span]:
    """The spans that are drawn; one that is too thin to be seen is part of what follows it."""
    end = -1.0
    for span in sorted(spans, key=lambda s: s.start):
        if clock.is_left_out(span):
            continue
        right = clock.place(span.end)
        if right - max(end, clock.place(span.start)) >= _THINNEST or span.kind in "FBW":
            end = right
            yield span


def _pale(span: Span, timeline: Timeline) -> str:
    """Later stages of one mesh are paler."""
    here = timeline.program.schedule.stages_of(span.mesh)
    if span.stage not in here[1:]:
        return ""
    return f' opacity="{1 - 0.5 * here.index(span.stage) / (len(here) - 1):.2f}"'


def _words(span: Span) -> str:
    name = TASKS[span.kind].name
    stage = f", stage {span.stage}" if span.stage >= 0 else ""
    number = "" if span.microbatch is None else f", microbatch {span.microbatch}"
    return f"{name}{stage}{number}: {format_seconds(span.end - span.start)}"


def _gap(clock: Clock, timeline: Timeline) -> str:
    assert clock.cut is not None
    first, last = clock.cut
    left = 100 * clock.place(clock.start + first)
    words = f"{format_seconds(last - first)} alike, left out"
    return (
        f'<rect x="{left:.2f}%" width="{100 * _GAP:.2f}%" height="{_HEIGHT}" fill="var(--bg)">'
        f"<title>{attribute(words)}</title></rect>"
        f'<text x="{left + 50 * _GAP:.2f}%" y="{_HEIGHT - 6}" text-anchor="middle" '
        f'fill="var(--quiet)">⋯</text>'
    )


def _ticks(clock: Clock) -> str:
    """The time below the rows: 0, the end, and what is left out."""
    marks = [(0.0, "0", "start"), (1.0, format_seconds(clock.seconds), "end")]
    if clock.cut is None:
        marks += [
            (share, format_seconds(share * clock.seconds), "middle") for share in (0.25, 0.5, 0.75)
        ]
    else:
        first, last = clock.cut
        middle = clock.place(clock.start + (first + last) / 2)
        marks.append((middle, f"{format_seconds(last - first)} left out", "middle"))
    shown = (
        f'<text x="{100 * place:.2f}%" y="11" text-anchor="{side}" fill="var(--quiet)"'
        f"{' class=w3' if side == 'middle' and clock.cut is None else ''}>{text(words)}</text>"
        for place, words, side in marks
    )
    return f'<svg height="14">{"".join(shown)}</svg>'
