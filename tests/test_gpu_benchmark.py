"""`benchmarks/gpu.py`: its rows on this machine, and rows that fail or take too long."""

import argparse
import io
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import gpu
from rich.console import Console


def setting(folder: Path) -> Any:
    return gpu.Setting(tiny=True, repeats=1, cluster_file=folder / "cluster.toml")


def shown(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    Console(file=text, width=250).print(gpu.table(rows))
    return text.getvalue()


def test_a_row_and_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> dict[str, Any]:
        raise RuntimeError("the device\nfell off the bus")

    monkeypatch.setitem(gpu.OTHERS, "transport", fail)
    rows = [gpu.row(name, setting(tmp_path)) for name in ("call", "transport")]
    assert rows[0]["platform"] == "cpu" and rows[0]["autopar_us"] > 0
    assert rows[1] == {
        "row": "transport",
        "error": "RuntimeError: the device fell off the bus",
    }
    text = shown(rows)
    assert "us more a call than by hand (20 leaves)" in text
    assert "the device fell off the bus" in text


def test_rows_that_take_too_long_are_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    options = argparse.Namespace(
        rows=["calibrate", "call"],
        minutes=0.002,
        row_minutes=0.001,
        size="tiny",
        repeats=1,
        cluster_file=tmp_path / "cluster.toml",
    )
    first, second = gpu.all_rows(options)["rows"]
    assert first["error"] == "it took more than 0 s"
    assert "error" in second
    assert "it took more than 0 s" in shown([first, second])


@pytest.mark.full
@pytest.mark.parametrize("name", [*gpu.CASES, "calibrate", "transport"])
def test_every_row(name: str, tmp_path: Path) -> None:
    found = gpu.row(name, setting(tmp_path))
    assert "error" not in found, found
    if "losses" in found:
        assert found["losses"]["autopar"] == pytest.approx(found["losses"]["jit"], rel=2e-3)
        assert found["planned_bytes"] > 0 and found["compiled_bytes"] > 0
    assert found["row"] in shown([found])
