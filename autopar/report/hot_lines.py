"""Where the time of a step goes, by line of the user's code, and what follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from autopar.base.displayed import Displayed
from autopar.base.line_times import MOST_LINES, LineTime, StepLines, together
from autopar.base.plan_records import PlanRecord
from autopar.base.units import format_bytes, format_seconds
from autopar.report.rich_parts import add_row, as_text, captioned, new_table
from autopar.report.summaries import memory_limit

WORTH_SAYING = 0.1
"""The share of a step from which on something is worth advice."""
WORTH_KEEPING = 0.1
"""The share of what a checkpoint does not keep, from which on keeping some of it is advised."""
MOST_IN_PLAN = 5
"""Lines that stand among a plan's other tables."""
_SHOWN = 0.0005  # of the step: 0.1%, rounded

KERNELS = {
    "cudnn": 'jax.nn.dot_product_attention(q, k, v, implementation="cudnn")',
    "pallas": "A Pallas kernel, as jax.experimental.pallas.ops.tpu.flash_attention,",
}
"""What computes attention without writing its scores."""


@dataclasses.dataclass(frozen=True)
class Advice:
    """What would make a step shorter.

    Args:
      about: "attention", "alike", "recomputation" or "communication".
      source: the line, `file.py:12`, or "".
      share: of the step, what this takes.
      bound_seconds: how much less a device would have to do in a step at most.
      text: all that as a sentence or two.
    """

    about: str
    source: str
    share: float
    bound_seconds: float
    text: str

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class HotLines(Displayed):
    """The lines of the user's code in which a step spends its time, as the plan expects it; prints.

    Args:
      lines: the longest first; of the last one, which is all others together, `source` is "".
      seconds: of all lines: what a device of the mesh that has most to do computes and moves.
      step_seconds: of a step, in which that device may wait for others.
      advice: what would make it shorter.
      is_known: whether the plan says; files of older versions do not.
    """

    lines: tuple[LineTime, ...]
    seconds: float
    step_seconds: float
    advice: tuple[Advice, ...] = ()
    is_known: bool = True

    page: ClassVar = ("line_page", "hot_lines_page")

    def share(self, line: LineTime) -> float:
        """That of a line of what the device does."""
        return line.seconds / self.seconds if self.seconds else 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = line_table(self)
        free = options.update(max_width=10_000)
        if Measurement.get(console, free, whole).maximum <= options.max_width or not self.lines:
            yield whole
        else:
            yield line_table(self, columns=KINDS)
            if shown_columns(self, PASSES):
                yield line_table(self, "And in which pass", columns=PASSES)
        if self.advice:
            yield advice_list(self.advice)

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__


def hot_lines(plan: PlanRecord) -> HotLines:
    """Those of a plan; none where its file is of a version that did not write them."""
    known = plan.lines or StepLines(())
    seconds = sum(line.seconds for line in known.lines)
    is_known = plan.lines is not None
    found = HotLines(known.lines, seconds, plan.estimates.step_seconds, is_known=is_known)
    return dataclasses.replace(found, advice=tuple(_advice(plan, known, found)))


def advice_list(advice: Sequence[Advice]) -> RenderableType:
    """Each as a paragraph."""
    grid = Table.grid(padding=(0, 1))
    for item in advice:
        add_row(grid, Text("▸", "bold yellow"), item.text)
    return grid


Columns = Mapping[str, Callable[[LineTime], float]]

KINDS: Columns = {
    "products": lambda x: x.product_seconds,
    "memory": lambda x: x.memory_seconds,
    "comm.": lambda x: x.communication_seconds,
}
PASSES: Columns = {
    "forward": lambda x: x.forward_seconds,
    "backward": lambda x: x.backward_seconds,
    "again": lambda x: x.again_seconds,
}
NOTES = {
    "memory": "memory: all that is no product, by the bytes that it moves",
    "comm.": "comm.: communication that nothing hides",
    "again": "again: of the forward pass, computed again in the backward pass",
}
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def shown_columns(found: HotLines, columns: Columns) -> Columns:
    """Those of which some line has something."""
    least = _SHOWN * found.seconds
    return {name: of for name, of in columns.items() if any(of(x) > least for x in found.lines)}


def line_table(
    found: HotLines,
    title: str = "Where the time goes",
    columns: Columns = MappingProxyType({**KINDS, **PASSES}),
    most: int = MOST_LINES,
) -> RenderableType:
    """A row for each line, or for the first alone and for all others."""
    if not found.lines:
        return Text(f"{title}: {why_no_lines(found)}.", "bold")
    shown = shown_columns(found, columns)
    unit, size = next((x for x in _UNITS if found.seconds >= x[1]), _UNITS[-1])
    right = ("share", unit, *shown)
    heading = f"{title}, {unit} of a step"
    table = new_table(heading, "line", "in", *right, right=right, plain=("in",))
    table.collapse_padding = True
    for line in first_lines(found, most):
        share = found.share(line)
        times = (line.seconds, *(of(line) for of in shown.values()))
        add_row(
            table,
            Text(line.source, "bold") if line.source else line_name(line),
            line.function.removesuffix(".__call__"),
            Text(f"{share:.1%}", "bold" if share >= WORTH_SAYING else ""),
            *(_number(seconds / size, found.seconds / size) for seconds in times),
        )
    notes = [*_waiting(found), *(NOTES[x] for x in shown if x in NOTES)]
    return captioned(table, "\n".join(notes)) if notes else table


def why_no_lines(found: HotLines) -> str:
    """What stands for them."""
    return "nothing of a step takes any" if found.is_known else "the plan does not say"


