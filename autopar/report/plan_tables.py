"""A plan as tables: what `print(plan)` shows as text, and `print_plan` in a terminal's colours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autopar.base.plan_records import PlanRecord, TensorPlan
from autopar.base.row_sorts import told
from autopar.base.run_flags import RunFlag, run_flags
from autopar.base.units import format_bytes, format_flops, format_seconds
from autopar.report import drawn_steps, summaries
from autopar.report.hot_lines import KINDS, MOST_IN_PLAN, advice_list, hot_lines, line_table
from autopar.report.path_folding import relative_path
from autopar.report.rich_parts import PathText, add_row, as_text, captioned, new_table
from autopar.report.stage_notes import describe_casts, describe_later_loops, describe_recomputed
from autopar.report.state_parts import input_categories, stage_contents
from autopar.report.task_spans import TASKS
from autopar.report.throughput import throughput
from autopar.report.timeline_rows import TimelineRows

# One colour for each mesh axis, in every table.
_AXIS_STYLES = ("bold cyan", "bold magenta", "bold yellow")
_BAR_WIDTH = 20
_MAX_NAMES = 3


def print_plan(plan: PlanRecord, console: Console | None = None) -> None:
    """Prints a plan as tables, by default in the terminal."""
    (console or Console()).print(plan_tables(plan))


def plan_text(plan: PlanRecord) -> str:
    """The same tables as text without colours, 120 columns wide at most.

    In characters that standard output can show, where that is not UTF-8.
    """
    return as_text(plan_tables(plan))


def plan_tables(plan: PlanRecord) -> RenderableType:
    """The summary, stages, tensors, collectives, certificate and candidates of a plan."""
    return Group(*_Tables(plan).all())


def summary_tables(plan: PlanRecord) -> RenderableType:
    """The summary of a plan, its stages where it has several, and what would be quicker."""
    tables = _Tables(plan)
    advice = hot_lines(plan).advice
    below = [advice_list(advice)] if advice else []
    return Group(tables.summary(), *([tables.stages()] if tables.staged else []), *below)


class _Tables:
    """The tables of one plan, which share the colours of its mesh axes."""

    def __init__(self, plan: PlanRecord) -> None:
        self.plan = plan
        names = dict.fromkeys(name for stage in plan.stages for name in stage.axis_names)
        self.styles = {name: _AXIS_STYLES[i % len(_AXIS_STYLES)] for i, name in enumerate(names)}
        self.meshes = [stage.mesh for stage in plan.stages]
        self.staged = len(plan.stages) > 1

    def all(self) -> Iterator[RenderableType]:
        yield self.summary()
        if self.staged:
            yield self.stages()
            timeline = drawn_steps.simulated(self.plan)
            if isinstance(timeline, str):
                yield Text(f"\nA step, simulated: {timeline}\n", "dim")
            else:
                yield TimelineRows(timeline)
            yield self.transfers()
        yield self.tensors("Inputs", self.plan.inputs)
        if results := summaries.results_of(self.plan):
            yield self.tensors("Results", results)
        if self.plan.lines is not None:
            yield self.lines()
        yield self.collectives()
        if flags := run_flags(self.plan):
            yield self.flags(flags)
        if self.plan.certificate:
            yield self.certificate()
        if self.plan.candidates:
            yield self.candidates()

    def summary(self) -> Panel:
        plan, grid = self.plan, Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        add_row(grid, "method", Text(plan.method, style="bold"))
        shapes = dict.fromkeys((stage.axis_names, stage.logical_mesh) for stage in plan.stages)
        meshes = [self.mesh(*shape) for shape in shapes]
        meshes[-1].append(f"  {summaries.describe_cluster(plan.cluster)}")
        for i, mesh in enumerate(meshes):
            add_row(grid, "mesh" if i == 0 else "", mesh)
        if plan.is_pipeline:
            add_row(grid, "pipeline", summaries.describe_pipeline(plan.pipeline, len(plan.stages)))
        reason = (f"  {plan.reason_for_microbatches}", "dim")
        add_row(grid, "microbatches", Text.assemble((str(plan.num_microbatches), "bold"), reason))
        if loops := describe_later_loops(plan):
            add_row(grid, "loops", f"several; {loops}")
        if again := describe_recomputed(plan):
            add_row(grid, "recomputed", again)
        if casting := describe_casts(plan.stages):
            add_row(grid, "casts", casting)
        if plan.host is not None:
            add_row(grid, "in hosts", str(plan.host))
        if plan.interrupted:
            add_row(grid, "interrupted", "the best plan that had been found when planning stopped")
        if plan.padding:
            text = ", ".join(f"{size} to {padded}" for size, padded in plan.padding)
            add_row(grid, "padded", Text(text))
        for i, line in enumerate(told(plan.row_sorts)):
            add_row(grid, "rows" if i == 0 else "", line)
        if plan.expert_blocks:
            add_row(grid, "experts", f"rows are sent to {plan.expert_blocks} blocks of experts")
        add_row(grid, "step", self.step())
        if done := str(throughput(plan)):
            add_row(grid, "throughput", done)
        add_row(grid, "memory", self.memory())
        if plan.confirmed is not None:
            add_row(grid, "confirmed", str(plan.confirmed))
        if plan.solver is not None:
            add_row(grid, "solver", summaries.describe_solver(plan.solver))
        return Panel.fit(grid, title="autopar plan", title_align="left", border_style="blue")

    def mesh(self, names: Sequence[str], sizes: Sequence[int]) -> Text:
        axes = zip(names, sizes, strict=True)
        return Text("  ").join(Text(f"{name}={size}", self.styles[name]) for name, size in axes)

    def step(self) -> Text:
        estimates = self.plan.estimates
        compute, communication = estimates.compute_seconds, estimates.communication_seconds
        waiting = estimates.waiting_seconds
        if waiting < 0.001 * estimates.step_seconds:
            waiting = 0.0
        bar = _bar((compute, "green"), (communication, "red"), total=estimates.step_seconds)
        return Text.assemble(
            (format_seconds(estimates.step_seconds), "bold"),
            (" estimated  ", "dim"),
            bar,
            (f"  compute {format_seconds(compute)}", "green"),
            (f"  communication {format_seconds(communication)}", "red"),
            (f"  waiting {format_seconds(waiting)}" if waiting else "", "dim"),
            (f"  {format_flops(estimates.flops)}", "dim"),
        )

    def memory(self) -> Text:
        state = self.plan.estimates.state_bytes_per_device
        peak = self.plan.estimates.peak_bytes_per_device
        limit = summaries.memory_limit(self.plan)
        return Text.assemble(
            (format_bytes(peak), "bold"),
            (" a device  ", "dim"),
            _bar((state, "blue"), (peak - state, "yellow"), total=limit or peak),
            (f"  state {format_bytes(state)}", "blue"),
            (f"  the rest {format_bytes(max(peak - state, 0))}", "yellow"),
            (f"  of {format_bytes(limit)}" if limit else "", "dim"),
        )

    def stages(self) -> Table:
        """A row for each stage: what it holds, on which mesh, how long it takes, its memory."""
        seconds = summaries.task_seconds(self.plan.pipeline)
        kinds = [kind for kind in TASKS if kind in seconds and kind in "FBW"]
        headings = [TASKS[kind].short_name for kind in kinds]
        right = ("stage", *headings, "peak")
        table = new_table(
            "Stages", "stage", "layers", "state", "mesh", *headings, "peak", right=right
        )
        table.collapse_padding = True
        for column in table.columns:
            column.no_wrap = column.header != "state"
        contents = stage_contents(self.plan)
        at_once = False
        for number, stage in enumerate(self.plan.stages):
            names = list(contents[number][:_MAX_NAMES])
            if more := len(contents[number]) - len(names):
                names.append(f"{more} more")
            mesh = self.mesh(stage.axis_names, stage.logical_mesh)
            if method := summaries.stage_method(self.plan, number):
                mesh.append(f"  {method}", "dim")
            times = {kind: format_seconds(seconds[kind].get(number, 0.0)) for kind in kinds}
            if "F" in times and number not in seconds["F"] and number in seconds.get("B", {}):
                times["F"], at_once = "-", True
            add_row(
                table,
                str(number),
                summaries.format_layers(stage.layers),
                ", ".join(names),
                Text.assemble((f"{stage.mesh}  ", "dim"), mesh),
                *times.values(),
                format_bytes(stage.peak_bytes_per_device),
            )
        tasks = f"{', '.join(headings)}: of one microbatch; " if kinds else ""
        both = "; -: one program with the backward pass, and in its time" if at_once else ""
        return captioned(table, f"{tasks}peak: of a device's memory{both}")

    def transfers(self) -> RenderableType:
        """A row for each kind of value that crosses between stages."""
        groups = summaries.group_transfers(self.plan.pipeline.transfers, len(self.plan.stages))
        if not groups:
            return Text("\nNothing is sent between stages.", "bold")
        columns, right = ("from and to", "what", "value"), ("a step", "bytes")
        table = new_table("Sent between stages", *columns, *right, right=right, plain=columns)
        for i, group in enumerate(groups):
            if i and groups[i - 1].per_microbatch != group.per_microbatch:
                table.add_section()
            size = format_bytes(group.bytes)
            add_row(table, group.routes, group.what, group.value, f"{group.count} x", size)
        return table

    def tensors(self, title: str, tensors: Sequence[TensorPlan]) -> Table:
        """A row for each group of tensors, under headings for parts of the state and roles."""
        categories = input_categories(self.plan)
        columns, right = ("path", "type", "shape, cut along"), ("tensors", "all", "per device")
        stage = ("stage",) if self.staged else ()
        table = new_table(title, *columns, *right, *stage, right=right, plain=("type",))
        members: dict[str, list[TensorPlan]] = {}
        for tensor in tensors:
            members.setdefault(categories.get(tensor.path, tensor.role), []).append(tensor)
        for category, kind in members.items():
            donated = [tensor.donated for tensor in kind]
            some = " (some donated)" if any(donated) else ""
            mark = " (donated)" if all(donated) else some
            table.add_section()
            add_row(table, category + mark, "", "", *self.totals(kind), style="bold")
            for group in summaries.fold_tensors(kind, self.meshes):
                add_row(
                    table,
                    PathText(relative_path(group.path, category)),
                    _short_dtype(group.tensor.dtype),
                    _shape(group.tensor, self.styles),
                    str(group.count),
                    format_bytes(group.bytes),
                    group.per_device,
                    *((summaries.format_homes(group.stages),) if self.staged else ()),
                )
        if len(members) > 1:
            table.add_section()
            add_row(table, "together", "", "", *self.totals(tensors), style="bold")
        if any(tensor.donated for tensor in tensors):
            note = "donated: the step reuses the buffer, the caller's array is gone"
            return captioned(table, note)
        return table

    def totals(self, tensors: Sequence[TensorPlan]) -> tuple[str, str, str]:
        size = sum(tensor.bytes for tensor in tensors)
        per_device = summaries.most_bytes_per_device(tensors, self.meshes)
        return str(len(tensors)), format_bytes(size), format_bytes(per_device)

    def lines(self) -> RenderableType:
        """The lines that take longest, and what follows from that."""
        found = hot_lines(self.plan)
        table = line_table(found, columns=KINDS, most=MOST_IN_PLAN)
        return Group(table, *([advice_list(found.advice), ""] if found.advice else []))

    def collectives(self) -> RenderableType:
        groups = summaries.group_collectives(self.plan.stages)
        if not groups:
            return Text("\nNo communication between devices.", "bold")
        right = ("a step", "bytes", "estimate")
        title = "Communication within stages" if self.staged else "Communication"
        typed = any(group.dtype for group in groups)
        left = ("purpose", "collective", "along", *(("dtype",) if typed else ()))
        columns = (*left, *right, *(("stage",) if self.staged else ()))
        table = new_table(
            f"{title} in a step", *columns, right=right, plain=("collective", "dtype")
        )
        for group in groups:
            add_row(
                table,
                group.purpose,
                group.kind,
                Text(" ").join(Text(axis, self.styles[axis]) for axis in group.axes),
                *((group.dtype,) if typed else ()),
                f"{group.count} x",
                format_bytes(group.bytes),
                format_seconds(group.seconds),
                *((summaries.format_stages(group.stages),) if self.staged else ()),
            )
        if self.plan.options.get("reduce_dtype") == "bfloat16":
            note = "gradients are rounded to bfloat16 before they are added, as asked: not exact"
            return captioned(table, note)
        return table

    def flags(self, flags: Sequence[RunFlag]) -> RenderableType:
        table = new_table("Flags of a run", "flag", "value", "set", "why", right=(), plain=("why",))
        for flag in flags:
            done = "by autopar" if flag.is_set else "in the environment"
            add_row(table, flag.name, flag.value, done, flag.why)
        return captioned(table, "Sources: " + "; ".join(dict.fromkeys(x.source for x in flags)))

    def certificate(self) -> Table:
        title = "How outputs come out of the microbatches"
        table = new_table(title, "how", "outputs", "which", right=("outputs",))
        for how, count, names in summaries.group_certificate(self.plan):
            add_row(table, how, str(count), "\n".join(names))
        return table

    def candidates(self) -> Table:
        right = ("microbatches", "step", "peak memory")
        table = new_table(
            "Considered", "", "method", "mesh", *right, "note", right=right, plain=("note",)
        )
        for item in self.plan.candidates:
            step, peak = item.step_seconds, item.peak_bytes_per_device
            add_row(
                table,
                "▶" if item.chosen else "",
                item.method,
                " x ".join(map(str, item.logical_mesh)),
                str(item.num_microbatches),
                "-" if step is None else format_seconds(step),
                "-" if peak is None else format_bytes(peak),
                item.note,
                style="bold green" if item.chosen else "",
            )
        return table


def _bar(*parts: tuple[float, str], total: float) -> Text:
    """Parts of a total side by side, each in its colour and its own line; the rest stays thin."""
    text = Text()
    for (size, style), line in zip(parts, "━═", strict=True):
        share = size / total if total else 0.0
        text.append(line * min(round(share * _BAR_WIDTH), _BAR_WIDTH - len(text)), style)
    return text.append("─" * (_BAR_WIDTH - len(text)), "bright_black")


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
