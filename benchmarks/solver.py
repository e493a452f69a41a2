"""How good and how quick the intra-op solver is, on files, made problems and real programs.

    python benchmarks/solver.py DIRECTORY [--instances A,B] [--time-limit S | --work-limit W]
        [--plain cp-sat|highs] [--json]
    python benchmarks/solver.py --families [--time-limit S | --work-limit W] [--json]
    python benchmarks/solver.py --programs [--instances mlp,unet] [--json]

`DIRECTORY` holds `*-NAME.json.gz` and, for limits and scores, `reference.json`. Every instance is
solved by a process of its own. Without a limit each instance gets the contest's own. The score is
the best known cost divided by ours. `--plain` measures the plain OR-Tools model instead.

`--families` solves problems of the size of one stage whose memory limit binds hard (see
`solver_families.py`), `--programs` plans all programs of `tests/programs` for eight devices, with
all the memory that the plan wants and with parts of that, and states the gap of each plan.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from contest import evaluate, is_allowed, load_problem, peak_usage
from plain_model import plain
from solver_families import FAMILIES, with_limit

from autopar.passes.solver import Infeasible, Problem, Solution, solve

FAMILY_SIZES = (
    ("chain", 300, 6, 0),
    ("chain", 800, 12, 1),
    ("transformer", 400, 8, 2),
    ("transformer", 1000, 14, 3),
    ("unet", 300, 20, 4),
    ("unet", 700, 10, 5),
    ("branches", 400, 8, 6),
    ("branches", 900, 5, 7),
)
"""Family, nodes, strategies, seed."""

LIMIT_PARTS = (0.1, 0.3, 0.5, 0.8)
"""Where a limit is between the least usages and the peak of the free optimum."""

MEMORY_PARTS = (0.9, 0.7)
MEMORY_PROGRAMS = ("mlp", "linen_gpt", "unet", "moe_one_hot")
"""The parts of the memory that a free plan uses which these programs are also planned with."""


def measure(path: Path, reference: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    start, cpu = time.monotonic(), time.process_time()
    problem = load_problem(path)
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


def report_families(options: argparse.Namespace) -> None:
    """Solves made problems of 300 to 1,000 nodes at several memory limits."""
    gaps = []
    for make, nodes, strategies, seed in FAMILY_SIZES:
        free = FAMILIES[make](nodes, strategies, seed)
        peak, _ = peak_usage(free, solve(free).assignment)
        least, _ = peak_usage(
            replace(free, usages=tuple(np.full_like(u, u.min()) for u in free.usages)),
            [0] * free.num_nodes,
        )
        for part in LIMIT_PARTS:
            problem = with_limit(free, least, peak, part)
            start, cpu = time.monotonic(), time.process_time()
            solution = solve(problem, time_limit=options.time_limit, work_limit=options.work_limit)
            _verify(problem, solution)
            gaps.append(solution.gap)
            row = {
                "instance": problem.name,
                "nodes": problem.num_nodes,
                "cost": solution.cost,
                "gap": round(solution.gap, 6),
                "seconds": round(time.monotonic() - start, 2),
                "cpu_seconds": round(time.process_time() - cpu, 2),
            }
            _print(row, options)
    print(f"largest gap {max(gaps):.4%}, {gaps.count(0.0)} of {len(gaps)} zero", file=sys.stderr)


def report_programs(options: argparse.Namespace) -> None:
    """Plans every test program for eight devices, some with little memory, and states the gaps."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from programs import PROGRAMS

    import autopar
    from autopar.base.errors import MemoryLimitError

    cluster = autopar.Cluster.preset(options.cluster, devices_per_node=8)
    gaps = []
    for name, program in PROGRAMS.items():
        if options.instances and name not in options.instances.split(","):
            continue
        if missing := program.missing():
            print(f"{name}: {missing}", file=sys.stderr)
            continue
        with program.context():
            case = program.build()
            arguments = case.arguments(case.state, case.batch)
            peak: int | None = None
            for part in (None, *MEMORY_PARTS) if name in MEMORY_PROGRAMS else (None,):
                memory = None if part is None or peak is None else int(part * peak)
                chosen = case.options | {"method": "auto", "memory_limit": memory}
                cpu = time.process_time()
                row: dict[str, Any] = {"program": name, "memory": part or "all"}
                try:
                    plan = autopar.plan(
                        case.step, *arguments, cluster=cluster, **case.keywords[0], **chosen
                    )
                except MemoryLimitError as error:
                    row["error"] = error.what
                else:
                    peak = peak or plan.estimates.peak_bytes_per_device
                    assert plan.solver is not None and plan.solver.gap is not None
                    gaps.append(plan.solver.gap)
                    row |= {"nodes": plan.solver.nodes, "cost": plan.solver.cost}
                    row["gap"] = round(plan.solver.gap, 6)
                row["planning_cpu_seconds"] = round(time.process_time() - cpu, 2)
                _print(row, options)
    print(f"largest gap {max(gaps):.4%}, {gaps.count(0.0)} of {len(gaps)} zero", file=sys.stderr)


def _print(row: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(row), flush=True)
    else:
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?", help="of the contest's files")
    parser.add_argument(
        "--families", action="store_true", help="problems of one stage where memory binds hard"
    )
    parser.add_argument(
        "--programs", action="store_true", help="the test programs' problems, for eight devices"
    )
    parser.add_argument("--instances", help="comma-separated names, by default all")
    parser.add_argument(
        "--cluster", default="v100", help="the preset that programs are planned for"
    )
    parser.add_argument("--time-limit", type=float)
    parser.add_argument("--work-limit", type=float)
    parser.add_argument("--plain", choices=["cp-sat", "highs"])
    parser.add_argument("--json", action="store_true", help="one JSON object per instance")
    options = parser.parse_args()
    if options.programs:
        return report_programs(options)
    if options.families:
        return report_families(options)
    if options.directory is None:
        parser.error("name the directory of the contest's files, or --families, or --programs")
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
