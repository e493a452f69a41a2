"""What a reader needs of a plan's long lists: repeated layers folded, collectives added up.

Every view of a plan (plain text, Rich tables, pictures) shows these same rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.base.plan_records import Collective, PlanRecord, TensorPlan


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that differ only in their paths, such as the layers of a model.

    `path` folds them (`Block_{0..11}/{bias,scale}`), `tensor` is the first of them, `bytes` are
    those of all together, `bytes_per_device` those on a device of the mesh that holds the most,
    and `stages` has an entry for each of them.
    """

    path: str
    count: int
    tensor: TensorPlan
    bytes: int
    bytes_per_device: int
    stages: tuple[tuple[int, ...], ...] = ((0,),)


@dataclass(frozen=True)
class CollectiveGroup:
    """Collectives of one purpose, kind and axes: their number in a step, bytes and seconds."""

    purpose: str
    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    seconds: float


def fold_tensors(
    tensors: Iterable[TensorPlan], meshes: Sequence[int] = ()
) -> tuple[TensorGroup, ...]:
    """Groups of tensors alike in all but stages, and names and numbers in their paths, in order.

    `meshes` are those of the stages; without them every stage has one of its own.
    """
    alike: dict[tuple[object, ...], dict[str, TensorPlan]] = {}
    order: dict[str, int] = {}
    for tensor in tensors:
        key = (tensor.role, tensor.shape, tensor.dtype, tensor.spec, tensor.donated)
        alike.setdefault(key, {})[tensor.path] = tensor
        order[tensor.path] = len(order)
    groups: list[tuple[int, TensorGroup]] = []
    for by_path in alike.values():
        for name, paths in fold_paths(by_path).items():
            members = [by_path[path] for path in paths]
            group = TensorGroup(
                path=name,
                count=len(members),
                tensor=members[0],
                bytes=sum(tensor.bytes for tensor in members),
                bytes_per_device=most_bytes_per_device(members, meshes),
                stages=tuple(tensor.stages for tensor in members),
            )
            groups.append((min(order[path] for path in paths), group))
    return tuple(group for _, group in sorted(groups, key=lambda item: item[0]))


def most_bytes_per_device(tensors: Iterable[TensorPlan], meshes: Sequence[int] = ()) -> int:
    """What a device of the fullest mesh holds of these tensors, in bytes."""
    sizes: Counter[int] = Counter()
    for tensor in tensors:
        for stage in tensor.stages:
            sizes[meshes[stage] if meshes else stage] += tensor.bytes_per_device
    return max(sizes.values(), default=0)


