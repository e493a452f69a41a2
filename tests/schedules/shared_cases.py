"""Where the cases lie that are shared between projects, beside the repository."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def shared_cases(name: str) -> Any:
    """The JSON file `name` of the shared schedules; skips where nothing is shared at all."""
    folder = Path(os.environ.get("AUTOPAR_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"{folder.name} is not beside the repository; AUTOPAR_SHARED can name it")
    path = folder / "schedules" / name
    if not path.is_file():
        pytest.fail(f"{folder.name} is there, but lacks schedules/{name}")
    return json.loads(path.read_text(encoding="utf-8"))