def first_lines(found: HotLines, most: int) -> Sequence[LineTime]:
    """So many lines, and all others as one, but for what is too little to be told."""
    lines = [line for line in found.lines if found.share(line) >= _SHOWN]
    first, rest = lines[:most], lines[most:]
    return [*first, together(rest)] if rest else first


def line_name(line: LineTime) -> str:
    """Its source, or what stands for lines that are not told."""
    if line.source:
        return line.source
    return f"{line.lines} others" if line.lines > 1 else "no line"


def _number(value: float, total: float) -> str:
    """With as many digits as all of a column need; what is too little to be seen is left out."""
    digits = 0 if total >= 1000 else 1 if total >= 10 else 2
    text = f"{value:.{digits}f}"
    return text if float(text) else ""


def _waiting(found: HotLines) -> list[str]:
    if found.step_seconds <= 1.001 * found.seconds:
        return []
    waiting = format_seconds(found.step_seconds - found.seconds)
    return [f"of the mesh that has most to do; it waits {waiting} of a step for others"]


def _advice(plan: PlanRecord, known: StepLines, found: HotLines) -> Iterator[Advice]:
    """What is true of a plan, the longest kind first."""
    made = (
        *_attention(known, found),
        *_alike(known, found),
        *_again(plan, known, found),
        *_communication(plan, found),
    )
    yield from sorted(made, key=lambda x: -x.share)


def _attention(known: StepLines, found: HotLines) -> Iterator[Advice]:
    for item in known.attention:
        share = item.seconds / found.seconds if found.seconds else 0.0
        if share < WORTH_SAYING:
            continue
        shorter = _shorter(item.bound_seconds, found)
        yield Advice(
            "attention",
            item.source,
            share,
            item.bound_seconds,
            f"{share:.0%} of {_whole(found)} is the softmax of attention at {item.source} "
            f"({item.function}), which writes and reads all scores. {KERNELS[item.kernel]} writes "
            f"none: {shorter}.",
        )


def _alike(known: StepLines, found: HotLines) -> Iterator[Advice]:
    """What several devices compute alike."""
    for item in known.alike:
        share = item.seconds / found.seconds if found.seconds else 0.0
        if share < WORTH_SAYING:
            continue
        bound = item.seconds * (1 - 1 / item.devices)
        yield Advice(
            "alike",
            item.source,
            share,
            bound,
            f"{share:.0%} of {_whole(found)} is {item.operation} at {item.source} "
            f"({item.function}), which {item.devices} devices compute alike: the method, and what "
            "may be cut of it, leave them nothing to share. A larger batch, more heads, "
            f"another method, or stages of fewer devices might; then {_shorter(bound, found)}.",
        )


def _again(plan: PlanRecord, known: StepLines, found: HotLines) -> Iterator[Advice]:
    """What is computed again: by the program's `jax.checkpoint`, or because autopar chose so."""
    own, asked = known.checkpoint_seconds, plan.options.get("remat")
    limit, peak = memory_limit(plan), plan.estimates.peak_bytes_per_device
    free, kept = max(limit - peak, 0) if limit else None, known.undone_bytes
    if asked != "override" and (free is None or free >= WORTH_KEEPING * kept):
        what = "keeps it" if free is not None and free >= kept else "keeps some of it"
        room = "" if free is None else f" of {format_bytes(free)} that are free on a device"
        how = f'as jax.checkpoint asks. remat="override" {what}, for which it takes up to '
        how += f"{format_bytes(min(kept, free or kept))}{room}: "
        yield from _computed_again(known.undone_seconds, how, found)
    chosen = plan.recomputation is not None or any(
        stage.remat == "full" or stage.recomputation is not None for stage in plan.stages
    )
    if chosen:
        how = "to save memory. With more of it "
        if asked == "full":
            how = 'as remat="full" asks. remat="auto" computes again only what does not fit: '
        seconds = sum(line.again_seconds for line in found.lines) - own
        yield from _computed_again(seconds, how, found)


def _computed_again(seconds: float, how: str, found: HotLines) -> Iterator[Advice]:
    share = seconds / found.seconds if found.seconds else 0.0
    if share >= WORTH_SAYING:
        text = f"{share:.0%} of {_whole(found)} computes the forward pass again, {how}"
        yield Advice("recomputation", "", share, seconds, f"{text}{_shorter(seconds, found)}.")


def _communication(plan: PlanRecord, found: HotLines) -> Iterator[Advice]:
    """A line that mostly waits for what devices exchange."""
    explained = {node.source for stage in plan.stages for node in stage.strategies}
    for line in found.lines:
        moved = line.communication_seconds
        share = moved / found.seconds if found.seconds else 0.0
        if share < WORTH_SAYING or 2 * moved < line.seconds or line.source not in explained:
            continue
        what = next((name for name in line.operations if " " in name), "communication")
        where = f"{line.source} ({line.function})"
        yield Advice(
            "communication",
            line.source,
            share,
            moved,
            f"{share:.0%} of {_whole(found)} is communication for {where}, mostly the {what}: "
            f'plan.explain("{line.source}") says what else it could be. '
            f"Without it {_shorter(moved, found)}.",
        )


def _whole(found: HotLines) -> str:
    """Of what the lines are shares."""
    return "what a device does" if _waiting(found) else "the step"


def _shorter(seconds: float, found: HotLines) -> str:
    """What is gained at most; of a step in which others wait, a device's part of it."""
    gained = f"{format_seconds(seconds)} ({seconds / found.seconds:.0%})"
    if _waiting(found):
        return f"a device would have at most {gained} less to do"
    return f"the step would be at most {gained} shorter"
