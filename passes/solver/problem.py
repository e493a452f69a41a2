"""The problem: one strategy per node, costs on nodes and edges, memory over time under a limit.

This is the form in which the ASPLOS / EuroSys 2025 contest on intra-operator parallelism poses it,
and the files of that contest can be read and written. Everything here is exact: costs and usages
are 64-bit integers, sums are Python integers.
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.base.errors import AutoparError

Integers = NDArray[np.int64]

FORBIDDEN = 10**18
"""A cost of this size or more means that the strategy, or the pair of strategies, is forbidden."""


class ProblemError(AutoparError, ValueError):
    """The problem is malformed; the message names the node or edge and what is wrong with it."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose one strategy per node so that cost is least and memory stays under a limit.

    Args:
        intervals: per node, the half-open interval `[start, end)` of time in which it is alive.
            An empty interval uses no memory.
        node_costs: per node, int64 `[strategies]`.
        usages: per node, int64 `[strategies]`, not negative: what the node uses while it is alive.
        edges: pairs of node indices; the same pair may occur more than once.
        edge_costs: per edge `(u, v)`, int64 `[strategies of u, strategies of v]`.
        usage_limit: what the usages of the nodes alive at any time may add up to; None: no limit.
        name: what messages and reports call the problem.

    Raises:
        ProblemError: if lengths, shapes, indices or signs don't fit together.
    """

    intervals: tuple[tuple[int, int], ...]
    node_costs: tuple[Integers, ...]
    usages: tuple[Integers, ...]
    edges: tuple[tuple[int, int], ...]
    edge_costs: tuple[Integers, ...]
    usage_limit: int | None = None
    name: str = "problem"

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def num_nodes(self) -> int:
        return len(self.node_costs)

    def __str__(self) -> str:
        strategies = sum(len(costs) for costs in self.node_costs)
        return (
            f"{self.name}: {self.num_nodes} nodes, {strategies} strategies, "
            f"{len(self.edges)} edges, usage limit {self.usage_limit}"
        )

    @staticmethod
    def load(path: str | Path) -> Problem:
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
        return Problem.from_json(document)

    def save(self, path: str | Path) -> None:
        """Writes the contest's JSON, compressed if the name ends in `.gz`."""
        path = Path(path)
        data = json.dumps(self.to_json()).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

    @staticmethod
    def from_json(document: Any) -> Problem:
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
            raise ProblemError(_uneven(len(costs), len(intervals), len(usages)))
        edges = _member(body, "edges", dict, "problem") if "edges" in body else {}
        edge_nodes = _member(edges, "nodes", list, "problem.edges") if edges else []
        edge_costs = _member(edges, "costs", list, "problem.edges") if edges else []
        limit = body.get("usage_limit")
        if limit is not None:
            limit = _integer(limit, "problem.usage_limit")
        if len(edge_nodes) != len(edge_costs):
            raise ProblemError(
                f"problem.edges has {len(edge_nodes)} entries in nodes "
                f"and {len(edge_costs)} in costs"
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
                    f"edge {e}: {flat.size} costs for nodes of {' x '.join(map(str, shape))} "
                    "strategies"
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

    def to_json(self) -> dict[str, Any]:
        """The contest's JSON document."""
        body: dict[str, Any] = {
            "name": self.name,
            "nodes": {
                "intervals": [list(interval) for interval in self.intervals],
                "costs": [costs.tolist() for costs in self.node_costs],
                "usages": [usage.tolist() for usage in self.usages],
            },
            "edges": {
                "nodes": [list(edge) for edge in self.edges],
                "costs": [matrix.ravel().tolist() for matrix in self.edge_costs],
            },
        }
        if self.usage_limit is not None:
            body["usage_limit"] = self.usage_limit
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


def _validate(problem: Problem) -> None:
    count = problem.num_nodes
    if len(problem.intervals) != count or len(problem.usages) != count:
        raise ProblemError(_uneven(count, len(problem.intervals), len(problem.usages)))
    if len(problem.edges) != len(problem.edge_costs):
        raise ProblemError(
            f"{len(problem.edges)} edges, but costs for {len(problem.edge_costs)} of them"
        )
    for i in range(count):
        costs, usage, interval = problem.node_costs[i], problem.usages[i], problem.intervals[i]
        if costs.ndim != 1 or costs.size == 0:
            raise ProblemError(f"node {i} has no strategies: its costs have shape {costs.shape}")
        if usage.shape != costs.shape:
            raise ProblemError(f"node {i}: {costs.size} costs but usages of shape {usage.shape}")
        if costs.dtype != np.int64 or usage.dtype != np.int64:
            raise ProblemError(
                f"node {i}: costs and usages must be int64 arrays, "
                f"they are {costs.dtype} and {usage.dtype}"
            )
        if usage.min() < 0:
            raise ProblemError(f"node {i}: a usage is negative ({usage.min()})")
        if costs.min() <= -FORBIDDEN:
            raise ProblemError(f"node {i}: the cost {costs.min()} is out of range")
        if interval[0] > interval[1]:
            raise ProblemError(f"node {i}: its interval {interval} ends before it starts")
        if interval[0] < -(2**63) or interval[1] >= 2**63:
            raise ProblemError(f"node {i}: its interval {interval} does not fit into 64 bits")
    for e, ((u, v), matrix) in enumerate(zip(problem.edges, problem.edge_costs, strict=True)):
        for end in (u, v):
            if not 0 <= end < count:
                raise ProblemError(f"edge {e}: there is no node {end}")
        shape = (len(problem.node_costs[u]), len(problem.node_costs[v]))
        if matrix.shape != shape:
            raise ProblemError(f"edge {e}: costs of shape {matrix.shape}, expected {shape}")
        if matrix.dtype != np.int64:
            raise ProblemError(f"edge {e}: costs must be an int64 array, it is {matrix.dtype}")
        if matrix.min() <= -FORBIDDEN:
            raise ProblemError(f"edge {e}: the cost {matrix.min()} is out of range")
    if problem.usage_limit is not None and problem.usage_limit < 0:
        raise ProblemError(f"the usage limit is negative ({problem.usage_limit})")


def _uneven(costs: int, intervals: int, usages: int) -> str:
    return (
        f"{costs} nodes have costs, {intervals} have intervals and {usages} have usages: "
        "the three must be as many"
    )


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
