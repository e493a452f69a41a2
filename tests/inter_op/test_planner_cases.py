"""Published planners' workloads: our plans keep their rules and are never worse than theirs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import planner_cases
from inter_op import planner_instances, planner_objectives

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("AUTOPAR_SHARED", ROOT.parent / "shared"))
CASES = SHARED / "planner-cases"
OBJECTIVES: dict[str, Any] = {
    "pipedream": planner_objectives.pipedream,
    "piper": planner_objectives.piper,
    "dnn-partitioning": planner_objectives.dnn_partitioning,
}
SLOW_PROFILES = ("resnet18", "gnmt")
SLOW_FILES = ("bert_l-3_inference_operators.json",)


def published_cases() -> list[Any]:
    """The cases of the shared folder, the slow ones marked; none where there is no folder."""
    path = CASES / "expected.json"
    expected = json.loads(path.read_text()) if path.exists() else {}
    parameters = []
    for planner in OBJECTIVES:
        for case in expected.get(planner.replace("-", "_"), []):
            slow = (
                len(case.get("levels_machines", [])) == 2 and case["profile"] in SLOW_PROFILES,
                case.get("devices", 8) > 8,
                case.get("file") in SLOW_FILES,
            )
            marks = [pytest.mark.full] if any(slow) else []
            parameters.append(pytest.param(planner, case, marks=marks))
    return parameters


@pytest.mark.skipif(not SHARED.exists(), reason="there is no shared folder")
def test_the_published_cases_are_there() -> None:
    planners = [parameter.values[0] for parameter in published_cases()]
    assert {planner: planners.count(planner) for planner in OBJECTIVES} == {
        "pipedream": 60,
        "piper": 21,
        "dnn-partitioning": 4,
    }


@pytest.mark.parametrize(("planner", "case"), published_cases())
def test_never_worse_than_published(planner: str, case: dict[str, Any]) -> None:
    instance = planner_cases.PLANNERS[planner].load(CASES / planner, case)
    row = planner_cases.solve(planner, instance, case)
    assert not row["worse"]
    if row["ours"] is None:
        assert row["published"] is None
    else:
        name = case.get("file") or f"{case['profile']}.json"
        raw = json.loads((CASES / planner / name).read_text())
        assert OBJECTIVES[planner](raw, case, row) == pytest.approx(row["ours"], rel=1e-9)
    if planner == "dnn-partitioning":
        # On these graphs nothing is lost by splitting in one topological order.
        assert row["topological_order"] <= row["published"] * (1 + 1e-9)


@pytest.fixture(scope="module")
def random_cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small instances, whose optima come from trying all of their plans."""
    folder = tmp_path_factory.mktemp("planner-cases")
    expected = {
        "pipedream": [
            planner_instances.pipedream(folder / "pipedream", seed, two_levels=seed % 3 == 0)
            for seed in range(12)
        ],
        "piper": [planner_instances.piper(folder / "piper", seed) for seed in range(6)],
        "dnn_partitioning": [
            planner_instances.dnn_partitioning(folder / "dnn-partitioning", seed)
            for seed in range(12)
        ],
    }
    (folder / "expected.json").write_text(json.dumps(expected))
    return folder


def test_equals_the_best_of_all_plans(
    random_cases: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["planner_cases", "--json", "--cases", str(random_cases)])
    planner_cases.main()
    *table, last = capsys.readouterr().out.splitlines()
    assert "30 cases: 0 worse than published, 0 better." in table
    rows = json.loads(last)["cases"]
    for row in rows:
        assert (row["ours"] is None) == (row["published"] is None), row
        assert row["ours"] is None or row["ratio"] == pytest.approx(1.0, rel=1e-9), row
    # Instances that nothing fits are among them, but most have a plan.
    assert 20 <= sum(row["ours"] is not None for row in rows) < 30


def test_a_folder_without_cases_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["planner_cases", "--cases", str(tmp_path)])
    with pytest.raises(SystemExit):
        planner_cases.main()
    assert "there is no expected.json" in capsys.readouterr().err
