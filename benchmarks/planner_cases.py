"""The stage search on published planners' workloads, beside the optima that those planners reach.

    python benchmarks/planner_cases.py [--cases DIRECTORY] [--planner NAME] [--json]

`DIRECTORY` holds `expected.json` and the folders `pipedream`, `piper` and `dnn-partitioning`, whose
README states the objectives. Each planner is a module here that says what its stages cost and which
cuts there are; the search is the one that plans pipelines. The ratio is our cost over theirs: 1 is
equal and less is better. dnn-partitioning's branching graphs are also split in one topological
order only; "in order" is that ratio. With `--json` the last line is an object with every case, its
plan and its cost.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dnn_partitioning
import pipedream
import piper
from rich.console import Console
from rich.table import Table

CASES = Path(__file__).resolve().parents[2] / "shared" / "planner-cases"
TOLERANCE = 1e-9
"""What counts as equal, relative to the published cost."""

PLANNERS = {"pipedream": pipedream, "piper": piper, "dnn-partitioning": dnn_partitioning}


def results(directory: Path, planner: str | None = None) -> Iterator[dict[str, Any]]:
    """One row per case: what was asked, the published cost, our plan, its cost and the seconds."""
    expected = json.loads((directory / "expected.json").read_text())
    for name, module in PLANNERS.items():
        if planner not in (None, name):
            continue
        for case in expected[name.replace("-", "_")]:
            yield solve(name, module.load(directory / name, case), case)


def solve(planner: str, instance: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Our plan of one case, compared with the published one."""
    module: Any = PLANNERS[planner]
    start = time.perf_counter()
    found = module.plan(instance, case)
    seconds = time.perf_counter() - start
    published = module.published(case)
    ours = found.pop("cost")
    return {
        "planner": planner,
        "case": module.describe(case),
        "published": published,
        "ours": ours,
        "ratio": None if ours is None or published is None else ours / published,
        "worse": published is not None and (ours is None or ours > published * (1 + TOLERANCE)),
        "seconds": round(seconds, 3),
        **found,
    }


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", type=Path, default=CASES, help="default: ../shared/planner-cases"
    )
    parser.add_argument("--planner", choices=list(PLANNERS), help="by default all")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    options = parser.parse_args()
    if not (options.cases / "expected.json").exists():
        parser.error(f"there is no expected.json in {options.cases}; name its folder with --cases")
    table = Table("case", title="Slowest stage, ours and published")
    for heading in ("published", "ours", "ratio", "in order", "s"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows: list[dict[str, Any]] = []
    for row in results(options.cases, options.planner):
        if not rows or rows[-1]["planner"] != row["planner"]:
            table.add_section()
            table.add_row(f"[bold]{row['planner']}")
        rows.append(row)
        ordered = row.get("topological_order")
        table.add_row(
            row["case"],
            _cost(row["published"]),
            _cost(row["ours"]),
            "" if row["ratio"] is None else f"{row['ratio']:.9f}" + " worse" * row["worse"],
            "" if ordered is None else f"{ordered / row['published']:.6f}",
            f"{row['seconds']:.1f}",
        )
    console = Console()
    console.print(table)
    worse = sum(row["worse"] for row in rows)
    better = sum(row["ratio"] is not None and row["ratio"] < 1 - TOLERANCE for row in rows)
    console.print(f"{len(rows)} cases: {worse} worse than published, {better} better.")
    if options.json:
        print(json.dumps({"cases": rows, "worse": worse, "better": better}))


def _cost(cost: float | None) -> str:
    return "no plan" if cost is None else f"{cost:.5g}"


if __name__ == "__main__":
    main()
