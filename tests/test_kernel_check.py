"""Our kernels for grouped products are tried where they are to run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.errors import KernelWarning
from autopar.passes.primitives.group_kernels import Kernels, KernelTiles
from autopar.passes.primitives.group_tiling import GroupedMeans
from autopar.passes.sharding.compiler_rules import CPU, RULES
from autopar.runtime.kernel_check import _found_on, problem_on

MEANS = GroupedMeans(tiles=KernelTiles(128, 128, 64, 4, 3, 8, 0.5), interpret=True)
SMALL = GroupedMeans(tiles=KernelTiles(32, 32, 16, 4, 3, 8, 0.5), interpret=True)
"""For trials that are as much smaller; one test makes them at full size."""


small = pytest.mark.usefixtures("small_trials")


@pytest.fixture(autouse=True)
def tried_anew() -> Any:
    _found_on.cache_clear()
    yield
    _found_on.cache_clear()


def step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        sizes = jnp.asarray([3, 5], jnp.int32)
        return jnp.mean(jax.lax.ragged_dot(x, weights, sizes).astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return weights - gradients, value


def test_kernels_that_work_are_used() -> None:
    assert problem_on(jax.devices()[0], MEANS) == ""


@small
def test_they_are_tried_wherever_a_step_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another function is traced, with wide numbers, and where nothing is moved unasked."""
    device, found, are_wide = jax.devices()[0], list[str](), set[bool]()
    rows = Kernels.rows

    def watched(self: Kernels, *operands: Any, **more: Any) -> Any:
        are_wide.add(jnp.asarray(1).dtype.itemsize == 8)
        return rows(self, *operands, **more)

    monkeypatch.setattr(Kernels, "rows", watched)

    def traced(x: Any) -> Any:
        found.append(problem_on(device, SMALL))
        return x

    jax.jit(traced)(1.0)
    assert are_wide == {False}
    with jax.enable_x64(True), jax.transfer_guard("disallow"):
        found.append(problem_on(device, SMALL))
    assert found == ["", ""] and are_wide == {False, True}


@small
def test_what_fails_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what computes wrong numbers."""
    rows, calls = Kernels.rows, list[int]()

    def fails_first(self: Kernels, *operands: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return rows(self, *operands, **more)

    monkeypatch.setattr(Kernels, "rows", fails_first)
    assert problem_on(jax.devices()[0], SMALL) == "RuntimeError: out of memory"
    assert problem_on(jax.devices()[0], SMALL) == ""


@small
@pytest.mark.parametrize("what", ["wrong numbers", "no result", "a compiler that fails"])
def test_kernels_that_do_not_work_are_not_used(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Kernels.rows

    def broken(self: Kernels, *operands: Any, **more: Any) -> Any:
        if what == "a compiler that fails":
            raise RuntimeError("shared memory size limit exceeded")
        made = rows(self, *operands, **more)
        return made * jnp.nan if what == "no result" else made.at[7].add(1)

    monkeypatch.setattr(Kernels, "rows", broken)
    monkeypatch.setitem(RULES, CPU, dataclasses.replace(RULES[CPU], grouped=SMALL))
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4)), jnp.bfloat16)
    x = jnp.ones((8, 4), jnp.bfloat16)
    wanted = jax.jit(step)(weights, x)
    with pytest.warns(KernelWarning, match="do not work on cpu.*Loops compute them"):
        compiled = autopar.compile(step, weights, x, devices=jax.devices()[:1], method="data")
        found = compiled(weights, x)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2e-2, atol=2e-2)
