"""`autopar` and `python -m autopar`: the command, or what to install for it."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Runs the command with the arguments of this process."""
    if importlib.util.find_spec("typer") is None:
        sys.exit(
            "The autopar command needs Typer.\n"
            f"  try:   {sys.executable} -m pip install 'autopar[cli]'"
        )
    from autopar.commands import app

    app(prog_name="autopar")


if __name__ == "__main__":
    main()
