"""Writes an actor's items of checkpoints.

The actor copies arrays between two steps, and a thread writes the copies while later steps run.

Where processes have joined by `jax.distributed`, Orbax (0.12.8) lets only the first one write NumPy
arrays. An actor of such a group hands its items to a child that has joined nobody. The child ends
when its standard input does, so it is gone with the actor.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import numpy as np

from autopar.base.errors import CheckpointError
from autopar.runtime.checkpoint_files import write_item


class Writer:
    """Writes items on an actor, by `write_item` or what does the same."""

    def __init__(self, write: Callable[[str, Mapping[str, np.ndarray]], None]) -> None:
        self._write_item = write
        self._outcomes: dict[str, Future[None]] = {}

    def begin(self, folder: str, copies: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Copy arrays, and start to write them."""
        outcome = self._outcomes.setdefault(folder, Future())
        try:
            arguments = (outcome, folder, copies())
        except Exception as error:
            outcome.set_exception(error)
        else:
            threading.Thread(target=self._write, args=arguments, daemon=True).start()

    def wait(self, folder: str) -> None:
        """Wait until an item is written; it may not even have begun.

        Raises:
          LostItem: an array of it was lost.
          Exception: it cannot be written.
        """
        self._outcomes.setdefault(folder, Future()).result()
        del self._outcomes[folder]

    def _write(self, outcome: Future[None], folder: str, arrays: Mapping[str, np.ndarray]) -> None:
        try:
            self._write_item(folder, arrays)
        except Exception as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)


class WriterProcess:
    """`write_item`, done by a child, which is started when it is first needed."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __call__(self, folder: str, arrays: Mapping[str, np.ndarray]) -> None:
        with self._lock:
            why = self._ask((folder, dict(arrays)))
        if why is not None:
            raise CheckpointError("A checkpoint cannot be written.", where=folder, why=why)

    def _ask(self, what: tuple[str, dict[str, np.ndarray]]) -> str | None:
        """Why it cannot be written, if so."""
        child = self._child
        if child is None or child.poll() is not None:
            self._child = child = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={
                    **os.environ,
                    "JAX_PLATFORMS": "cpu",
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            pickle.dump(what, child.stdin, protocol=5)
            child.stdin.flush()
            answer: str | None = pickle.load(child.stdout)
        except BaseException as error:
            child.kill()
            self._child, code = None, child.wait()
            if not isinstance(error, (OSError, EOFError)):
                raise
            return f"the process that was to write it ended with code {code}."
        return answer


def main() -> None:
    """Write what comes, until nothing does."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    while True:
        try:
            folder, arrays = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        why: str | None = None
        try:
            write_item(folder, arrays)
        except CheckpointError as error:
            why = f"{error.what} {error.why or ''}"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        pickle.dump(why, answers)
        answers.flush()


if __name__ == "__main__":
    main()
