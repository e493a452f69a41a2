"""Calls of a solver that Ctrl-C ends.

Python raises `KeyboardInterrupt` in its main thread, as soon as that runs Python code. While that
is in a solver's C++ nothing is raised; and where it is called back from there, to read a message,
what is raised is dropped. CP-SAT has a handler of its own, which ends its search and tells nobody.
So solvers run in a thread of their own, for which the main one waits; a little at a time, for the
signal may go to another thread, which does not wake it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

HEARD_EVERY = 0.1  # seconds, an interrupt
ASKED_EVERY = 0.05  # seconds; a solver that has not begun yet does not hear that it should end


def interruptible_call(call: Callable[[], T], stop: Callable[[], object]) -> T:
    """What a call gives; an interrupt ends it.

    Args:
      call: runs in a thread of its own, unless this one is not interrupted anyway.
      stop: asks it to end soon; is asked again until it has.

    Raises:
      KeyboardInterrupt: it was interrupted, and has ended; with a second one while it is ending, it
        may go on for a while.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    found, gives_up, ended = Future[T](), threading.Event(), threading.Event()

    def run(found: Future[T]) -> None:
        try:
            if not gives_up.is_set():
                found.set_result(call())
        except BaseException as error:
            found.set_exception(error)
        ended.set()  # what is waited for: an interrupt may leave its lock, and not that of `found`

    thread = threading.Thread(target=run, args=(found,), name="solver", daemon=True)
    try:
        thread.start()
        while not ended.wait(HEARD_EVERY):
            pass
        made = found.result()
    except BaseException:
        gives_up.set()  # for a thread that has hardly begun
        while thread.is_alive() and not found.done():
            stop()
            thread.join(ASKED_EVERY)
        raise
    finally:
        del found  # what it raises holds this frame, and so all that the call holds
    return made
