"""What the search is given: the cuts between stages, and what every possible stage costs and takes.

A state says what has run before a cut: of layers in a row, the first so many of them. A plan is a
path from the first state to the last. Each of its steps is a stage of one *kind* (its number of
devices, and whatever else sets its costs) that runs with one *option* (its logical mesh,
rematerialization, ...). The cost of a plan is

    sum of its stages' `summed`  +  the largest of its stages' `bottleneck`

For a pipeline of M microbatches, with `summed` = t and `bottleneck` = (M - 1) t, this is the step
time of Alpa (Zheng et al., OSDI 2022, section 5.2). Planners for asynchronous pipelines minimise
the slowest stage alone (PipeDream, SOSP 2019; Piper, NeurIPS 2021): they leave `summed` out.

Memory depends on where in the pipeline a stage stands. Every kind has a `weight`; the *count* of a
stage is the weight of itself and of all later stages, and the microbatches that it holds in flight
are a function of that count: of the stages after it where weights are 1, of the devices after it
(PipeDream) or of the replicas (Piper).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Successors = tuple[NDArray[np.intp], ...]
"""For each cut state, the states that may be the next cut, ascending and later than it."""


@dataclass(frozen=True, eq=False)
class StageKind:
    """One kind of stage, and what each stage of that kind costs between every two cuts.

    Args:
      devices: how many devices such a stage takes.
      weight: what it adds to the count of itself and of the stages before it.
      bottleneck: float64 `[options, states, states]`, not negative: entry `[o, i, j]` is the cost
        of the stage between the cuts i and j with option o as far as only the largest counts;
        infinite where there is no such stage.
      summed: the same for the cost that adds up over the stages; None: nothing adds up.
      bytes_fixed: the same for the bytes per device that a stage needs once; None: 0.
      bytes_per_microbatch: the same for the bytes per microbatch in flight; None: 0.
      in_flight: the number of microbatches in flight on a stage of a given count.
    """

    devices: int
    weight: int
    bottleneck: Floats
    summed: Floats | None = None
    bytes_fixed: Floats | None = None
    bytes_per_microbatch: Floats | None = None
    in_flight: Callable[[int], int] = lambda count: 1

    def __post_init__(self) -> None:
        if self.devices < 0 or self.weight < 0:
            raise ValueError(f"a stage cannot have {self.devices} devices, weight {self.weight}")
        arrays = (self.bottleneck, self.summed, self.bytes_fixed, self.bytes_per_microbatch)
        for array in arrays:
            if array is not None and array.shape != self.bottleneck.shape:
                raise ValueError(f"shapes differ: {array.shape} and {self.bottleneck.shape}")
            # Also false where an entry is not a number.
            if array is not None and not (array >= 0).all():
                raise ValueError("costs and bytes of stages must not be negative")


@dataclass(frozen=True, eq=False)
class StageProblem:
    """The cuts, the kinds of stages between them, and the limits of a plan.

    Args:
      successors: the cuts in a topological order, the first of which is the program's start, the
        last its end.
      kinds: the kinds of stages; where plans are equally good, earlier kinds and options win.
      num_devices: the devices that the stages share.
      max_count: the largest weight that the stages of a plan may have together.
      all_devices: whether every device must be used.
      memory_limit: bytes per device; None: no limit.
    """

    successors: Successors
    kinds: tuple[StageKind, ...]
    num_devices: int
    max_count: int
    all_devices: bool = True
    memory_limit: float | None = None

    def __post_init__(self) -> None:
        states = len(self.successors)
        if not states:
            raise ValueError("a problem needs a state")
        for state, after in enumerate(self.successors):
            if not (np.diff(np.concatenate(([state], after, [states]))) > 0).all():
                raise ValueError(
                    f"the successors of state {state} must be later, each once: {after}"
                )
        for kind in self.kinds:
            if kind.bottleneck.ndim != 3 or kind.bottleneck.shape[1:] != (states, states):
                raise ValueError(f"costs of shape {kind.bottleneck.shape} for {states} states")

    @property
    def in_larger_units(self) -> StageProblem:
        """The same problem whose devices are counted in the largest groups that none divides."""
        unit = math.gcd(self.num_devices, *(kind.devices for kind in self.kinds))
        if unit <= 1:
            return self
        kinds = tuple(replace(kind, devices=kind.devices // unit) for kind in self.kinds)
        return replace(self, kinds=kinds, num_devices=self.num_devices // unit)


class PathStep(NamedTuple):
    """One stage of a plan: the cuts before and after it, and the indices of what it runs as."""

    start: int
    stop: int
    kind: int
    option: int


@dataclass(frozen=True)
class StagePath:
    """A plan: its stages in order, what adds up over them, and the largest bottleneck of one."""

    steps: tuple[PathStep, ...]
    summed: float
    bottleneck: float

    @property
    def cost(self) -> float:
        return self.summed + self.bottleneck
