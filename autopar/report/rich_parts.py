"""What all text reports are made of: tables of one look, paths that break well, plain text.

A table that is wider than the terminal is shown row by row, each as a short paragraph, unless
breaking its widest column is enough: columns of a few letters cannot be read.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
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


class FittingTable(Table):
    """A table that becomes a list of paragraphs where the terminal is too narrow for it."""

    def __init__(self, *, plain: Sequence[str] = (), **look: Any) -> None:
        super().__init__(**look)
        self._plain = frozenset(plain)
        self._shown: list[tuple[tuple[RenderableType, ...], Any]] = []
        self._sections: set[int] = set()

    def add_row(self, *cells: Any, style: Any = None, end_section: bool = False) -> None:
        """Adds a row, as `Table.add_row` does."""
        super().add_row(*cells, style=style, end_section=end_section)
        missing = len(self.columns) - len(cells)
        self._shown.append(((*cells, *(Text() for _ in range(missing))), style))

    def add_section(self) -> None:
        """Begins a new group of rows."""
        super().add_section()
        self._sections.add(len(self._shown))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._fits(console, options):
            yield from super().__rich_console__(console, options)
            return
        yield Text()
        yield Text(str(self.title), "bold")
        for number, (cells, style) in enumerate(self._shown):
            if number in self._sections:
                yield Text()
            yield from self._paragraph(cells, style, options)
        if self.caption:
            yield Text(f"\n{self.caption}", "dim italic")
        else:
            yield Text()

    def _fits(self, console: Console, options: ConsoleOptions) -> bool:
        """Whether it is narrow enough, perhaps with its widest column broken."""
        free = options.update(max_width=10_000)
        over = Measurement.get(console, free, self).maximum - options.max_width
        if over <= 0:
            return True
        widths = [
            Measurement.get(console, free, cell)
            for column in range(len(self.columns))
            for cell in [Group(*(row[column] for row, _ in self._shown))]
        ]
        heads = [len(str(column.header)) for column in self.columns]
        most = [max(size.maximum, head) for size, head in zip(widths, heads, strict=True)]
        widest = max(range(len(most)), key=most.__getitem__)
        others = [size for column, size in enumerate(most) if column != widest]
        least = max(widths[widest].minimum, *others, 0)
        return not self.columns[widest].no_wrap and over <= most[widest] - least

    def _paragraph(
        self, cells: Sequence[RenderableType], style: Any, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """The first cell, then the others with their headings, as many in a line as fit."""
        named = [*zip((str(column.header) for column in self.columns), cells, strict=True)]
        if not named[0][0]:  # a mark before the row
            mark, (_, first), named = named[0][1], named[1], named[2:]
            yield Text.assemble(str(mark) or " ", " ", str(first), style=style or "")
        else:
            first, named = named[0][1], named[1:]
            if isinstance(first, Text):
                is_number = first.plain.isdecimal()  # which says nothing alone
                heading = f"{self.columns[0].header} " if is_number else ""
                first = Text.assemble(heading, first, style=style or "")
            yield first
        line, width = Text(), options.max_width - 4
        for heading, cell in named:
            value = cell if isinstance(cell, Text) else Text(str(cell))
            if not value.plain.strip():
                continue
            value = value[len(value) - len(value.plain.lstrip()) :]
            part = Text.assemble("" if heading in self._plain else (f"{heading} ", "dim"), value)
            if line and len(line) + 3 + len(part) > width:
                yield Padding(line, (0, 0, 0, 4), expand=False)
                line = Text()
            line.append(" · " if line else "", "dim").append_text(part)
        if line:
            yield Padding(line, (0, 0, 0, 4), expand=False)


def new_table(title: str, *columns: str, right: Sequence[str], plain: Sequence[str] = ()) -> Table:
    """An empty table as all of a plan's tables look.

    `right` names columns of numbers, `plain` those that say what they are without a heading.
    """
    look: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}
    table = FittingTable(plain=plain, title=title, padding=(0, 1), **look)
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

    def __str__(self) -> str:
        return self.path

    def _pieces(self) -> list[str]:
        return re.findall(r"[^/,]*[/,]|[^/,]+$", self.path) or [self.path]
