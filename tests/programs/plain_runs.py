"""A program's run under plain `jax.jit`, kept for the next tests of the same program."""

from __future__ import annotations

import functools

import pytest

from . import PROGRAMS, Case, compare


@functools.lru_cache(maxsize=2)
def plain_run(name: str) -> tuple[Case, compare.Run]:
    """A program's case and its run; tests of one program stand next to each other for it.

    (`pytest_collection_modifyitems` sees to that, in all files that import this function.)
    """
    program = PROGRAMS[name]
    reason = program.missing()
    if reason:
        pytest.skip(reason)
    with program.context():
        case = program.build()
        return case, compare.record(case.plain, case)
