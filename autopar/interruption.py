"""`interruptible`: a training loop that Ctrl-C or a scheduler's signal ends between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.runtime.agreed_checks import AgreedChecks


class Interruption:
    """Whether a loop was asked to end; true once it was.

    Where several processes of `jax.distributed` run the loop, they answer alike: it is true in all
    of them at the same check, the first one that all come to after one of them was asked.

    Attributes:
      signal: what asked this process for it, or None.
    """

    def __init__(self, agreed: AgreedChecks | None = None) -> None:
        self._event, self._agreed = threading.Event(), agreed
        self.signal: signal.Signals | None = None

    def set(self) -> None:
        """Ask the loop to end, from any thread."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether it was asked, here or in another process.

        Raises:
          DeviceError: another process does not come to this check.
        """
        if self._agreed is None:
            return self._event.is_set()
        return self._agreed.ask(self._event.is_set())

    def __bool__(self) -> bool:
        return self.is_set()

    def __repr__(self) -> str:
        by = f" by {self.signal.name}" if self.signal else ""
        return f"<interrupted{by}>" if self._event.is_set() else "<not interrupted>"


@contextlib.contextmanager
def interruptible(
    signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM),
) -> Iterator[Interruption]:
    """Let a loop end after a step, and save, when it is interrupted.

    Within it the first Ctrl-C (or SIGTERM, by which Slurm, Kubernetes and spot machines announce an
    end) only sets what is returned; the second one does what it did before. Outside of the main
    thread, where Python has no signals, only `set()` does. Planning that is interrupted within it
    is not cut short.

    Several processes of `jax.distributed` end at the same step, whichever of them hears the signal:
    they wait for each other at each check (`if interrupted`), so all have to make the same checks.

    Args:
      signals: those that are listened to.

    Yields:
      An `Interruption`, which is true once one came.

    >>> import autopar
    >>> with autopar.interruptible() as interrupted:
    ...     for step in range(1000):
    ...         if interrupted:
    ...             break
    ...         if step == 3:
    ...             interrupted.set()
    >>> step
    4
    """
    from autopar.runtime.agreed_checks import agreed_checks  # it loads JAX

    interruption = Interruption(agreed_checks("interruptible"))
    before: dict[int, Any] = {}

    def back() -> None:
        while before:
            number, handler = before.popitem()
            if handler is not None:  # None: it was not set from Python, which cannot set it again
                signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        interruption.signal = signal.Signals(number)
        interruption.set()
        back()

    try:
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                handler = signal.getsignal(number)
                if handler is not signal.SIG_IGN:  # a shell's background job does not hear Ctrl-C
                    before[number] = handler
                    signal.signal(number, stop)
        yield interruption
    finally:
        back()
