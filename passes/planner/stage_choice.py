"""`best_stages`: which consecutive layers form a stage, on how many devices, for least step time.

The search (`stage_search`) is exact: over every split of the layers, every assignment of submesh
sizes and every option that the oracle offers, under the memory limit with the microbatches that the
schedule keeps in flight on each stage. The objective is Alpa's (Zheng et al., OSDI 2022, section
5.2), with what a stage does once a step added to its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from autopar.base.errors import MemoryLimitError, OptionError
from autopar.base.units import format_bytes, format_seconds
from autopar.passes.planner.stage_problem import StageKind, StagePath, StageProblem
from autopar.passes.planner.stage_search import best_path, least_memory_path


@dataclass(frozen=True)
class StageOption:
    """One way to run a range of layers on a submesh: what it costs and needs.

    Args:
      seconds: the time of one microbatch, forward and backward.
      bytes_fixed: bytes per device that do not depend on the microbatches in flight.
      bytes_per_microbatch: bytes per device for each microbatch in flight.
      choice: what the option stands for (a logical mesh, a rematerialization, a plan); the search
        does not look at it.
      once_seconds: the time that the stage takes once a step (synchronisation, optimizer).
      tensors: (path, bytes per device) of the largest tensors, for the message where nothing fits.

    Raises:
      ValueError: a cost is negative or not finite.
    """

    seconds: float
    bytes_fixed: int
    bytes_per_microbatch: int
    choice: Any = None
    once_seconds: float = 0.0
    tensors: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("seconds", "bytes_fixed", "bytes_per_microbatch", "once_seconds"):
            number = getattr(self, name)
            if not 0 <= number < float("inf"):
                raise ValueError(f"{name} of a stage must be finite and not negative: {number}")

    def bytes_per_device(self, in_flight: int) -> int:
        """The bytes per device with `in_flight` microbatches in flight."""
        return self.bytes_fixed + in_flight * self.bytes_per_microbatch


class Stage(NamedTuple):
    """Layers `start` to `stop` (half open) on a submesh of `num_devices`, run as `option` says."""

    start: int
    stop: int
    num_devices: int
    option: StageOption


@dataclass(frozen=True)
class StageChoice:
    """The stages of a pipeline, first to last.

    Args:
      stages: the stages.
      num_microbatches: M.
      in_flight: for each stage, the microbatches in flight on it.
      step_seconds: the sum of the stages' seconds + the largest (M - 1) * seconds + once_seconds.
    """

    stages: tuple[Stage, ...]
    num_microbatches: int
    in_flight: tuple[int, ...]
    step_seconds: float

    @property
    def bytes_per_device(self) -> tuple[int, ...]:
        """For each stage, the bytes that each of its devices needs."""
        return tuple(
            stage.option.bytes_per_device(in_flight)
            for stage, in_flight in zip(self.stages, self.in_flight, strict=True)
        )

    def __str__(self) -> str:
        lines = [
            f"{_number(len(self.stages), 'stage')}, "
            f"{_number(self.num_microbatches, 'microbatch', 'microbatches')}: "
            f"{format_seconds(self.step_seconds)} a step"
        ]
        rows = zip(self.stages, self.in_flight, self.bytes_per_device, strict=True)
        for stage, in_flight, size in rows:
            lines.append(
                f"  {_layers(stage.start, stage.stop)} on {_number(stage.num_devices, 'device')}: "
                f"{format_seconds(stage.option.seconds)} a microbatch, {in_flight} in flight, "
                f"{format_bytes(size)} per device"
                + ("" if stage.option.choice is None else f", {stage.option.choice}")
            )
        return "\n".join(lines)


Oracle = Callable[[int, int, int], Sequence[StageOption]]
"""The options of layers start to stop (half open) on a submesh of so many devices; () if none."""

InFlight = Callable[[int, int], int]
"""From a stage's place from the end (the last is 1) and M to its microbatches in flight."""


def one_f_one_b_in_flight(stage_from_the_end: int, num_microbatches: int) -> int:
    """The microbatches in flight under 1F1B: one per stage from this one to the last, at most M."""
    return min(stage_from_the_end, num_microbatches)


