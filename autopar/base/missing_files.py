"""What to say of a file that is not there: what its folder has, and what was meant."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from autopar.base.errors import MissingClusterError, MissingPlanError, did_you_mean

_SHOWN = 5
_TIMELINES = ".trace.json"


def missing_plan(path: Path) -> MissingPlanError:
    """The error for a plan's file that is not there."""
    why, hint = _looked_for(path, (".json",), ".json file")
    hint = hint or "plan.save(path) writes one, autopar.plan(...) makes a plan."
    return MissingPlanError(f"There is no plan file {os.fspath(path)!r}.", why=why, hint=hint)


def missing_cluster(path: Path) -> MissingClusterError:
    """The error for a cluster's file that is not there."""
    why, hint = _looked_for(path, (".toml", ".json"), ".toml or .json file")
    hint = hint or (
        "autopar calibrate -o FILE measures the devices that are here, cluster.save(FILE) writes "
        'one; names such as "8x8 h100" need no file.'
    )
    return MissingClusterError(f"There is no cluster file {os.fspath(path)!r}.", why=why, hint=hint)


def _looked_for(path: Path, endings: Sequence[str], what: str) -> tuple[str, str | None]:
    """Why there is no such file, and which one may be meant."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {os.fspath(folder)!r}.", None
    names = sorted(
        file.name
        for file in folder.iterdir()
        if file.suffix in endings and not file.name.endswith(_TIMELINES)
    )
    shown = ", ".join(names[:_SHOWN]) + ", .." * (len(names) > _SHOWN)
    has = f"has {shown}" if names else f"has no {what} at all"
    return f"{os.fspath(folder)!r} {has}.", did_you_mean(path.name, names)
