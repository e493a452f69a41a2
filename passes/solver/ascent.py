"""Dual ascent: alternately improve the messages and the memory prices, and round on the way.

Every pass also makes a choice. Where the choices of the last passes use more than there is room
for, the price rises, where they use less it falls, by a factor each: prices then adapt to scales
that differ between points of time by orders of magnitude. The steps shrink towards the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.passes.solver.arrays import Arrays, Floats
from autopar.passes.solver.budget import Budget
from autopar.passes.solver.dual import Chooser, Dual, DualState
from autopar.passes.solver.primal import ALLOWED, improve, repair
from autopar.passes.solver.problem import Integers

STEP = 0.3
"""The exponent's factor on the relative excess of usage over room where nothing is known yet."""

SMALL_STEP = 0.03
"""The same where the prices are nearly right."""

SMOOTHING = 0.5
"""The weight of the newest choice's usage in the average that prices react to."""


REPAIR_EVERY = 10
"""After so many passes their choice is made to fit."""


@dataclass
class Ascent:
    """What an ascent has reached; costs and bounds are without the model's offset.

    Args:
        dual: the messages and prices.
        budget: what may be used.
        found: takes each feasible choice and returns the least cost known so far.
        upper: a cost that was known before, or that no choice exceeds.
        bound: the best bound.
        best: the state of the dual that has it.
        choice: the cheapest feasible choice.
        cost: what that costs.
        known: what `found` returned last.
        worthless: a choice that costs more is of no use.
    """

    dual: Dual
    budget: Budget
    found: Callable[[Integers], float]
    upper: float = np.inf
    bound: float = -np.inf
    best: DualState | None = None
    choice: Integers | None = None
    cost: float = np.inf
    known: float = np.inf
    worthless: float = np.inf

    @property
    def is_worthless(self) -> bool:
        """Whether the bound says that every choice is."""
        return self.bound > self.worthless

    @property
    def least(self) -> float:
        """The least cost known."""
        return min(self.upper, self.known)

    @property
    def gap(self) -> float:
        return self.least - self.bound

    def note(self, bound: float) -> None:
        """Remembers the dual's present state if its bound is the best."""
        if bound > self.bound:
            self.bound, self.best = bound, self.dual.state()

    def attempt(self, choice: Integers) -> tuple[Integers, bool]:
        """The choice made to fit and improved, and whether that succeeded; it is passed on then."""
        arrays, budget = self.dual.arrays, self.budget

        def stop() -> bool:
            budget.spend(4e-8 * len(arrays.low.slot_start) + 1e-3)
            return budget.exhausted

        choice, fits = repair(arrays, choice, stop)
        if fits:
            choice = improve(arrays, choice, stop)
            cost = arrays.costs_of(choice)
            if cost < self.cost:
                self.cost, self.choice = cost, choice
            self.known = self.found(choice)
        return choice, fits

    def restore(self) -> None:
        """Takes the dual back to the state of the best bound."""
        if self.best is not None:
            self.dual.restore(self.best)


def ascend(
    dual: Dual,
    sweeps: int,
    budget: Budget,
    found: Callable[[Integers], float],
    *,
    upper: float = np.inf,
    until: float = 1.0,
    known: bool = False,
    step: float = STEP,
    enough: int | None = None,
    tolerance: Callable[[], float] = float,
    worthless: float = np.inf,
) -> Ascent:
    """Runs passes until `sweeps` or the part `until` of the budget is used.

    `found` takes each feasible choice and returns the least cost known so far. Until there is one
    (`known` says that there was one before), it also takes each allowed choice that does not fit
    but comes nearer than those before. `step` is the first exponent's factor on the relative excess
    of usage over room. Once a choice fits, `enough` passes are enough; so is a gap of `tolerance`,
    or a bound above what is `worthless`. The dual is left in the state of the best bound.
    """
    arrays = dual.arrays
    result = Ascent(dual, budget, found, upper, worthless=worthless)
    average: Floats | None = None
    nearest = np.inf
    started = budget.used
    sweep_seconds = repair_seconds = 0.0
    for index in range(sweeps):
        if not budget.fits(sweep_seconds):
            break
        start = budget.seconds
        chooser = Chooser(arrays)
        bound = dual.sweep(index % 2 == 0, chooser)
        budget.spend(sweep_work(arrays) * 1.3)
        sweep_seconds = budget.seconds - start
        result.note(bound)
        used = (budget.used - started) / max(until - started, 1e-9)
        total = enough if known and enough is not None else sweeps
        progress = max((index + 1) / total, used)
        if result.gap < max(1.0, tolerance()) or result.is_worthless:
            break
        due = index % REPAIR_EVERY == REPAIR_EVERY - 1 or progress >= 1.0
        # Until something fits, it is tried more often: after passes 2, 4 and 8 of the first ten.
        due = due or (not known and index in (1, 3, 7))
        start = budget.seconds
        cost = arrays.costs_of(chooser.choice)
        if due and budget.fits(repair_seconds) and cost < ALLOWED:
            choice, fits = result.attempt(chooser.choice)
            known = known or fits
            if not known:
                missing = float((arrays.profile(choice) - arrays.room).max())
                if missing < nearest:
                    nearest = missing
                    found(choice)
            repair_seconds = budget.seconds - start
        if progress >= 1.0 or budget.exhausted:
            break
        if len(arrays.room):
            excess = (arrays.profile(chooser.choice) - arrays.room) / arrays.limit
            average = excess if average is None else average + SMOOTHING * (excess - average)
            scale = result.known if np.isfinite(result.known) else max(bound, cost, 1.0)
            shrink = 1.0 if progress < 0.4 else max(0.02, (1.0 - progress) / 0.6)
            dual.set_prices(_adapted(dual, average, scale, step * shrink))
    result.restore()
    return result


def sweep_work(arrays: Arrays) -> float:
    """The work of a pass."""
    return 1e-8 * len(arrays.low.cells) + 6e-5 * arrays.num_levels


def _adapted(dual: Dual, excess: Floats, scale: float, step: float) -> Floats:
    """Prices multiplied according to the excess; where there is any, zero prices start small."""
    arrays = dual.arrays
    limit = float(arrays.limit)
    relative = np.clip(excess * limit / np.maximum(arrays.room, 0.01 * limit), -0.9, 3.0)
    least = 1e-3 * min(scale, ALLOWED) / (len(arrays.room) * limit)
    return np.maximum(dual.prices, np.where(excess > 0, least, 0.0)) * _grown(step * relative)


def _grown(exponents: Floats) -> Floats:
    """About e to these powers, by operations that give the same bits on every processor.

    NumPy's own exponential does not: it has others for processors with wider vectors, and a plan
    must not depend on where it is made. A Padé approximant, 0.2% from it for powers up to 2.
    """
    square = exponents * exponents
    even, odd = 120 + 12 * square, exponents * (60 + square)
    return (even + odd) / (even - odd)
