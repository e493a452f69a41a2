"""The `autopar` command, as people and programs use it: answers, exit codes, narrow terminals."""

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

testing = pytest.importorskip("typer.testing")

import autopar  # noqa: E402
from autopar import __main__, calibration  # noqa: E402
from autopar.commands import app  # noqa: E402
from autopar.report.cluster_tables import measured_table  # noqa: E402
from autopar.report.rich_parts import add_row, as_text, captioned, new_table  # noqa: E402
from autopar.report.verification_report import Verification  # noqa: E402

ROOT = Path(__file__).parent.parent

TRAIN = """
import jax, jax.numpy as jnp

def train_step(params, x, y):
    def loss(params):
        return jnp.mean((jax.nn.relu(x @ params["hidden"]["w"]) @ params["out"]["w"] - y) ** 2)
    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)

PARAMS = {"hidden": {"w": shape(32, 64)}, "out": {"w": shape(64, 8)}}

def shapes():
    return PARAMS, shape(64, 32), shape(64, 8)

def by_name():
    return {"params": PARAMS, "x": shape(64, 32), "y": shape(64, 8)}

def wrong():
    return 1, shape(64, 32), shape(64, 8)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a train step and two plans of it, one with stages."""
    made = tmp_path_factory.mktemp("command")
    (made / "small_train.py").write_text(TRAIN)
    asked = ["plan", f"{made}/small_train.py:train_step", "--args", f"{made}/small_train.py:shapes"]
    plans = {
        "one.json": ["--cluster", "h100", "--method", "data"],
        "two.json": ["--cluster", "2x8 h100", "--stages", "2", "--microbatches", "4"],
    }
    for name, options in plans.items():
        done = run(*asked, *options, "-o", f"{made}/{name}")
        assert done.exit_code == 0, done.output
        assert "autopar plan" in done.stdout
        assert f"{made}/{name}" in done.stderr.replace("\n", "")
    return made


def run(*arguments: str, columns: int = 120) -> Any:
    return testing.CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})


def answer(*arguments: str, code: int = 0) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_a_plan_is_what_the_library_plans(folder: Path) -> None:
    step = f"{folder}/small_train.py"
    found = answer("plan", f"{step}:train_step", "--args", f"{step}:by_name", "--cluster", "h100")
    assert found["devices"] == 8
    assert found["stages"][0]["logical_mesh"] == {"x": 8}
    saved = autopar.Plan.load(folder / "two.json")
    assert len(saved.stages) == 2
    assert saved.num_microbatches == 4
    assert answer("show", f"{folder}/two.json")["step_seconds"] == saved.estimates.step_seconds


def test_where_the_time_goes_is_shown_by_line(folder: Path) -> None:
    plan = autopar.Plan.load(folder / "one.json")
    longest = plan.hot_lines.lines[0]
    assert longest.source.startswith("small_train.py:")
    assert longest.source in run("show", f"{folder}/one.json", "--by-line").stdout
    told = answer("show", f"{folder}/one.json", "--by-line")
    assert told["lines"][0]["source"] == longest.source
    assert told["step_seconds"] == plan.estimates.step_seconds


def test_it_says_for_which_devices_it_plans_where_none_are_named(folder: Path) -> None:
    """On standard error: the table, and the answer for programs, have them as well."""
    step = f"{folder}/small_train.py"
    asked = [f"{step}:train_step", "--args", f"{step}:shapes"]
    said = 'Planning for what is here, 1 node of 8 x CPU; for others: --cluster "8x8 h100".\n'
    assert run("plan", *asked).stderr == said
    assert run("plan", *asked, "--json").stderr == ""
    assert run("plan", *asked, "--cluster", "h100").stderr == ""
    refused = run("plan", *asked, "--memory-limit", "1KiB")
    assert refused.exit_code == 1
    assert refused.stderr.startswith(said)
    # A plan from a file has devices; without one, those that are here are planned for.
    nowhere = [*asked, "--target", "tpu:v9"]
    assert run("verify", *nowhere).stderr.startswith(said)
    assert said not in run("verify", *nowhere, "--plan", f"{folder}/one.json").stderr


