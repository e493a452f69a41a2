"""The examples, made small: what they write, and that a resumed run is the same run."""

import functools
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import typer
from typer.testing import CliRunner

import autopar

pytest.importorskip("matplotlib")
pytest.importorskip("orbax.checkpoint")
if importlib.util.find_spec("sklearn") is None:  # to import it takes seconds, and one test does
    pytest.skip("could not find 'sklearn'", allow_module_level=True)

EXAMPLES = Path(__file__).parents[1] / "examples"

STEPS = 6
SMALL: dict[str, Any] = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 32,
    "batch": 8,
    "steps": STEPS,
    "eval_every": 3,
    "eval_batches": 2,
    "sample_bytes": 40,
    "save_every": 2,
    "keep": 2,
}


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Makes what lies beside an example importable, as it is when Python runs the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield


@pytest.fixture(scope="module")
def gpt(importable: None) -> Iterator[ModuleType]:
    module = importlib.import_module("train_gpt")
    with pytest.MonkeyPatch.context() as patch:  # several runs read the text once
        patch.setattr(module, "read_corpus", functools.cache(module.read_corpus))
        yield module


@pytest.fixture(scope="module")
def corpus(importable: None) -> ModuleType:
    return importlib.import_module("corpus")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a small run, started as a user would."""
    out = tmp_path_factory.mktemp("straight")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / "train_gpt.py", *flags, f"--out={out}"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def restored(gpt: ModuleType, out: Path) -> tuple[Any, dict[str, Any]]:
    """State and progress of the last checkpoint in a folder."""
    state = gpt.initial_state(*model_and_optimizer(gpt), seed=0)
    saved = autopar.Checkpoints(out / "checkpoints").restore(state)
    return saved.state, saved.extra


def model_and_optimizer(gpt: ModuleType) -> tuple[Any, Any]:
    model = gpt.GPT(SMALL["layers"], SMALL["width"], SMALL["heads"], SMALL["context"], 0.1)
    return model, gpt.make_optimizer(2e-3, STEPS)


def raw(state: Any) -> list[np.ndarray]:
    """All leaves as plain arrays, a key as its bits."""
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(state)
    ]


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_gpt_tells_and_writes_what_it_did(straight: tuple[Path, str]) -> None:
    out, said = straight
    words = " ".join(said.split())
    assert re.search(r"The GPT \(.* parameters\) (beats|does not beat) the bigram model", words)
    assert re.search(r"[\d,]+ tokens/s", words)
    assert autopar.Plan.load(out / "plan.json").stages[0].num_devices == 8
    assert is_picture(out / "loss.png")
    assert is_picture(out / "plan.png")
    checkpoints = autopar.Checkpoints(out / "checkpoints")
    assert checkpoints.steps == (STEPS - 2, STEPS)
    half_written = [path for path in checkpoints.directory.iterdir() if "writing" in path.name]
    assert not half_written


def test_gpt_resumes_bit_for_bit(
    gpt: ModuleType, straight: tuple[Path, str], tmp_path: Path
) -> None:
    half = STEPS // 2
    shutil.copytree(straight[0], tmp_path, dirs_exist_ok=True)  # a new run replaces an old one
    gpt.main(**SMALL, out=tmp_path, stop_at=half, plots=False)
    assert len(restored(gpt, tmp_path)[1]["losses"]) == half
    gpt.main(**SMALL, out=tmp_path, resume=True, plots=False)

    state, progress = restored(gpt, tmp_path)
    expected_state, expected_progress = restored(gpt, straight[0])
    assert progress == expected_progress
    assert len(progress["losses"]) == progress["position"] == STEPS
    leaves, expected = raw(state), raw(expected_state)
    assert len(leaves) == len(expected) > 20
    for leaf, other in zip(leaves, expected, strict=True):
        np.testing.assert_array_equal(leaf, other)


def test_gpt_goes_on_in_stages_as_without(
    gpt: ModuleType, straight: tuple[Path, str], tmp_path: Path
) -> None:
    """The end of a run again, from the checkpoint before it, in a pipeline of two stages."""
    shutil.copytree(straight[0], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / f"step_{STEPS:08}")
    assert len(restored(gpt, tmp_path)[1]["losses"]) == STEPS - 2
    gpt.main(**SMALL, out=tmp_path, resume=True, stages=2, microbatches="2", schedule="1f1b")

    plan = autopar.Plan.load(tmp_path / "plan.json")
    assert [stage.num_devices for stage in plan.stages] == [4, 4]
    assert is_picture(tmp_path / "plan.png")
    state, progress = restored(gpt, tmp_path)
    expected_state, expected_progress = restored(gpt, straight[0])
    np.testing.assert_allclose(progress["losses"], expected_progress["losses"], rtol=1e-4)
    (_, bits), (_, expected_bits) = progress["validation"][-1], expected_progress["validation"][-1]
    assert bits == pytest.approx(expected_bits, rel=1e-4)
    for leaf, other in zip(raw(state), raw(expected_state), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-3, atol=1e-5)


def test_gpt_validation_is_the_plain_loss(
    gpt: ModuleType, corpus: ModuleType, straight: tuple[Path, str]
) -> None:
    state, progress = restored(gpt, straight[0])
    text = corpus.read_corpus()[1]
    apply = jax.jit(model_and_optimizer(gpt)[0].apply)
    logs = []
    for batch in corpus.validation_batches(text, SMALL["context"], SMALL["batch"], 2):
        probability = jax.nn.softmax(apply({"params": state.params}, batch["inputs"]))
        target = batch["targets"][..., None]
        logs.append(np.log2(np.take_along_axis(np.asarray(probability), target, axis=-1)))
    step, bits = progress["validation"][-1]
    assert step == STEPS
    np.testing.assert_allclose(bits, -np.mean(logs), rtol=1e-5)


def test_gpt_keeps_an_earlier_run_when_it_cannot_plan(
    gpt: ModuleType, straight: tuple[Path, str]
) -> None:
    with pytest.raises(autopar.AutoparError, match="3 microbatches"):
        gpt.main(**SMALL, out=straight[0], microbatches="3")
    assert len(restored(gpt, straight[0])[1]["losses"]) == STEPS


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "has already done step 6"),
        ({"width": 64}, "made with width=32, not 64"),
        ({"seed": 1}, "made with seed=0, not 1"),
        ({"width": 33}, "not a multiple of --heads"),
    ],
)
def test_gpt_refuses_to_resume_another_run(
    gpt: ModuleType, straight: tuple[Path, str], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        gpt.main(**{**SMALL, **changed}, out=straight[0], resume=True)


def test_gpt_needs_a_checkpoint_to_resume(gpt: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="there is no checkpoint"):
        gpt.main(**SMALL, out=tmp_path, resume=True)


def test_gpt_decays_matrices_only_and_clips(gpt: ModuleType) -> None:
    optimizer = gpt.make_optimizer(1e-2, 10)
    params = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)}
    state = optimizer.init(params)
    zero = jax.tree.map(jnp.zeros_like, params)
    for _ in range(2):
        updates, state = optimizer.update(zero, state, params)
    assert (updates["matrix"] < 0).all()
    assert (updates["vector"] == 0).all()
    huge = jax.tree.map(lambda x: 1e6 * x, params)
    _, state = optimizer.update(huge, state, params)
    moments = optax.tree_utils.tree_get(state, "mu")
    assert optax.tree_utils.tree_norm(moments) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["train_gpt", "train_digits"])
def test_every_option_is_explained(name: str) -> None:
    app = typer.Typer(add_completion=False)
    app.command()(importlib.import_module(name).main)
    command = typer.main.get_command(app)
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", ""), parameter.name
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert "--method" in shown.output


def test_corpus_is_split_by_file(corpus: ModuleType) -> None:
    training, validation = corpus.read_corpus()
    assert len(training) > 5 * len(validation) > 500_000
    again = corpus.read_corpus()
    assert np.array_equal(training, again[0])
    assert np.array_equal(validation, again[1])
    middle = validation[len(validation) // 2 :][:400].tobytes()
    assert middle not in training.tobytes()


def test_training_batches_depend_on_seed_and_position_alone(corpus: ModuleType) -> None:
    text = np.arange(1000).astype(np.uint8)
    batches = corpus.TrainingBatches(text, context=5, batch=3, seed=7)
    first, second = next(batches), next(batches)
    assert batches.position == 2
    assert not np.array_equal(first["inputs"], second["inputs"])
    resumed = next(corpus.TrainingBatches(text, context=5, batch=3, seed=7, position=1))
    np.testing.assert_array_equal(resumed["inputs"], second["inputs"])
    np.testing.assert_array_equal(second["targets"], (second["inputs"] + 1) % 256)
    other = next(corpus.TrainingBatches(text, context=5, batch=3, seed=8))
    assert not np.array_equal(first["inputs"], other["inputs"])


def test_bigram_bits_by_hand(corpus: ModuleType) -> None:
    text = np.frombuffer(b"abab", np.uint8)
    batch = {"inputs": np.array([[97, 98]]), "targets": np.array([[98, 99]])}
    b_after_a = (2 + 3 / 260) / (2 + 1)
    c_after_b = (0 + 1 / 260) / (1 + 1)
    expected = -(np.log2(b_after_a) + np.log2(c_after_b)) / 2
    assert corpus.bigram_bits(text, [batch]) == pytest.approx(expected)


def test_digits_learns_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("train_digits").main(epochs=2, out=tmp_path)
    accuracy = re.search(r"test accuracy ([\d.]+)%", capsys.readouterr().out)
    assert accuracy is not None
    assert float(accuracy[1]) > 90
    assert is_picture(tmp_path / "digits.png")
    assert is_picture(tmp_path / "plan.png")
    assert autopar.Plan.load(tmp_path / "plan.json").stages[0].num_devices == 8
