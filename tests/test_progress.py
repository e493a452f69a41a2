"""What people see while a step is planned: in a terminal, in a notebook, in a log."""

import io
import re
import sys
import threading
import types
from typing import Any

import pytest

from autopar.base import progress as progress_views
from autopar.base.progress import Progress
from autopar.passes.planner.watch import PlanningWatch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_live_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for shown, says in ((None, True), (True, True), (False, False)):
        monkeypatch.setattr("sys.stderr", terminal := Terminal())
        monkeypatch.setenv("TERM", "xterm")
        with Progress("planning it", shown) as progress:
            progress.report("solving (best so far: 3 ms a step)")
            progress.conclude("2 ms a step")
        told = terminal.getvalue()
        assert ("best so far" in told) == says
        assert told.rstrip().endswith(" s: 2 ms a step" if says else "")


def test_logs_are_told_of_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 6.0, 20.0, 37.0, 80.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    monkeypatch.setattr(progress_views, "TICK_SECONDS", 60.0)
    with Progress("planning it") as progress:
        for phase in "abcd":
            progress.report(phase)
    assert capsys.readouterr().err.splitlines() == [
        "autopar: planning it, after 6 s: b",
        "autopar: planning it, after 37 s: d",
        "autopar: planning it took 80.0 s",
    ]


def test_a_long_phase_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told, log = threading.Event(), io.StringIO()

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            told.set()
            return log.write(text)

    monkeypatch.setattr("sys.stderr", Log())
    monkeypatch.setattr(progress_views, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(progress_views, "QUIET_SECONDS", 0.01)
    with Progress("compiling it") as progress:
        progress.report("compiling")
        assert told.wait(60), "no new phase began"
    assert re.match(r"autopar: compiling it, after \d+ s: compiling\n", log.getvalue())
    assert "autopar progress" not in {thread.name for thread in threading.enumerate()}


def test_progress_changes_one_output_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            shown.append(data)
            if len(shown) >= most:
                ticked.set()

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append(data)
        return Handle()

    shown: list[dict[str, str]] = []
    ticked, most = threading.Event(), 10
    shell = types.SimpleNamespace(kernel=object())
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    with Progress("planning <lambda>") as progress:
        progress.report("tracing")
    assert [set(data) for data in shown] == [{"text/plain", "text/html"}] * 3
    assert "tracing" in shown[1]["text/html"]
    assert "planning &lt;lambda&gt; took" in shown[-1]["text/html"]
    with Progress("quiet", shown=False) as progress:
        progress.report("tracing")
    assert len(shown) == 3
    monkeypatch.setattr(progress_views, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(progress_views, "_NOTEBOOK_SECONDS", 0.0)
    with Progress("planning it") as progress:
        progress.report("compiling")
        assert ticked.wait(60), "the seconds go on without a new phase"
    assert "compiling" in shown[most - 1]["text/html"]


def test_what_is_missing_or_spare_is_told() -> None:
    def candidate(peak: int, seconds: float) -> Any:
        return types.SimpleNamespace(peak_bytes=(0, peak), limit=1000, step_seconds=seconds)

    lines: list[str] = []
    watch = PlanningWatch(lines.append, None)
    watch.report("a")
    watch.keep([candidate(3000, 1.0), candidate(2000, 1.0)])
    watch.report("b")
    watch.keep([candidate(900, 2.0), candidate(500, 1.0)])
    watch.report("c")
    assert lines == [
        "a",
        "b (nearest so far: 1000 B a device too much)",
        "c (best so far: 1 s a step, 500 B a device to spare)",
    ]
