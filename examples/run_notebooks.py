"""Runs the notebooks of this folder from top to bottom, and keeps what they show.

    python examples/run_notebooks.py                    all of them, in some minutes
    python examples/run_notebooks.py first_steps        those with this in their names

It needs `pip install 'autopar[examples,notebook]'`.
"""

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def run(path: Path) -> None:
    """Execute a notebook in a new process, and write it without what differs from run to run."""
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(HERE)}}
    NotebookClient(notebook, timeout=600, coalesce_streams=True, resources=place).execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
        for output in cell.get("outputs", ()):
            output["metadata"] = {}
            for kind, data in output.get("data", {}).items():
                if isinstance(data, str) and kind.startswith("text/"):
                    output["data"][kind] = re.sub(r" at 0x[0-9a-f]+", "", data)
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, path)


if __name__ == "__main__":
    wanted = sys.argv[1:] or [""]
    notebooks = sorted(HERE.glob("*.ipynb"))
    for name in wanted:
        if not any(name in path.name for path in notebooks):
            known = ", ".join(path.stem for path in notebooks)
            sys.exit(f"There is no notebook {name!r}: there are {known}.")
    for path in notebooks:
        if any(name in path.name for name in wanted):
            print(path.name, flush=True)
            run(path)
