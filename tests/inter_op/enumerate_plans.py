"""Every plan of a small instance, one by one: what the searches are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from autopar.passes.planner.stage_choice import StageOption


class Planned(NamedTuple):
    """A stage of a plan; `option` is its position among the oracle's."""

    start: int
    stop: int
    num_devices: int
    option: int


Plan = tuple[Planned, ...]
Options = dict[tuple[int, int, int], list[StageOption]]


def plans(num_layers: int, num_devices: int, options: Options, start: int = 0) -> Iterator[Plan]:
    """The plans of the layers from `start` on that use at most `num_devices`."""
    if start == num_layers:
        yield ()
    for (first, stop, size), found in options.items():
        if first == start and size <= num_devices:
            for rest in plans(num_layers, num_devices - size, options, stop):
                for option in range(len(found)):
                    yield (Planned(start, stop, size, option), *rest)


def step_seconds(
    plan: Plan,
    options: Options,
    num_microbatches: int,
    early: Sequence[float] = (),
    filled: Sequence[float] = (),
) -> float:
    """Sum of the stages' times, the slowest one's other microbatches, the latest work once.

    And what stages wait for longer than for the first microbatch.
    """
    chosen = [options[stage[:3]][stage.option] for stage in plan]
    slowest = (num_microbatches - 1) * max(one.seconds for one in chosen)
    before = (early[stage.start] if early else 0.0 for stage in plan)
    late = max(one.once_seconds - own for one, own in zip(chosen, before, strict=True))
    begun = (filled[stage.start] if filled else 0.0 for stage in plan)
    waits = sum(max(one.awaited_seconds - at, 0) for one, at in zip(chosen, begun, strict=True))
    return sum(one.seconds for one in chosen) + waits + slowest + late


def largest_bytes(plan: Plan, options: Options, in_flight: Callable[[int], int]) -> int:
    """The bytes per device of the stage that needs the most."""
    sizes = []
    for from_the_end, stage in enumerate(reversed(plan), start=1):
        one = options[stage[:3]][stage.option]
        sizes.append(one.bytes_fixed + in_flight(from_the_end) * one.bytes_per_microbatch)
    return max(sizes)


def order(plan: Plan) -> tuple[int, Sequence[Planned]]:
    """Fewest stages first, then lexicographic."""
    return len(plan), plan
