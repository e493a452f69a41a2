"""`step.metrics` and `step.on_step`: what the calls of a loop take."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import step_metrics
from autopar.base.errors import AutoparError, OptionError
from autopar.report.throughput import throughput
from autopar.step_metrics import StepMetrics


def train(table: Any, tokens: Any) -> Any:
    def loss(table: Any) -> Any:
        return jnp.mean((table[tokens] @ jnp.ones((4, 4))) ** 2)

    value, gradient = jax.value_and_grad(loss)(table)
    return table - 0.1 * gradient, value


TOKENS = np.zeros((16, 8), np.int32)


def test_seconds_are_those_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            now[0] += 0.5
            return now[0]

    monkeypatch.setattr(step_metrics, "time", Clock)
    step = autopar.parallelize(train, method="data", microbatches=1)
    with pytest.raises(AutoparError, match="has no plan yet"):
        _ = step.metrics
    table: Any = jnp.ones((10, 4))
    table, _ = step(table, TOKENS)
    assert step.metrics.step_seconds is None and step.metrics.steps == 1
    for _ in range(3):
        table, _ = step(table, TOKENS)
    found = step.metrics
    assert (found.steps, found.window, found.step_seconds) == (4, 3, 0.5)
    assert found.examples_per_second == 32 and found.tokens_per_second == 256
    assert found.mfu == throughput(step.plan, 0.5).model_flops_utilization > 0
    assert set(found.as_dict()) >= {"step_seconds", "tokens_per_second", "mfu"}
    assert None not in found.as_dict().values()
    assert str(found).startswith("step 4, 500 ms a step, 256 tokens/s, 32 examples/s")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.errors.AutoparWarning)
        table, _ = step(table, TOKENS[:8])  # the last of an epoch, which is compiled meanwhile
        assert step.metrics == dataclasses.replace(found, steps=5)
        now[0] += 100  # an evaluation
        for _ in range(2):
            table, _ = step(table, TOKENS)
        assert step.metrics == dataclasses.replace(found, steps=7, window=4)
        for _ in range(2):
            table, _ = step(table, TOKENS[:8])
    assert (step.metrics.window, step.metrics.examples_per_second) == (1, 16)


def test_callbacks_come_when_results_are_there() -> None:
    step = autopar.compile(train, jnp.ones((10, 4)), TOKENS, method="data", microbatches=1)
    told: list[StepMetrics] = []
    end = step.on_step(told.append, every=2)
    table: Any = jnp.ones((10, 4))
    for _ in range(5):
        table, _ = step(table, TOKENS)
    assert [x.steps for x in told] == [2, 4]
    assert told[-1].window == 3 and told[-1].step_seconds

    def fail(found: StepMetrics) -> None:
        raise ZeroDivisionError("no logger")

    end()
    step.on_step(fail, every=1)
    with pytest.warns(autopar.errors.AutoparWarning, match="fail, which on_step calls.*no logger"):
        table, _ = step(table, TOKENS)
    assert np.isfinite(table).all()
    assert len(told) == 2
    with pytest.raises(OptionError, match="every=0"):
        step.on_step(told.append, every=0)
