"""Odd steps on eight devices, in microbatches and in stages: what plain `jax.jit` computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import rare_calls  # noqa: F401 (its steps are among STEPS then)
from odd_steps import ONE_MICROBATCH, STEPS

import autopar

WAYS: dict[str, dict[str, Any]] = {
    "data": {"method": "data"},
    "microbatches": {"microbatches": 4},
    "stages": {"stages": 2, "microbatches": 4},
}


def combinations() -> Iterator[Any]:
    """Every step in every way; `make test` takes the ways in turn."""
    for (index, name), (turn, way) in itertools.product(enumerate(STEPS), enumerate(WAYS)):
        if way == "data" or name not in ONE_MICROBATCH:
            chosen = turn == index % 3 or name in ONE_MICROBATCH
            marks = () if chosen else pytest.mark.full
            yield pytest.param(name, way, id=f"{name}-{way}", marks=marks)


@pytest.mark.filterwarnings("ignore:One trip is counted:autopar.errors.AutoparWarning")
@pytest.mark.parametrize(("name", "way"), list(combinations()))
def test_a_step_computes_what_it_does_alone(name: str, way: str) -> None:
    step, arguments = STEPS[name]()
    expected = jax.jit(step)(*arguments)
    batch = tuple(range(1, len(arguments)))
    compiled = autopar.compile(
        step, *arguments, batch_argnums=batch, donate_argnums=(), **WAYS[way]
    )
    got = compiled.gather(compiled(*arguments))
    structures = {jax.tree.structure(tree) for tree in (got, expected)}
    assert len(structures) == 1
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        one, other = (np.asarray(x).astype(np.float64) for x in (one, other))
        scale = np.abs(other[np.isfinite(other)]).max(initial=1e-6)
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * scale)


def test_matrices_are_done_one_by_one_on_cpus() -> None:
    """Several at a time wait for each other's threads."""
    step, arguments = STEPS["matrices_of_layers"]()
    compiled = autopar.compile(step, *arguments, donate_argnums=(), method="data")
    calls = [line for line in compiled.hlo().splitlines() if "lapack_" in line]
    assert calls
    assert not any("f32[2,8,8]" in line for line in calls)
