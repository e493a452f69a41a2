"""Every real step on one mesh, in microbatches and in stages, against plain `jax.jit`.

`make test` takes every other step in stages, the others on one mesh or in microbatches, of decoders
that are much alike those of `SPLIT` in microbatches; steps that are refused somewhere, or whose
rows meet, in all of them.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from programs import Case, compare
from real_steps import REAL_STEPS, RealStep

import autopar

METHODS = ("data", "zero2", "zero3", "shard", "auto")
SCHEDULES = ("1f1b", "gpipe", "zb_h1")

SPLIT = (
    "decoder_remat_full", "decoder_remat_names", "decoder_remat_offload", "decoder_bfloat16",
    "decoder_scan_remat_dots",
)  # fmt: skip
"""In stages are others that compute again, in bfloat16, and in a scan (and in `test_remat`)."""


def is_special(step: RealStep) -> bool:
    return step.one_mesh is not None or step.whole is not None or step.rows_meet


def alone(number: int, step: RealStep) -> bool:
    return number % 8 == 1 or step.one_mesh is not None


def split(number: int, step: RealStep) -> bool:
    return number % 8 in (3, 5, 7) or step.name in SPLIT or step.whole is not None or step.rows_meet


def staged(number: int, step: RealStep) -> bool:
    return (number % 2 == 0 and step.name not in SPLIT) or is_special(step)


def turns(values: tuple[str, ...], which: Callable[[int, RealStep], bool]) -> Iterator[Any]:
    """Steps x values; every step of `which` meets one value, the others are marked `full`."""
    for (number, step), (turn, value) in itertools.product(
        enumerate(REAL_STEPS.values()), enumerate(values)
    ):
        chosen = number % len(values) == turn and which(number, step)
        marks = () if chosen else pytest.mark.full
        yield pytest.param(step, value, id=f"{step}-{value}", marks=marks)


@functools.lru_cache(maxsize=1)
def plain_run(name: str) -> tuple[Case, compare.Run]:
    """A step's case and its run under plain `jax.jit`."""
    pytest.importorskip("flax")
    case = REAL_STEPS[name].build()
    return case, compare.record(case.plain, case)


def check(step: RealStep, refused: str | None, **options: Any) -> None:
    """Compares the step with the plain one, or asserts that it is refused for that reason."""
    case, plain = plain_run(step.name)
    arguments = case.arguments(compare.copy_tree(case.state), case.batch)

    def parallel() -> Any:
        return autopar.compile(case.step, *arguments, **{**case.options, **options})

    if refused is None:
        compare.assert_steps_equal(plain, parallel(), case, step.tolerance)
        return
    with pytest.raises(autopar.AutoparError, match=refused):
        parallel()


@pytest.mark.filterwarnings("ignore:One trip is counted:autopar.errors.AutoparWarning")
@pytest.mark.parametrize(("program", "method"), list(turns(METHODS, alone)))
def test_on_one_mesh(program: RealStep, method: str) -> None:
    check(program, None, method=method)


@pytest.mark.filterwarnings("ignore:One trip is counted:autopar.errors.AutoparWarning")
@pytest.mark.parametrize(("program", "method"), list(turns(METHODS, split)))
def test_in_microbatches(program: RealStep, method: str) -> None:
    check(program, program.whole, method=method, microbatches=4)


@pytest.mark.filterwarnings("ignore:One trip is counted:autopar.errors.AutoparWarning")
@pytest.mark.parametrize(("program", "schedule"), list(turns(SCHEDULES, staged)))
def test_in_stages(program: RealStep, schedule: str) -> None:
    count = 1 if program.whole or program.rows_meet else 2
    check(program, program.one_mesh, stages=2, microbatches=count, schedule=schedule)
    if program.rows_meet:
        check(program, "into 2 microbatches", stages=2, microbatches=2, schedule=schedule)


def test_few_are_refused() -> None:
    runs = [reason for step in REAL_STEPS.values() for reason in (None, step.whole, step.one_mesh)]
    assert len(REAL_STEPS) >= 40
    assert sum(reason is None for reason in runs) >= 0.85 * len(runs)
