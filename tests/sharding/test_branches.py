"""What a step takes that branches: as long as its longest branch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Plan


def plan_of(branches: int, heavy: int) -> Plan:
    """A layer of so many branches of so many products each, the last one of none."""

    def train_step(w: Any, kind: Any, x: Any) -> Any:
        def branch(number: int) -> Any:
            def body(h: Any) -> Any:
                for _ in range(heavy if number < branches - 1 else 0):
                    h = jnp.tanh(h @ w)
                return h * (number + 2)

            return body

        return w, jax.lax.switch(kind, [branch(n) for n in range(branches)], x)

    shapes = ((1024, 1024), jnp.float32), ((), jnp.int32), ((8192, 1024), jnp.float32)
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    more: dict[str, Any] = {"method": "data", "batch_argnums": 2, "microbatches": 1}
    return autopar.plan(train_step, *given, cluster="1x8 h100", **more)


def sorts(h: jax.Array) -> jax.Array:
    for turn in range(8):
        h = jnp.sort(h, axis=1) * (turn + 1)
    return h


def test_a_branch_without_operations_may_be_the_longest() -> None:
    """Sorts do no floating-point operations, and take longer than a product."""

    def step(w: Any, kind: Any, x: Any) -> Any:
        return w, jax.lax.cond(kind > 0, sorts, lambda h: h @ w, x)

    def alone(w: Any, kind: Any, x: Any) -> Any:
        return w, sorts(x)

    shapes = ((1024, 1024), jnp.float32), ((), jnp.int32), ((8192, 1024), jnp.float32)
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    more: dict[str, Any] = {"method": "data", "batch_argnums": 2, "microbatches": 1}
    found, least = (
        autopar.plan(each, *given, cluster="1x8 h100", **more).estimates.step_seconds
        for each in (step, alone)
    )
    assert found == pytest.approx(least, rel=0.1)


def test_a_step_takes_as_long_as_its_longest_branch() -> None:
    few, many = plan_of(2, 2), plan_of(6, 2)
    assert few.estimates.compute_seconds > 0
    assert many.estimates.step_seconds == pytest.approx(few.estimates.step_seconds, rel=0.1)
    assert many.estimates.flops == few.estimates.flops
    longer = plan_of(2, 4)
    assert longer.estimates.flops == pytest.approx(2 * few.estimates.flops, rel=0.01)
    assert longer.estimates.step_seconds > 1.5 * few.estimates.step_seconds
