"""How actors are told of a step: by a thread of its own, in turn."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import ray

from autopar.runtime.ray.actor.messages import Message


@dataclass
class Told:
    """A step that actors were told of: of each what says how it ended, and of whom that is left.

    If `is_off`, nobody else is told.
    """

    serial: int
    refs: list[Any]
    left: list[Any] = field(default_factory=list)
    is_off: bool = False


def tell(
    handles: Sequence[Any],
    messages: Sequence[Message | bytes],
    told: Told,
    undo: Callable[[], None],
) -> None:
    """Tell actors of a step, one after the other; if that fails, `undo` is called.

    Raises:
      RuntimeError: Ray was shut down, or the step called off.
    """
    try:
        for actor, message in zip(handles, messages, strict=True):
            if told.is_off:
                raise RuntimeError("The step was called off.")
            if not ray.is_initialized():  # a call would start another Ray
                raise RuntimeError("Ray was shut down in this process.")
            told.refs.append(actor.step.remote(message))
        told.left = list(told.refs)
    except Exception:
        undo()
        raise


class Teller:
    """A thread that does what it is given, one after the other; no process waits for its end."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]
        self._given = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._given.put, None)

    def give(self, over: Future[None], what: Callable[[], None]) -> None:
        """Have something done; `over` says how it ends. Done at once where no thread can begin."""
        if self._thread is None:
            thread = threading.Thread(
                target=_do_all, args=(self._given,), name="autopar tells actors", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                _do(over, what)
                return
            self._thread = thread
        self._given.put((over, what))


def _do_all(given: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    while (each := given.get()) is not None:
        _do(*each)
        del each


def _do(over: Future[None], what: Callable[[], None]) -> None:
    try:
        what()
    except BaseException as error:
        over.set_exception(error)
    else:
        over.set_result(None)