@pytest.mark.parametrize("columns", [60, 120])
def test_everything_fits_the_terminal(folder: Path, columns: int) -> None:
    one, two = f"{folder}/one.json", f"{folder}/two.json"
    for arguments in (
        ("show", one),
        ("show", two),
        ("show", two, "--by-line"),
        ("explain", two, "hidden"),
        ("simulate", two),
        ("presets",),
        ("presets", "8x8 h100"),
        ("doctor",),
        ("plan", "--help"),
    ):
        done = run(*arguments, columns=columns)
        assert done.exit_code == 0, done.output
        assert max(map(len, done.stdout.splitlines())) <= columns, arguments


def test_it_says_its_version() -> None:
    assert run("--version").stdout == f"autopar {autopar.__version__}\n"


def test_a_table_becomes_paragraphs_where_it_cannot_be_read() -> None:
    table = new_table("Sizes", "path", "type", "bytes", right=("bytes",), plain=("type",))
    add_row(table, "model/layers/kernel", "float32", "1024")
    add_row(table, "7", "", "12")
    table.add_section()
    add_row(table, "bias")
    captioned(table, "note")
    assert as_text(table, 60).splitlines()[0].split() == ["Sizes"]
    assert "model/layers/kernel   float32    1024" in as_text(table, 60)
    assert as_text(table, 24).split("\n") == [
        "",
        "Sizes",
        "model/layers/kernel",
        "    float32 · bytes 1024",
        "path 7",
        "    bytes 12",
        "",
        "bias",
        "",
        "note",
    ]


def test_explanations_differences_and_simulations_for_programs(folder: Path) -> None:
    one, two = f"{folder}/one.json", f"{folder}/two.json"
    assert answer("explain", one, "hidden")["decisions"]
    assert answer("diff", one, one) == {"same": True, "lines": [], "details": []}
    assert not answer("diff", one, two, code=1)["same"]
    assert run("diff", one, one).stdout.strip() == "The plans are the same."
    planned, slower = (answer("simulate", two, *more) for more in ((), ("--compute-scale", "0.5")))
    assert planned["step_seconds"] == pytest.approx(planned["planned_seconds"])
    assert slower["step_seconds"] > planned["step_seconds"]
    assert "this: +" in run("simulate", two, "--compute-scale", "0.5").stdout


def test_a_trace_is_one_that_perfetto_reads(folder: Path) -> None:
    two = f"{folder}/two.json"
    assert answer("trace", two)["file"] == f"{folder}/two.trace.json"
    saved = json.loads((folder / "two.trace.json").read_text())
    assert {"M", "X", "C"} <= {row["ph"] for row in saved["traceEvents"]}
    assert json.loads(run("trace", two, "-o", "-").stdout) == saved


def test_presets_are_the_librarys() -> None:
    found = answer("presets")
    assert list(found) == list(autopar.Cluster.presets())
    assert answer("presets", "8x8 h100") == autopar.Cluster.named("8x8 h100").to_dict()


