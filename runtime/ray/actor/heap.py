"""How an actor's process handles the memory that XLA's CPU client frees."""

from __future__ import annotations

import contextlib
import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_KEPT = (1 << 31) - 1
_MMAP_THRESHOLDS = _KEPT, 32 << 20  # glibc before 2.35 refuses more than 32 MiB


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next allocation, rather than give it back.

    What one piece leaves to the next (activations, gradients) is of the same size in every
    microbatch. Given back, it is mapped and cleared anew each time: of a GPT of 12 layers, some
    80,000 page faults in a step, which took a tenth of its CPU time. An arena keeps up to 2 GiB at
    its end; outside the main thread, blocks of more than 64 MiB are given back all the same. Other
    C libraries do as they like, and so does glibc where it is configured (`MALLOC_*`,
    `GLIBC_TUNABLES`).
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # The second alone would keep the first from growing by itself.
        if any(mallopt(_MMAP_THRESHOLD, bytes_) for bytes_ in _MMAP_THRESHOLDS):
            mallopt(_TRIM_THRESHOLD, _KEPT)


def give_back() -> None:
    """Return what is free now, such as what compiling took."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
