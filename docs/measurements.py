"""Writes docs/measurements.md from docs/measurements.toml, or runs the commands again.

    python docs/measurements.py                     writes the page
    python docs/measurements.py --run overhead      runs the commands that have this in them

What a command prints goes to runs/measured/, with the date and the machine. A figure is changed in
the file by hand, with that in sight.
"""

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

SECTIONS = {
    "planning": "How long planning takes",
    "steps": "Steps and calls, beside plain JAX",
    "exactness": "Numbers, beside plain JAX",
    "memory": "Memory, planned and compiled",
    "pipelines": "Pipelines",
    "ray": "Under Ray",
    "gpu": "On a GPU",
    "model": "The cost model",
}

HEAD = """# Measurements

Every figure stands with its command, its date and the version that it was measured with. It was
measured on two cores with other work on them and eight virtual CPU devices (on a GPU, with 16
cores); run the commands to get your own, in a clone of the repository, in the environment that
`make test` makes. The date is that on which the figure was written down.
`python docs/measurements.py --run NAME` runs commands again, and keeps what they print.

The rows of `overhead.py` and `pipeline.py` are older than the computation of products as products
of matrices, which makes steps on CPUs quicker; those of `compilers.py` and `memory.py` are older
than the account of memory by the rules of XLA's compilers.
"""

TAIL = """## The solver

[The solver, measured](solver.md) has the instances of a public contest, and problems of one stage
with little memory.
"""


def figures() -> list[dict[str, Any]]:
    """All that was measured, in the order of the file."""
    made: list[dict[str, Any]] = tomllib.loads((HERE / "measurements.toml").read_text())["figure"]
    return made


def page(measured: Sequence[dict[str, Any]]) -> str:
    """The page, as Markdown."""
    parts = [HEAD]
    for section, title in SECTIONS.items():
        rows = [each for each in measured if each["section"] == section]
        if not rows:
            continue
        lines = [f"## {title}", "", "| what | result | when |", "|---|---|---|"]
        for each in rows:
            command = f"`{each['command']}` {each.get('note', '')}".strip()
            when = f"{each['date']}<br>{each['version']}"
            lines.append(f"| {each['what']}<br>{command} | {each['result']} | {when} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, TAIL])


def run_again(name: str) -> None:
    """Run the commands with this name in them, one after the other."""
    out = ROOT / "runs" / "measured"
    out.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(figures()):
        if name not in each["command"]:
            continue
        print(each["command"], flush=True)
        command = [sys.executable, *shlex.split(each["command"])[1:]]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        head = f"{each['command']}\n{now}, {platform.machine()}, {os.cpu_count()} cores\n\n"
        file = out / f"{number:02}.txt"
        file.write_text(head + done.stdout + done.stderr)
        print(f"exit code {done.returncode}; {file.relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", metavar="NAME", help="run these commands again")
    asked = parser.parse_args()
    if asked.run:
        run_again(asked.run)
    else:
        (HERE / "measurements.md").write_text(page(figures()))
