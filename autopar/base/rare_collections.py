"""Python's search for cyclic garbage is rare while a program is traced and planned.

A plan of a large model makes millions of small objects that all live until it is made, with hardly
a cycle among them. CPython looks through all of them again and again, as often as their number has
grown by a quarter (`Python's gc module <https://docs.python.org/3/library/gc.html>`_), for nothing.
Garbage without cycles is freed at once as ever.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (200_000, 50, 100)
"""New containers before the youngest are looked through, and how many such rounds before the
older and the oldest are: cyclic garbage waits for up to some hundred megabytes of new objects."""


_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []  # the thresholds outside, once for everyone inside


@contextmanager
def rare_collections() -> Iterator[None]:
    """While it is open, cyclic garbage is looked for rarely; then as before.

    Also usable as a decorator. A user's own wider thresholds, or a collector that is off, stay.
    Several threads may be inside: the last one that leaves restores what the first one found.
    """
    with _lock:
        _before.append(_before[0] if _before else gc.get_threshold())
        if len(_before) == 1 and _before[0][0] and gc.isenabled():
            first, second, third = map(max, _before[0], THRESHOLDS)
            gc.set_threshold(first, second, third)
    try:
        yield
    finally:
        with _lock:
            found = _before.pop()
            if not _before:
                gc.set_threshold(*found)
