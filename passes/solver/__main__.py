"""`python -m autopar.passes.solver INSTANCE.json[.gz] [--time-limit 60] [--json]`.

Progress (seconds, cost, bound, gap) goes to standard error, the result to standard output. The exit
status is 0 with a solution, 1 if the problem is infeasible or nothing was found in time, 2 if the
input is not a valid problem.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from autopar.passes.solver.problem import Problem, ProblemError
from autopar.passes.solver.search import solve
from autopar.passes.solver.solution import Infeasible, relative_gap


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m autopar.passes.solver",
        description="Solve an instance of the intra-operator parallelism contest.",
    )
    parser.add_argument("instance", help="the contest's JSON, compressed if it ends in .gz")
    parser.add_argument(
        "--time-limit", type=float, help="seconds of wall clock, reading the file included"
    )
    parser.add_argument("--work-limit", type=float, help="deterministic work, about a second each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    options = parser.parse_args(arguments)
    for name in ("time_limit", "work_limit"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    start = time.monotonic()
    try:
        problem = Problem.load(options.instance)
    except ProblemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    time_limit = options.time_limit
    if time_limit is not None:
        time_limit = max(0.001, time_limit - (time.monotonic() - start))
    result: dict[str, Any] = {"name": problem.name, "nodes": problem.num_nodes}
    try:
        solution = solve(
            problem,
            time_limit=time_limit,
            work_limit=options.work_limit,
            seed=options.seed,
            progress=None if options.quiet else _progress,
        )
    except Infeasible as error:
        result |= {
            "status": "infeasible" if error.proven else "unknown",
            "smallest_usage": error.smallest_usage,
            "usage_lower_bound": error.lower_bound,
            "interval": error.interval,
            "usage_limit": problem.usage_limit,
        }
        print(json.dumps(result) if options.json else str(error))
        return 1
    result |= {
        "status": "optimal" if solution.cost == solution.lower_bound else "feasible",
        "cost": solution.cost,
        "lower_bound": solution.lower_bound,
        "gap": solution.gap,
        "seconds": round(time.monotonic() - start, 3),
        "stats": dict(solution.stats),
        "assignment": list(solution.assignment),
    }
    print(json.dumps(result) if options.json else str(solution))
    return 0


def _progress(cost: int | None, bound: int | None, seconds: float) -> None:
    gap = "-" if cost is None or bound is None else f"{relative_gap(cost, bound):.3%}"
    print(f"{seconds:8.2f} s  cost {cost}  bound {bound}  gap {gap}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
