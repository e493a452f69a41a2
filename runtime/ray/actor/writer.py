"""Writes an actor's items of checkpoints.

The actor copies arrays between two steps, and a thread writes the copies while later steps run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from autopar.runtime.checkpoint_files import LostItem
from autopar.runtime.ray.actor.store import Missing


class Writer:
    """Writes items on an actor.

    Args:
      write: does it (`write_item`).
    """

    def __init__(self, write: Callable[[Path, Mapping[str, np.ndarray]], None]) -> None:
        self._write_item = write
        self._outcomes: dict[str, Exception | None] = {}
        self._changed = threading.Condition()

    def begin(self, folder: str, copies: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Copy arrays, and start to write them."""
        try:
            arrays = copies()
        except Missing as error:
            self._end(folder, LostItem(str(error)))
            return
        except Exception as error:
            self._end(folder, error)
            return
        threading.Thread(target=self._write, args=(folder, arrays), daemon=True).start()

    def wait(self, folder: str) -> None:
        """Wait until an item is written; it may not even have begun.

        Raises:
          Exception: it cannot be written.
        """
        with self._changed:
            while folder not in self._outcomes:
                self._changed.wait()
            outcome = self._outcomes.pop(folder)
        if outcome is not None:
            raise outcome

    def _write(self, folder: str, arrays: Mapping[str, np.ndarray]) -> None:
        try:
            self._write_item(Path(folder), arrays)
        except Exception as error:
            self._end(folder, error)
        else:
            self._end(folder, None)

    def _end(self, folder: str, error: Exception | None) -> None:
        with self._changed:
            self._outcomes[folder] = error
            self._changed.notify_all()
