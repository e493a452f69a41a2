"""A plan as Rich tables for a terminal or a notebook."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autopar.base.plan_records import Candidate, TensorPlan
from autopar.base.units import format_bytes, format_flops, format_seconds
from autopar.plans.plan import Plan
from autopar.plans.plan_text import describe_pipeline, describe_solver
from autopar.plans.stage_summaries import format_homes, format_stages, group_stage_collectives
from autopar.plans.summaries import (
    describe_cluster,
    fold_tensors,
    group_certificate,
    input_categories,
    memory_limit,
    most_bytes_per_device,
    relative_path,
    results_of,
)
from autopar.report.stage_tables import (
    TimelineRows,
    simulated,
    stages_table,
    table,
    transfers_table,
)

# One colour for each mesh axis, in every table.
_AXIS_STYLES = ("bold cyan", "bold magenta", "bold yellow")
_BAR_WIDTH = 20


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Prints a plan as tables.

    Args:
      plan: what to print.
      console: where; by default the terminal.
    """
    (console or Console()).print(plan_tables(plan))


def plan_tables(plan: Plan) -> RenderableType:
    """The summary, stages, tensors, collectives, certificate and candidates of a plan."""
    styles = _axis_styles(plan)
    parts: list[RenderableType] = [_summary(plan, styles)]
    if plan.pipeline is not None:
        parts += [stages_table(plan, styles), _timeline(plan), transfers_table(plan)]
    for title, tensors in (("Inputs", plan.inputs), ("Results", results_of(plan))):
        if tensors:
            parts.append(_tensors(title, tensors, plan))
    parts.append(_collectives(plan, styles))
    if plan.certificate:
        parts.append(_certificate(plan))
    if plan.candidates:
        parts.append(_candidates(plan.candidates))
    return Group(*parts)


def _axis_styles(plan: Plan) -> dict[str, str]:
    names = dict.fromkeys(name for stage in plan.stages for name in stage.axis_names)
    return {name: _AXIS_STYLES[i % len(_AXIS_STYLES)] for i, name in enumerate(names)}


def _summary(plan: Plan, styles: Mapping[str, str]) -> Panel:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("method", Text(plan.method, style="bold"))
    shapes = dict.fromkeys((stage.axis_names, stage.logical_mesh) for stage in plan.stages)
    for i, (names, sizes) in enumerate(shapes):
        mesh = Text()
        for name, size in zip(names, sizes, strict=True):
            mesh.append(f"{name}={size}  ", style=styles[name])
        grid.add_row("mesh" if i == 0 else "", mesh)
    mesh.append(describe_cluster(plan.cluster))
    if plan.pipeline is not None:
        grid.add_row("pipeline", describe_pipeline(plan.pipeline, len(plan.stages)))
    microbatches = Text(str(plan.num_microbatches), style="bold")
    grid.add_row("microbatches", microbatches.append(f"  {plan.reason_for_microbatches}", "dim"))
    grid.add_row("step", _step(plan))
    grid.add_row("memory", _memory(plan))
    if plan.solver is not None:
        grid.add_row("solver", describe_solver(plan.solver))
    return Panel(grid, title="autopar plan", title_align="left", border_style="blue")


def _step(plan: Plan) -> Text:
    estimates = plan.estimates
    text = Text(format_seconds(estimates.step_seconds), style="bold")
    text.append(" estimated  ", "dim")
    text.append_text(
        _bar(
            (estimates.compute_seconds, "green"),
            (estimates.communication_seconds, "red"),
            total=estimates.compute_seconds + estimates.communication_seconds,
        )
    )
    text.append(f"  compute {format_seconds(estimates.compute_seconds)}", "green")
    text.append(f"  communication {format_seconds(estimates.communication_seconds)}", "red")
    return text.append(f"  {format_flops(estimates.flops)}", "dim")


def _memory(plan: Plan) -> Text:
    estimates = plan.estimates
    state, peak = estimates.state_bytes_per_device, estimates.peak_bytes_per_device
    limit = memory_limit(plan)
    text = Text(format_bytes(peak), style="bold")
    text.append(" a device  ", "dim")
    text.append_text(_bar((state, "blue"), (peak - state, "yellow"), total=limit or peak))
    text.append(f"  state {format_bytes(state)}", "blue")
    text.append(f"  the rest {format_bytes(max(peak - state, 0))}", "yellow")
    return text.append(f"  of {format_bytes(limit)}" if limit else "", "dim")


def _bar(*parts: tuple[float, str], total: float) -> Text:
    """Parts of a total side by side, each in its colour; what is left stays dim."""
    text = Text()
    for size, style in parts:
        share = size / total if total else 0.0
        text.append("━" * min(round(share * _BAR_WIDTH), _BAR_WIDTH - len(text)), style)
    return text.append("━" * (_BAR_WIDTH - len(text)), "bright_black")


