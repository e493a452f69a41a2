"""From one layout to another: a short list of collectives, and what it costs.

Cheap and shrinking steps come first: slices cost nothing, a reduce-scatter and an all-to-all move
less than an all-reduce and an all-gather. The same list is priced by the planner, listed in the
plan and executed by the runtime.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autopar.passes.sharding.layout import Layout, cuts_product, num_parts, on_device

StepKind = Literal[
    "slice", "to-partial", "all-reduce", "reduce-scatter", "all-gather", "all-to-all",
    "to-device", "to-host",
]  # fmt: skip
COLLECTIVES: tuple[StepKind, ...] = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
HOST_COPIES: tuple[StepKind, ...] = ("to-device", "to-host")
"""Copies between the memory of a device and that of its host."""


@dataclass(frozen=True)
class ReshardStep:
    """One step: over which axes, along which dimension (`target` for an all-to-all's new one).

    One device holds the whole value's elements over `parts_in` before and over `parts_out` after.
    """

    kind: StepKind
    axes: tuple[int, ...]
    dim: int = -1
    target: int = -1
    monoid: str = "sum"
    parts_in: int = 1
    parts_out: int = 1

    def elements(self, whole: int) -> int:
        """Elements of one device's buffer, before or after the step, whichever is larger."""
        return whole // min(self.parts_in, self.parts_out)


def adding(steps: Sequence[ReshardStep]) -> range:
    """The places of the steps from the first one that adds over devices to the last one."""
    adds = [
        place
        for place, step in enumerate(steps)
        if step.kind in ("all-reduce", "reduce-scatter") and step.monoid == "sum"
    ]
    return range(adds[0], adds[-1] + 1) if adds else range(0)


@lru_cache(maxsize=500_000)
def reshard_steps(
    source: Layout, target: Layout, mesh: tuple[int, ...], reduce_scatter: bool = True
) -> tuple[ReshardStep, ...]:
    """The steps that turn `source` into `target`; both divide the value's shape.

    `reduce_scatter=False` (ZeRO-1) completes partial sums by an all-reduce and slices after it.
    """
    if source == target:
        return ()
    if source.in_host or target.in_host:
        return _by_host(source, target, mesh, reduce_scatter)
    dims = [list(axes) for axes in source.dims]
    partial = dict(source.partial)
    wanted_partial = dict(target.partial)
    wanted_cuts = {a for axes in target.dims for a in axes}
    parts = cuts_product(source, mesh)
    steps: list[ReshardStep] = []

    def emit(kind: StepKind, axes: tuple[int, ...], after: int, **where: object) -> None:
        nonlocal parts
        steps.append(ReshardStep(kind, axes, parts_in=parts, parts_out=after, **where))  # type: ignore[arg-type]
        parts = after

    def next_axis(d: int) -> int | None:
        """The axis to append to dimension d, if what it has is a prefix of what it should have."""
        have, want = dims[d], target.dims[d]
        if len(have) < len(want) and tuple(have) == want[: len(have)]:
            return want[len(have)]
        return None

    def holder(axis: int) -> int | None:
        return next((d for d, axes in enumerate(dims) if axis in axes), None)

    def grow() -> bool:
        """Cut some dimension further: for free, else by a reduce-scatter, else an all-to-all."""
        candidates = [(d, a) for d in range(len(dims)) if (a := next_axis(d)) is not None]
        for d, axis in candidates:
            if axis not in partial and holder(axis) is None:
                emit("slice", (axis,), parts * mesh[axis], dim=d)
                dims[d].append(axis)
                return True
        for d, _ in candidates:
            further = target.dims[d][len(dims[d]) :]
            axes = tuple(itertools.takewhile(lambda a: partial.get(a) == "sum", further))
            if axes and reduce_scatter:
                emit("reduce-scatter", axes, parts * num_parts(axes, mesh), dim=d)
                for axis in axes:
                    del partial[axis]
                dims[d].extend(axes)
                return True
        for d, axis in candidates:
            other = holder(axis)
            if other is not None and dims[other][-1] == axis:
                emit("all-to-all", (axis,), parts, dim=other, target=d)
                dims[other].pop()
                dims[d].append(axis)
                return True
        return False

    def reduce() -> bool:
        for monoid in sorted(set(partial.values())):
            axes = tuple(
                a for a in sorted(partial) if partial[a] == monoid != wanted_partial.get(a)
            )
            if axes:
                emit("all-reduce", axes, parts, monoid=monoid)
                for axis in axes:
                    del partial[axis]
                return True
        return False

    def gather() -> bool:
        """Join what the target does not cut so; axes that it needs elsewhere stay, if any can."""
        candidates: list[tuple[int, int, tuple[int, ...]]] = []
        for d, axes in enumerate(dims):
            want = target.dims[d]
            keep = 0
            while keep < min(len(axes), len(want)) and axes[keep] == want[keep]:
                keep += 1
            if keep < len(axes):
                gone = tuple(axes[keep:])
                candidates.append((len(wanted_cuts.intersection(gone)), d, gone))
        if not candidates:
            return False
        _, d, gone = min(candidates)
        emit("all-gather", gone, parts // num_parts(gone, mesh), dim=d)
        del dims[d][-len(gone) :]
        return True

    while grow() or reduce() or gather():
        pass
    missing = tuple(a for a in wanted_partial if a not in partial)
    if missing:
        emit("to-partial", missing, parts)
    assert tuple(map(tuple, dims)) == target.dims, (source, target, steps)
    return tuple(steps)


def _by_host(
    source: Layout, target: Layout, mesh: tuple[int, ...], reduce_scatter: bool
) -> tuple[ReshardStep, ...]:
    """The same where a value comes from the hosts' memory, or goes there: it moves in its parts."""
    steps = list(reshard_steps(on_device(source), on_device(target), mesh, reduce_scatter))
    if source.in_host:
        parts = cuts_product(source, mesh)
        steps.insert(0, ReshardStep("to-device", (), parts_in=parts, parts_out=parts))
    if target.in_host:
        parts = cuts_product(target, mesh)
        steps.append(ReshardStep("to-host", (), parts_in=parts, parts_out=parts))
    return tuple(steps)
