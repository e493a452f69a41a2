"""With how many microbatches more is tried after some number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.base.cluster import Cluster
from autopar.base.errors import AutoparError, InexactMicrobatchError
from autopar.base.options import Options
from autopar.passes.planner.auto_stages import StageSearch
from autopar.passes.planner.candidates import PlannedStep
from autopar.passes.planner.layouts import largest_count
from autopar.passes.planner.least_memory import state_on_devices
from autopar.passes.planner.one_mesh import MAY_MEET

ENOUGH = 1.05  # times the least time that is expected with any number of microbatches
LOOSE = 1.02  # times what stages of many microbatches take: about the most that their bound says
FEWEST = 8  # microbatches of stages
WORTH_PRICING = 1.02  # times what another number may take: with less, it is not looked at


def worth_trying(
    stages: StageSearch, counts: Sequence[int], limit: int, promised: float, own: float
) -> Sequence[int]:
    """What is left to try, first the fewest microbatches that may fit and are as good as any.

    None where that is hardly less than what is `promised` of the best that is known. From the
    number that stages are known for it is looked both ways: with fewer while they fit and get
    better or are about as good, for stages wait longer for each other and need more memory, and
    with more, for they start more often what takes as long for few rows. By how much something
    takes longer is not found out. With fewer, stages wait longer for each other but by schedules
    that divide the backward pass, which the objective of the dynamic program does not know: their
    stages are timed. With more, that is done only where the objective says that they may be worth
    it. Fewer rows are guessed at the least.

    Args:
      stages: the search with the microbatches that units were priced with.
      counts: numbers of microbatches.
      limit: bytes that a device may hold.
      promised: seconds of a step, of the best that is known.
      own: what these stages promise; infinite where none fit.
    """
    best = own if own <= promised else math.inf
    seconds: dict[int, float] = {}
    fewer = [count for count in counts if count < stages.num_microbatches]
    more = [count for count in counts if count > stages.num_microbatches]
    for count in sorted(fewer, reverse=True):
        longest = promised if math.isinf(best) else ENOUGH * best
        found = stages.with_microbatches(count).within(limit, longest)
        if found is None:
            if math.isinf(best):
                continue
            break
        seconds[count] = found[1]
        best = min(best, found[1])
    for count in sorted(more):
        search = stages.with_microbatches(count)
        longest = min(ENOUGH * best, promised / WORTH_PRICING)
        if math.isinf(search.bound(limit, LOOSE * longest)):
            continue
        if found := search.within(limit, longest):
            seconds[count] = found[1]
            best = min(best, found[1])
    best = min(seconds.values(), default=math.inf)
    if best * WORTH_PRICING > promised:
        return []
    good = [count for count, each in sorted(seconds.items()) if each <= ENOUGH * best]
    return [*good, *(count for count in counts if count not in good)] if good else []


def not_possible(count: int, error: AutoparError) -> str:
    """Why there are no more microbatches; of a step that mixes rows, at which line."""
    if not isinstance(error, InexactMicrobatchError):
        return f"{count} microbatches are not possible: {error.what}"
    what, at = error.what.removesuffix("."), f" at {error.where}" if error.where else ""
    return f"{count} microbatches are not possible: {what}{at}; microbatches={count} says why."


def doubled(sizes: set[int], enough: int) -> Iterator[int]:
    """Numbers of microbatches from one that is enough, as far as the batch divides."""
    count = largest_count(sizes, enough)
    yield count
    while largest_count(sizes, 2 * count) > count:
        count *= 2
        yield count


def counts_of_stages(sizes: set[int], num_nodes: int, *, is_long: bool) -> list[int]:
    """The microbatches of automatic stages, first those with which the search begins.

    About four for each node, at least eight; of a long program a number in the middle between that
    and the batch, which tells most about the others.
    """
    counts = [*doubled(sizes, max(FEWEST, 4 * num_nodes))]
    first = counts[len(counts) // 2] if is_long else counts[0]
    fewer = [count for count in doubled(sizes, FEWEST) if count < counts[0]]
    return [first, *fewer, *counts]


def too_small(
    made: Sequence[PlannedStep], count: int, limit: int, options: Options, cluster: Cluster
) -> frozenset[tuple[int, ...]]:
    """Meshes on which so many microbatches need more than there is, as plans with fewer say.

    With half of the rows a device holds no less than half of what it holds beside the state.
    """
    found = dict[tuple[int, ...], bool]()
    kept = (step for step in made if step.split.recomputation is None)
    for step in kept:  # what is known of a mesh last is of the most microbatches
        state = state_on_devices(step.split.graph, options, cluster) / cluster.num_devices
        rows = step.split.num_microbatches / count
        needed = state + rows * (max(step.peak_bytes) - state)
        found[step.planned[0].mesh] = needed > MAY_MEET * limit
    return frozenset(mesh for mesh, is_small in found.items() if is_small)
