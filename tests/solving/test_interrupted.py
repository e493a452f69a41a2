"""Ctrl-C while a solver's C++ runs: it ends soon, and nothing swallows the interrupt."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from ortools.math_opt.python import mathopt
from ortools.sat.python import cp_model
from solver_instances import grid

from autopar.passes.solver import cp_sat, linear
from autopar.passes.solver.arrays import flatten
from autopar.passes.solver.dual import Dual
from autopar.passes.solver.interrupted import interruptible_call
from autopar.passes.solver.linear import Core
from autopar.passes.solver.model import Model

DEADLINE = 60.0  # seconds


@pytest.fixture(autouse=True)
def hears_ctrl_c() -> Iterator[None]:
    """A shell that starts the suite in the background has the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def interrupted_once(is_there: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C as soon as something is there, which has to raise."""

    def press() -> None:
        until = time.monotonic() + DEADLINE
        while not is_there() and time.monotonic() < until:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join(DEADLINE)


def test_what_is_asked_to_end_has_ended() -> None:
    begun, asked, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        assert asked.wait(DEADLINE)
        ended.set()

    with interrupted_once(begun.is_set):
        interruptible_call(call, asked.set)
    assert ended.is_set()


def test_an_interrupt_that_another_thread_takes_is_heard() -> None:
    """As where the kernel does not give it to the main thread, which goes on to wait."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        begun, asked, in_time = threading.Event(), threading.Event(), list[bool]()

        def call() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            begun.set()
            in_time.append(asked.wait(DEADLINE))

        with interrupted_once(begun.is_set):
            interruptible_call(call, asked.set)
        assert in_time == [True]
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def test_what_a_call_gives_or_raises_is_its_own() -> None:
    never: Callable[[], Any] = lambda: pytest.fail("it was not interrupted")  # noqa: E731
    assert interruptible_call(lambda: 3, never) == 3
    with pytest.raises(ZeroDivisionError):
        interruptible_call(lambda: 1 // 0, never)


def test_in_another_thread_nothing_interrupts() -> None:
    found: Future[threading.Thread] = Future()

    def call() -> None:
        found.set_result(interruptible_call(threading.current_thread, lambda: None))

    thread = threading.Thread(target=call)
    thread.start()
    assert found.result(DEADLINE) is thread


@pytest.mark.parametrize("solver", ["CP-SAT", "simplex"])
def test_solvers_end_and_tell(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a program that takes them a while: they say that they were stopped."""
    model, running = Model(grid(24, 24, 8, seed=1, tightness=0.3)), threading.Event()
    module, given, asked = (cp_sat if solver == "CP-SAT" else linear), list[Any](), list[Any]()

    def watched(call: Callable[[], Any], stop: Callable[[], object]) -> Any:
        def began() -> Any:
            running.set()
            given.append(call())

        return interruptible_call(began, lambda: asked.append(stop()))

    monkeypatch.setattr(module, "interruptible_call", watched)
    if solver == "CP-SAT":
        with interrupted_once(running.is_set):
            cp_sat.solve_cp_sat(model, time_limit=DEADLINE)
        assert asked and given[0] in (cp_model.UNKNOWN, cp_model.FEASIBLE)
        return
    dual = Dual(flatten(model))
    core = Core(dual)
    core.look()
    with interrupted_once(running.is_set):
        linear.relaxation(dual, *core.cheapest(10**9, None), time_limit=DEADLINE)
    assert given[0].termination.limit == mathopt.Limit.INTERRUPTED.value


def test_a_second_interrupt_does_not_wait() -> None:
    begun, ends, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        ends.wait(DEADLINE)
        ended.set()

    with interrupted_once(begun.is_set):
        interruptible_call(call, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert not ended.is_set()
    ends.set()


def test_an_interrupt_before_a_call_has_begun_keeps_it_from_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(threading.Thread):
        def start(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        interruptible_call(lambda: pytest.fail("it began"), lambda: None)
