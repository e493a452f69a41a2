"""A plan as a page: what runs where, whether it fits, how fast, and why."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from autopar.base.plan_records import PlanRecord, TensorPlan
from autopar.base.row_sorts import told
from autopar.base.units import format_bytes, format_count, format_flops, format_mesh, format_seconds
from autopar.notebook.line_page import line_part
from autopar.notebook.page import (
    Cell,
    attribute,
    bar,
    folded,
    key,
    page,
    row,
    rows,
    search_field,
    table,
    text,
    tile,
    tiles,
)
from autopar.notebook.timeline_svg import timeline_rows
from autopar.report import drawn_steps, summaries
from autopar.report.hot_lines import hot_lines
from autopar.report.palette import APART, APART_PARTS, IDLE
from autopar.report.path_folding import fold_paths, short_path
from autopar.report.reasons import partition_spec, reasons_of_leaves
from autopar.report.stage_notes import describe_casts, describe_later_loops, describe_recomputed
from autopar.report.state_parts import input_categories, stage_contents
from autopar.report.throughput import throughput

_MAX_MESHES = 12
_MOST_LETTERS = 60_000  # of all paths together, that a search finds

_COMPUTE, _COMMUNICATE = APART["F"], APART["B"]


def plan_page(plan: PlanRecord) -> str:
    """The page of a plan."""
    return page(*titles(plan), *plan_parts(plan))


def titles(plan: PlanRecord) -> tuple[str, str]:
    """Title and subtitle of a plan."""
    where = summaries.describe_cluster(plan.cluster)
    if plan.is_pipeline:
        how = summaries.describe_pipeline(plan.pipeline, len(plan.stages))
    else:
        stage = plan.stages[0]
        how = f"one mesh, {format_mesh(stage.logical_mesh, stage.axis_names)}"
    return f"Plan: {plan.method} on {where}", how


def plan_parts(plan: PlanRecord) -> list[str]:
    """What stands below the titles."""
    parts = [_header(plan), *_notes(plan)]
    if plan.is_pipeline:
        parts += ["<h4>A step, simulated</h4>", _timeline(plan)]
    parts += ["<h4>Memory of a device</h4>", memory_rows(plan)]
    parts.append(line_part(hot_lines(plan)))
    parts.append(_tensors(plan))
    parts.append(_communication(plan))
    if plan.pipeline.transfers:
        parts.append(_transfers(plan))
    parts += [_certificate(plan), _candidates(plan)]
    return parts


def _header(plan: PlanRecord) -> str:
    estimates, done = plan.estimates, throughput(plan)
    waiting = estimates.waiting_seconds
    waiting = waiting if waiting >= 0.001 * estimates.step_seconds else 0.0
    shares = [
        ("computes", estimates.compute_seconds, _COMPUTE),
        ("communicates", estimates.communication_seconds, _COMMUNICATE),
    ]
    words = [f"{name} {format_seconds(size)}" for name, size, _ in shares if size]
    words += [f"waits {format_seconds(waiting)}"] if waiting else []
    limit, peak = summaries.memory_limit(plan), estimates.peak_bytes_per_device
    of_limit = f"of {format_bytes(limit)}, {_spare(peak, limit)}" if limit else "a device"
    count = plan.num_microbatches
    return tiles(
        tile(
            "step, estimated",
            format_seconds(estimates.step_seconds),
            ", ".join(words),
            bar(shares, estimates.step_seconds),
        ),
        _throughput_tile(plan) if done.examples or done.model_flops else "",
        tile(
            "memory of a device",
            format_bytes(peak),
            of_limit,
            bar([("peak", peak, APART["W"])], max(limit or 0, peak)),
        ),
        tile(
            "microbatches",
            str(count),
            plan.reason_for_microbatches,
        ),
        _gap_tile(plan),
        _certificate_tile(plan),
    )


def _spare(peak: int, limit: int) -> str:
    if peak > limit:
        return f"{format_bytes(peak - limit)} too much"
    return f"{format_bytes(limit - peak)} to spare"


def _throughput_tile(plan: PlanRecord) -> str:
    done = throughput(plan)
    rate, unit = done.tokens_per_second, "tokens/s"
    if rate is None:
        rate, unit = done.examples_per_second, "examples/s"
    value = f"{format_count(rate)} {unit}" if rate is not None else "-"
    mfu = f"{done.model_flops_utilization:.1%} MFU, " if done.model_flops else ""
    cost = done.cost_per_million()
    price = f", {cost:.3g} a million" if cost else ""
    return tile("throughput", value, f"{mfu}{format_flops(plan.estimates.flops)} a step{price}")


def _gap_tile(plan: PlanRecord) -> str:
    if plan.solver is None:
        return ""
    gap = plan.solver.gap
    value = "unknown" if gap is None else "0, optimal" if gap == 0 else f"{gap:.2%}"
    about = f"{plan.solver.nodes} nodes, {plan.solver.edges} edges"
    return tile("gap to the best", value, f"{about}; of the cost model")


def _certificate_tile(plan: PlanRecord) -> str:
    if not plan.certificate:
        return ""
    counts = [f"{how} {count}" for how, count, _ in summaries.group_certificate(plan)]
    outputs = len(plan.certificate)
    return tile("certificate", f"{outputs} outputs", f"exact: {', '.join(counts)}")


def _notes(plan: PlanRecord) -> list[str]:
    """What is not so in most plans."""
    notes = []
    if plan.interrupted:
        notes.append("Planning was stopped: this is the best plan that had been found.")
    if plan.confirmed is not None:
        notes.append(f"Confirmed: {plan.confirmed}.")
    if again := describe_recomputed(plan):
        notes.append(f"Computed again: {again}.")
    if casting := describe_casts(plan.stages):
        notes.append(f"Casts: {casting}.")
    if plan.host is not None:
        notes.append(f"In the memory of the hosts: {plan.host}.")
    if plan.padding:
        sizes = ", ".join(f"{size} to {padded}" for size, padded in plan.padding)
        notes.append(f"Padded inside the step: {sizes}.")
    notes += [f"Rows {line}." for line in told(plan.row_sorts)]
    if loops := describe_later_loops(plan):
        notes.append(f"Several loops over the microbatches; {loops}.")
    return [f'<div class="q">{text(note)}</div>' for note in notes]


def _timeline(plan: PlanRecord) -> str:
    timeline = drawn_steps.simulated(plan)
    if isinstance(timeline, str):
        return f'<div class="q">{text(timeline)}</div>'
    return timeline_rows(timeline)


def memory_rows(plan: PlanRecord) -> str:
    """A bar for each mesh: what its devices hold at the peak, by kind, against their limit."""
    categories = input_categories(plan)
    kinds = list(dict.fromkeys(categories[tensor.path] for tensor in plan.inputs))
    colors = dict(zip(kinds, itertools.cycle(APART_PARTS[1:]), strict=False))
    colors["computed values"] = APART_PARTS[0]
    limit = summaries.memory_limit(plan)
    most = max(limit or 0, *(stage.peak_bytes_per_device for stage in plan.stages), 1)
    meshes = sorted({stage.mesh for stage in plan.stages})
    contents = stage_contents(plan)
    lines = []
    for mesh in meshes[:_MAX_MESHES]:
        here = [number for number, stage in enumerate(plan.stages) if stage.mesh == mesh]
        peak = max(plan.stages[number].peak_bytes_per_device for number in here)
        sizes: Counter[str] = Counter()
        for tensor in plan.inputs:
            copies = sum(stage in here for stage in tensor.stages)
            sizes[categories[tensor.path]] += copies * tensor.device_bytes
        if (rest := peak - sizes.total()) > 0:
            sizes["computed values"] = rest
        parts = [(f"{k}: {format_bytes(n)}", float(n), colors[k]) for k, n in sizes.items()]
        nothing = "no state" if plan.is_pipeline else "the whole step"
        holds = ", ".join(name for number in here for name in contents[number]) or nothing
        stage = plan.stages[here[0]]
        axes = format_mesh(stage.logical_mesh, stage.axis_names)
        name = f"mesh {mesh}: {axes}" if plan.is_pipeline else axes
        label = f'<span class="q">{text(name)}</span> {text(_shortened(holds))}'
        is_bad = limit is not None and peak > limit
        size = f'<span class="{"bad" if is_bad else ""}">{format_bytes(peak)}</span>'
        of = f" of {format_bytes(limit)}" if limit else ""
        lines.append(row(label, bar(parts, most), f'{size}<span class="q">{of}</span>'))
    if more := len(meshes[_MAX_MESHES:]):
        lines.append(row(f'<span class="q">{more} meshes more</span>', "", ""))
    return rows(lines) + key([*colors.items(), ("free", IDLE)])


def _shortened(names: str, most: int = 44) -> str:
    return names if len(names) <= most else f"{names[: most - 2]}.."


def _tensors(plan: PlanRecord) -> str:
    """All inputs, those alike in one row, to be searched by any of their paths."""
    meshes = [stage.mesh for stage in plan.stages]
    reasons = reasons_of_leaves(plan)
    groups = sorted(summaries.fold_tensors(plan.inputs, meshes), key=lambda x: -x.bytes_per_device)
    members = _members(plan.inputs)
    staged = plan.is_pipeline
    lines = []
    for group in groups:
        reason = reasons.get(group.tensor.path)
        why = "" if reason is None else reason.why
        brief = why.partition(", with what moves")[0].removeprefix("there is no other: ")
        if (
            reason is not None
            and reason.runner_up is not None
            and reason.runner_up != reason.sharding
        ):
            brief = f"not {reason.runner_up}: {brief}"
        found_by = " ".join([group.tensor.role, *members.get(group.path, ())])
        lines.append(
            (
                Cell(f"<code>{text(group.path)}</code>", found_by),
                Cell(_shape(group.tensor)),
                Cell(f'<code class="l">{text(partition_spec(group.tensor.spec))}</code>'),
                str(group.count),
                format_bytes(group.bytes),
                group.per_device,
                *((summaries.format_homes(group.stages),) if staged else ()),
                Cell(f'<span class="q" title="{attribute(why)}">{text(brief)}</span>'),
            )
        )
    columns = ["path", "shape", "sharding", "leaves", "all", "a device"]
    columns += ["stage"] if staged else []
    numbers = ("leaves", "all", "a device")
    about = f"{len(plan.inputs)} leaves, {format_bytes(_total(plan.inputs))}"
    field = search_field("block_3, bias, P('x', None) ..")
    body = field + table([*columns, "why"], lines, numbers=numbers)
    return folded("Parameters, state and batch", about, body)


def _members(tensors: Sequence[TensorPlan]) -> dict[str, tuple[str, ...]]:
    """The short paths in each row, where they are not too many to write them all down."""
    if sum(len(tensor.path) for tensor in tensors) > _MOST_LETTERS:
        return {}
    alike: dict[tuple[object, ...], list[str]] = {}
    for tensor in tensors:
        same = (tensor.role, tensor.shape, tensor.dtype, tensor.spec, tensor.donated)
        alike.setdefault(same, []).append(tensor.path)
    return {
        name: tuple(short_path(path) for path in paths)
        for group in alike.values()
        for name, paths in fold_paths(group).items()
    }


def _total(tensors: Iterable[TensorPlan]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def _shape(tensor: TensorPlan) -> str:
    """`1024 x 4096/x` with the axes that cut it marked."""
    dims = []
    for size, axes in zip(tensor.shape, tensor.spec, strict=True):
        cut = "".join(f'/<span class="cut">{text(axis)}</span>' for axis in axes)
        dims.append(f"{size}{cut}")
    kind = re.sub(r"float", "f", tensor.dtype.replace("bfloat", "bf"))
    kind = kind.replace("uint", "u").replace("int", "i") if "int" in kind else kind
    shape = " x ".join(dims) or "scalar"
    return f'<code class="l">{shape}</code> <span class="q">{text(kind)}</span>'


def _communication(plan: PlanRecord) -> str:
    groups = summaries.group_collectives(plan.stages)
    if not groups:
        return folded("Communication", "none within a mesh", "")
    longest = max(group.seconds for group in groups) or 1.0
    lines = []
    for group in groups:
        drawn = bar([(group.kind, group.seconds, _COMMUNICATE)], longest)
        lines.append(
            (
                group.purpose,
                f"{group.kind} along {' '.join(group.axes)}",
                group.dtype,
                f"{group.count} x",
                format_bytes(group.bytes),
                format_seconds(group.seconds),
                Cell(f'<div style="min-width:80px">{drawn}</div>'),
                *((summaries.format_stages(group.stages),) if plan.is_pipeline else ()),
            )
        )
    columns = ["purpose", "collective", "dtype", "a step", "bytes", "seconds", ""]
    columns += ["stage"] if plan.is_pipeline else []
    seconds = format_seconds(plan.estimates.communication_seconds)
    body = table(columns, lines, numbers=("a step", "bytes", "seconds"))
    return folded("Communication", f"{seconds} of a step, within meshes", body)


def _transfers(plan: PlanRecord) -> str:
    groups = summaries.group_transfers(plan.pipeline.transfers, len(plan.stages))
    lines = [
        (
            g.routes,
            g.what,
            Cell(f"<code>{text(g.value)}</code>"),
            f"{g.count} x",
            format_bytes(g.bytes),
        )
        for g in groups
    ]
    columns = ("from and to", "what", "value", "a step", "bytes")
    size = format_bytes(sum(group.bytes for group in groups))
    body = table(columns, lines, numbers=("a step", "bytes"))
    return folded("Sent between stages", f"{size} a step", body)


def _certificate(plan: PlanRecord) -> str:
    lines = [
        (how, str(count), ", ".join(names))
        for how, count, names in summaries.group_certificate(plan)
    ]
    if not lines:
        return ""
    note = "from the microbatches, each exactly"
    return folded(
        "How outputs come out",
        note,
        table(("how", "outputs", "which"), lines, numbers=("outputs",)),
    )


def _candidates(plan: PlanRecord) -> str:
    lines = []
    for item in plan.candidates:
        step, peak = item.step_seconds, item.peak_bytes_per_device
        chosen = '<b class="good">✓ </b>' if item.chosen else ""
        lines.append(
            (
                Cell(f"{chosen}{text(item.method)}"),
                " x ".join(map(str, item.logical_mesh)),
                str(item.num_microbatches),
                "-" if step is None else format_seconds(step),
                "-" if peak is None else format_bytes(peak),
                item.note,
            )
        )
    if not lines:
        return ""
    columns = ("method", "mesh", "microbatches", "step", "peak", "note")
    body = table(columns, lines, numbers=("microbatches", "step", "peak"))
    return folded("Considered", "1 plan" if len(lines) == 1 else f"{len(lines)} plans", body)
