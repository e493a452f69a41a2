"""`Numerics`: a plan's numbers beside those of the plain function; `print` shows them."""

from __future__ import annotations

from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from autopar.base.numerics_records import NumericsRecord
from autopar.report.path_folding import short_path
from autopar.report.rich_parts import add_row, as_text, captioned, new_table

_MOST_LEAVES = 20


class Numerics(NumericsRecord):
    """What `autopar.verify_numerics` found; its fields are those of `NumericsRecord`."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"{self.plan}\nrun on {self.devices}")
        yield self._table()
        if self.not_float64:
            yield Text(f"Not in float64: {self.not_float64}")
        if self.first_difference is not None:
            yield Text(f"First difference: {self.first_difference}", style="bold red")
        if self.note:
            yield Text(self.note)
        verdict = "the plan computes what the function does"
        if not self.agrees:
            verdict = f"{len(self.differing)} leaves differ"
        yield Text(f"Verdict: {verdict}.", style="bold" if self.agrees else "bold red")

    def _table(self) -> Any:
        right = ("in its own dtypes", "in float64")
        table = new_table("Largest error of each output", "leaf", *right, "", right=right)
        wide = {x.path: x for x in self.float64}
        rows = sorted(self.own, key=lambda x: (x.agrees and _agrees(wide.get(x.path)), -x.error))
        for x in rows[:_MOST_LEAVES]:
            other = wide.get(x.path)
            is_same = x.agrees and _agrees(other)
            add_row(
                table,
                short_path(x.path),
                f"{x.error:.1e}",
                "-" if other is None else f"{other.error:.1e}",
                "" if is_same else "differs",
                style="" if is_same else "red",
            )
        more = len(rows) - _MOST_LEAVES
        said = "Of the largest number of the leaf."
        return captioned(table, said if more <= 0 else f"{said} {more} more leaves agree better.")

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"<Numerics: {'agrees' if self.agrees else 'differs'}>"


def _agrees(leaf: Any) -> bool:
    return leaf is None or bool(leaf.agrees)
