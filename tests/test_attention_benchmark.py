"""`benchmarks/attention.py`: layers of attention, planned and compiled for CPUs."""

from __future__ import annotations

import json

import pytest
from benchmark_modules import attention


def test_forms_are_planned_and_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--lengths", "64", "--heads", "4", "--width", "16", "--sequences", "1"]
    monkeypatch.setattr("sys.argv", ["attention.py", "--target", "cpu", *sizes, "--json"])
    monkeypatch.setattr(attention, "FORMS", {"grouped": attention.grouped})
    attention.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(x["form"], x["rotary"]) for x in found["rows"]] == [
        ("grouped", False),
        ("grouped", True),
    ]
    for x in found["rows"]:
        assert x["planned_bytes"] > 0 < x["compiled_bytes"]
        assert x["ratio"] == pytest.approx(x["planned_bytes"] / x["compiled_bytes"])
