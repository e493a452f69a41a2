"""Plans one program, and says what is stored of each plan."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import programs

import autopar

from . import matrix, text

Estimates = dict[str, float]


@dataclass(frozen=True)
class Request:
    """A program, the name of a set of options, and what that stands for."""

    program: str
    name: str
    cluster: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.program}/{self.name}"

    @property
    def title(self) -> str:
        """The options as a person would write them."""
        words = [
            f"{key}={getattr(value, '__name__', None) or repr(value)}"
            for key, value in self.options.items()
        ]
        return f"{', '.join(words) or 'no options'}; {self.cluster}"


@dataclass(frozen=True)
class Golden:
    """The text that a plan must keep, and its estimates, which may change."""

    text: str
    estimates: Estimates


def requests() -> list[Request]:
    """All that the matrix asks for, a program after the other."""
    asked = []
    for program, names in matrix.PLANNED.items():
        rows = {name: matrix.OPTIONS[name] for name in names.split()}
        for name, options in {**rows, **matrix.SPECIAL.get(program, {})}.items():
            rest = dict(options)
            asked.append(Request(program, name, rest.pop("cluster", "balanced"), rest))
    return asked


def missing(program: str) -> str | None:
    """Why a program cannot be planned here, or None if it can."""
    return programs.PROGRAMS[program].missing()


def goldens(program: str, asked: Iterable[Request]) -> Iterator[tuple[Request, Golden]]:
    """Builds a program and plans it as each request says."""
    entry = programs.PROGRAMS[program]
    with entry.context():
        case = entry.build()
    for request in asked:
        yield request, golden(case, request)


def golden(case: programs.Case, request: Request) -> Golden:
    """Plans a built program as a request says."""
    entry = programs.PROGRAMS[request.program]
    arguments = case.arguments(case.state, case.batch)
    options = {**case.options, **request.options, "cluster": matrix.CLUSTERS[request.cluster]}
    estimates: Estimates = {}
    with warnings.catch_warnings(record=True) as raised, entry.context():
        warnings.simplefilter("always")
        try:
            plan = autopar.plan(
                case.step, *arguments, **case.keywords[0], **options, progress=False
            )
        except autopar.AutoparError as error:
            result = text.error_text(error)
        else:
            result = text.plan_text(plan)
            estimates = _estimates(plan)
    lines = [text.warning_text(w.message) for w in raised if _is_ours(w)]
    return Golden("".join([*sorted(lines), result]), estimates)


def _is_ours(warning: warnings.WarningMessage) -> bool:
    return issubclass(warning.category, autopar.errors.AutoparWarning)


def _estimates(plan: autopar.Plan) -> Estimates:
    found: dict[str, float] = {
        "step_seconds": plan.estimates.step_seconds,
        "peak_bytes": plan.estimates.peak_bytes_per_device,
        "flops": plan.estimates.flops,
        **_of_lines(plan),
    }
    if plan.solver is not None:
        found["solver_cost"] = plan.solver.cost
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _of_lines(plan: autopar.Plan) -> Estimates:
    """Seconds of the lines that are told, and of the longest; with the rest they are the plan's.

    The rest is what the plan expects of no line, so lines that lose instructions take less.
    """
    estimates, lines = plan.estimates, plan.hot_lines.lines
    expected = estimates.compute_seconds + estimates.communication_seconds
    together = sum(line.seconds for line in lines)
    assert math.isclose(together, expected, rel_tol=1e-9), f"{together} s of {expected}"
    told = [line.seconds for line in lines if line.source]
    return {"longest_line_seconds": max(told, default=0.0), "line_seconds": sum(told)}