def test_the_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {item["name"]: item for item in answer("doctor")}
    assert found["jax"]["found"] == importlib.metadata.version("jax")
    assert found["devices"]["state"] == "ok"

    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "ortools":
            raise importlib.metadata.PackageNotFoundError
        return "0.1" if name == "matplotlib" else real(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    found = {item["name"]: item for item in answer("doctor", code=1)}
    assert found["ortools"] == {
        "name": "ortools", "found": "", "state": "needed", "about": "pip install ortools"
    }  # fmt: skip
    assert found["matplotlib"]["state"] == "optional"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["show", "ones.json"], 2, "did you mean 'one.json'?"),
        (["show", "nowhere/one.json"], 2, "there is no folder"),
        (["diff", "one.json"], 2, "Missing argument"),
        (["explain", "one.json", "hiden"], 2, "did you mean"),
        (["simulate", "one.json", "--schedule", "gpipe"], 2, "A plan of one stage has no schedule"),
        (["verify", "small_train.py:train_step", "--args", "small_train.py:shapes", "--plan",
          "two.json", "--target", "gpu"], 2, "the targets are"),
        (["presets", "h1000"], 2, "did you mean 'h100'?"),
        (["plan", "small_train.py", "--args", "small_train.py:shapes"], 2, "MODULE:NAME"),
        (["plan", "smal_train.py:f", "--args", "small_train.py:shapes"], 2, "'small_train.py'?"),
        (["plan", "small_train.py:train_step", "--args", "small_train.py:shapes", "--stages", "2",
          "--option", "stages=4"], 2, "stages is given twice"),
        (["plan", "small_train.py:train_step", "--args", "small_train.py:shapes", "--option",
          "seed=1", "--option", "seed=2"], 2, "seed is given twice"),
        (["trace", "one.json", "-o", "nowhere/x.json"], 2, "There is no folder 'nowhere'"),
        (["show", "one.json", "--picture", "one.pgn"], 2, "did you mean 'png'?"),
        (["plan", "no_such:f", "--args", "small_train.py:shapes"], 2, "no module 'no_such'"),
        (["plan", "small_train.py:train", "--args", "small_train.py:shapes"], 2, "it has by_name"),
        (["plan", "small_train.py:train_step", "--args", "small_train.py:shape.x"], 2, "has no"),
        (["plan", "small_train.py:train_step", "--args", "small_train.py:jax"], 2, "tuple"),
        (["plan", "small_train.py:train_step", "--args", "small_train.py:wrong"], 2, "TypeError"),
        (
            ["plan", "small_train.py:train_step", "--args", "small_train.py:shapes", "--cluster",
             "h100", "--method", "data", "--memory-limit", "1KiB"],
            1,
            "No plan keeps within",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(
    folder: Path, arguments: list[str], code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    done = run(*arguments)
    assert done.exit_code == code, done.output
    assert says in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert str(ROOT / "autopar") not in done.stderr


def test_errors_for_programs_are_json(folder: Path) -> None:
    error = answer("show", f"{folder}/ones.json", code=2)["error"]
    assert error["kind"] == "MissingPlanError"
    assert error["hint"] == "did you mean 'one.json'?"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["diff", "one.json"], "Missing argument"),
        (["show"], "Missing argument"),
        (["shwo", "one.json"], "No such command"),
        (["show", "one.json", "--breif"], "No such option"),
        (["simulate", "one.json", "--link-scale", "much"], "--link-scale"),
        (["--verison", "show"], "No such option"),
    ],
)
def test_wrong_calls_are_json_for_programs(arguments: list[str], says: str) -> None:
    error = answer(*arguments, code=2)["error"]
    assert error["kind"] == "UsageError" and says in error["what"]


def test_an_interrupted_command_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(file: Path) -> autopar.Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr(autopar.Plan, "load", interrupted)
    assert run("show", f"{folder}/one.json").exit_code == 130


def test_without_typer_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install 'autopar\[cli\]'"):
        __main__.main()


def test_it_is_a_module_and_a_script() -> None:
    command = [sys.executable, "-m", "autopar", "presets", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout)["device"]["name"] == "CPU core"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"autopar": "autopar.__main__:main"}


def test_calibrate_measures_what_is_here(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(calibration._LARGEST, "cpu", 128)
    monkeypatch.setitem(calibration._BYTES, "cpu", (1 << 10, 1 << 14))
    file = tmp_path / "cluster.toml"
    done = run("calibrate", "--seconds", "0.1", "--json", "-o", str(file))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    measured = autopar.Cluster.load(file)
    assert found["cluster"] == measured.to_dict()
    names = {number["name"] for number in found["measured"]}
    assert {"peak_flops.float32", "memory_bandwidth", "intra_node.bandwidth"} <= names
    assert "host_bandwidth" in names and measured.host_bandwidth > 0
    assert all(number["value"] > 0 for number in found["measured"])
    assert "measured by autopar calibrate" in measured.source
    assert measured.num_devices == autopar.Cluster.local().num_devices
    table = as_text(measured_table("here", [("kernel_seconds", 2e-6, 1e-6, "s")]), 60)
    assert "kernel_seconds" in table and "2 us" in table
    refused = run("calibrate", "--cluster", "h100")
    assert refused.exit_code == 2 and "leave --cluster out" in " ".join(refused.output.split())


@pytest.mark.parametrize("interrupted", [False, True])
def test_verifying_ends_with_what_was_compiled(
    interrupted: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def verify(*args: Any, **given: Any) -> Verification:
        asked.update(given)
        return Verification("cpu", "XLA", "", "", "", "", "<Plan>", (), (), (), interrupted)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(autopar, "verify", verify)
    done = run(
        "verify", "small_train.py:train_step", "--args", "small_train.py:shapes", "--target", "cpu",
        "--processes", "1", "--seconds", "90",
    )  # fmt: skip
    assert (asked["processes"], asked["compile_seconds"]) == (1, 90.0)
    assert done.exit_code == (130 if interrupted else 0), done.output
    assert ("Verdict: interrupted" if interrupted else "Verdict: holds") in done.output
