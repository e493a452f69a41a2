"""What a reader needs of a plan's long lists: repeated layers folded, collectives added up.

Every view of a plan (plain text, Rich tables, pictures) shows these same rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plans import Collective, TensorPlan


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that differ only in numbers of their paths, such as the layers of a model.

    `path` folds those numbers (`Block_{0..11}/kernel`), `tensor` is the first of them, and the
    bytes are those of all together.
    """

    path: str
    count: int
    tensor: TensorPlan
    bytes: int
    bytes_per_device: int


@dataclass(frozen=True)
class CollectiveGroup:
    """Collectives of one purpose, kind and axes: their number in a step, bytes and seconds."""

    purpose: str
    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    seconds: float


def fold_tensors(tensors: Iterable[TensorPlan]) -> tuple[TensorGroup, ...]:
    """Groups of tensors alike in all but numbers in their paths, in order of appearance."""
    alike: dict[tuple[object, ...], list[TensorPlan]] = {}
    for tensor in tensors:
        words = re.sub(r"\d+", "#", tensor.path)
        key = (words, tensor.role, tensor.shape, tensor.dtype, tensor.spec, tensor.donated)
        alike.setdefault(key, []).append(tensor)
    order: dict[str, int] = {}
    groups: list[tuple[int, TensorGroup]] = []
    for members in alike.values():
        by_path = {member.path: member for member in members}
        for path, paths in fold_paths(by_path).items():
            chosen = [by_path[p] for p in paths]
            group = TensorGroup(
                path=path,
                count=len(chosen),
                tensor=chosen[0],
                bytes=sum(tensor.bytes for tensor in chosen),
                bytes_per_device=sum(tensor.bytes_per_device for tensor in chosen),
            )
            groups.append((order.setdefault(path, len(order)), group))
    return tuple(group for _, group in groups)


def fold_paths(paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Paths that fill every combination of some numbers, under one name each.

    >>> fold_paths(["a_0/w", "a_1/w", "a_2/w", "b/w"])
    {'a_{0..2}/w': ('a_0/w', 'a_1/w', 'a_2/w'), 'b/w': ('b/w',)}
    """
    by_words: dict[tuple[str, ...], _Folded] = {}
    for path in paths:
        pieces = re.split(r"(\d+)", path)
        numbers = tuple((int(digits),) for digits in pieces[1::2])
        by_words.setdefault(tuple(pieces[::2]), {}).setdefault(numbers, []).append(path)
    return {
        members[0] if len(members) == 1 else _name(words, numbers): tuple(members)
        for words, entries in by_words.items()
        for numbers, members in _unite(entries, len(words) - 1).items()
    }


_Folded = dict[tuple[tuple[int, ...], ...], list[str]]


def _unite(entries: _Folded, places: int) -> _Folded:
    """Unites entries that differ in one place only, place by place: results are full products."""
    for place in range(places):
        united: dict[tuple[tuple[int, ...], ...], dict[tuple[int, ...], list[str]]] = {}
        for numbers, members in entries.items():
            rest = numbers[:place] + numbers[place + 1 :]
            united.setdefault(rest, {})[numbers[place]] = members
        entries = {}
        for rest, parts in united.items():
            here = tuple(sorted(n for values in parts for n in values))
            members = [path for values in sorted(parts) for path in parts[values]]
            entries[(*rest[:place], here, *rest[place:])] = members
    return entries


def _name(words: Sequence[str], numbers: Sequence[Sequence[int]]) -> str:
    text = words[0]
    for values, word in zip(numbers, words[1:], strict=True):
        text += _number_set(values) + word
    return text


def _number_set(values: Sequence[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    if len(values) == values[-1] - values[0] + 1:
        return f"{{{values[0]}..{values[-1]}}}"
    return "{" + ",".join(map(str, values)) + "}"


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
    """dtype and shape, each dimension with the mesh axes that cut it: `float32[512, 2048/x]`."""
    dims = []
    for size, axes in zip(tensor.shape, tensor.spec, strict=True):
        cut = f"({','.join(axes)})" if len(axes) > 1 else "".join(axes)
        dims.append(f"{size}/{cut}" if cut else str(size))
    return f"{tensor.dtype}[{', '.join(dims)}]"


def format_mesh(sizes: Sequence[int], names: Sequence[str]) -> str:
    """A logical mesh as `x=4, y=2`."""
    return ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))


def describe_cluster(cluster: Mapping[str, object]) -> str:
    """One line for a plan's cluster, such as `2 nodes of 8 x H100-SXM`."""
    nodes, devices = cluster.get("num_nodes", 1), cluster.get("devices_per_node", "?")
    device = cluster.get("device", {})
    kind = device.get("name", "device") if isinstance(device, Mapping) else device
    return f"{nodes} node{'' if nodes == 1 else 's'} of {devices} x {kind}"
