"""`benchmarks/gpu.py`: its rows on this machine, and rows that fail or take too long."""

import argparse
import functools
import io
import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import gpu, gpu_profile, gpu_setting
from rich.console import Console


def setting(folder: Path) -> Any:
    return gpu_setting.Setting(tiny=True, repeats=1, cluster_file=folder / "cluster.toml")


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


def test_products_of_every_shape_are_measured_and_priced(tmp_path: Path) -> None:
    found = gpu.row("calibrate", setting(tmp_path))
    assert "error" not in found, found
    shapes = {x["shape"]: x for x in found["products"]}
    assert {"square", "tall", "wide", "thin result", "few terms", "many terms"} == set(shapes)
    for x in shapes.values():
        rows, terms, columns = x["sizes"]
        assert x["flops_per_second"] == pytest.approx(2 * rows * terms * columns / x["seconds"])
        assert x["priced_seconds"] > 0
    assert shapes["tall"]["sizes"] == shapes["wide"]["sizes"][::-1]
    assert "tall products:" in " ".join(shown([found]).split())


def test_grouped_products_are_measured_in_every_way(tmp_path: Path) -> None:
    found = gpu.row("grouped products", setting(tmp_path))
    assert "error" not in found, found
    assert len(found["groups"]) == 6
    for x in found["groups"]:
        assert x["apart"] < 1e-2 and x["priced_seconds"] > 0
        rows, depth, columns, _ = x["sizes"]
        assert {"kernel", "loop", "xla", "plain"} == set(x["seconds"])
        for way, seconds in x["seconds"].items():
            assert x["tflops"][way] == pytest.approx(2e-12 * rows * depth * columns / seconds)
    assert "qwen3 sums: kernel" in " ".join(shown([found]).split())


def test_a_model_is_also_measured_without_waiting(tmp_path: Path) -> None:
    found = gpu.row("gpt-125M", setting(tmp_path))
    assert "error" not in found, found
    assert found["in_a_row_seconds"] > 0 and found["jit_in_a_row_seconds"] > 0
    assert "busy_seconds" not in found  # only GPUs have streams


def test_what_is_not_waited_for_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"row": "gpt-125M", "busy_seconds": 0.0125, "in_a_row_seconds": 0.0131}
    monkeypatch.setattr(gpu, "apart", lambda *_: dict(seen))
    options = argparse.Namespace(rows=["gpt-125M"], minutes=1.0, row_minutes=1.0, size="tiny")
    text = shown(gpu.all_rows(options)["rows"])
    assert "12.5 ms" in text and "13.1 ms" in text
    failed = {"losses": {"autopar": 1.0, "jit": 1.0}, "profiler_error": "OSError: no room"}
    assert "no profile: OSError: no room" in shown([seen | failed])


def test_states_that_do_not_fit_together_are_made_again() -> None:
    there: set[str] = set()
    most = 0

    class State:
        """One of two that fill the device."""

        def __init__(self, name: str):
            nonlocal most
            self.name = name
            there.add(name)
            most = max(most, len(there))

        def __del__(self) -> None:
            there.discard(self.name)

    def step(state: State, batch: str) -> tuple[State, dict[str, float]]:
        assert state.name == batch
        return state, {}

    names = ("autopar", "jit")
    found = gpu.not_waited_for(
        dict.fromkeys(names, step),
        {"jit": State("jit")},
        {name: functools.partial(State, name) for name in names},
        {name: name for name in names},
    )
    assert set(found) == {"in_a_row_seconds", "jit_in_a_row_seconds"} and most == 1


@pytest.mark.parametrize(
    "spans, total",
    [([], 0.0), ([(0, 4), (1, 2), (3, 6)], 6.0), ([(0, 1), (2, 3)], 2.0), ([(1, 1)], 0.0)],
)
def test_what_overlaps_is_busy_once(spans: list[tuple[float, float]], total: float) -> None:
    assert gpu_profile.covered(spans) == total


@pytest.mark.full
def test_all_rows_from_the_command_line_end_with_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--size", "tiny", "--repeats", "1", "--rows", "calibrate", "gpt-125M", "--json"]
    arguments += ["--cluster-file", str(tmp_path / "cluster.toml")]
    monkeypatch.setattr("sys.argv", ["gpu.py", *arguments])
    gpu.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["size"] == "tiny" and (tmp_path / "cluster.toml").exists()
    calibrated, model = found["rows"]
    assert calibrated["products"] and model["compiled_bytes"] > 0
    assert model["losses"]["autopar"] == pytest.approx(model["losses"]["jit"], rel=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("name", [*gpu.CASES, "calibrate", "transport", "2 stages on Ray"])
def test_every_row(name: str, tmp_path: Path) -> None:
    found = gpu.row(name, setting(tmp_path))
    assert "error" not in found, found
    if "losses" in found:
        assert found["losses"]["autopar"] == pytest.approx(found["losses"]["jit"], rel=2e-3)
        assert name not in gpu.CASES or found["planned_bytes"] > 0 < found["compiled_bytes"]
    assert found["row"] in shown([found])
