"""New state whose parts are columns is exchanged for rows before it is gathered."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.passes.sharding import gathered_state
from autopar.passes.sharding.compiler_rules import CPU, RULES
from autopar.passes.sharding.gathered_state import GATHERED_BYTES, along_rows
from autopar.passes.sharding.layout import Layout, replicated
from autopar.passes.sharding.reshard import reshard_steps

LARGE = (2048, 4096)
WHOLE = replicated(2)


def cut(*dims: tuple[int, ...]) -> Layout:
    return replicated(len(dims))._replace(dims=dims)


def test_only_large_columns_become_rows() -> None:
    assert np.prod(LARGE) * 4 >= GATHERED_BYTES
    assert along_rows([cut((), (0,))], WHOLE, LARGE, 4, (8,)) == cut((0,), ())
    home, rows = cut((), (0, 1)), cut((1, 0), ())
    assert along_rows([home], WHOLE, LARGE, 4, (2, 4)) == rows
    steps = reshard_steps(home, rows, (2, 4))
    assert [step.kind for step in steps] == ["all-to-all", "all-to-all"], "nothing is gathered"
    assert along_rows([cut((), (0,)), WHOLE], WHOLE, LARGE, 4, (8,)) is None, "it is there"
    assert along_rows([], WHOLE, LARGE, 4, (8,)) is None
    for home, wanted, shape, size in (
        (cut((0,), ()), WHOLE, LARGE, 4),  # rows already
        (WHOLE, WHOLE, LARGE, 4),  # nothing to gather
        (cut((), (0,)), cut((), (0,)), LARGE, 4),  # stays as it is
        (cut((), (0,)), WHOLE, (1024, 1024), 4),  # small
        (cut((), (0,)), WHOLE, (2049, 4096), 4),  # no equal parts
        (cut((), (0,))._replace(partial=((0, "sum"),)), WHOLE, LARGE, 4),
    ):
        assert along_rows([home], wanted, shape, size, (8,)) is None


def step(state: Any, x: Any) -> Any:
    w, mean = state
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.square(x @ w)))(w)
    mean = 0.9 * mean + gradient
    return (w - 0.1 * mean, mean), loss


@pytest.mark.parametrize("turns", [True, False])
def test_the_numbers_stay(turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_state, "GATHERED_BYTES", 1)
    monkeypatch.setitem(RULES, CPU, dataclasses.replace(RULES[CPU], turns_gathers=turns))
    random = np.random.default_rng(0)
    w = jnp.asarray(random.normal(size=(16, 64)) / 8, jnp.float32)
    args = (w, jnp.zeros_like(w)), jnp.asarray(random.normal(size=(32, 16)), jnp.float32)
    wanted = jax.jit(step)(*args)
    pins = {"state[1]": (None, "x")}
    compiled = autopar.compile(step, *args, method="zero1", microbatches=1, pins=pins)
    found = compiled(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)
    kinds = [(x.kind, x.purpose) for x in compiled.plan.stages[0].collectives]
    assert (("all-to-all", "state") in kinds) == turns