def _tensors(title: str, tensors: Sequence[TensorPlan], plan: Plan) -> Table:
    """A row for each group of tensors, under a heading for each part of the state and each role."""
    styles = _axis_styles(plan)
    categories = input_categories(plan)
    right = ("tensors", "all", "per device")
    staged = plan.pipeline is not None
    columns = ("path", "type", "shape, cut along", *right, *(("stage",) if staged else ()))
    meshes = [stage.mesh for stage in plan.stages]
    made = table(title, *columns, right=right)
    members: dict[str, list[TensorPlan]] = {}
    for tensor in tensors:
        members.setdefault(categories.get(tensor.path, tensor.role), []).append(tensor)
    for category, kind in members.items():
        donated = " (donated)" if all(tensor.donated for tensor in kind) else ""
        made.add_section()
        made.add_row(category + donated, "", "", *_totals(kind, meshes), style="bold")
        for group in fold_tensors(kind, meshes):
            made.add_row(
                _Path(relative_path(group.path, category)),
                _short_dtype(group.tensor.dtype),
                _shape(group.tensor, styles),
                str(group.count),
                format_bytes(group.bytes),
                format_bytes(group.bytes_per_device),
                *((format_homes(group.stages),) if staged else ()),
            )
    if len(members) > 1:
        made.add_section()
        made.add_row("together", "", "", *_totals(tensors, meshes), style="bold")
    if any(tensor.donated for tensor in tensors):
        made.caption = "donated: the step reuses the buffer, the caller's array is gone\n"
        made.caption_justify = "left"
    return made


def _totals(tensors: Sequence[TensorPlan], meshes: Sequence[int]) -> tuple[str, str, str]:
    return (
        str(len(tensors)),
        format_bytes(sum(tensor.bytes for tensor in tensors)),
        format_bytes(most_bytes_per_device(tensors, meshes)),
    )


@dataclass(frozen=True)
class _Path:
    """A path, indented; a narrow column breaks it behind `/` and `,` rather than inside a name."""

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


def _short_dtype(dtype: str) -> str:
    """As jaxprs print it: `f32` for float32, `bf16` for bfloat16."""
    match = re.fullmatch(r"(bfloat|float|uint|int|complex)(\d+)", dtype)
    short = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}
    return short[match[1]] + match[2] if match else dtype


def _shape(tensor: TensorPlan, styles: Mapping[str, str]) -> Text:
    text = Text()
    for i, (size, axes) in enumerate(zip(tensor.shape, tensor.spec, strict=True)):
        text.append(" x " if i else "", "dim").append(str(size))
        for axis in axes:
            text.append("/", "dim").append(axis, styles[axis])
    return text if tensor.shape else Text("scalar", "dim")


def _timeline(plan: Plan) -> RenderableType:
    found = simulated(plan)
    if isinstance(found, str):
        return Text(f"\nA step, simulated: {found}\n", "dim")
    return TimelineRows(found)


def _collectives(plan: Plan, styles: Mapping[str, str]) -> RenderableType:
    rows = group_stage_collectives(plan.stages)
    if not rows:
        return Text("\nNo communication between devices.", "bold")
    staged = plan.pipeline is not None
    right = ("a step", "bytes", "estimate")
    title = "Communication within stages" if staged else "Communication"
    columns = ("purpose", "collective", "along", *right, *(("stage",) if staged else ()))
    made = table(f"{title} in a step", *columns, right=right)
    for group, stages in rows:
        along = Text(" ").join(Text(axis, styles[axis]) for axis in group.axes)
        made.add_row(
            group.purpose,
            group.kind,
            along,
            f"{group.count} x",
            format_bytes(group.bytes),
            format_seconds(group.seconds),
            *((format_stages(stages),) if staged else ()),
        )
    return made


def _certificate(plan: Plan) -> Table:
    right = ("outputs",)
    made = table("How outputs come out of the microbatches", "how", *right, "which", right=right)
    for how, count, names in group_certificate(plan):
        made.add_row(how, str(count), "\n".join(names))
    return made


def _candidates(candidates: Sequence[Candidate]) -> Table:
    right = ("microbatches", "step", "peak memory")
    made = table("Considered", "", "method", "mesh", *right, "note", right=right)
    for item in candidates:
        step, peak = item.step_seconds, item.peak_bytes_per_device
        made.add_row(
            "▶" if item.chosen else "",
            item.method,
            " x ".join(map(str, item.logical_mesh)),
            str(item.num_microbatches),
            "-" if step is None else format_seconds(step),
            "-" if peak is None else format_bytes(peak),
            item.note,
            style="bold green" if item.chosen else "",
        )
    return made
