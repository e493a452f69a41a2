"""What planning is doing, while it runs: on a terminal, in a notebook, or as lines in a log."""

from __future__ import annotations

import contextvars
import functools
import html
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

QUIET_SECONDS = 5.0
"""Where standard error is no terminal, what nobody asked to see is told after so long: a log says
that something goes on, and what is quick stays quiet."""

LINE_SECONDS = 30.0
"""From one such line to the next."""

TICK_SECONDS = 1.0
"""What is shown is drawn again after so long, though no new phase began."""

JOIN_SECONDS = 5.0
"""For what is being drawn, where nobody may read it any more (a pipe that is full)."""

_NOTEBOOK_SECONDS = 0.2


class Progress:
    """Phases of one planning, shown while it runs; a line with the total time stays.

    Args:
      title: what is planned.
      shown: whether to show anything. None: live in a terminal and in a notebook; elsewhere lines
        on standard error, and only of what takes longer than `QUIET_SECONDS`, one
        every `LINE_SECONDS` at most.
    """

    def __init__(self, title: str, shown: bool | None = None):
        self._title, self._view = title, _view_for(shown)
        self._phase = self._result = ""

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        self._view.begin(self._now)
        return self

    def report(self, phase: str) -> None:
        """The phase that starts now."""
        self._phase = phase
        self._view.show(self._now())

    def conclude(self, result: str) -> None:
        """What came of it, for the line that stays."""
        self._result = result

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        text = f"{self._title} took {self._seconds:.1f} s"
        text += f": {self._result}" if self._result else ""
        self._view.end(text if error is None else None)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _now(self) -> State:
        return self._title, self._phase, self._seconds


State = tuple[str, str, float]
"""What is planned, the phase, and for how many seconds."""


class View(Protocol):
    """Where progress is shown."""

    def begin(self, now: Callable[[], State]) -> None:
        """Starts to show; `now` says what is going on, at any time."""

    def show(self, state: State) -> None:
        """A new phase began."""

    def end(self, text: str | None) -> None:
        """Takes what was shown away; the text stays, if there is one."""


def _view_for(shown: bool | None) -> View:
    if shown is False:
        return _Silent()
    if _in_notebook():
        return _InNotebook()
    if sys.stderr is not None and sys.stderr.isatty():
        return _OnTerminal()
    return _EachPhase() if shown else _Lines()


def _in_notebook() -> bool:
    """Whether a kernel runs this, not IPython in a terminal."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and getattr(get_ipython(), "kernel", None) is not None


class _Ticker:
    """Calls a function again and again, on a thread, until it is stopped."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick, self._stopped = tick, threading.Event()
        # A notebook's kernel finds by context variables which cell an output is of.
        run = functools.partial(contextvars.copy_context().run, self._run)
        self._thread = threading.Thread(target=run, name="autopar progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(TICK_SECONDS):
            self._tick()

    def stop(self) -> None:
        """The function is not called again; a call that is under way is waited for, a while."""
        self._stopped.set()
        self._thread.join(JOIN_SECONDS)


class _Silent:
    """Nothing is shown."""

    def begin(self, now: Callable[[], State]) -> None:
        """Nothing."""

    def show(self, state: State) -> None:
        """Nothing."""

    def end(self, text: str | None) -> None:
        """Nothing."""


class _EachPhase:
    """A line on standard error for each phase, and one for what came of it."""

    _was_shown = False

    def begin(self, now: Callable[[], State]) -> None:
        """Nothing was done yet."""

    def show(self, state: State) -> None:
        title, phase, _ = state
        self._print(f"{title}: {phase}")

    def end(self, text: str | None) -> None:
        if self._was_shown and text is not None:
            self._print(text)

    def _print(self, text: str) -> None:
        self._was_shown = True
        print(f"autopar: {text}", file=sys.stderr, flush=True)


class _Lines(_EachPhase):
    """Lines on standard error about what takes long, some time apart."""

    def __init__(self) -> None:
        self._next = QUIET_SECONDS
        self._lock = threading.Lock()

    def begin(self, now: Callable[[], State]) -> None:
        self._ticker = _Ticker(lambda: self.show(now()))

    def show(self, state: State) -> None:
        title, phase, seconds = state
        with self._lock:
            if seconds >= self._next:
                self._next = seconds + LINE_SECONDS
                self._print(f"{title}, after {seconds:.0f} s: {phase}")

    def end(self, text: str | None) -> None:
        self._ticker.stop()
        super().end(text)


class _OnTerminal:
    """Two lines that change: what is planned and for how long, and the phase."""

    def begin(self, now: Callable[[], State]) -> None:
        from rich.console import Console, Group  # slow to import
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        spinner = Spinner("dots")

        def shown() -> Group:
            title, phase, seconds = now()
            head = Text(no_wrap=True, overflow="ellipsis")
            head.append_text(Text(str(spinner.render(seconds)), "green"))
            head.append(f" autopar: {title}").append(f"  {seconds:.0f} s", "dim")
            return Group(head, Text(f"  {phase}", "dim"))

        self._console = Console(stderr=True)
        self._live = Live(
            get_renderable=shown, console=self._console, transient=True, refresh_per_second=8
        )
        self._live.start()

    def show(self, state: State) -> None:
        """It is asked for when it is drawn."""

    def end(self, text: str | None) -> None:
        self._live.stop()
        if text is not None:
            self._console.print(f"autopar: {text}", highlight=False, markup=False)


class _InNotebook:
    """One output that changes, in the notebook's own colours."""

    def begin(self, now: Callable[[], State]) -> None:
        from IPython.display import display

        self._last, self._lock = 0.0, threading.Lock()
        self._handle: Any = display(self._data(now()), raw=True, display_id=True)
        self._ticker = _Ticker(lambda: self.show(now()))

    def show(self, state: State) -> None:
        with self._lock:
            if time.monotonic() - self._last >= _NOTEBOOK_SECONDS:
                self._last = time.monotonic()
                self._handle.update(self._data(state), raw=True)

    def end(self, text: str | None) -> None:
        self._ticker.stop()
        plain = f"autopar: {text}" if text else "autopar: stopped"
        shown = f'<div style="{_STYLE}">{"✓" if text else "✗"} {html.escape(plain)}</div>'
        self._handle.update({"text/plain": plain, "text/html": shown}, raw=True)

    def _data(self, state: State) -> dict[str, str]:
        title, phase, seconds = state
        head, below = html.escape(f"autopar: {title}"), html.escape(phase)
        clock = f'<span style="opacity:.65">{seconds:.0f} s<br>{below}</span>'
        return {
            "text/plain": f"autopar: {title}, {seconds:.0f} s: {phase}",
            "text/html": f'<div style="{_STYLE}">◌ {head} &nbsp;{clock}</div>',
        }


_STYLE = "font:13px/1.5 system-ui,sans-serif"
