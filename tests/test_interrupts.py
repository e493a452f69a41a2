"""Planning that is interrupted keeps the best plan that it has, if it has one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
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


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """A shell that starts the suite in the background has the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_loop_is_asked_to_end_and_then_made_to(hears_ctrl_c: None) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with autopar.interruptible() as interrupted:
        assert not interrupted and repr(interrupted) == "<not interrupted>"
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupted and interrupted.signal is signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is before
        with pytest.raises(KeyboardInterrupt):  # the second one does as always
            signal.raise_signal(signal.SIGINT)
    assert repr(interrupted) == "<interrupted by SIGTERM>"


def test_signals_are_as_they_were_after_a_loop_that_fails(hears_ctrl_c: None) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), autopar.interruptible():
        assert signal.getsignal(signal.SIGINT) is not before[0]
        _ = 1 / 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_loop_in_a_thread_is_asked_by_hand() -> None:
    steps: list[int] = []

    def loop() -> None:
        with autopar.interruptible() as interrupted:
            while not interrupted:
                steps.append(1)
                interrupted.set()

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join(10)
    assert steps == [1]
