"""What was compiled once, by content: findings in a folder, one file each."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from autopar.base.compiled_records import ProgramFinding
from autopar.base.records import dump_json
from autopar.base.version import __version__

FORM = 4
"""Rises when something else is read from compiled programs, so that older findings are none."""


def default_folder() -> Path:
    """Where findings are kept: in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "autopar" / "verified"


class KnownFindings:
    """Findings by the digest of the program and of its compiler.

    Args:
      folder: where they are kept from one process to the next; None: nowhere.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.own: dict[str, ProgramFinding] = {}

    def digest(self, program: str, compiler: str) -> str:
        """The name of a program's finding: of its text, its compiler and this release."""
        text = f"{__version__} {FORM}\n{compiler}\n{program}"
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, digest: str) -> ProgramFinding | None:
        """What is known of a program; a file that cannot be read is none."""
        if digest in self.own:
            return self.own[digest]
        if self.folder is None:
            return None
        try:
            text = (self.folder / f"{digest}.json").read_text(encoding="utf-8")
            return ProgramFinding.from_dict(json.loads(text))
        except (OSError, ValueError, TypeError):
            return None

    def add(self, digest: str, finding: ProgramFinding) -> None:
        """Keep a finding; what failed may not fail the next time, and is not kept in the folder."""
        self.own[digest] = finding
        if self.folder is None or finding.failure:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.folder / f".{digest}.{os.getpid()}.partial"
            partial.write_text(dump_json(finding.to_dict()), encoding="utf-8")
            partial.replace(self.folder / f"{digest}.json")
        except OSError:  # a folder that cannot be written: it is compiled again next time
            return
