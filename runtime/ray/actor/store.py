"""Arrays of an actor that outlive a step, by the keys under which the driver knows them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

KEYS = 1 << 32
"""Keys of a step: its number times this, and what is below is the number of a value."""
FIRST_OTHER = 1 << 48
"""In place of a step's number for what comes from elsewhere, such as `initialize`."""


class Missing(Exception):
    """A key that the store does not have."""


class Store:
    """Arrays that outlive a step, by key; readers may come before the array does."""

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._lost: list[tuple[int, int]] = []
        self._complete: dict[bool, int] = {}

    def __getitem__(self, key: int) -> Any:
        with self._changed:
            if key not in self._arrays:
                raise Missing(f"key {key}")
            return self._arrays[key]

    def wait(self, key: int) -> Any:
        """The array, when it is there: the driver watches that its step goes on.

        Raises:
          Missing: it was lost, or dropped.
        """
        serial = key // KEYS
        with self._changed:
            while key not in self._arrays:
                is_past = serial <= self._complete.get(serial >= FIRST_OTHER, 0)
                if is_past or any(first <= key < last for first, last in self._lost):
                    raise Missing(f"key {key}")
                self._changed.wait()
            return self._arrays[key]

    def put(self, key: int, array: Any) -> None:
        with self._changed:
            self._arrays[key] = array
            self._changed.notify_all()

    def complete(self, serial: int) -> None:
        """Say that all arrays with these numbers, and lower ones of their kind, were put."""
        with self._changed:
            self._complete[serial >= FIRST_OTHER] = serial
            self._changed.notify_all()

    def drop(self, keys: Sequence[int]) -> None:
        with self._changed:
            for key in keys:
                self._arrays.pop(key, None)

    def lose(self, first: int, last: int) -> None:
        """Say that keys from `first` to `last` (left out) will not come, and drop those there."""
        with self._changed:
            for key in [key for key in self._arrays if first <= key < last]:
                del self._arrays[key]
            self._lost.append((first, last))
            self._changed.notify_all()
