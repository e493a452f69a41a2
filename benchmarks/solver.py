"""How good and how quick the intra-op solver is, on files of the contest's format.

    python benchmarks/solver.py DIRECTORY [--instances A,B] [--time-limit S | --work-limit W]
        [--plain cp-sat|highs] [--json]

`DIRECTORY` holds `*-NAME.json.gz` and, for limits and scores, `reference.json`. Every instance is
solved by a process of its own. Without a limit each instance gets the contest's own. The score is
the best known cost divided by ours. `--plain` measures the plain OR-Tools model instead.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from autopar.passes.solver import (
    Infeasible,
    Problem,
    Solution,
    evaluate,
    is_allowed,
    peak_usage,
    plain,
    solve,
)


def measure(path: Path, reference: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    start, cpu = time.monotonic(), time.process_time()
    problem = Problem.load(path)
    loaded = time.monotonic() - start
    time_limit = options.time_limit
    if time_limit is None and options.work_limit is None:
        time_limit = float(reference.get("time_limit_s", 60))
    left = None if time_limit is None else max(0.001, time_limit - loaded)
    row: dict[str, Any] = {"nodes": problem.num_nodes, "seconds_load": round(loaded, 2)}
    try:
        if options.plain:
            solution = plain(
                problem, time_limit=left, work_limit=options.work_limit, engine=options.plain
            )
        else:
            solution = solve(problem, time_limit=left, work_limit=options.work_limit)
    except Infeasible as error:
        row["error"] = error.what
    else:
        row |= {
            "cost": solution.cost,
            "lower_bound": solution.lower_bound,
            "gap": round(solution.gap, 6),
            "seconds_first": solution.stats.get("seconds_first"),
            "seconds_best": solution.stats.get("seconds_best"),
            "work": solution.stats.get("work"),
        }
        if "best_known" in reference:
            row["score"] = round(reference["best_known"] / solution.cost, 5)
        row["seconds"] = round(time.monotonic() - start, 2)
        _verify(problem, solution)
    row.setdefault("seconds", round(time.monotonic() - start, 2))
    row["cpu_seconds"] = round(time.process_time() - cpu, 2)
    row["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return row


def _verify(problem: Problem, solution: Solution) -> None:
    """Raises AssertionError if a solution is not what it says, by the plain definitions."""
    assert is_allowed(problem, solution.assignment), "the assignment is forbidden"
    assert evaluate(problem, solution.assignment) == solution.cost, "the cost is not as stated"
    limit = problem.usage_limit
    peak, interval = peak_usage(problem, solution.assignment)
    assert limit is None or peak <= limit, f"usage {peak} in {interval} exceeds {limit}"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--instances", help="comma-separated names, by default all")
    parser.add_argument("--time-limit", type=float)
    parser.add_argument("--work-limit", type=float)
    parser.add_argument("--plain", choices=["cp-sat", "highs"])
    parser.add_argument("--json", action="store_true", help="one JSON object per instance")
    options = parser.parse_args()
    references: dict[str, Any] = {}
    if (options.directory / "reference.json").exists():
        references = json.loads((options.directory / "reference.json").read_text())
    wanted = options.instances.split(",") if options.instances else None
    context = multiprocessing.get_context("spawn")
    scores: list[float] = []
    for path in sorted(options.directory.glob("*.json.gz")):
        name = path.name.removesuffix(".json.gz").rpartition("-")[2]
        if wanted is not None and name not in wanted:
            continue
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                row = pool.submit(measure, path, references.get(name, {}), options).result()
            except BrokenProcessPool:
                row = {"error": "Its process was killed: there may be too little memory."}
        if "score" in row or name in references:
            scores.append(row.get("score", 0.0))
        if options.json:
            print(json.dumps({"instance": name} | row), flush=True)
        else:
            print(name, *(f"{key}={value}" for key, value in row.items()), flush=True)
    if scores:
        mean = sum(scores) / len(scores)
        print(f"mean score {mean:.4f}, least {min(scores):.4f}", file=sys.stderr)


if __name__ == "__main__":
    main()
