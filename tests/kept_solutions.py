"""Solutions of the solver, taken again where the same problem is solved the same way."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from autopar.passes.planner import stage_shardings
from autopar.passes.solver import Infeasible, Problem, Solution, solve

KEPT: dict[bytes, Solution | Infeasible] = {}


@contextlib.contextmanager
def kept_solutions() -> Iterator[None]:
    """For tests that plan the same step in several ways, and are about how these are chosen.

    Without a limit of time, what the solver finds depends on what it is given alone. That it does
    so is for other tests to see: those of the solver, and of plans that are made twice.
    """

    def solved(problem: Problem, **options: Any) -> Solution:
        if options.get("time_limit"):
            return solve(problem, **options)
        key = hashlib.sha256(pickle.dumps((problem, sorted(options.items())))).digest()
        if key not in KEPT:
            try:
                KEPT[key] = solve(problem, **options)
            except Infeasible as error:
                KEPT[key] = error.with_traceback(None)
        made = copy.copy(KEPT[key])
        if isinstance(made, Infeasible):
            raise made
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_shardings, "solve", solved)
        yield
    KEPT.clear()
