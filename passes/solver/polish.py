"""The best memory prices, by linear programs over the part of a model that is near its optimum.

Few of a model's pairs are part of any good choice. A linear program over these alone (a *core*)
gives prices that are nearly, and often exactly, those of the whole model; message passing over
the whole model then says what they are worth, and which pairs the core lacked.
"""

from __future__ import annotations

import numpy as np

from autopar.passes.solver.ascent import Ascent, sweep_work
from autopar.passes.solver.dual import Chooser
from autopar.passes.solver.linear import (
    BRANCH_SECONDS,
    ROOT_SECONDS,
    SECONDS_PER_CELL,
    Core,
    best_in_core,
    relaxation,
)
from autopar.passes.solver.primal import ALLOWED
from autopar.passes.solver.problem import Integers

FIRST_CELLS = 12_000
"""The pairs of the first core."""

PROGRAMS = 6
"""The most linear programs of one polish."""

CLOSE = 0.03
"""The part of the gap that is not worth another program."""

PROGRAM_PART = 0.5
"""The most that one program may take of what a polish has left."""

FIRST_INTEGER_CELLS = 2_000
"""The pairs of the first core in which the best choice is looked for by branch and bound."""

INTEGER_PROGRAMS = 4
INTEGER_PART = 0.6
"""The most that one search for the best choice of a core may take of what is left."""

ROOT_PART = 0.7
"""The most that such a search may take of its part before it branches."""

MOST_BRANCHES = 500

LEAST_CELLS = 50
"""With less than this a program is not worth building."""

TIES = 2
"""How many times larger than asked for a core may be, because pairs add the same to the bound."""

LOOK_EVERY = 5
MOST_SWEEPS = 100


def polish(result: Ascent, until: float) -> None:
    """Improves the bound and the choice of an ascent, in place.

    The prices may take until the part `until` of the budget.
    """
    core = Core(result.dual)
    improve_prices(result, core, until)
    if result.is_worthless:
        return
    core.look()
    search_core(result, core)


def attempt(result: Ascent, choice: Integers) -> None:
    """Makes a choice fit and passes it on, if there is no forbidden pair in it."""
    if result.dual.arrays.costs_of(choice) < ALLOWED and not result.budget.exhausted:
        result.attempt(choice)


def improve_prices(result: Ascent, core: Core, until: float) -> None:
    """Finds better prices and messages; each program's optimum is also rounded to a choice."""
    dual, budget = result.dual, result.budget
    result.note(converge(result, until))
    cells, rate = FIRST_CELLS, SECONDS_PER_CELL
    for _ in range(PROGRAMS):
        work, seconds = budget.left(until)
        cells = int(min(cells, PROGRAM_PART * min(work, seconds) / rate))
        if result.gap < 1.0 or cells < LEAST_CELLS or result.is_worthless:
            break
        core.look()
        budget.spend(2 * sweep_work(dual.arrays))
        strategies, pairs = core.cheapest(cells, result.choice)
        if len(pairs) > TIES * cells:
            break  # so many add the same that a core of this size says little
        start = budget.seconds
        relaxed = relaxation(
            dual,
            strategies,
            pairs,
            work_limit=PROGRAM_PART * work,
            time_limit=PROGRAM_PART * seconds,
        )
        budget.spend(relaxed.work)
        rate = max(rate, relaxed.work / max(1, len(pairs)))
        if seconds < np.inf:
            rate = max(rate, (budget.seconds - start) / max(1, len(pairs)))
        if relaxed.prices is None:
            if result.choice is not None:
                break  # it had to stop
            cells *= 4  # the core may be too small for any choice
            continue
        dual.set_prices(relaxed.prices)
        dual.add_messages(relaxed.low, relaxed.high)
        bound = converge(result, until)
        if bound < result.bound and result.best is not None:
            # The core lacked what the new prices make cheap: look there, and go half the way.
            core.look()
            dual.set_prices(0.5 * (dual.prices + result.best.prices))
            bound = converge(result, until)
        result.note(bound)
        if relaxed.choice is not None:
            attempt(result, relaxed.choice)
        for forward in (True, False):
            chooser = Chooser(dual.arrays)
            dual.sweep(forward, chooser)
            attempt(result, chooser.choice)
        value = np.inf if relaxed.value is None else relaxed.value
        if value - result.bound <= CLOSE * result.gap:
            break
        cells *= 2
    result.restore()


def search_core(result: Ascent, core: Core) -> None:
    """Looks for a better choice by branch and bound over larger and larger cores."""
    budget, wanted = result.budget, FIRST_INTEGER_CELLS
    for _ in range(INTEGER_PROGRAMS):
        work, seconds = budget.share(INTEGER_PART)
        left = min(work, seconds)
        cells = int(min(wanted, (ROOT_PART * left / ROOT_SECONDS) ** 0.5))
        if result.choice is None or result.gap < 1.0 or cells < LEAST_CELLS:
            break
        strategies, pairs = core.cheapest(cells, result.choice)
        spare = left / len(pairs) - ROOT_SECONDS * len(pairs) if len(pairs) else np.inf
        if spare < 0:
            break
        choice, solved, spent = best_in_core(
            result.dual,
            strategies,
            pairs,
            result.choice,
            branches=int(min(MOST_BRANCHES, 1 + spare / BRANCH_SECONDS)),
            time_limit=seconds,
        )
        budget.spend(spent)
        before = result.gap
        if choice is not None:
            attempt(result, choice)
        if not solved or len(pairs) < cells:
            break
        wanted *= 2 if before - result.gap > CLOSE * before else 4


def converge(result: Ascent, until: float) -> float:
    """Passes at the present prices until the bound hardly rises; returns it."""
    dual, budget, last = result.dual, result.budget, -np.inf
    for sweep in range(MOST_SWEEPS):
        bound = dual.sweep(sweep % 2 == 0)
        budget.spend(sweep_work(dual.arrays))
        if budget.used >= until:
            break
        if sweep % LOOK_EVERY == LOOK_EVERY - 1:
            if bound - last < 0.2 * CLOSE * (result.least - bound):
                break
            last = bound
    return bound
