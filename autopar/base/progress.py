"""What planning is doing, on standard error."""

from __future__ import annotations

import time
from typing import Any


class Progress:
    """Phases of one planning, shown while it runs; a line with the total time stays.

    Args:
      title: what is planned.
      shown: whether to show anything; None: only in a terminal.
    """

    def __init__(self, title: str, shown: bool | None = None):
        from rich.console import Console  # slow to import

        self._console = Console(stderr=True)
        self._shown = self._console.is_terminal if shown is None else shown
        self._title = title
        self._status = self._console.status(f"autopar: {title}")

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        if self._shown and self._console.is_terminal:
            self._status.start()
        return self

    def report(self, phase: str) -> None:
        """The phase that starts now."""
        if not self._shown:
            return
        if self._console.is_terminal:
            self._status.update(f"autopar: {self._title}: {phase}")
        else:
            self._console.print(f"autopar: {self._title}: {phase}", highlight=False)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._status.stop()
        if self._shown and error is None:
            text = f"{self._title} is ready after {time.monotonic() - self._start:.1f} s"
            self._console.print(f"autopar: {text}", highlight=False)
