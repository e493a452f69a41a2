"""What would make a step fit that does not: each change by itself, cheapest first, and tried.

What every plan has passes over what cannot fit, and for more devices what was found to need least.
What is left is planned once, as small as that goes quickly (`small_plans`, of stages by their
schedule that needs least). Only what fits then is named.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from autopar.base.cluster import Cluster
from autopar.base.errors import AutoparError, InexactMicrobatchError
from autopar.base.options import Options
from autopar.passes.planner.candidates import PlannedStep, plan_layout
from autopar.passes.planner.layouts import (
    StageLayout,
    asked_layout,
    microbatch_counts,
)
from autopar.passes.planner.least_memory import LeastMemory, state_on_devices
from autopar.passes.planner.refusals import smallest
from autopar.passes.planner.searched_step import SearchedStep
from autopar.passes.planner.small_plans import small_plans
from autopar.passes.planner.stage_shardings import memory_limit_of

SECONDS = 6.0  # for tries of options, and of devices; the one that is going on is ended
SECONDS_OF_SOLVER = 0.5  # for a stage of a pipeline: close to the limit, proofs take long
MOST_NAMED = 3
DOUBLINGS = 6  # of the nodes
TRIED_SURELY = 2  # of these
MAY_NEED = 0.85  # of what is needed in all, what larger clusters need at the least


class Searched(SearchedStep, Protocol):
    """A step for which changes are tried."""

    @property
    def least_memory(self) -> LeastMemory:
        """What every plan has, on all devices together."""


S = TypeVar("S", bound=Searched)


@dataclass(frozen=True)
class Remedy:
    """A change: in words, and the options and the cluster with it."""

    words: str
    options: Options
    cluster: Cluster


def remedies(
    search: S,
    within: Callable[[S, Options, Cluster], S],
    candidates: Sequence[PlannedStep],
    seconds: float = SECONDS,
) -> tuple[str, ...]:
    """Changes with which the step fits, in words.

    Args:
      search: for which nothing fits.
      within: the same search with other options and another cluster.
      candidates: what was planned.
      seconds: of this process for options, and as many for devices, after which no other change is
        tried; of devices two are, unless a user's limit of time leaves less than `SECONDS`.
    """
    best = smallest(candidates)
    needed = MAY_NEED * _needed(best)

    begun = time.process_time()

    def fitting(changes: Iterable[Remedy], most: int, surely: int = 0) -> list[str]:
        """Of some changes those that fit; `surely` so many are tried."""
        found = list[str]()
        for tried, remedy in enumerate(changes):
            is_late = time.process_time() - begun >= seconds
            if len(found) == most or (is_late and tried >= surely):
                break
            if _fits(within(search, remedy.options, remedy.cluster)):
                found.append(remedy.words)
        return found

    def more_devices(options: Options, needed: float, words: str = "") -> list[str]:
        """The fewest nodes that would do, of those that have so many bytes at the least."""
        changes = _more_devices(options, cluster, words)
        limits = ((x, x.cluster.num_devices * memory_limit_of(options, x.cluster)) for x in changes)
        surely = TRIED_SURELY if seconds >= SECONDS else 0
        return fitting((x for x, limit in limits if needed <= limit), 1, surely)

    options, cluster = search.options, search.cluster
    free = _without_restrictions(options)
    found = fitting(_option_changes(options, cluster), MOST_NAMED)
    if not found and free is not None:
        found = fitting([Remedy(f"all of {_told(free, options)}", free, cluster)], 1)
    if len(found) < MOST_NAMED:  # these take longest to try
        found += fitting(_more_stages(options, cluster), 1)
    begun = time.process_time()
    larger = more_devices(options, needed)
    if not found and not larger and free is not None:
        larger = more_devices(free, 0.0, f" with {_told(free, options)}")
    found += larger
    least_bytes = max(best.peak_bytes)
    device, limit = search.cluster.device, memory_limit_of(search.options, search.cluster)
    if limit < least_bytes <= device.program_bytes:
        found.append(f"memory_limit={format_bytes_up(least_bytes)!r}")
    else:
        memory = math.ceil(least_bytes / device.memory_fraction)
        found.append(f"devices of {format_bytes_up(memory)}")
    return tuple(found)


def _needed(candidate: PlannedStep) -> int:
    """Bytes of all devices together."""
    first: dict[int, int] = {}
    for stage, mesh in enumerate(candidate.schedule.mesh_of_stage):
        first.setdefault(mesh, math.prod(candidate.planned[stage].mesh))
    return sum(candidate.peak_bytes[mesh] * devices for mesh, devices in first.items())


def format_bytes_up(size: int) -> str:
    """A size of at least so many bytes, as it is written in `memory_limit`.

    >>> format_bytes_up(2**30 + 1), format_bytes_up(700)
    ('1.01GiB', '1KiB')
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{math.ceil(size / scale * 100) / 100:g}{unit}"
    return f"{max(math.ceil(size / 1024), 1)}KiB"


