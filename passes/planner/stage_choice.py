"""`best_stages`: which consecutive layers form a stage, on how many devices, for least step time.

The search (`stage_search`) is exact: over every split of the layers, every assignment of submesh
sizes and every option that the oracle offers, under the memory limit with the microbatches that
1F1B keeps in flight on each stage. The objective is Alpa's (Zheng et al., OSDI 2022, section
5.2), with what a stage does once a step added to its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.passes.planner.stage_problem import StageKind, StageProblem
from autopar.passes.planner.stage_search import best_path


@dataclass(frozen=True)
class StageOption:
    """One way to run a range of layers on a submesh: what it costs and needs.

    Args:
      seconds: the time of one microbatch, forward and backward.
      bytes_fixed: bytes per device that do not depend on the microbatches in flight.
      bytes_per_microbatch: bytes per device for each microbatch in flight.
      remat: whether the forward pass is computed again; the search does not look at it.
      once_seconds: the time that the stage takes once a step (synchronisation, optimizer).
      hidden_seconds: what a microbatch waits beside, while the stage works on another one.
      casts: whether parameters are cast in every microbatch; the search does not look at it.
    """

    seconds: float
    bytes_fixed: int
    bytes_per_microbatch: int
    remat: bool = False
    once_seconds: float = 0.0
    hidden_seconds: float = 0.0
    casts: bool = False

    def bytes_in_flight(self, microbatches: int) -> int:
        """Bytes per device with so many microbatches in flight."""
        return self.bytes_fixed + microbatches * self.bytes_per_microbatch


class StageRange(NamedTuple):
    """Layers `start` to `stop` (half open) on a submesh of `num_devices`, run as `option` says."""

    start: int
    stop: int
    num_devices: int
    option: StageOption


@dataclass(frozen=True)
class StageChoice:
    """The stages of a pipeline, first to last, and the step time that `best_stages` minimises."""

    stages: tuple[StageRange, ...]
    step_seconds: float


Oracle = Callable[[int, int, int], Sequence[StageOption]]
"""The options of layers start to stop (half open) on a submesh of so many devices; () if none."""


def best_stages(
    num_layers: int,
    submeshes: Sequence[int],
    num_devices: int,
    oracle: Oracle,
    *,
    num_microbatches: int,
    memory_limit: float | None,
    in_flight: Callable[[int], int] | None = None,
    at_most: float = math.inf,
) -> StageChoice | None:
    """The split into stages of least step time that uses all devices and fits; None without any.

    The step time is the sum over the stages of `seconds + hidden_seconds` + the largest over the
    stages of `(M - 1) * seconds + once_seconds`. Equally good choices: the one of fewest stages,
    then the first in the lexicographic order of (stop, num_devices, position of the option), stage
    by stage.

    Args:
      num_layers: how many layers there are, in a row.
      submeshes: the numbers of devices that a stage may have, ascending; maybe none.
      num_devices: the devices that the stages share.
      oracle: called once for every range of layers and every size of submesh.
      num_microbatches: M.
      memory_limit: bytes per device; None: no limit.
      in_flight: the microbatches that a stage has in flight, by the number of stages from it to the
        last one, itself counted; None: 1F1B's, one for each.
      at_most: seconds of a step; splits that take longer are not looked for.

    >>> def oracle(start, stop, num_devices):
    ...     return [StageOption((stop - start) / num_devices, 100 * (stop - start), 10)]
    >>> best = best_stages(6, [1, 2], 3, oracle, num_microbatches=4, memory_limit=450)
    >>> [stage[:3] for stage in best.stages], best.step_seconds
    ([(0, 2, 1), (2, 6, 2)], 10.0)
    """
    if not submeshes:
        return None
    options = {
        (start, stop, size): tuple(oracle(start, stop, size))
        for size in submeshes
        for start in range(num_layers)
        for stop in range(start + 1, num_layers + 1)
    }
    problem = StageProblem(
        tuple(np.arange(cut + 1, num_layers + 1) for cut in range(num_layers + 1)),
        tuple(
            _kind(size, num_layers, options, num_microbatches, in_flight or (lambda left: left))
            for size in submeshes
        ),
        num_devices,
        max_count=min(num_layers, num_devices // submeshes[0]),
        memory_limit=memory_limit,
    )
    path = best_path(problem, at_most)
    if path is None:
        return None
    stages = []
    for step in path.steps:
        size = submeshes[step.kind]
        option = options[step.start, step.stop, size][step.option]
        stages.append(StageRange(step.start, step.stop, size, option))
    return StageChoice(tuple(stages), path.cost)


def _kind(
    size: int,
    num_layers: int,
    options: dict[tuple[int, int, int], tuple[StageOption, ...]],
    num_microbatches: int,
    in_flight: Callable[[int], int],
) -> StageKind:
    """The stages on submeshes of one size, as the search wants them."""
    cells, numbers = list[tuple[int, int, int]](), list[tuple[float, float, float, float]]()
    for start in range(num_layers):
        for stop in range(start + 1, num_layers + 1):
            for index, option in enumerate(options[start, stop, size]):
                cells.append((index, start, stop))
                numbers.append(
                    (
                        option.seconds + option.hidden_seconds,
                        (num_microbatches - 1) * option.seconds + option.once_seconds,
                        option.bytes_fixed,
                        option.bytes_per_microbatch,
                    )
                )
    most = max((index for index, _, _ in cells), default=-1) + 1
    arrays = np.zeros((4, most, num_layers + 1, num_layers + 1))
    arrays[:2] = np.inf
    if cells:
        arrays[:, *np.transpose(cells)] = np.transpose(numbers)
        assert np.isfinite(numbers).all(), "an option without a cost"
    return StageKind(
        devices=size,
        weight=1,
        summed=arrays[0],
        bottleneck=arrays[1],
        bytes_fixed=arrays[2],
        bytes_per_microbatch=arrays[3],
        in_flight=lambda count: min(in_flight(count), num_microbatches),
    )
