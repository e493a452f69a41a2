"""Whether stages may fit by a schedule in which the gradients of weights come last.

They fill a stage's waits (zero bubble pipelines, Qi et al., ICLR 2024). What they are made of, of
the backward pass, waits for them, and that of several microbatches does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from autopar.passes.planner.stage_choice import StageRange
from autopar.passes.planner.stage_clock import in_flight_by
from autopar.passes.planner.stage_costs import Way

DIVIDING = ("zb_h1", "zb_h2")  # the gradients of weights from the rest of the backward pass


def may_fit_divided(
    schedule: str,
    stages: Sequence[StageRange],
    ways: Mapping[int, Sequence[Way]],
    inside: Sequence[bool],
    num_microbatches: int,
    limit: float,
) -> bool:
    """Whether all stages may fit, each in the way in which least waits for gradients of weights.

    Later stages have fewer microbatches between their forward and backward passes than the first
    one, and so many more that wait. What else waits is not counted: what the forward pass left for
    these gradients, and what a stage computes again for them as a whole.

    Args:
      schedule: one of those that divide the backward pass.
      stages: ranges of units.
      ways: what units cost, for each size of submesh.
      inside: of each unit, whether it begins within what was priced as one: then the first one of
        that has all that waits.
      num_microbatches: of a step.
      limit: bytes that a device may hold.
    """
    flight = in_flight_by(schedule)
    for place, (start, stop, size, option) in enumerate(stages):
        kept = flight(len(stages) - place)
        waiting = min(flight(len(stages)) - kept + 1, num_microbatches)
        own = [True, *(not each for each in inside[start + 1 : stop])]
        sizes = ([x.bytes_waiting for x in way[start:stop]] for way in ways[size])
        least = min(sum(itertools.compress(several, own)) for several in sizes)
        if option.bytes_in_flight(min(kept, num_microbatches)) + waiting * least > limit:
            return False
    return True
