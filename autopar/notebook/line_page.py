"""Where the time of a step goes, by line of the user's code, as a part of a page."""

from __future__ import annotations

from autopar.base.line_times import LEAST_SHARE, MOST_LINES
from autopar.base.units import format_seconds
from autopar.notebook.page import Cell, attribute, bar, folded, key, page, table, text
from autopar.report.hot_lines import (
    KINDS,
    PASSES,
    HotLines,
    first_lines,
    line_name,
    shown_columns,
    why_no_lines,
)
from autopar.report.palette import APART


def hot_lines_page(found: HotLines) -> str:
    """The page of a plan's lines."""
    part = line_part(found, is_open=True) or why_no_lines(found)
    return page("A step by line", f"{format_seconds(found.step_seconds)}, estimated", part)


def line_part(found: HotLines, *, is_open: bool = False) -> str:
    """Where the time goes, by line: a bar for each, of what it is; and what follows from it."""
    if not found.lines:
        return ""
    shown, colors = shown_columns(found, {**KINDS, **PASSES}), (APART["F"], APART["W"], APART["B"])
    own = dict(zip(KINDS, colors, strict=True))
    longest = max(line.seconds for line in found.lines)
    lines: list[list[str | Cell]] = []
    for line in first_lines(found, MOST_LINES):
        kinds = [(name, of(line), own[name]) for name, of in KINDS.items() if name in shown]
        name = f"<code>{text(line_name(line))}</code>" if line.source else text(line_name(line))
        operations = ", ".join(line.operations)
        lines.append(
            [
                Cell(f'<span title="{attribute(operations)}">{name}</span>', operations),
                Cell(f'<span class="q">{text(line.function.removesuffix(".__call__"))}</span>'),
                f"{found.share(line):.1%}",
                format_seconds(line.seconds),
                Cell(f'<div style="min-width:120px">{bar(kinds, longest)}</div>'),
                *(_seconds(of(line), found) for of in shown.values()),
            ]
        )
    numbers = ("share", "time", *shown)
    columns = ("line", "in", "share", "time", "", *shown)
    body = table(columns, lines, numbers=numbers)
    drawn = key((name, color) for name, color in own.items() if name in shown)
    advice = "".join(f"<p>▸ {text(item)}</p>" for item in found.advice)
    first = found.lines[0]
    note = f"{found.share(first):.0%} at {first.source}" if first.source else ""
    return folded("Where the time goes", note, advice + drawn + body, is_open=is_open)


def _seconds(seconds: float, found: HotLines) -> str:
    return format_seconds(seconds) if seconds > LEAST_SHARE * found.seconds else ""
