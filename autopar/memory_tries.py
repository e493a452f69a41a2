"""Plans that are compiled until one fits: within what the next one is planned."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from autopar.base.confirmation import CompiledTry
from autopar.plans.plan import Plan

UNKNOWN_EXCESS = 0.02  # of a device's memory, where a compiler that ran out of it does not say more

_EXCESS = re.compile(r"[Ee]xceeded \w+ capacity by ([\d.]+[KMGT]?)")
_OF = re.compile(r"\(([\d.]+[KMGT]?)\) exceeds available \w+ \(([\d.]+[KMGT]?)\)")
"""How XLA:TPU says it, when it has placed all buffers and before."""


@dataclass
class MemoryTries:
    """What was planned and compiled for devices with so many bytes for programs.

    Args:
      limit: of a device.
      within: the bytes of a device that the next plan shall keep within.
      made: the tries.
    """

    limit: int
    within: int
    made: list[CompiledTry] = field(default_factory=list)

    @classmethod
    def of(cls, limit: int) -> MemoryTries:
        """None yet."""
        return cls(limit, limit)

    def note(self, plan: Plan, compiled: list[int | None], failure: str = "") -> CompiledTry | None:
        """Remember what a device of each mesh takes; None where the compiler does not say it all.

        Sets what the next plan shall keep within: as much less as the compiler needs more than the
        plan says, and less than the plan. A `failure` for want of memory says it as well.
        """
        planned = [stage.peak_bytes_per_device for stage in plan.stages]
        most = max(planned)
        pairs = [(p, compiled[s.mesh]) for p, s in zip(planned, plan.stages, strict=True)]
        known = [(p, taken) for p, taken in pairs if taken]
        if len(known) < len(pairs):
            excess = excess_of(failure, self.limit)
            if excess is None:
                return None
            known.append((min(most, self.limit), self.limit + excess))
        share = min(p / taken for p, taken in known)
        found = CompiledTry(self.within, most, max(taken for _, taken in known))
        self.made.append(found)
        self.within = max(min(int(share * self.limit), most - 1), 1)
        return found

    def fits(self, found: CompiledTry) -> bool:
        """Whether a device has what a plan takes."""
        return found.compiled_bytes <= self.limit


def excess_of(words: str, limit: int) -> int | None:
    """The bytes that a compiler which ran out of memory had too few; None: it failed otherwise.

    >>> excess_of("Used 16.5G of 15.7G hbm. Exceeded hbm capacity by 512.0M.", 0)
    536870912
    >>> excess_of("required for HLO temporaries (17.5G) exceeds available HBM (15.0G)", 0)
    2684354560
    >>> excess_of("RESOURCE_EXHAUSTED: no more", 1000), excess_of("Mosaic failed", 1000)
    (20, None)
    """
    if said := _EXCESS.search(words):
        return max(_size(said[1]), 1)
    if said := _OF.search(words):
        return max(_size(said[1]) - _size(said[2]), 1)
    return math.ceil(UNKNOWN_EXCESS * limit) if "RESOURCE_EXHAUSTED" in words else None


def _size(text: str) -> int:
    """The bytes of "15.7G"."""
    power = " KMGT".find(text[-1])
    return int(float(text) if power < 1 else float(text[:-1]) * 1024**power)