_FREE = {"microbatches": "auto", "remat": "auto", "method": "auto", "logical_mesh": None}


def _restrictions(options: Options) -> dict[str, Any]:
    """What the options restrict, with the values that restrict nothing."""
    changed = {name: free for name, free in _FREE.items() if getattr(options, name) != free}
    if options.remat in ("full", "override"):
        changed.pop("remat", None)
    return changed


def _without_restrictions(options: Options) -> Options | None:
    """The options without all that they restrict, if that is more than one thing."""
    changed = _restrictions(options)
    if len(changed) < 2 or options.stages_by_hand:
        return None
    return _with(options, changed)


def _with(options: Options, changed: Mapping[str, Any]) -> Options | None:
    """The options with some changed; None if they do not go together then."""
    try:
        return replace(options, **changed)
    except AutoparError:
        return None


def _told(free: Options, options: Options) -> str:
    """What one of two options says otherwise, as it is written."""
    names = [name for name in _FREE if getattr(free, name) != getattr(options, name)]
    return ", ".join(f"{name}={getattr(free, name)!r}" for name in names)


def _option_changes(options: Options, cluster: Cluster) -> Iterator[Remedy]:
    """One option that says something else."""
    changes = [
        {name: free}
        for name, free in _restrictions(options).items()
        if name == "microbatches" or not options.stages_by_hand
    ]
    if options.offload == "none" and cluster.host_bandwidth:
        changes.append({"offload": "auto"})
    if options.stages not in ("auto", 1) and options.logical_mesh is None:
        changes.append({"stages": 1})
    for changed in changes:
        ((name, value),) = changed.items()
        alone = {"num_chunks": "auto", "schedule": "auto"} if value == 1 else {}
        other = _with(options, {**changed, **alone})
        if other is not None:
            yield Remedy(f"{name}={value!r}", other, cluster)


def _more_stages(options: Options, cluster: Cluster) -> Iterator[Remedy]:
    """Twice as many stages, and four times."""
    asked = 1 if options.stages == "auto" else options.stages
    if options.logical_mesh is None and isinstance(asked, int):
        for stages in (2 * asked, 4 * asked):
            other = _with(options, {"stages": stages})
            if cluster.num_devices % stages == 0 and other is not None:
                yield Remedy(f"stages={stages}", other, cluster)


def _more_devices(options: Options, cluster: Cluster, more: str) -> Iterator[Remedy]:
    """Twice as many nodes, and so on."""
    for doubled in range(1, DOUBLINGS + 1):
        larger = replace(cluster, num_nodes=cluster.num_nodes << doubled)
        words = f"{larger.num_nodes} nodes ({larger.num_devices} devices) instead of "
        yield Remedy(f"{words}{cluster.num_nodes}{more}", options, larger)


def _fits(search: Searched) -> bool:
    """Whether a step is found to fit; one that may fit otherwise is not looked for."""
    options, cluster = search.options, search.cluster
    try:
        layout = asked_layout(options, cluster)
        counts = list(microbatch_counts(search.graph, options, layout))
        if not _possible(search, counts, layout):
            return False
        if layout.is_pipeline:
            return any(_pipelines(search, layout, counts))
        return any(planned.fits for planned in small_plans(search, counts))
    except AutoparError:
        return False


def _possible(search: Searched, counts: Sequence[int], layout: StageLayout) -> bool:
    """Whether the bounds from below leave room."""
    limit, devices = (
        memory_limit_of(search.options, search.cluster),
        search.cluster.num_devices,
    )
    if state_on_devices(search.graph, search.options, search.cluster) > devices * limit:
        return False
    least, most = search.least_memory, counts[-1]
    if search.options.remat != "none" or layout.is_pipeline:
        return 1 in counts or least.at_any_time(most) <= devices * limit
    return least.bytes(most, devices) <= limit


def _pipelines(search: Searched, layout: StageLayout, counts: list[int]) -> Iterator[bool]:
    """Of pipelines with the most microbatches, whether they fit."""
    options = search.options
    if options.schedule == "auto":
        options = replace(options, schedule="1f1b")
    if options.remat == "auto":
        options = replace(options, remat="full")
    options = replace(options, solver_time_limit=options.solver_time_limit or SECONDS_OF_SOLVER)
    for count in reversed(counts):
        try:
            split = search.split(count, True)
        except InexactMicrobatchError:
            continue
        made = plan_layout(split, layout, options, search.cluster, lambda message: None)
        yield any(candidate.fits for candidate in made)
        break
