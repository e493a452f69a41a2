"""Why something in a plan lies as it does, from what the plan holds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from autopar.base.errors import OptionError
from autopar.base.methods import BATCH_METHODS, LOOP_METHODS
from autopar.base.plan_records import NodeStrategy, PlanRecord, Spec, StagePlan, TensorPlan
from autopar.base.runner_up import RunnerUp
from autopar.base.units import format_bytes, format_microbatches, format_seconds, without_rows
from autopar.passes.sharding.pins import matches_path
from autopar.report.explanation import (
    IN_HOST,
    TINY_SECONDS,
    Explanation,
    LayoutReason,
    parts_of,
    place_of,
)
from autopar.report.name_matching import is_called, near_names, patterns
from autopar.report.path_folding import fold_paths, short_path


def explain(plan: PlanRecord, name: str) -> Explanation:
    """What a plan decided about a leaf, a layer or a line of the user's code, and why.

    Raises:
      OptionError: the plan has nothing of that name; says which names are near.
    """
    if not isinstance(name, str):
        raise OptionError(
            f"explain takes a name, and got {name!r}.",
            hint="give a leaf's path or a part of it, a layer's name, or a line such as 'a.py:4'.",
        )
    everything = list(_decisions(plan))
    found = [item for item in everything if name in (item.name, short_path(item.name))]
    wanted = patterns(name)
    if not found and wanted:
        found = [item for item in everything if is_called(parts_of(item), wanted)]
    found = found or [item for item in everything if name and item.source == name]
    # New state lies as the old one does, which is there under its own name.
    found = [item for item in found if item.forced_by != "input"] or found
    if not found:
        raise _unknown(name, everything)
    price = max(stage.seconds_per_gib for stage in plan.stages)
    return Explanation(name, tuple(found), price, _quicker(plan))


def reasons_of_leaves(plan: PlanRecord) -> dict[str, LayoutReason]:
    """Why every input of the step lies as it does, by its path."""
    inputs = {tensor.path for tensor in plan.inputs}
    found: dict[str, LayoutReason] = {}
    for item in _decisions(plan):
        if item.name in inputs and item.forced_by != "input":
            found.setdefault(item.name, item)
    return found


def _unknown(name: str, everything: list[LayoutReason]) -> OptionError:
    names = [item.name if item.role != "computation" else place_of(item) for item in everything]
    names += dict.fromkeys(item.source for item in everything)
    near = near_names(name, filter(None, names))
    some = list(fold_paths(item.name for item in everything if item.role == "state"))[:4]
    return OptionError(
        f"The plan has no leaf, layer or line called {name!r}.",
        why=f"names look like {', '.join(some or names[:4])}.",
        hint=f"did you mean {' or '.join(repr(_as_written(x)) for x in near)}?" if near else None,
    )


def _as_written(name: str) -> str:
    """A line of a file as it is, a leaf's path as people write it."""
    return name if re.search(r"\.\w+:\d+$", name) else short_path(name)


def _decisions(plan: PlanRecord) -> Iterator[LayoutReason]:
    """All of a plan: inputs, outputs, then computations by stage."""
    nodes: dict[tuple[int, str], tuple[NodeStrategy, RunnerUp | None, NodeStrategy | None]] = {}
    for number, stage in enumerate(plan.stages):
        nodes.update(((number, key), found) for key, found in _nodes(stage))
    inputs = {(stage, tensor.path) for tensor in plan.inputs for stage in tensor.stages}
    by_label = {(stage, _label(found[0])): key for (stage, key), found in nodes.items()}
    for tensor in plan.inputs:
        key = by_label.get((tensor.stages[0], tensor.path))
        yield _of_leaf(plan, tensor, nodes.get((tensor.stages[0], key or "")))
    replaced = {without_rows(tensor.path) for tensor in plan.inputs if tensor.role == "state"}
    for tensor in plan.outputs:
        pinned = nodes.get((tensor.stages[0], by_label.get((tensor.stages[0], tensor.path), "")))
        yield _of_output(plan, tensor, pinned, bool(replaced))
    outputs = {(stage, tensor.path) for tensor in plan.outputs for stage in tensor.stages}
    for (number, _), (node, other, neighbour) in nodes.items():
        label = _label(node)
        if (number, label) not in inputs and (number, label) not in outputs:
            plain = LayoutReason(label, "computation", "", number, node.source, _sharding(node))
            yield _with_reason(plan, plain, node, other, neighbour)


def _nodes(
    stage: StagePlan,
) -> Iterator[tuple[str, tuple[NodeStrategy, RunnerUp | None, NodeStrategy | None]]]:
    others = {
        node: (other, neighbour)
        for other in stage.runners_up
        for node, neighbour in zip(other.nodes, other.neighbours, strict=True)
    }
    for index, node in enumerate(stage.strategies):
        other, neighbour = others.get(index, (None, -1))
        yield node.node, (node, other, stage.strategies[neighbour] if neighbour >= 0 else None)


def _label(node: NodeStrategy) -> str:
    return node.node.partition(": ")[2]


def _of_leaf(
    plan: PlanRecord,
    tensor: TensorPlan,
    found: tuple[NodeStrategy, RunnerUp | None, NodeStrategy | None] | None,
) -> LayoutReason:
    value = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
    source = found[0].source if found else ""
    plain = LayoutReason(tensor.path, tensor.role, value, tensor.stages[0], source, _stored(tensor))
    if found is None:
        return dataclasses.replace(plain, forced_by="computed", why="it is stored as it is made.")
    pin = next((p for p in plan.options.get("pins", ()) if matches_path(tensor.path, p)), None)
    if pin is not None:
        return dataclasses.replace(plain, forced_by="pin", why=f"the pin {pin!r} asks for it.")
    return _with_reason(plan, plain, *found)


