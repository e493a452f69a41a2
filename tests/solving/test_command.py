"""The command on files, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_modules import contest
from solver_instances import make


def test_json_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json.gz"
    contest.save_problem(make([[3, 1], [2, 5]], {(0, 1): [[0, 0], [9, 1]]}), path)
    assert contest.main([str(path), "--time-limit", "60", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["status"] == "optimal"
    assert result["cost"] == result["lower_bound"] == 5
    assert result["assignment"] == [0, 0]
    assert "cost 5" in captured.err


def test_infeasible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    contest.save_problem(make([[3, 1]], usages=[[7, 8]], limit=5), path)
    assert contest.main([str(path), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "infeasible"
    assert result["smallest_usage"] == result["usage_lower_bound"] == 7
    assert result["interval"] == [0, 1]


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"problem": ')
    assert contest.main([str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "not valid JSON" in " ".join(captured.err.split())


@pytest.mark.parametrize("limit", ["0", "-3", "nan"])
def test_limits_must_be_positive(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        contest.main(["p.json", "--time-limit", limit])
    assert "must be positive" in capsys.readouterr().err
