"""What actors do with the memory that they free."""

import json
import os
import platform
import subprocess
import sys

import pytest

FREES = """
import json, resource, sys
import numpy as np
from autopar.runtime.ray.actor.stage_actor import give_back, keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory()
found = []
for size in (40 << 20,) * 8:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(size, np.uint8)
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
give_back()
print(json.dumps(found))
"""


def faults(*how: str, **environment: str) -> list[int]:
    """Page faults of each of eight arrays of 40 MiB, which live one after the other."""
    run = subprocess.run(
        [sys.executable, "-c", FREES, *how],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    found: list[int] = json.loads(run.stdout)
    return found


LIBRARY, VERSION = platform.libc_ver()
KEEPS = LIBRARY == "glibc" and int(VERSION.split(".")[1]) >= 35


@pytest.mark.skipif(not KEEPS, reason="this C library always gives back 40 MiB")
def test_freed_memory_is_used_again() -> None:
    pages = (40 << 20) // os.sysconf("SC_PAGESIZE")
    kept = faults("keep")
    assert 10 < kept[0] < pages + 1000  # few where pages are huge
    assert sum(kept[4:]) < kept[0] / 10


def test_whoever_configures_malloc_has_the_last_word() -> None:
    configured = faults("keep", MALLOC_MMAP_THRESHOLD_=str(1 << 20))
    assert min(configured[4:]) > 10
