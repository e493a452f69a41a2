"""Where the time of a planned step goes, by line of the user's code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn

from autopar.base.cluster import Cluster
from autopar.base.line_times import (
    LEAST_SHARE,
    MOST_LINES,
    AlikeWork,
    LineTime,
    StepLines,
    together,
)
from autopar.base.units import format_seconds
from autopar.base.user_code import warn
from autopar.passes.planner.attention_lines import attention_lines
from autopar.passes.planner.candidates import PlannedStep
from autopar.passes.planner.timed_lines import MeshTimes, Timed, UserLine, place_of
from autopar.passes.planner.undone_checkpoints import undone_shares
from autopar.passes.sharding.spmd_program import Compute

LONG_ALIKE, LONG_WARNED = 0.001, 0.01
"""Seconds of a step; what takes less may be computed alike because that is quicker."""
MUCH_WARNED = 0.25
"""The share of what a device does."""
MOST_WARNED = 3
"""Lines that a warning names."""


@dataclass
class _Times:
    """Seconds of one line, and whether one trip counts for some of them."""

    knows_trips: bool = True
    by_operation: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_kind: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_pass: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def step_lines(
    chosen: PlannedStep,
    mesh: int,
    cluster: Cluster,
    compute_seconds: float,
    communication_seconds: float,
) -> StepLines:
    """The lines that take longest on a device of one mesh.

    Args:
      chosen: the planned step.
      mesh: the number of the mesh.
      cluster: all devices.
      compute_seconds: what the plan expects that a device of it computes in a step. What
        instructions do not take of it, because the integer program priced several of them together
        or one of them otherwise, is no line's.
      communication_seconds: and what it communicates. Where some of it is hidden beside
        computation, lines take so much less.
    """
    run = MeshTimes(chosen, mesh, cluster)
    times = [*run.timed()]
    moved = sum(x.moving for x in times)
    computed = sum(x.seconds for x in times) - moved
    wanted = (compute_seconds, computed), (communication_seconds, moved)
    computing, moving = (_scale(whole, own) for whole, own in wanted)
    known: dict[UserLine, _Times] = defaultdict(_Times)
    for x in times:
        own, took = known[x.place], (computing * (x.seconds - x.moving), moving * x.moving)
        own.by_kind["product" if x.is_product else "memory"] += took[0]
        own.by_kind["communication"] += took[1]
        own.by_pass[x.when] += sum(took)
        own.by_operation[x.operation] += sum(took)
        own.knows_trips &= x.knows_trips
    rest = known[UserLine()].by_kind
    rest["memory"] += compute_seconds - computing * computed if computing == 1 else 0.0
    rest["communication"] += communication_seconds - moving * moved if moving == 1 else 0.0
    attention = attention_lines(chosen.split.graph, cluster, times, run.costs, computing)
    checkpointed = sum(own.by_pass["checkpoint"] for own in known.values())
    undone = _undone(chosen, times, computing) if checkpointed else (0.0, 0)
    alike = _alike(chosen, times, computing)
    return StepLines(_longest(known), tuple(attention), alike, checkpointed, *undone)


def _alike(chosen: PlannedStep, times: Sequence[Timed], scale: float) -> tuple[AlikeWork, ...]:
    """The products and kernels that axes of a mesh share nothing of, by line."""
    seconds: dict[tuple[UserLine, str, int], float] = defaultdict(float)
    for x in times:
        devices = x.devices_alike(chosen.planned[x.stage].mesh) if x.is_product else 1
        if devices > 1 and x.place.file:
            seconds[x.place, x.operation, devices] += scale * (x.seconds - x.moving)
    made = [
        AlikeWork(place.source, place.function, operation, devices, taken)
        for (place, operation, devices), taken in seconds.items()
        if taken >= LONG_ALIKE
    ]
    return tuple(sorted(made, key=lambda x: (-x.seconds, x.source, x.operation)))


def warn_of_lines(lines: StepLines | None) -> None:
    """Say what is wrong with lines that take much of a step, or what nobody knows of them."""
    warn_of_alike(lines)
    warn_of_trips(lines)


def warn_of_alike(lines: StepLines | None) -> None:
    """Say that devices compute alike what is much of a step."""
    whole = sum(line.seconds for line in lines.lines) if lines else 0.0
    found = [x for x in lines.alike if x.seconds >= LONG_WARNED] if lines else []
    if sum(x.seconds for x in found) < MUCH_WARNED * whole or not found:
        return
    told = "; ".join(
        f"{x.operation} at {x.source} ({x.function}), {format_seconds(x.seconds)}, "
        f"{x.devices} devices alike"
        for x in found[:MOST_WARNED]
    )
    more = f"; {len(found) - MOST_WARNED} more" if len(found) > MOST_WARNED else ""
    warn(
        f"Devices compute alike {sum(x.seconds for x in found) / whole:.0%} of what they do in a "
        "step.",
        None,
        f"the method, and what may be cut, leave them nothing to share of {told}{more}.",
        "a larger batch, more heads, another method, or stages of fewer devices may share it; "
        "plan.hot_lines says what that would save at most.",
    )


def warn_of_trips(lines: StepLines | None) -> None:
    """Say in which lines one trip is counted of a loop of which nobody knows how often it runs."""
    all_lines = lines.lines if lines else ()
    found = [x for x in all_lines if "while" in x.operations and x.seconds >= LONG_ALIKE]
    if not found:
        return
    told = ", ".join(f"{x.source} ({x.function}), {format_seconds(x.seconds)}" for x in found)
    warn(
        f"One trip is counted of loops that run as long as something is true, in {told}.",
        None,
        "nothing says how often they will run.",
        "jax.lax.scan, and jax.lax.fori_loop between Python numbers, are counted.",
    )


def _scale(whole: float, own: float) -> float:
    """What makes instructions take as long as all of it, if they take longer (or are rounded)."""
    return whole / own if own and whole < (1 + 1e-6) * own else 1.0


def _undone(chosen: PlannedStep, times: Sequence[Timed], scale: float) -> tuple[float, int]:
    """Of what the program's checkpoints compute again, the seconds that an override saves a step.

    And the bytes of a device that it would keep instead, if it kept all that the backward pass
    reads of it, as often as microbatches are in flight.
    """
    shares = undone_shares(chosen.split.graph, _line_and_name)
    again = [x for x in times if x.when == "checkpoint" and isinstance(x.instruction, Compute)]
    seconds = kept = 0.0
    for x in again:
        assert isinstance(x.instruction, Compute)
        share = shares.get(_line_and_name(x.instruction.eqn), 0.0)
        seconds, kept = seconds + share * x.seconds, kept + share * x.read_bytes
    count = chosen.split.num_microbatches
    in_flight = min(count, chosen.schedule.num_meshes)
    return scale * seconds, int(kept * in_flight / count)


def _line_and_name(eqn: JaxprEqn) -> tuple[UserLine, str]:
    return place_of(eqn), str(eqn.primitive.name)


def _longest(known: Mapping[UserLine, _Times]) -> tuple[LineTime, ...]:
    lines = [_line(place, own) for place, own in known.items()]
    lines.sort(key=lambda x: (not x.source, -x.seconds, x.source, x.function))
    least = LEAST_SHARE * sum(x.seconds for x in lines)
    told = [x for x in lines[:MOST_LINES] if x.source and x.seconds > least]
    others = [x for x in lines[len(told) :] if x.seconds > 0]
    return (*told, together(others)) if others else tuple(told)


def _line(place: UserLine, own: _Times) -> LineTime:
    longest = sorted(own.by_operation.items(), key=lambda item: (-item[1], item[0]))
    names = [name for name, seconds in longest[:3] if seconds > 0]
    if not own.knows_trips and "while" not in names:
        names.append("while")
    return LineTime(
        source=place.source,
        function=place.function,
        operations=tuple(names),
        product_seconds=own.by_kind["product"],
        memory_seconds=own.by_kind["memory"],
        communication_seconds=own.by_kind["communication"],
        forward_seconds=own.by_pass["forward"],
        backward_seconds=own.by_pass["backward"],
        again_seconds=own.by_pass["again"] + own.by_pass["checkpoint"],
    )
