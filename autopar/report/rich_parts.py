"""What all text reports are made of: tables of one look, paths that break well, plain text."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

TEXT_WIDTH = 120


def as_text(shown: RenderableType, width: int = TEXT_WIDTH) -> str:
    """Text without colours of something that Rich shows, so many columns wide at most.

    In characters that standard output can show, where that is not UTF-8.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = io.TextIOWrapper(io.BytesIO(), encoding, errors="replace")
    plain = Console(
        width=width, file=text, color_system=None, force_terminal=False, force_jupyter=False
    )
    plain.print(shown)
    text.seek(0)
    read = text.read()
    return "\n".join(line.rstrip() for line in read.rstrip().splitlines())


def new_table(title: str, *columns: str, right: Sequence[str]) -> Table:
    """An empty table as all of a plan's tables look; `right` names columns of numbers."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: RenderableType, style: str = "") -> None:
    """Adds a row whose texts are shown as they are: brackets in them are no markup."""
    shown = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
    table.add_row(*shown, style=style)


def captioned(table: Table, caption: str) -> Table:
    """A table with a line below it."""
    table.caption, table.caption_justify = f"{caption}\n", "left"
    return table


@dataclass(frozen=True)
class PathText:
    """A path, indented; a narrow column breaks it after `/` and `,` rather than inside a name."""

    path: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = max(len(piece) for piece in self._pieces())
        return Measurement(min(widest + 4, options.max_width), len(self.path) + 2)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = "  "
        for piece in self._pieces():
            if len(line) + len(piece) > options.max_width and line.strip():
                yield Text(line, overflow="fold")
                line = "    "
            line += piece
        yield Text(line, overflow="fold")

    def _pieces(self) -> list[str]:
        return re.findall(r"[^/,]*[/,]|[^/,]+$", self.path) or [self.path]
