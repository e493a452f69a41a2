"""Planning that is interrupted keeps the best plan that it has, if it has one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.base.progress import Progress
from autopar.passes.planner import watch

CLUSTER = autopar.Cluster.preset("p3.16xlarge")


def step(state: jax.Array, x: jax.Array) -> Any:
    loss = lambda w: jnp.mean(jnp.tanh(x @ w) ** 2)  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(state)
    return state - 0.1 * gradient, value


def planned(**options: Any) -> autopar.Plan:
    arguments = jnp.ones((16, 16)), jnp.ones((32, 16))
    return autopar.plan(step, *arguments, cluster=CLUSTER, stages=1, **options)


def interrupt_at(patch: pytest.MonkeyPatch, word: str) -> list[str]:
    lines: list[str] = []

    def report(self: Progress, line: str) -> None:
        lines.append(line)
        if word in line:
            raise KeyboardInterrupt

    patch.setattr(Progress, "report", report)
    return lines


def test_an_interrupt_keeps_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not planned().interrupted
    lines = interrupt_at(monkeypatch, "2 of")
    plan = planned()
    assert plan.interrupted and "interrupted" in str(plan)
    assert "best so far" in lines[-1] and "best so far" not in lines[-2]
    assert autopar.Plan.from_dict(plan.to_dict()) == plan


def test_an_interrupt_before_any_plan_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, "1 of")
    with pytest.raises(KeyboardInterrupt):
        planned()


def test_the_clock_interrupts_once_there_is_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 10.0
        return now[0]

    monkeypatch.setattr(watch.PlanningWatch.__init__, "__defaults__", (clock,))
    plan = planned(planning_time_limit=1.0)
    assert plan.interrupted and plan.options["planning_time_limit"] == 1.0
    assert len(plan.candidates) == 1
    assert not planned(planning_time_limit=1e6).interrupted
