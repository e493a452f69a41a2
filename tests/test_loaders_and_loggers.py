"""`step.prefetch` and `step.on_step` with libraries that need not be there, where they are."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

ROWS, BATCHES = 16, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS * BATCHES, 4)).astype(np.float32)
Y = RANDOM.normal(size=ROWS * BATCHES).astype(np.float32)
START = np.ones(4, np.float32)


def train(w: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


@functools.cache
def made_step() -> Any:
    made = autopar.parallelize(train, method="data", microbatches=1, donate_argnums=())
    made(START, {"x": X[:ROWS], "y": Y[:ROWS]})
    return made


def plain() -> np.ndarray:
    w: Any = START
    for first in range(0, len(X), ROWS):
        w, _ = jax.jit(train)(w, {"x": X[first : first + ROWS], "y": Y[first : first + ROWS]})
    return np.asarray(w)


def imported(name: str) -> Any:
    """The library; what it warns of itself while it is imported is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def check(make: Any) -> None:
    """All batches train as plain `jax.jit`; a loop that was left goes on at its position."""
    step, w = made_step(), START
    with step.prefetch(make()) as batches:
        for _ in range(2):
            w, _ = step(w, next(batches))
    with step.prefetch(make(), position=batches.position) as batches:
        for each in batches:
            w, _ = step(w, each)
    np.testing.assert_allclose(w, plain(), rtol=1e-5)


def test_grain() -> None:
    grain = imported("grain")

    def dataset() -> Any:
        rows = grain.MapDataset.range(len(X)).map(lambda i: {"x": X[i], "y": Y[i]})
        return rows.batch(ROWS)

    check(dataset)
    check(lambda: dataset().to_iter_dataset())


def test_pytorch() -> None:
    torch = imported("torch")
    loader = imported("torch.utils.data").DataLoader
    rows = [{"x": torch.tensor(x), "y": torch.tensor(y)} for x, y in zip(X, Y, strict=True)]
    check(lambda: loader(rows, batch_size=ROWS))
    ragged = loader(rows[: ROWS + 3], batch_size=ROWS)
    *_, (last, mask) = made_step().prefetch(ragged, ragged="pad")
    assert last["x"].shape == (ROWS, 4) and int(mask.sum()) == 3


def test_tensorflow() -> None:
    tf = imported("tensorflow")
    check(lambda: tf.data.Dataset.from_tensor_slices({"x": X, "y": Y}).batch(ROWS))


def logged(call: Any) -> set[str]:
    """Calls `call` with the metrics of two steps, as the documentation has it; their names."""
    names: set[str] = set()

    def told(metrics: Any) -> None:
        call(metrics)
        names.update(metrics.as_dict())

    step = made_step()
    end = step.on_step(told, every=1)
    for _ in range(2):
        step(START, {"x": X[:ROWS], "y": Y[:ROWS]})
    end()
    assert "step_seconds" in names
    return names


def test_tensorboard(tmp_path: Path) -> None:
    writer = imported("tensorboardX").SummaryWriter(str(tmp_path))
    names = logged(lambda m: [writer.add_scalar(k, v, m.steps) for k, v in m.as_dict().items()])
    writer.close()
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert all(name.encode() in content for name in names)


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder, and no database
    mlflow = imported("mlflow")
    mlflow.set_tracking_uri(f"file:{tmp_path}")
    mlflow.set_experiment("steps")
    with mlflow.start_run() as run:
        names = logged(lambda m: mlflow.log_metrics(m.as_dict(), step=m.steps))
    kept = mlflow.get_run(run.info.run_id).data.metrics
    assert names <= set(kept)


def test_wandb_offline(tmp_path: Path) -> None:
    wandb = imported("wandb")
    with wandb.init(mode="offline", dir=str(tmp_path), project="p") as run:
        names = logged(lambda m: wandb.log(m.as_dict(), step=m.steps))
        kept = dict(run.summary)
    assert names <= set(kept)