def _of_output(
    plan: PlanRecord,
    tensor: TensorPlan,
    found: tuple[NodeStrategy, RunnerUp | None, NodeStrategy | None] | None,
    has_state: bool,
) -> LayoutReason:
    value = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
    plain = LayoutReason(tensor.path, "output", value, tensor.stages[0], "", _stored(tensor))
    pin = next((p for p in plan.options.get("pins", ()) if matches_path(tensor.path, p)), None)
    if pin is not None and found is not None:
        return dataclasses.replace(plain, forced_by="pin", why=f"the pin {pin!r} asks for it.")
    if tensor.role == "state" and has_state:
        why = "it replaces an input of the step, and lies as that does."
        return dataclasses.replace(plain, role="state", forced_by="input", why=why)
    return dataclasses.replace(plain, forced_by="computed", why="it lies as it is computed.")


def _with_reason(
    plan: PlanRecord,
    plain: LayoutReason,
    node: NodeStrategy,
    other: RunnerUp | None,
    neighbour: NodeStrategy | None,
) -> LayoutReason:
    if other is None:
        forced_by, why = _only(plan, plain, node)
        return dataclasses.replace(plain, forced_by=forced_by, why=why)
    instead, more = layout_text(other.choice), other.more_seconds
    named = ""
    if more < -TINY_SECONDS and other.more_bytes > 0:
        forced_by = "memory"
        why = f"memory: {instead} takes up to {format_bytes(other.more_bytes)} more of a device."
    elif more < -TINY_SECONDS:
        forced_by, why = "search", "the solver stopped before it found the other one."
    elif more <= TINY_SECONDS:
        forced_by, why = "nothing", "nothing: the other one costs as much."
    elif max(other.own_seconds, other.neighbour_seconds) < more / 4:
        forced_by, why = "surroundings", "what lies further around it would take longer."
    elif other.own_seconds >= other.neighbour_seconds or neighbour is None:
        forced_by, longer = "computation", format_seconds(other.own_seconds)
        why = f"its own computation would take {longer} longer."
    else:
        named, cost = _called(neighbour), format_seconds(other.neighbour_seconds)
        forced_by = "neighbour"
        why = f"{named} would take {cost} more, with what moves between the two"
        less = format_seconds(other.neighbour_seconds - more)
        why += (
            f", other parts {less} less." if other.neighbour_seconds - more > TINY_SECONDS else "."
        )
    return dataclasses.replace(
        plain,
        runner_up=instead,
        more_seconds=more,
        more_bytes=other.more_bytes,
        forced_by=forced_by,
        neighbour=named,
        why=why,
    )


def _only(plan: PlanRecord, plain: LayoutReason, node: NodeStrategy) -> tuple[str, str]:
    if _label(node).startswith("constrain "):
        return "constraint", "a sharding constraint in the step asks for it."
    if plan.method in (*BATCH_METHODS, *LOOP_METHODS) and plain.value.rpartition("[")[2] != "]":
        return "method", f"method={plan.method!r} allows nothing else."
    return "shape", "there is no other: nothing else divides it."


def _called(node: NodeStrategy) -> str:
    """`dot_general gpt.py:47` or a leaf's path."""
    label = _label(node)
    operation, _, place = label.partition(" ")
    if operation == "scan":
        return f"a loop's {place.rpartition(' ')[2]}" + (f" {node.source}" if " " in place else "")
    if place and not operation.endswith("]"):
        return f"{operation} {node.source}" if node.source else f"{operation} {place}"
    return short_path(label)


def _sharding(node: NodeStrategy) -> str:
    return layout_text(node.choice.partition(" ")[2])


def _stored(tensor: TensorPlan) -> str:
    """How a leaf is stored."""
    return partition_spec(tensor.spec) + (IN_HOST if tensor.memory == "host" else "")


def partition_spec(spec: Spec) -> str:
    """How a leaf is cut, as a `PartitionSpec`.

    >>> partition_spec(((), ("x", "y"), ("z",)))
    "P(None, ('x', 'y'), 'z')"
    """
    dims = [repr(axes[0]) if len(axes) == 1 else repr(axes) if axes else "None" for axes in spec]
    return f"P({', '.join(dims)})"


def layout_text(text: str) -> str:
    """A layout as plans write it, as a `PartitionSpec`; axes have names of one letter.

    >>> layout_text("[xy|-] +sum(z)")
    "P(('x', 'y'), None), a sum over z left to do"
    """
    dims, _, rest = text.removeprefix("[").partition("]")
    spec = tuple(tuple(axes.replace("-", "")) for axes in dims.split("|")) if dims else ()
    sums = re.findall(r"\+(\w+)\((\w+)\)", rest)
    left = "".join(f", a {kind} over {axis} left to do" for kind, axis in sums)
    return partition_spec(spec) + left + (IN_HOST if rest.endswith(" host") else "")


def _quicker(plan: PlanRecord) -> str:
    """The quickest of the candidates that are quicker and do not fit, and by how much."""
    chosen = plan.estimates
    too_large = [
        (item.step_seconds, item.peak_bytes_per_device, item)
        for item in plan.candidates
        if item.step_seconds is not None
        and item.peak_bytes_per_device is not None
        and item.step_seconds < chosen.step_seconds
        and "exceeds the memory limit" in item.note
    ]
    if not too_large:
        return ""
    seconds, peak, item = min(too_large, key=lambda found: found[0])
    mesh, parts = "x".join(map(str, item.logical_mesh)), format_microbatches(item.num_microbatches)
    saved = format_seconds(chosen.step_seconds - seconds)
    return f"with {format_bytes(peak)} a device, {mesh} with {parts} would be {saved} quicker"
