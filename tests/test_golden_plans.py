"""The compiler decides what it decided: plans of the real programs, compared with golden text.

A plan that changes on purpose is stored anew by `python tests/golden/regenerate.py`; the diff of
`tests/golden/plans` then says what the change does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from golden import files, matrix
from golden.compute import Request, golden, requests
from golden.text import fold
from programs import PROGRAMS, Case, Program, is_variant

REQUESTS = {str(request): request for request in requests()}
QUICK = {f"{program}/{name}" for program, names in matrix.QUICK.items() for name in names.split()}


def plans() -> Iterator[Any]:
    """All of them; those beyond the covering subset are marked `full`."""
    for plan, request in REQUESTS.items():
        marks = () if plan in QUICK else pytest.mark.full
        yield pytest.param(PROGRAMS[request.program], request, id=plan, marks=marks)


@functools.lru_cache(maxsize=2)
def built(program: Program) -> Case:
    """A program's case, kept for its next plans."""
    with program.context():
        return program.build()


@pytest.mark.parametrize(("program", "request_"), list(plans()))
def test_plan_is_as_stored(program: Program, request_: Request) -> None:
    reason = program.missing()
    other = files.other_versions()
    if reason or other:
        pytest.skip(reason or f"the goldens are of {other}")
    now = golden(built(program), request_).text
    section = files.section(request_.name, request_.title, now)
    diff = files.difference(str(request_), files.read(program.name).get(request_.name, ""), section)
    if diff:
        command = f"python tests/golden/regenerate.py --only '^{request_}$'"
        pytest.fail(f"The plan changed. If that is right, run {command}\n{diff}", pytrace=False)


def test_what_is_stored_is_what_is_asked_for() -> None:
    stored = [
        f"{program}/{name}" for program in files.stored_programs() for name in files.read(program)
    ]
    assert sorted(stored) == sorted(REQUESTS)
    assert set(files.read_estimates()) <= set(REQUESTS)


def test_subset_covers_every_program_and_option() -> None:
    assert set(REQUESTS) >= QUICK
    every = {name for name, program in PROGRAMS.items() if not is_variant(program)}
    assert every <= {request.program for request in REQUESTS.values()}
    assert set(matrix.OPTIONS) <= {request.name for request in REQUESTS.values()}
    assert set(matrix.CLUSTERS) == {request.cluster for request in REQUESTS.values()}


def test_folding_loses_nothing() -> None:
    paths = [f"p['a_{i}'].{name}" for i in range(3) for name in ("w", "b")]
    assert fold([*paths, "q[0]", "q[10]"]) == ["p['a_{0,1,2}'].{w,b}", "q[{0,10}]"]
    assert fold(paths[1:]) == ["p['a_{0,1,2}'].b", "p['a_{1,2}'].w"]
    assert fold(["", "scalar", "partial sum"]) == ["", "{scalar,partial sum}"]
