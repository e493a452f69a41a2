"""The solver's command on files of the ASPLOS / EuroSys 2025 contest; how they are read and scored.

    python benchmarks/contest.py INSTANCE.json[.gz] [--time-limit 60] [--json]

Progress (seconds, cost, bound, gap) goes to standard error, the result to standard output. The exit
status is 0 with a solution, 1 if the problem is infeasible or nothing was found in time, 2 if the
input is not a valid problem.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopar.passes.solver import FORBIDDEN, Infeasible, Problem, ProblemError, solve
from autopar.passes.solver.problem import Integers
from autopar.passes.solver.solution import relative_gap


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/contest.py",
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
        problem = load_problem(options.instance)
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


def load_problem(path: str | Path) -> Problem:
    """Reads the contest's JSON, compressed if the name ends in `.gz`."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProblemError(f"cannot read {path}: {error.strerror}") from error
    try:
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        document = json.loads(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ProblemError(f"{path} is not a complete gzip file: {error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ProblemError(f"{path} is not valid JSON: {error}") from error
    return problem_from_json(document)


def save_problem(problem: Problem, path: str | Path) -> None:
    """Writes the contest's JSON, compressed if the name ends in `.gz`."""
    path = Path(path)
    data = json.dumps(problem_to_json(problem)).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def problem_from_json(document: Any) -> Problem:
    """Builds a problem from the contest's JSON document.

    An edge of a single node is added to that node's costs; edges of three or more nodes are
    refused.
    """
    body = _member(document, "problem", dict, "the document")
    nodes = _member(body, "nodes", dict, "problem")
    intervals = _member(nodes, "intervals", list, "problem.nodes")
    costs = _member(nodes, "costs", list, "problem.nodes")
    usages = _member(nodes, "usages", list, "problem.nodes")
    if not len(intervals) == len(costs) == len(usages):
        raise ProblemError(
            f"{len(costs)} nodes have costs, {len(intervals)} have intervals and {len(usages)} "
            "have usages: the three must be as many"
        )
    edges = _member(body, "edges", dict, "problem") if "edges" in body else {}
    edge_nodes = _member(edges, "nodes", list, "problem.edges") if edges else []
    edge_costs = _member(edges, "costs", list, "problem.edges") if edges else []
    limit = body.get("usage_limit")
    if limit is not None:
        limit = _integer(limit, "problem.usage_limit")
    if len(edge_nodes) != len(edge_costs):
        raise ProblemError(
            f"problem.edges has {len(edge_nodes)} entries in nodes and {len(edge_costs)} in costs"
        )
    node_costs = [_integers(c, f"costs of node {i}") for i, c in enumerate(costs)]
    for i, array in enumerate(node_costs):
        if not array.size:
            raise ProblemError(f"node {i} has no strategies: its list of costs is empty")
    pairs: list[tuple[int, int]] = []
    matrices: list[Integers] = []
    for e, (ends, entries) in enumerate(zip(edge_nodes, edge_costs, strict=True)):
        if not isinstance(ends, list) or not 1 <= len(ends) <= 2:
            raise ProblemError(f"edge {e}: expected one or two node indices, got {ends!r}")
        ends = [_integer(end, f"edge {e}") for end in ends]
        for end in ends:
            if not 0 <= end < len(costs):
                raise ProblemError(f"edge {e}: there is no node {end}")
        flat = _integers(entries, f"costs of edge {e}")
        shape = tuple(len(node_costs[end]) for end in ends)
        if flat.size != np.prod(shape, dtype=np.int64):
            raise ProblemError(
                f"edge {e}: {flat.size} costs for nodes of {' x '.join(map(str, shape))} strategies"
            )
        if len(ends) == 1:
            node_costs[ends[0]] = np.minimum(node_costs[ends[0]], FORBIDDEN) + np.minimum(
                flat, FORBIDDEN
            )
        else:
            pairs.append((ends[0], ends[1]))
            matrices.append(flat.reshape(shape))
    return Problem(
        intervals=tuple(_interval(i, n) for n, i in enumerate(intervals)),
        node_costs=tuple(node_costs),
        usages=tuple(_integers(u, f"usages of node {i}") for i, u in enumerate(usages)),
        edges=tuple(pairs),
        edge_costs=tuple(matrices),
        usage_limit=limit,
        name=str(body.get("name", "problem")),
    )


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """The contest's JSON document."""
    body: dict[str, Any] = {
        "name": problem.name,
        "nodes": {
            "intervals": [list(interval) for interval in problem.intervals],
            "costs": [costs.tolist() for costs in problem.node_costs],
            "usages": [usage.tolist() for usage in problem.usages],
        },
        "edges": {
            "nodes": [list(edge) for edge in problem.edges],
            "costs": [matrix.ravel().tolist() for matrix in problem.edge_costs],
        },
    }
    if problem.usage_limit is not None:
        body["usage_limit"] = problem.usage_limit
    return {"problem": body}


def evaluate(problem: Problem, assignment: Sequence[int]) -> int:
    """The exact cost of an assignment: the chosen node and edge costs, forbidden ones included."""
    cost = sum(int(c[s]) for c, s in zip(problem.node_costs, assignment, strict=True))
    for (u, v), matrix in zip(problem.edges, problem.edge_costs, strict=True):
        cost += int(matrix[assignment[u], assignment[v]])
    return cost


def is_allowed(problem: Problem, assignment: Sequence[int]) -> bool:
    """Whether an assignment chooses no forbidden strategy and no forbidden pair."""
    return all(
        c[s] < FORBIDDEN for c, s in zip(problem.node_costs, assignment, strict=True)
    ) and all(
        matrix[assignment[u], assignment[v]] < FORBIDDEN
        for (u, v), matrix in zip(problem.edges, problem.edge_costs, strict=True)
    )


def peak_usage(problem: Problem, assignment: Sequence[int]) -> tuple[int, tuple[int, int]]:
    """The largest total usage over time, and the first interval in which it is reached."""
    changes: dict[int, int] = {}
    for (start, end), usage, strategy in zip(
        problem.intervals, problem.usages, assignment, strict=True
    ):
        if start < end:
            changes[start] = changes.get(start, 0) + int(usage[strategy])
            changes[end] = changes.get(end, 0) - int(usage[strategy])
    times = sorted(changes)
    peak, where, total = 0, (0, 0), 0
    for start, end in itertools.pairwise(times):
        total += changes[start]
        if total > peak:
            peak, where = total, (start, end)
    return peak, where


def _member(value: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(value, dict) or key not in value:
        raise ProblemError(f"{where} has no member {key!r}")
    if not isinstance(value[key], kind):
        raise ProblemError(
            f"{where}.{key} must be a JSON {'object' if kind is dict else 'array'}, "
            f"it is {type(value[key]).__name__}"
        )
    return value[key]


def _integer(value: Any, where: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ProblemError(f"{where}: expected an integer, got {value!r}")
    return value


def _interval(value: Any, node: int) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ProblemError(f"interval of node {node}: expected [start, end], got {value!r}")
    start, end = (_integer(time, f"interval of node {node}") for time in value)
    return start, end


def _integers(values: Any, where: str) -> Integers:
    """An int64 array of a JSON list; costs beyond int64 become `FORBIDDEN`."""
    if not isinstance(values, list):
        raise ProblemError(f"{where}: expected a list of integers, got {values!r}")
    if not all(type(value) is int for value in values):
        values = [_integer(value, where) for value in values]
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        if where.startswith("usages") or min(values) < -FORBIDDEN:
            raise ProblemError(f"{where}: a value does not fit into 64 bits") from None
        return np.array([min(value, FORBIDDEN) for value in values], dtype=np.int64)


if __name__ == "__main__":
    sys.exit(main())
