"""Writes an actor's items of checkpoints.

The actor copies arrays between two steps, and a thread writes the copies while later steps run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
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
        self._outcomes: dict[str, Future[None]] = {}

    def begin(self, folder: str, copies: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Copy arrays, and start to write them."""
        outcome = self._outcomes.setdefault(folder, Future())
        try:
            arrays = copies()
        except Exception as error:
            outcome.set_exception(LostItem(str(error)) if isinstance(error, Missing) else error)
        else:
            arguments = (outcome, Path(folder), arrays)
            threading.Thread(target=self._write, args=arguments, daemon=True).start()

    def wait(self, folder: str) -> None:
        """Wait until an item is written; it may not even have begun.

        Raises:
          LostItem: an array of it was lost.
          Exception: it cannot be written.
        """
        self._outcomes.setdefault(folder, Future()).result()
        del self._outcomes[folder]

    def _write(self, outcome: Future[None], folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
        try:
            self._write_item(folder, arrays)
        except Exception as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)
