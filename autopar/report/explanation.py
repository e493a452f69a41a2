"""What `plan.explain` returns: why something in a plan lies as it does; it prints."""

from __future__ import annotations

import dataclasses
import re

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autopar.base.units import format_seconds
from autopar.report.name_matching import segments
from autopar.report.path_folding import fold_paths, short_path
from autopar.report.rich_parts import PathText, add_row, as_text, captioned, new_table

MOST_ROWS = 24
IN_HOST = " in the host's memory"
"""What is said of the layout of a leaf that lies there."""

TINY_SECONDS = 1e-15  # seconds; costs are whole picoseconds


@dataclasses.dataclass(frozen=True)
class LayoutReason:
    """How one leaf or one computation of a step is laid out, and why.

    Args:
      name: the leaf's path, or the operation with its place in the model.
      role: "state", "batch", ... of a leaf, "computation" of an operation.
      value: dtype and shape of a leaf, else "".
      stage: the pipeline stage.
      source: `file.py:12` of the user's line that makes it, or reads it first, or "".
      sharding: the chosen one, as a `PartitionSpec`.
      runner_up: the best other one that was found, or None where there is none.
      more_seconds: what that would add to the stage's work in a step. The layouts around it were
        chosen again for this, all others were not: chosen again everywhere it may cost less. It is
        negative where only memory stands against it.
      more_bytes: the most that the runner-up would take more of a device's memory at any time,
        where it would be quicker; else 0.
      forced_by: "pin", "constraint", "method", "shape" (nothing else divides it), "memory",
        "neighbour", "computation" (its own would take longer), "surroundings" (more of what lies
        around it would), "input" (an output that replaces
        one), "computed" (an output lies as it is computed), "nothing" (the other costs the same),
        "search" (the solver stopped before it was found).
      neighbour: whose layout it follows, where a neighbour forced it.
      why: all that as a sentence.
    """

    name: str
    role: str
    value: str
    stage: int
    source: str
    sharding: str
    runner_up: str | None = None
    more_seconds: float | None = None
    more_bytes: int = 0
    forced_by: str = ""
    neighbour: str = ""
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a plan decided about something, and why; it prints.

    Args:
      name: what was asked for.
      decisions: about every leaf and computation of that name.
      seconds_per_gib: what a GiB more on each device would save of a step at the margin, on the
        stage where that is most; 0 where memory does not bind.
      quicker: what was considered, is quicker, and does not fit the memory, in words.
    """

    name: str
    decisions: tuple[LayoutReason, ...]
    seconds_per_gib: float
    quicker: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if len(self.decisions) == 1:
            yield _card(self.decisions[0], _memory(self))
        else:
            yield _rows(self)

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__


def parts_of(item: LayoutReason) -> tuple[str, ...]:
    """The names in what a decision is about, an operation first."""
    if item.role != "computation":
        return segments(item.name)
    operation, _, place = item.name.partition(" ")
    return (operation, *segments(place))


def place_of(item: LayoutReason) -> str:
    """Where in the model an operation is."""
    return "/".join(parts_of(item)[1:])


def _memory(explanation: Explanation) -> str:
    price = explanation.seconds_per_gib
    if price:
        text = f"a GiB more on each device would save about {format_seconds(price)} a step"
    else:
        text = "does not bind: more of it would change no layout"
    return f"{text}; {explanation.quicker}" if explanation.quicker else text


def _more(item: LayoutReason) -> str:
    if item.more_seconds is None:
        return "-"
    if abs(item.more_seconds) <= TINY_SECONDS:
        return "0"
    return f"{'+' if item.more_seconds > 0 else '-'}{format_seconds(abs(item.more_seconds))}"


def _card(item: LayoutReason, memory: str) -> Panel:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    kind = f"{item.role} {item.value}".strip()
    add_row(grid, "what", f"{kind}, stage {item.stage}" if item.stage else kind)
    add_row(grid, "sharding", Text(item.sharding, "bold"))
    add_row(grid, "because", item.why)
    if item.runner_up is not None:
        where = " of its stage" if item.stage else ""
        add_row(grid, "runner-up", f"{item.runner_up}: {_more(item)} a step{where}")
        add_row(grid, "", Text("layouts around it chosen again, all others kept", "dim"))
    if item.source:
        add_row(grid, "line", item.source)
    add_row(grid, "memory", memory)
    return Panel.fit(grid, title=short_path(item.name), title_align="left", border_style="blue")


def _rows(explanation: Explanation) -> RenderableType:
    """A row for decisions that are alike, those that would cost most to change first."""
    alike: dict[tuple[object, ...], list[LayoutReason]] = {}
    for item in explanation.decisions:
        is_leaf = item.role != "computation"
        what = "" if is_leaf else _operation(item)
        key = (is_leaf, what, item.sharding, item.runner_up, item.forced_by, _more(item))
        alike.setdefault(key, []).append(item)
    columns = ("what", "lies as", "runner-up", "costs", "because of")
    table = new_table(f"Why {explanation.name} lies so", *columns, right=("costs",))
    for column in ("lies as", "runner-up", "costs"):
        next(c for c in table.columns if c.header == column).no_wrap = True
    groups = sorted(alike.values(), key=lambda g: -(g[0].more_seconds or 0.0))
    groups.sort(key=lambda g: g[0].role == "computation")
    for i, group in enumerate(groups[:MOST_ROWS]):
        item = group[0]
        if i and item.role == "computation" != groups[i - 1][0].role:
            table.add_section()
        other = "-" if item.runner_up is None else _short_layout(item.runner_up)
        same = other == _short_layout(item.sharding)
        add_row(
            table,
            _folded(group),
            _short_layout(item.sharding),
            "same" if same else other,
            _more(item),
            _broken(item.neighbour or item.forced_by),
        )
    notes = [f"and {len(groups) - MOST_ROWS} rows more"] if len(groups) > MOST_ROWS else []
    if any(group[0].runner_up == group[0].sharding for group in groups):
        notes += ["same: it would lie so too, and be made otherwise"]
    notes += ["costs: of a step of its stage; layouts around it chosen again, all others kept"]
    return captioned(table, "\n".join([*notes, f"memory {_memory(explanation)}"]))


def _folded(group: list[LayoutReason]) -> RenderableType:
    """The names of decisions alike."""
    if group[0].role == "computation":
        times = f" ({len(group)} of them)" if len(group) > 1 else ""
        return f"{_operation(group[0])}{times}"
    return PathText(", ".join(fold_paths(x.name for x in group)))


def _broken(name: str) -> RenderableType:
    return PathText(name) if "/" in name else f"  {name}"


def _operation(item: LayoutReason) -> str:
    """`dot_general gpt.py:47, backward`."""
    operation, _, place = item.name.partition(" ")
    again = ", again" if "rematted_computation" in place else ""
    backward = ", backward" if "transpose(" in place and not again else ""
    return f"{operation} {item.source or place_of(item)}{again}{backward}"


def _short_layout(text: str) -> str:
    """A `PartitionSpec` as in a table: `P(None, ('x', 'y'))` as `[-, x/y]`."""
    spec, comma, rest = text.partition("), ") if "), a " in text else (text, "", "")
    dims = spec.removeprefix("P(").removesuffix(")") if not comma else spec.removeprefix("P(")
    dims = re.sub(
        r"\('(\w)', '(\w)'(?:, '(\w)')?\)", lambda m: "/".join(filter(None, m.groups())), dims
    )
    sums = re.findall(r"a \w+ over (\w)", rest)
    there = " host" * text.endswith(IN_HOST)
    dims = dims.removesuffix(IN_HOST).removesuffix(")").replace("None", "-").replace("'", "")
    return f"[{dims}]{''.join(f' +{a}' for a in sums)}{there}"
