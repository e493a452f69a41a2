"""Arrays on actors become items of a checkpoint: each actor writes its own, all in parallel."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from autopar.arrays.ray_array import RayArray
from autopar.base.errors import CheckpointError
from autopar.runtime.checkpoint_files import LostItem, StoredPiece
from autopar.runtime.ray.driver.resident_arrays import ResidentArrays


class Saving:
    """So many arrays on their way into a checkpoint's folder, as items whose names begin so.

    Attributes:
      tries: how often they were sent.
      pieces: for every array, its parts, known when it was sent.
    """

    def __init__(self, folder: Any, label: str, arrays: int) -> None:
        self.folder, self._label, self.is_done = folder, label, False
        self.pieces: list[tuple[StoredPiece, ...]] = [()] * arrays
        self.tries = 0
        self._refs: list[Any] = []
        self._lock = threading.Lock()  # whoever waits is another thread than whoever sends

    def send(self, resident: ResidentArrays, arrays: Sequence[RayArray], num_actors: int) -> None:
        """Tell the actors to copy and write their parts; again, unless that was done."""
        with self._lock:
            if self.is_done:
                return
            names = [f"{self._label}_actor_{n}_try_{self.tries}" for n in range(num_actors)]
            items: list[list[tuple[str, int, Any]]] = [[] for _ in names]
            found = []
            for index, array in enumerate(arrays):
                pieces: list[StoredPiece] = []
                starts = (0, *array.sharding.ends)  # of its parts, along one dimension
                for part, first in zip(array.residents, starts, strict=False):
                    for actor, box in resident.sources(part) if array.size else ():
                        item, name = names[actor], f"{index}.{len(pieces)}"
                        items[actor].append((name, part.key, box))
                        start = [0 if box is None else box[dim][0] for dim in range(array.ndim)]
                        if array.sharding.ends:
                            start[array.sharding.axis] += first
                        pieces.append(StoredPiece(item, name, tuple(start)))
                found.append(tuple(pieces))
            folders = [str(self.folder / name) for name in names]
            self._refs, self.pieces = resident.save(folders, items), found
            self.tries += 1

    def is_settled(self) -> bool:
        """Whether it was written, or never can be; does not wait."""
        if self._refs and ray.wait(self._refs, num_returns=len(self._refs), timeout=0)[1]:
            return False
        try:
            self.wait(0)
        except LostItem:
            return False
        except CheckpointError:
            pass
        return True

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all is written, at most so many seconds; None: as long as it takes.

        Raises:
          LostItem: an actor or an array was lost, or the time is over; they may be sent again.
          CheckpointError: something cannot be written.
        """
        while not self.is_done:
            refs = self._refs
            try:
                ray.get(refs, timeout=seconds)
            except (RayActorError, RayTaskError, GetTimeoutError) as error:
                if refs is self._refs:
                    self._fail(error)
            else:
                with self._lock:
                    self.is_done = refs is self._refs

    def _fail(self, error: RayError) -> None:
        cause = error.cause if isinstance(error, RayTaskError) else None
        if cause is None or isinstance(cause, LostItem):
            raise LostItem from error
        if isinstance(cause, CheckpointError):
            raise cause from None
        raise CheckpointError(
            "A checkpoint cannot be written.",
            where=str(self.folder),
            why=f"{type(cause).__name__}: {cause}",
        ) from error
