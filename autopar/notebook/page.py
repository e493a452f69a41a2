"""What all pages are made of: one look for light and dark, wide and narrow, without any file.

A page is an element of a notebook: its styles hold for nothing else there, and what it says can be
read where styles or scripts are taken away. It follows the notebook's own theme where that says
what it is, else the system's.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

LIGHT = {
    "bg": "#ffffff", "ink": "#1f2933", "quiet": "#5b6673", "line": "#dfe4ea", "soft": "#f3f5f8",
    "idle": "#e8ecf1", "cut": "#0b6bcb", "good": "#0a7d4f", "bad": "#b3261e",
}  # fmt: skip
DARK = {
    "bg": "#16191d", "ink": "#e6e9ed", "quiet": "#9aa5b1", "line": "#343a42", "soft": "#20252b",
    "idle": "#2a3038", "cut": "#6db3ff", "good": "#4cc38a", "bad": "#ff8a80",
}  # fmt: skip

_DARK_PAGES = (
    "body[data-jp-theme-light='false'] .apv", "body.vscode-dark .apv", "html[theme='dark'] .apv",
    "html[data-theme='dark'] .apv",
)  # fmt: skip
_LIGHT_PAGES = (
    "body[data-jp-theme-light='true'] .apv", "body.vscode-light .apv", "html[theme='light'] .apv",
    "html[data-theme='light'] .apv",
)  # fmt: skip


@functools.cache
def _styles() -> str:
    def variables(colors: dict[str, str]) -> str:
        return "{" + ";".join(f"--{name}:{color}" for name, color in colors.items()) + "}"

    rules = resources.files("autopar").joinpath("notebook/page.css").read_text(encoding="utf-8")
    rules = re.sub(r"\s+", " ", re.sub(r"\s*([{};])\s*", r"\1", rules)).strip()
    return (
        f"<style>.apv{variables(LIGHT)}"
        f"@media (prefers-color-scheme:dark){{.apv{variables(DARK)}}}"
        f"{','.join(_LIGHT_PAGES)}{variables(LIGHT)}{','.join(_DARK_PAGES)}{variables(DARK)}"
        f"{rules}</style>"
    )


def page(title: str, subtitle: str, *parts: str) -> str:
    """A whole page; title and subtitle are text, parts are HTML."""
    below = f'<div class="q">{text(subtitle)}</div>' if subtitle else ""
    body = "".join(parts)
    return f'<div class="apv">{_styles()}<h3>{text(title)}</h3>{below}{body}</div>'


def text(words: object) -> str:
    """Text as HTML; long paths may break after their slashes."""
    return html.escape(str(words)).replace("/", "/<wbr>")


def attribute(words: object) -> str:
    """Text within quotes."""
    return html.escape(str(words), quote=True)


def tile(name: str, value: str, note: str = "", bar: str = "") -> str:
    """One number of a header with what it is; `bar` is HTML."""
    below = f"<i>{text(note)}</i>" if note else ""
    return f'<div class="tile"><i>{text(name)}</i><b>{html.escape(value)}</b>{bar}{below}</div>'


def tiles(*made: str) -> str:
    """The numbers of a header side by side."""
    return f'<div class="tiles">{"".join(filter(None, made))}</div>'


def bar(parts: Iterable[tuple[str, float, str]], total: float) -> str:
    """Parts of a total side by side: name, size, colour."""
    spans = [
        f'<span style="width:{100 * size / total:.2f}%;background:{color}" '
        f'title="{attribute(name)}"></span>'
        for name, size, color in parts
        if total and size > 0
    ]
    return f'<div class="bar">{"".join(spans)}</div>'


def key(entries: Iterable[tuple[str, str]]) -> str:
    """A legend: names and their colours."""
    made = (
        f'<span><i style="background:{color}"></i>{text(name)}</span>' for name, color in entries
    )
    return f'<div class="key">{"".join(made)}</div>'


def row(name: str, drawn: str, value: str) -> str:
    """Three places, as HTML; where it is narrow, what is drawn has a line of its own."""
    places = f'<div>{name}</div><div class="wide">{drawn}</div><div class="n">{value}</div>'
    return f'<div class="row">{places}</div>'


def rows(made: Iterable[str]) -> str:
    """Rows below each other, whose places are as wide as in the others."""
    return f'<div class="rows">{"".join(made)}</div>'


def folded(title: str, note: str, body: str, *, is_open: bool = False) -> str:
    """A part that is opened by a click; `body` is HTML."""
    state = " open" if is_open else ""
    about = f' <span class="q">{text(note)}</span>' if note else ""
    return f"<details{state}><summary>{text(title)}{about}</summary>{body}</details>"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: HTML, and what a search finds it by."""

    shown: str
    found_by: str = ""


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Cell]],
    *,
    numbers: Sequence[str] = (),
    is_long: bool = True,
) -> str:
    """A table; texts are escaped, `Cell`s are HTML, and columns of `numbers` stand to the right.

    A long one is scrolled. Where it is too narrow for a table, rows become paragraphs, with the
    heading before each value.
    """

    def cell(column: str, value: str | Cell, is_first: bool) -> str:
        shown = value.shown if isinstance(value, Cell) else text(value)
        kind = ' class="n"' if column in numbers else ""
        heading = "" if is_first else f' data-h="{attribute(column)}"'
        return f"<td{kind}{heading}>{shown}</td>"

    lines = []
    for row in rows:
        words = " ".join(value.found_by for value in row if isinstance(value, Cell))
        found_by = f' data-s="{attribute(words)}"' if words else ""
        cells = (cell(c, v, i == 0) for i, (c, v) in enumerate(zip(columns, row, strict=True)))
        lines.append(f"<tr{found_by}>{''.join(cells)}</tr>")
    heads = (f"<th{' class=n' if c in numbers else ''}>{text(c)}</th>" for c in columns)
    head = f"<thead><tr>{''.join(heads)}</tr></thead>"
    kind = ' class="scroll"' if is_long else ""
    return f"<div{kind}><table>{head}<tbody>{''.join(lines)}</tbody></table></div>"


SEARCH = (
    "const q=this.value.toLowerCase().split(/\\s+/);"
    "for(const r of this.closest('details').querySelectorAll('tr[data-s]'))"
    "r.hidden=!q.every(w=>(r.dataset.s+' '+r.textContent).toLowerCase().includes(w))"
)
"""What a search field does with the rows of the table below it."""


def search_field(about: str) -> str:
    """A field that shows only rows with all of its words."""
    return f'<input type="search" placeholder="{attribute(about)}" oninput="{attribute(SEARCH)}">'