def best_stages(
    num_layers: int,
    submeshes: Sequence[int],
    num_devices: int,
    oracle: Oracle,
    *,
    num_microbatches: int,
    memory_limit: float | None,
    in_flight: InFlight = one_f_one_b_in_flight,
    num_stages: int | None = None,
    all_devices: bool = True,
) -> StageChoice:
    """The split into stages of least step time that fits into memory.

    The step time is the sum over the stages of `seconds` + the largest over the stages of
    `(M - 1) * seconds + once_seconds`. Equally good choices: the one of fewest stages, then the
    first in the lexicographic order of (stop, num_devices, position of the option), stage by stage.

    Args:
      num_layers: how many layers there are, in a row.
      submeshes: the numbers of devices that a stage may have.
      num_devices: the devices that the stages share.
      oracle: called once for every range of layers and every size of submesh.
      num_microbatches: M.
      memory_limit: bytes per device; None: no limit.
      in_flight: the schedule's microbatches in flight on a stage, by its place from the end.
      num_stages: how many stages there must be; None: as many as are best.
      all_devices: whether every device must be used; otherwise some may stay idle.

    Raises:
      OptionError: the counts do not fit together: no submesh, more stages than layers or devices,
        no submeshes that add up to the devices, or no options that cover the layers.
      MemoryLimitError: no split fits; names the stage that is too large in the split that needs
        the least memory, its tensors, and what would fit.

    >>> def oracle(start, stop, num_devices):
    ...     return [StageOption((stop - start) / num_devices, 100 * (stop - start), 10)]
    >>> print(best_stages(6, [1, 2], 3, oracle, num_microbatches=4, memory_limit=450))
    2 stages, 4 microbatches: 10 s a step
      layers 0..1 on 1 device: 2 s a microbatch, 2 in flight, 220 B per device
      layers 2..5 on 2 devices: 2 s a microbatch, 1 in flight, 410 B per device
    """
    sizes = _sizes(num_layers, submeshes, num_devices, num_microbatches, num_stages, all_devices)
    options = {
        (start, stop, size): tuple(oracle(start, stop, size))
        for size in sizes
        for start in range(num_layers)
        for stop in range(start + 1, num_layers + 1)
    }
    most_stages = min(num_layers, num_devices // sizes[0])
    problem = StageProblem(
        tuple(np.arange(cut + 1, num_layers + 1) for cut in range(num_layers + 1)),
        tuple(_kind(size, num_layers, options, num_microbatches, in_flight) for size in sizes),
        num_devices,
        max_count=most_stages if num_stages is None else num_stages,
        count=num_stages,
        all_devices=all_devices,
        memory_limit=memory_limit,
    )

    def choice(path: StagePath) -> StageChoice:
        stages = tuple(
            Stage(step.start, step.stop, size, options[step.start, step.stop, size][step.option])
            for step in path.steps
            for size in [sizes[step.kind]]
        )
        flights = tuple(in_flight(step.count_to_end, num_microbatches) for step in path.steps)
        return StageChoice(stages, num_microbatches, flights, path.cost)

    path = best_path(problem)
    if path is not None:
        return choice(path)
    smallest = least_memory_path(problem)
    if smallest is None:
        raise OptionError(
            f"No stages cover the {_number(num_layers, 'layer')}.",
            where="stages",
            why="no row of stages has, for each of its ranges of layers, a submesh on which those "
            "layers can run.",
            hint="allow other submeshes, another number of stages or other sharding methods.",
        )
    freer = None
    if num_stages is not None:
        freer = best_path(replace(problem, max_count=most_stages, count=None))
    raise _does_not_fit(choice(smallest), memory_limit, None if freer is None else choice(freer))


def _sizes(
    num_layers: int,
    submeshes: Sequence[int],
    num_devices: int,
    num_microbatches: int,
    num_stages: int | None,
    all_devices: bool,
) -> list[int]:
    """The usable sizes of submeshes, ascending; checks that the numbers fit together."""
    named = {
        "layers": num_layers,
        "devices": num_devices,
        "microbatches": num_microbatches,
        "stages": 1 if num_stages is None else num_stages,
        "devices of a submesh": min(submeshes, default=1),
    }
    for name, number in named.items():
        if number < 1:
            raise OptionError(f"The number of {name} must be at least 1, not {number}.")
    sizes = sorted({size for size in submeshes if size <= num_devices})
    if not sizes:
        raise OptionError(
            f"There is no submesh for a stage on {_number(num_devices, 'device')}.",
            where="submeshes",
            why=f"the allowed sizes are {sorted(set(submeshes))}." if submeshes else "it is empty.",
            hint=f"allow a size from 1 to {num_devices}.",
        )
    if num_stages is not None:
        limits = {"layers": num_layers, "devices": num_devices}
        for name, number in limits.items():
            if num_stages > number:
                raise OptionError(
                    f"{num_stages} stages are more than the {number} {name}.",
                    where="stages",
                    why=f"every stage needs {name} of its own.",
                    hint=f"use at most {min(limits.values())} stages.",
                )
    sums = {0}
    reached = set()
    for stages in range(1, min(num_layers, num_devices // sizes[0]) + 1):
        sums = {total + size for total in sums for size in sizes if total + size <= num_devices}
        if num_stages in (None, stages):
            reached |= sums
    if not reached or (all_devices and num_devices not in reached):
        stages_text = "at most" if num_stages is None else "exactly"
        most = num_layers if num_stages is None else num_stages
        raise OptionError(
            f"Submeshes of {sizes} devices do not add up to {num_devices} devices in {stages_text} "
            f"{_number(most, 'stage')}.",
            where="stages",
            why=f"{max(reached)} devices could be used." if reached else None,
            hint="allow other sizes of submeshes or another number of stages.",
        )
    return sizes


def _kind(
    size: int,
    num_layers: int,
    options: dict[tuple[int, int, int], tuple[StageOption, ...]],
    num_microbatches: int,
    in_flight: InFlight,
) -> StageKind:
    """The stages on submeshes of one size, as the search wants them."""
    own = {(start, stop): found for (start, stop, of), found in options.items() if of == size}
    most = max(map(len, own.values()))
    arrays = np.zeros((4, most, num_layers + 1, num_layers + 1))
    arrays[:2] = np.inf
    for (start, stop), found in own.items():
        for index, option in enumerate(found):
            arrays[:, index, start, stop] = (
                option.seconds,
                (num_microbatches - 1) * option.seconds + option.once_seconds,
                option.bytes_fixed,
                option.bytes_per_microbatch,
            )
    return StageKind(
        devices=size,
        weight=1,
        summed=arrays[0],
        bottleneck=arrays[1],
        bytes_fixed=arrays[2],
        bytes_per_microbatch=arrays[3],
        in_flight=lambda count: in_flight(count, num_microbatches),
    )


def _does_not_fit(
    smallest: StageChoice, memory_limit: float | None, freer: StageChoice | None
) -> MemoryLimitError:
    """The error that names the largest stage of the split that needs the least memory."""
    assert memory_limit is not None
    needed = max(smallest.bytes_per_device)
    place = smallest.bytes_per_device.index(needed)
    stage, in_flight = smallest.stages[place], smallest.in_flight[place]
    size = in_flight * stage.option.bytes_per_microbatch
    kept = (f"what {_number(in_flight, 'microbatch', 'microbatches')} in flight keep", size)
    tensors = sorted([*stage.option.tensors, *([kept] if size else [])], key=lambda item: -item[1])
    hints = []
    if freer is not None:
        hints.append(f"use {_number(len(freer.stages), 'stage')}, which fit")
    hints += [
        f"allow {format_bytes(needed)} per device",
        "use more devices, smaller microbatches or rematerialization",
    ]
    return MemoryLimitError(
        f"No split into stages fits into {format_bytes(memory_limit)} per device.",
        where=f"stage {place + 1} of {len(smallest.stages)} in the split that needs the least: "
        f"{_layers(stage.start, stage.stop)} on {_number(stage.num_devices, 'device')}",
        hint="; or ".join(hints) + ".",
        least_bytes=needed,
        largest_tensors=tensors,
    )


def _layers(start: int, stop: int) -> str:
    return f"layer {start}" if stop - start == 1 else f"layers {start}..{stop - 1}"


def _number(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
