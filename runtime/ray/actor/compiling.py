"""Actors of one machine compile the same program once: the others find it in JAX's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def in_turn(text: str) -> Iterator[None]:
    """Wait while another process compiles a program of this text into the same cache folder.

    The lock is a file's, so that it ends with the process that has it. Without a folder on this
    machine nobody waits.
    """
    folder = str(jax.config.jax_compilation_cache_dir or "")  # type: ignore[attr-defined]
    if not os.path.isdir(folder):
        yield
        return
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    with open(os.path.join(folder, f"{name}.turn"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
