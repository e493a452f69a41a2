"""Calls of a solver that Ctrl-C ends.

Python raises `KeyboardInterrupt` in its main thread, as soon as that runs Python code. While that
is in a solver's C++ nothing is raised; and where it is called back from there, to read a message,
what is raised is dropped. CP-SAT has a handler of its own, which ends its search and tells nobody.
So solvers run in a thread of their own, for which the main one waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def interruptible_call(call: Callable[[], T], stop: Callable[[], object]) -> T:
    """What a call gives; an interrupt ends it.

    Args:
      call: runs in a thread of its own, unless this one is not interrupted anyway.
      stop: asks it to end soon.

    Raises:
      KeyboardInterrupt: it was interrupted, and has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=run, name="solver", daemon=True)
    thread.start()
    try:
        return found.result()
    except BaseException:
        if not found.done():
            stop()
        raise
    finally:
        thread.join()
