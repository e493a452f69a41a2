"""Files that are written for the user."""

from __future__ import annotations

import os
from pathlib import Path


def place_for(path: str | os.PathLike[str]) -> Path:
    """The path of a file that is to be written, in a folder that is there by now."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target