def fold_paths(paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Paths that fill every combination of some numbers or names, under one short name each.

    >>> list(fold_paths([f"p['a_{i}']['{name}']" for i in range(3) for name in ("w", "b")]))
    ['p/a_{0..2}/{w,b}']
    """
    entries: _Entries = {}
    for path in paths:
        entries.setdefault(tuple(re.split(r"(\d+)", short_path(path))), []).append(path)
    # Numbers are at odd places; after them, names that differ fold as well ({mu,nu}, {bias,scale}).
    segments: _Entries = {}
    for pieces, members in _unite(entries, _odd_places, _number_set).items():
        segments.setdefault(tuple("".join(pieces).split("/")), []).extend(members)
    folded: dict[str, list[str]] = {}
    for pieces, members in _unite(segments, _later_places, _name_set).items():
        folded.setdefault("/".join(pieces), []).extend(members)
    return {name: tuple(members) for name, members in folded.items()}


def short_path(path: str) -> str:
    """A path of a pytree leaf as people write it: `state.params['a'][0]` is `state/params/a/0`."""
    return re.sub(r"['\"]?\]?(?:\.|\[['\"]?)|['\"]?\]$", "/", path).strip("/")


_Entries = dict[tuple[str, ...], list[str]]


def _unite(
    entries: _Entries,
    places_of: Callable[[int], range],
    join: Callable[[Sequence[str]], str],
) -> _Entries:
    """Unites entries that differ in one place only, place by place: results are full products."""
    for place in range(max(map(len, entries), default=0)):
        united: dict[tuple[object, ...], dict[str, list[str]]] = {}
        for pieces, members in entries.items():
            key: tuple[object, ...] = pieces
            here = ""
            if place in places_of(len(pieces)):
                key, here = (*pieces[:place], None, *pieces[place + 1 :]), pieces[place]
            united.setdefault(key, {})[here] = members
        entries = {}
        for key, parts in united.items():
            pieces = tuple(join(list(parts)) if piece is None else str(piece) for piece in key)
            for members in parts.values():
                entries.setdefault(pieces, []).extend(members)
    return entries


def _odd_places(length: int) -> range:
    return range(1, length, 2)


def _later_places(length: int) -> range:
    return range(1, length)


def _number_set(texts: Sequence[str]) -> str:
    if len(texts) == 1:
        return texts[0]
    values = sorted(map(int, texts))
    if len(values) > 2 and len(values) == values[-1] - values[0] + 1:
        return f"{{{values[0]}..{values[-1]}}}"
    return "{" + ",".join(map(str, values)) + "}"


def _name_set(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else "{" + ",".join(names) + "}"


def group_certificate(plan: PlanRecord) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    """For each way in which outputs are put together: their number, and folded paths.

    Outputs that are new state are only counted, because there are many and their names are known.
    """
    is_state = {tensor.path: tensor.role == "state" for tensor in plan.outputs}
    rows = []
    for how in dict.fromkeys(entry.how for entry in plan.certificate):
        paths = [entry.path for entry in plan.certificate if entry.how == how]
        results = [path for path in paths if not is_state.get(path, False)]
        names = list(fold_paths(results))
        if len(results) < len(paths):
            names.append(f"{len(paths) - len(results)} leaves of the new state")
        rows.append((how, len(paths), tuple(names)))
    return tuple(rows)


def results_of(plan: PlanRecord) -> tuple[TensorPlan, ...]:
    """The outputs worth a line of their own: all but new state laid out as the old one is."""

    def layouts(tensors: Iterable[TensorPlan]) -> Counter[object]:
        return Counter((t.dtype, t.shape, t.spec) for t in tensors if t.role == "state")

    if layouts(plan.inputs) == layouts(plan.outputs):
        return tuple(tensor for tensor in plan.outputs if tensor.role != "state")
    return plan.outputs


def group_collectives(collectives: Iterable[Collective]) -> tuple[CollectiveGroup, ...]:
    """Collectives added up by purpose, kind and axes; the most seconds, then bytes, first."""
    sums: dict[tuple[str, str, tuple[str, ...]], tuple[int, int, float]] = {}
    for item in collectives:
        key = (item.purpose, item.kind, item.axes)
        count, size, seconds = sums.get(key, (0, 0, 0.0))
        sums[key] = (
            count + item.times,
            size + item.bytes * item.times,
            seconds + item.seconds * item.times,
        )
    groups = [CollectiveGroup(*key, *value) for key, value in sums.items()]
    return tuple(sorted(groups, key=lambda g: (-g.seconds, -g.bytes, g.purpose, g.kind, g.axes)))


def format_value(tensor: TensorPlan) -> str:
    """dtype and shape, each dimension with the mesh axes that cut it: `float32[512, 2048/x/y]`."""
    dims = [
        "/".join([str(size), *axes]) for size, axes in zip(tensor.shape, tensor.spec, strict=True)
    ]
    return f"{tensor.dtype}[{', '.join(dims)}]"


def describe_cluster(cluster: Mapping[str, object]) -> str:
    """One line for a plan's cluster, such as `2 nodes of 8 x H100-SXM`."""
    nodes, devices = cluster.get("num_nodes", 1), cluster.get("devices_per_node", "?")
    device = cluster.get("device", {})
    kind = device.get("name", "device") if isinstance(device, Mapping) else device
    return f"{nodes} node{'' if nodes == 1 else 's'} of {devices} x {kind}"


def memory_limit(plan: PlanRecord) -> int | None:
    """Bytes that the plan may use on each device, or None where neither user nor cluster say."""
    limit = plan.options.get("memory_limit")
    if limit is None and isinstance(plan.cluster.get("device"), Mapping):
        limit = plan.cluster["device"].get("memory_bytes")
    return limit if isinstance(limit, int) else None


def relative_path(path: str, category: str) -> str:
    """What follows a category in a short path, without leading numbers.

    >>> relative_path("state/opt_state/0/mu/w", "opt_state")
    'mu/w'
    """
    names = path.split("/")
    if category in names[:-1]:
        names = names[names.index(category) + 1 :]
    while len(names) > 1 and names[0].isdigit():
        del names[0]
    return "/".join(names)


def input_categories(plan: PlanRecord) -> dict[str, str]:
    """A name for what each input belongs to: the part of the state, or its role.

    The part is the first name by which paths of the state differ: `params` of `state/params/w`.
    """
    state = [short_path(t.path).split("/") for t in plan.inputs if t.role == "state"]
    common = 0
    while state and all(len(p) > common and p[common] == state[0][common] for p in state):
        common += 1
    categories = {}
    for tensor in plan.inputs:
        parts = short_path(tensor.path).split("/")
        is_part = tensor.role == "state" and len(parts) > common + 1
        categories[tensor.path] = parts[common] if is_part else tensor.role
    if len({categories[t.path] for t in plan.inputs if t.role == "state"}) > _MAX_PARTS:
        return {tensor.path: tensor.role for tensor in plan.inputs}
    return categories


_MAX_PARTS = 5
"""Of the state; where it has more, they are layers and not kinds of state."""
