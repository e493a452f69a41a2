"""Why a stage's nodes have the layouts that they have: what else they could have taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.base.costs import PICOSECONDS
from autopar.base.runner_up import RunnerUp
from autopar.passes.planner.planned_stage import PlannedStage
from autopar.passes.sharding.integer_program import to_problem
from autopar.passes.sharding.layout import describe
from autopar.passes.solver.alternatives import Alternative, alternatives

GIB = 2**30
NEGLIGIBLE_PRICE = 1e-4
"""A price of memory below this share of the step for a GiB is one that the solver only tried."""


def runners_up(planned: PlannedStage, limit: int) -> tuple[RunnerUp, ...]:
    """For the nodes of a stage that could choose, the best that was found with another choice.

    Args:
      planned: the stage.
      limit: bytes that a device may hold; with it, values have their sizes.
    """
    built, names = planned.built, planned.program.axis_names
    count = len(built.nodes)
    assignment = planned.solution.assignment[:count]
    found = alternatives(to_problem(built, None), assignment, range(count))
    if quicker := [node for node, other in found.items() if other.more_cost < 0]:
        # Values have sizes only in a problem with a limit; other nodes hardly need them.
        found |= alternatives(to_problem(built, limit), assignment, quicker)
    alike: dict[tuple[object, ...], list[tuple[int, Alternative]]] = defaultdict(list)
    for node, other in found.items():
        text = describe(built.nodes[node].layouts[other.strategy], names)
        costs = (other.more_cost, other.own_cost, other.neighbour_cost, other.more_usage)
        alike[text, *costs].append((node, other))
    return tuple(
        RunnerUp(
            nodes=tuple(node for node, _ in members),
            neighbours=tuple(-1 if x.neighbour is None else x.neighbour for _, x in members),
            choice=str(text),
            more_seconds=members[0][1].more_cost / PICOSECONDS,
            own_seconds=members[0][1].own_cost / PICOSECONDS,
            neighbour_seconds=members[0][1].neighbour_cost / PICOSECONDS,
            more_bytes=members[0][1].more_usage,
        )
        for (text, *_), members in alike.items()
    )


def seconds_per_gib(planned: PlannedStage, others: Sequence[RunnerUp]) -> float:
    """What a GiB more on each device would save of a stage's step, where memory binds.

    The solver's price of memory (the multiplier of the limit); where it needed none, because the
    limit left hardly a choice, the best that a runner-up gives for its bytes.
    """
    price = float(planned.solution.stats.get("price_of_memory", 0.0)) * GIB
    if price > NEGLIGIBLE_PRICE * planned.solution.cost:
        return price / PICOSECONDS
    exchanges = (
        -x.more_seconds / x.more_bytes for x in others if x.more_seconds < 0 and x.more_bytes > 0
    )
    return GIB * max(exchanges, default=0.0)
