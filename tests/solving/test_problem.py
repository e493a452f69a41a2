"""The problem type: evaluation by hand, files, and one clear error for each kind of bad input."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_modules import contest, evaluate, is_allowed, peak_usage
from hypothesis import given, settings
from solver_instances import make, problems

from autopar.base.errors import AutoparError
from autopar.passes.solver import FORBIDDEN, Problem, ProblemError, solve

DOCUMENT: dict[str, Any] = {
    "problem": {
        "name": "small",
        "nodes": {
            "intervals": [[0, 4], [2, 6], [5, 9]],
            "costs": [[1, 2], [10, 20, 30], [7]],
            "usages": [[5, 3], [4, 2, 1], [6]],
        },
        "edges": {"nodes": [[0, 1], [2, 1]], "costs": [[1, 2, 3, 4, 5, 6], [9, 8, 7]]},
        "usage_limit": 8,
    }
}


def test_costs_and_peak_of_a_problem_computed_by_hand() -> None:
    problem = contest.problem_from_json(DOCUMENT)
    assert evaluate(problem, (0, 0, 0)) == (1 + 10 + 7) + 1 + 9
    assert evaluate(problem, (1, 2, 0)) == (2 + 30 + 7) + 6 + 7
    assert peak_usage(problem, (0, 0, 0)) == (10, (5, 6))
    assert peak_usage(problem, (0, 2, 0)) == (7, (5, 6))
    assert is_allowed(problem, (1, 2, 0))


def test_sums_are_exact_beyond_64_bits() -> None:
    large = 2**62
    problem = make([[large], [large]], {(0, 1): [[large]]})
    assert evaluate(problem, (0, 0)) == 3 * 2**62
    assert not is_allowed(problem, (0, 0))


def test_an_empty_interval_uses_nothing() -> None:
    problem = make([[0]], usages=[[5]], intervals=[(3, 3)])
    assert peak_usage(problem, (0,)) == (0, (0, 0))


@settings(max_examples=30, deadline=None)
@given(problem=problems())
def test_json_round_trip(problem: Problem) -> None:
    again = contest.problem_from_json(json.loads(json.dumps(contest.problem_to_json(problem))))
    assert again.intervals == problem.intervals
    assert again.edges == problem.edges
    assert again.usage_limit == problem.usage_limit
    for mine, theirs in zip(
        problem.node_costs + problem.usages + problem.edge_costs,
        again.node_costs + again.usages + again.edge_costs,
        strict=True,
    ):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_files(tmp_path: Path, name: str) -> None:
    problem = contest.problem_from_json(DOCUMENT)
    contest.save_problem(problem, tmp_path / name)
    assert contest.problem_to_json(contest.load_problem(tmp_path / name)) == DOCUMENT


def test_an_edge_of_one_node_is_a_node_cost() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["problem"]["edges"] = {"nodes": [[0]], "costs": [[100, FORBIDDEN]]}
    problem = contest.problem_from_json(document)
    assert problem.edges == ()
    assert problem.node_costs[0].tolist() == [101, FORBIDDEN + 2]


def test_costs_beyond_64_bits_are_forbidden() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["problem"]["nodes"]["costs"][0][1] = 10**30
    assert contest.problem_from_json(document).node_costs[0].tolist() == [1, FORBIDDEN]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["nodes"], None, "problem.nodes must be a JSON object"),
        (["nodes", "costs"], 3, "problem.nodes.costs must be a JSON array"),
        (["nodes", "costs"], [[1, 2], [10, 20, 30]], "costs, 3 have intervals"),
        (["nodes", "costs", 2], [], "node 2 has no strategies"),
        (["nodes", "costs", 2], ["x"], "expected an integer, got 'x'"),
        (["nodes", "costs", 2], [float("nan")], "expected an integer, got nan"),
        (["nodes", "costs", 2], [1.5], "expected an integer, got 1.5"),
        (["nodes", "costs", 2], [-(10**18)], "out of range"),
        (["nodes", "costs", 2], [-(10**30)], "does not fit into 64 bits"),
        (["nodes", "usages", 1], [4, 2], "node 1: 3 costs but usages"),
        (["nodes", "usages", 1, 0], -4, "a usage is negative"),
        (["nodes", "usages", 1, 0], 10**30, "does not fit into 64 bits"),
        (["nodes", "intervals", 1], [6, 2], "ends before it starts"),
        (["nodes", "intervals", 1], [2, 10**30], "does not fit into 64 bits"),
        (["nodes", "intervals", 1], [6], "expected [start, end]"),
        (["edges", "nodes", 0], [0, 3], "edge 0: there is no node 3"),
        (["edges", "nodes", 0], [0, -1], "edge 0: there is no node -1"),
        (["edges", "nodes", 0], [0, 1, 2], "expected one or two node indices"),
        (["edges", "nodes"], [[0, 1]], "1 entries in nodes and 2 in costs"),
        (["edges", "costs", 1], [9, 8], "edge 1: 2 costs for nodes of 1 x 3 strategies"),
        (["usage_limit"], -1, "the usage limit is negative"),
        (["usage_limit"], True, "expected an integer, got True"),
    ],
)
def test_bad_documents(path: list[Any], value: Any, message: str) -> None:
    document = copy.deepcopy(DOCUMENT)
    target = document["problem"]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ProblemError) as caught:
        contest.problem_from_json(document)
    assert message in " ".join(str(caught.value).split())


@pytest.mark.parametrize(
    ("document", "message"),
    [([], "the document has no member 'problem'"), ({"problem": {}}, "no member 'nodes'")],
)
def test_documents_of_another_kind(document: Any, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        contest.problem_from_json(document)


def test_broken_files(tmp_path: Path) -> None:
    data = json.dumps(DOCUMENT).encode()
    (tmp_path / "cut.json").write_bytes(data[:-20])
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(data)[:-20])
    (tmp_path / "plain.json.gz").write_bytes(data)
    with pytest.raises(ProblemError, match=r"not\s+valid\s+JSON"):
        contest.load_problem(tmp_path / "cut.json")
    with pytest.raises(ProblemError, match=r"not\s+a\s+complete\s+gzip\s+file"):
        contest.load_problem(tmp_path / "cut.json.gz")
    with pytest.raises(ProblemError, match=r"not\s+a\s+complete\s+gzip\s+file"):
        contest.load_problem(tmp_path / "plain.json.gz")
    with pytest.raises(ProblemError, match=r"No\s+such\s+file"):
        contest.load_problem(tmp_path / "none.json")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400"])
def test_numbers_that_json_writers_make_up(tmp_path: Path, value: str) -> None:
    text = json.dumps(DOCUMENT).replace("[1, 2]", f"[1, {value}]", 1)
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ProblemError, match="expected an integer"):
        contest.load_problem(tmp_path / "p.json")


def test_arrays_of_other_types_are_refused() -> None:
    with pytest.raises(ProblemError, match="int64"):
        Problem(((0, 1),), (np.array([1.0]),), (np.array([0]),), (), ())
    assert issubclass(ProblemError, AutoparError)


def test_a_limit_beyond_64_bits_limits_nothing() -> None:
    problem = make([[3, 1]], usages=[[1, 2]], limit=10**30)
    assert solve(problem).assignment == (1,)


def test_a_limit_of_zero_is_valid() -> None:
    assert make([[1]], limit=0).usage_limit == 0
