"""Python's search for cyclic garbage is rare while a program is planned.

A plan of a large model makes millions of small objects that all live until it is made, with hardly
a cycle among them. CPython looks through all of them again and again, as often as their number has
grown by a quarter (`Python's gc module <https://docs.python.org/3/library/gc.html>`_): a quarter of
the time of planning GPT-39B, for nothing. Garbage without cycles is freed at once as ever.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (200_000, 50, 100)
"""New containers before the youngest are looked through, and how many such rounds before the
older and the oldest are: cyclic garbage waits for up to some hundred megabytes of new objects."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """While it is open, cyclic garbage is looked for rarely; then as before.

    Also usable as a decorator. A user's own wider thresholds, or a collector that is off, stay.
    """
    before = gc.get_threshold()
    if before[0] == 0 or not gc.isenabled():
        yield
        return
    first, second, third = map(max, before, THRESHOLDS)
    gc.set_threshold(first, second, third)
    try:
        yield
    finally:
        gc.set_threshold(*before)
