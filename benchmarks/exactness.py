"""How far a parallelized step is from plain `jax.jit` over three steps, and how it was certified.

    python benchmarks/exactness.py --method zero2 --microbatches 4 --json
    python benchmarks/exactness.py --programs mlp linen_gpt

For every real program of the tests: the largest difference of any output or state leaf, in units
of the largest magnitude in that leaf, and how the outputs are put together from the microbatches.
The last line is a JSON object with `--json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autopar
from autopar.base.errors import InexactMicrobatchError


def measure(program: Any, method: str, microbatches: int) -> dict[str, Any]:
    """One program's largest relative difference, or why it was refused."""
    from programs import compare

    reason = program.missing()
    if reason:
        return {"program": program.name, "skipped": reason}
    with program.context():
        case = program.build()
        try:
            step = autopar.compile(
                case.step,
                *case.arguments(case.state, case.batch),
                method=method,
                microbatches=microbatches,
                **case.options,
                **case.keywords[0],
            )
        except InexactMicrobatchError as error:
            return {"program": program.name, "refused": error.what, "where": error.where}
        plain = compare.record(case.plain, case)
        found = compare.largest_relative_difference(plain, step, case, program.tolerance)
    return {
        "program": program.name,
        "relative": found.relative,
        "path": found.path,
        "certificate": dict(sorted(Counter(c.how for c in step.plan.certificate).items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="zero2")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--programs", nargs="+", help="names; all by default")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from programs import PROGRAMS

    names = options.programs or list(PROGRAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [
            measure(PROGRAMS[name], options.method, options.microbatches)
            for name in track(names, console=Console(stderr=True))
        ]
    title = f"{options.method}, {options.microbatches} microbatches, {options.devices} devices"
    table = Table("program", "largest relative difference", "in", "certificate", title=title)
    for row in results:
        if "relative" in row:
            how = ", ".join(f"{count} {name}" for name, count in row["certificate"].items())
            table.add_row(row["program"], f"{row['relative']:.1e}", row["path"], how)
        else:
            what = (
                "refused: " + row["refused"] if "refused" in row else "skipped: " + row["skipped"]
            )
            table.add_row(row["program"], "", "", what)
    Console(width=max(Console().width, 110)).print(table)
    if options.json:
        print(
            json.dumps(
                {
                    "benchmark": "exactness",
                    "method": options.method,
                    "microbatches": options.microbatches,
                    "results": results,
                }
            )
        )


if __name__ == "__main__":
    main()
