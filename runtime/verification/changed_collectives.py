"""Which pass of XLA changed a program's collectives, and how.

What JAX hands over has the plan's collectives. Where the compiled program has others, the passes
where collectives change are found by halves in its text after every pass.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.base.compiled_records import CollectiveChange
from autopar.runtime.verification.hlo_collectives import Canonical, collectives

_AFTER = re.compile(r"\.(\d{4})\.(.+)\.after_([\w.\-]+?)\.before_([\w.\-]+?)\.txt$")
TEXT_AFTER_PASSES: dict[str, Any] = {"xla_dump_hlo_pass_re": ".*"}


def before_passes(folder: Path, mesh: Sequence[int], names: Sequence[str]) -> Canonical | None:
    """The collectives of the program that XLA was given; None: it wrote none."""
    found = sorted(folder.glob("*before_optimizations.txt"), key=lambda p: p.stat().st_size)
    if not found:
        return None
    return collectives(found[-1].read_text(encoding="utf-8"), mesh, names)


def changes(
    folder: Path, mesh: Sequence[int], names: Sequence[str]
) -> tuple[CollectiveChange, ...]:
    """The passes after which a program's collectives are others than before, in their order.

    Args:
      folder: what XLA wrote with `TEXT_AFTER_PASSES`.
      mesh: the sizes of the mesh's axes.
      names: their names.
    """
    modules: dict[str, list[tuple[int, str, Path]]] = {}
    for path in folder.glob("*.txt"):
        match = _AFTER.search(path.name)
        if match:
            stem = path.name[: match.start()]
            modules.setdefault(stem, []).append((int(match[1]), match[3], path))
    if not modules:
        return ()
    # Constants and small helpers are modules of their own: the step's is the largest.
    largest = max(modules.values(), key=lambda own: max(p.stat().st_size for *_, p in own))
    steps = sorted(largest)

    @functools.cache
    def there(place: int) -> Canonical:
        return collectives(steps[place][2].read_text(encoding="utf-8"), mesh, names)

    found: list[CollectiveChange] = []

    def search(first: int, last: int) -> None:
        if first >= last or there(first) == there(last):
            return
        if last - first > 1:
            middle = (first + last) // 2
            search(first, middle)
            search(middle, last)
            return
        old, new = there(first), there(last)
        found.extend(
            CollectiveChange(steps[last][1], *key, old[key], new[key])
            for key in sorted({*old, *new})
            if old[key] != new[key]
        )

    search(0, len(steps) - 1)
    return tuple(found)
