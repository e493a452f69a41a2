"""What differs between two plans, by cause, in so few lines that people read them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autopar.base.plan_records import PlanRecord, StagePlan, TensorPlan
from autopar.base.records import Differences, differences
from autopar.base.units import format_bytes, format_mesh, format_seconds
from autopar.report.path_folding import fold_paths
from autopar.report.reasons import partition_spec
from autopar.report.stage_notes import describe_casts, describe_recomputed
from autopar.report.summaries import describe_cluster, group_collectives

MOST_LINES = 20
_MOST_OF_A_KIND = 4
_LONG = 60


def plan_differences(plan: PlanRecord, other: PlanRecord) -> Differences:
    """What differs, causes first: what was asked, cluster, memory, meshes, stages, then leaves."""
    details = tuple(differences(plan.to_dict(), other.to_dict()))
    lines = list(_causes(plan, other))
    leaves = [*_leaves("inputs", plan.inputs, other.inputs)]
    leaves += _leaves("outputs", *map(_results, (plan, other)))
    room = MOST_LINES - len(lines) - min(_MOST_OF_A_KIND, len(_collectives(plan, other))) - 2
    lines += _shortened(leaves, max(room, 1), "kinds of leaves")
    lines += _computations(plan, other)
    lines += _shortened(_collectives(plan, other), _MOST_OF_A_KIND, "kinds of collectives")
    if details and not lines:
        fields = Counter(line.partition(":")[0].partition("[")[0].split(".")[0] for line in details)
        lines = ["only in " + ", ".join(f"{name} ({n})" for name, n in fields.items())]
    found = Differences(lines)
    found.details = details
    return found


def _causes(plan: PlanRecord, other: PlanRecord) -> Iterator[str]:
    if plan.program_hash != other.program_hash:
        yield f"program: {plan.program_hash[:12]} -> {other.program_hash[:12]}"
    yield from _shortened(_fields("options", plan.options, other.options), _MOST_OF_A_KIND, "more")
    clusters = describe_cluster(plan.cluster), describe_cluster(other.cluster)
    if clusters[0] != clusters[1]:
        yield f"cluster: {clusters[0]} -> {clusters[1]}"
    elif plan.cluster != other.cluster:
        changed = differences(dict(plan.cluster), dict(other.cluster))
        yield from _shortened([f"cluster.{line}" for line in changed], 2, "numbers of the cluster")
    a, b = plan.estimates, other.estimates
    yield from _changed("step", a.step_seconds, b.step_seconds, format_seconds)
    yield from _changed(
        "memory", a.peak_bytes_per_device, b.peak_bytes_per_device, format_bytes, " a device"
    )
    if plan.method != other.method and "method" not in plan.options:
        yield f"method: {plan.method} -> {other.method}"
    if plan.num_microbatches != other.num_microbatches:
        yield f"microbatches: {plan.num_microbatches} -> {other.num_microbatches}"
    yield from _pair("mesh", _meshes(plan.stages), _meshes(other.stages))
    yield from _pair("stages", _stages(plan), _stages(other))
    yield from _pair("recomputed", *(describe_recomputed(p) or "-" for p in (plan, other)))
    yield from _pair("casts", *(describe_casts(p.stages) or "once a step" for p in (plan, other)))
    yield from _pair("in the hosts' memory", str(plan.host or "-"), str(other.host or "-"))
    yield from _pair("padded", _padding(plan), _padding(other))
    yield from _pair("blocks of experts", *(str(p.expert_blocks) for p in (plan, other)))
    yield from _pair("later loops", plan.later_loops or "-", other.later_loops or "-")
    versions = [f"autopar {p.autopar_version}, jax {p.jax_version}" for p in (plan, other)]
    yield from _pair("made by", *versions)


def _pair(name: str, before: str, after: str) -> Iterator[str]:
    if before != after:
        yield f"{name}: {before} -> {after}"


def _changed(name: str, before: float, after: float, text: Any, unit: str = "") -> Iterator[str]:
    if text(before) == text(after):  # what nobody would see
        return
    share = f" ({after / before - 1:+.1%})" if before else ""
    yield f"{name}: {text(before)} -> {text(after)}{unit}{share}"


def _fields(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [f"{name}.{line}" for line in differences(dict(before), dict(after))]


def _meshes(stages: Iterable[StagePlan]) -> str:
    counts = Counter(format_mesh(stage.logical_mesh, stage.axis_names) for stage in stages)
    return "; ".join(mesh if n == 1 else f"{n} of {mesh}" for mesh, n in counts.items())


def _stages(plan: PlanRecord) -> str:
    if not plan.is_pipeline:
        return "1"
    pipeline = plan.pipeline
    begin = ", ".join(map(str, pipeline.boundaries))
    begin = begin if len(begin) < _LONG else f"{begin[:_LONG]}.."
    meshes = f" on {pipeline.num_meshes} meshes" if pipeline.num_chunks > 1 else ""
    return f"{len(plan.stages)}{meshes}, {pipeline.schedule}, beginning at layers {begin}"


def _padding(plan: PlanRecord) -> str:
    return ", ".join(f"{size} to {padded}" for size, padded in plan.padding) or "nothing"


def _results(plan: PlanRecord) -> tuple[TensorPlan, ...]:
    """Outputs but new state, which lies as the old one does."""
    return tuple(tensor for tensor in plan.outputs if tensor.role != "state")


def _leaves(name: str, before: Iterable[TensorPlan], after: Iterable[TensorPlan]) -> list[str]:
    """Leaves that are stored otherwise, those alike in one line, the largest first."""
    a, b = ({tensor.path: tensor for tensor in tensors} for tensors in (before, after))
    alike: dict[str, list[TensorPlan]] = defaultdict(list)
    for path, tensor in a.items():
        if path not in b:
            alike["only in the first"].append(tensor)
        elif text := _otherwise(tensor, b[path]):
            alike[text].append(tensor)
    alike["only in the second"] = [tensor for path, tensor in b.items() if path not in a]
    alike = {text: tensors for text, tensors in alike.items() if tensors}
    sizes = {text: sum(x.bytes for x in tensors) for text, tensors in alike.items()}
    lines = []
    if moved := sum(path in a and a[path].stages != tensor.stages for path, tensor in b.items()):
        lines.append(f"{name}: {moved} of {len(a)} are on other stages")
    for text in sorted(alike, key=lambda text: -sizes[text]):
        tensors = alike[text]
        names = ", ".join(fold_paths(tensor.path for tensor in tensors))
        names = (
            names
            if len(names) <= 2 * _LONG
            else f"{names[: 2 * _LONG].rpartition(', ')[0] or names[:_LONG]}, .."
        )
        count = f" ({len(tensors)} leaves)" if len(tensors) > 1 else ""
        lines.append(f"{names}{count}: {text}")
    if not lines and list(a) != list(b):
        lines.append(f"{name}: in another order")
    return lines


def _otherwise(before: TensorPlan, after: TensorPlan) -> str:
    parts = []
    for field in ("shape", "dtype", "role"):
        x, y = getattr(before, field), getattr(after, field)
        parts += [f"{field} {x} -> {y}"] if x != y else []
    if before.spec != after.spec:
        parts.append(f"{partition_spec(before.spec)} -> {partition_spec(after.spec)}")
    if before.memory != after.memory:
        parts.append(f"in the memory of the {before.memory} -> {after.memory}")
    if before.donated != after.donated:
        parts.append("donated" if after.donated else "no longer donated")
    if before.bytes_per_device != after.bytes_per_device:
        sizes = [format_bytes(tensor.bytes_per_device) for tensor in (before, after)]
        parts.append(f"{sizes[0]} -> {sizes[1]} a device")
    return ", ".join(parts)


def _computations(plan: PlanRecord, other: PlanRecord) -> list[str]:
    """How many computations are cut otherwise, where both plans have the same ones."""

    def choices(p: PlanRecord) -> Counter[tuple[str, str]]:
        leaves = {tensor.path for tensor in (*p.inputs, *p.outputs)}
        return Counter(
            (label, node.choice.partition(" ")[2])
            for stage in p.stages
            for node in stage.strategies
            if (label := node.node.partition(": ")[2]) not in leaves
        )

    a, b = choices(plan), choices(other)
    moved = (a - b).total(), (b - a).total()
    if not any(moved):
        return []
    return [f"computations: {moved[0]} of {a.total()} are cut otherwise or not there"]


def _collectives(plan: PlanRecord, other: PlanRecord) -> list[str]:
    """Kinds of collectives whose time in a step differs, those that differ most first."""

    def seconds(p: PlanRecord) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for group in group_collectives(p.stages):
            name = f"{group.purpose} {group.kind} along {','.join(group.axes)}"
            found[name] += group.seconds * len(group.stages)
        return found

    a, b = seconds(plan), seconds(other)
    names = [name for name in dict.fromkeys((*a, *b)) if a.get(name, 0.0) != b.get(name, 0.0)]
    names.sort(key=lambda name: -abs(a.get(name, 0.0) - b.get(name, 0.0)))
    return [
        f"{name}: {format_seconds(a.get(name, 0.0))} -> {format_seconds(b.get(name, 0.0))} a step"
        for name in names
    ]


def _shortened(lines: list[str], most: int, kinds: str) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"and {len(lines) - most + 1} {kinds}"]
