"""How a value lies on a logical mesh: which axes cut which dimension, and which leave it unreduced.

`Layout(dims=((0, 1), ()), partial=())` on a mesh of shape (4, 2) cuts the first dimension into
eight parts, axis 0 being the outer cut; `partial=((1, "sum"),)` says that the value is the sum of
what the devices along axis 1 hold. Axes are numbers, in ascending order within a dimension.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Layout(NamedTuple):
    """Mesh axes per dimension (outermost first), and the axes over which the value is partial.

    `in_host`: the parts are not in the devices' memory but in that of their hosts.
    """

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[tuple[int, str], ...] = ()
    in_host: bool = False

    @property
    def used(self) -> frozenset[int]:
        """Axes that cut a dimension or that the value is partial over."""
        return frozenset(a for dim in self.dims for a in dim) | {a for a, _ in self.partial}

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not any(self.dims)


def on_device(layout: Layout) -> Layout:
    """The same parts in the devices' memory."""
    return Layout(layout.dims, layout.partial) if layout.in_host else layout


def in_host(layout: Layout) -> Layout:
    """The same parts in the hosts' memory."""
    return Layout(layout.dims, layout.partial, True)


def replicated(rank: int) -> Layout:
    """The layout in which every device holds the whole value."""
    return Layout(((),) * rank)


def without_partial(layout: Layout) -> Layout:
    """The same cuts, with every sum completed."""
    return Layout(layout.dims)


def stacked(layout: Layout) -> Layout:
    """The layout of a stack of values along a new leading dimension."""
    return Layout(((), *layout.dims), layout.partial)


def num_parts(axes: Iterable[int], mesh: Sequence[int]) -> int:
    """Into how many parts these axes together cut a dimension."""
    return math.prod(mesh[a] for a in axes)


def local_shape(shape: Sequence[int], layout: Layout, mesh: Sequence[int]) -> tuple[int, ...]:
    """The shape that one device holds; every cut divides."""
    return tuple(
        size // num_parts(axes, mesh) for size, axes in zip(shape, layout.dims, strict=True)
    )


def cuts_product(layout: Layout, mesh: Sequence[int]) -> int:
    """Into how many parts the value is cut."""
    parts = 1
    for axes in layout.dims:
        for axis in axes:
            parts *= mesh[axis]
    return parts


def divides(shape: Sequence[int], layout: Layout, mesh: Sequence[int]) -> bool:
    """Whether every cut of `layout` divides its dimension."""
    return all(
        size % num_parts(axes, mesh) == 0 for size, axes in zip(shape, layout.dims, strict=True)
    )


def without_replicas(shape: Sequence[int], layout: Layout, mesh: Sequence[int]) -> Layout:
    """Cut further along axes that cut nothing, as far as they divide a dimension: the first one."""
    for axis in range(len(mesh)):
        if mesh[axis] == 1 or axis in layout.used:
            continue
        for d, cuts in enumerate(layout.dims):
            further = tuple(sorted((*cuts, axis)))
            trial = Layout((*layout.dims[:d], further, *layout.dims[d + 1 :]))
            if shape[d] > 1 and divides(shape, trial, mesh):
                layout = trial
                break
    return layout


def describe(layout: Layout, names: Sequence[str]) -> str:
    """`x,y|-|z +sum(y)`: the axes of every dimension, what is unreduced, `host` if it is there."""
    dims = "|".join("".join(names[a] for a in axes) or "-" for axes in layout.dims)
    partial = "".join(f" +{monoid}({names[a]})" for a, monoid in layout.partial)
    return f"[{dims}]{partial}{' host' if layout.in_host else ''}"


def with_sums(layout: Layout, mesh: Sequence[int]) -> Iterator[Layout]:
    """A layout, and the same unreduced over some of the axes that it does not use."""
    free = [axis for axis, size in enumerate(mesh) if size > 1 and axis not in layout.used]
    for count in range(len(free) + 1):
        for axes in itertools.combinations(free, count):
            yield Layout(layout.dims, tuple((axis, "sum") for axis in axes))


def all_layouts(
    shape: Sequence[int], mesh: Sequence[int], *, partial: bool = False
) -> tuple[Layout, ...]:
    """Every layout of a shape: each axis cuts one dimension, or none, or (`partial`) is unreduced.

    The first one is the replicated layout; the order is deterministic.
    """
    found: list[Layout] = []

    def extend(axis: int, dims: list[list[int]], sums: list[int]) -> None:
        if axis == len(mesh):
            found.append(Layout(tuple(map(tuple, dims)), tuple((a, "sum") for a in sums)))
            return
        extend(axis + 1, dims, sums)
        if mesh[axis] == 1:
            return
        for d, size in enumerate(shape):
            if size % (num_parts(dims[d], mesh) * mesh[axis]) == 0 and size > 1:
                dims[d].append(axis)
                extend(axis + 1, dims, sums)
                dims[d].pop()
        if partial:
            extend(axis + 1, dims, [*sums, axis])

    extend(0, [[] for _ in shape], [])
    return tuple(found)
