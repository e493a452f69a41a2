"""Trains a convolutional network on scikit-learn's handwritten digits, on eight devices.

    python examples/train_digits.py                     under a minute on two cores
    python examples/train_digits.py --method zero2
    python examples/train_digits.py --help

The model is written in Flax NNX. Its train step is a function of arrays: `nnx.split` takes model
and optimizer apart into a static description and arrays, `nnx.merge` puts them together again.
"""

import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import optax
import pictures
import typer
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from sklearn.datasets import load_digits

import autopar
from autopar import report

Batch = dict[str, np.ndarray]
"""`images`, float32 [rows, 8, 8, 1] between 0 and 1, and `labels`, int32 [rows]."""


class Classifier(nnx.Module):
    """Images [rows, 8, 8, 1] to logits [rows, 10]."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.norm1 = nnx.LayerNorm(32, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.norm2 = nnx.LayerNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.hidden = nnx.Linear(4 * 4 * 64, 128, rngs=rngs)
        self.logits = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images: jax.typing.ArrayLike) -> jax.Array:
        x = nnx.relu(self.norm1(self.conv1(images)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = self.dropout(x.reshape(len(x), -1))
        x = nnx.relu(self.hidden(x))
        return self.logits(x)


def read_digits() -> tuple[Batch, Batch]:
    """The 1,797 images in a fixed order: all but 360 for training, those for the test."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    training = {"images": images[360:], "labels": labels[360:]}
    return training, {"images": images[:360], "labels": labels[:360]}


def make_steps(graphdef: Any, method: str, microbatches: int | str) -> tuple[Any, Any]:
    """A parallelized train step, and a function that classifies where its parameters lie."""

    @autopar.parallelize(method=method, microbatches=microbatches)
    def train_step(state: nnx.State, batch: Batch) -> tuple[nnx.State, dict[str, jax.Array]]:
        training = nnx.merge(graphdef, state)
        model, optimizer = training["model"], training["optimizer"]

        def loss_fn(model: Classifier) -> jax.Array:
            logits = model(batch["images"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return nnx.state(training), {"loss": loss}

    @autopar.follow(train_step)
    def classify(state: nnx.State, images: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)["model"]
        model.eval()
        return jax.nn.softmax(model(images))

    return train_step, classify


def main(
    epochs: Annotated[int, typer.Option(help="Times that each image is seen.", min=1)] = 12,
    batch: Annotated[int, typer.Option(help="Images per step.", min=1)] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate at the start.", min=0)] = 2e-3,
    seed: Annotated[int, typer.Option(help="Of parameters, dropout and order.", min=0)] = 0,
    method: Annotated[
        Literal["auto", "data", "zero1", "zero2", "zero3", "hsdp", "shard"],
        typer.Option(help="How tensors may be divided among devices; auto: any way."),
    ] = "auto",
    microbatches: Annotated[
        str, typer.Option(help="Parts into which a batch is split in time: a number, or auto.")
    ] = "auto",
    devices: Annotated[
        int, typer.Option(help="Virtual CPU devices; 0 uses what JAX sees.", min=0)
    ] = 8,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("runs/digits"),
    plots: Annotated[bool, typer.Option(help="Save pictures of results and plan.")] = True,
) -> None:
    """Train a convolutional network on scikit-learn's digits and test it."""
    began = time.perf_counter()
    if devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    console = Console(width=None if sys.stdout.isatty() else 110)
    training, test = read_digits()
    steps_per_epoch = len(training["labels"]) // batch
    if steps_per_epoch == 0:
        raise typer.BadParameter(f"--batch {batch} is more than all training images.")
    steps = epochs * steps_per_epoch

    model = Classifier(nnx.Rngs(seed))
    adam = optax.adamw(optax.cosine_decay_schedule(lr, steps), weight_decay=1e-3)
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    graphdef, state = nnx.split({"model": model, "optimizer": optimizer})
    parts = int(microbatches) if microbatches.isdecimal() else microbatches
    train_step, classify = make_steps(graphdef, method, parts)

    generator = np.random.default_rng(seed)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4f}"))
    bar = Progress("training", *columns, console=console)
    task = bar.add_task("training", total=steps, loss=float("nan"))
    try:
        for _ in range(epochs):
            order = generator.permutation(len(training["labels"]))
            for rows in order[: steps_per_epoch * batch].reshape(steps_per_epoch, batch):
                state, metrics = train_step(state, {k: v[rows] for k, v in training.items()})
                bar.update(task, advance=1, loss=float(metrics["loss"]))
                bar.start()  # once: planning, in the first step, shows progress of its own
    finally:
        bar.stop()

    probabilities = np.asarray(classify(state, test["images"]))
    right = probabilities.argmax(1) == test["labels"]
    report.print_plan(train_step.plan, console)
    out.mkdir(parents=True, exist_ok=True)
    train_step.plan.save(out / "plan.json")
    if plots:
        pictures.draw_predictions(out / "digits.png", test["images"], test["labels"], probabilities)
        report.save_plot(train_step.plan, out / "plan.png")
    console.print(
        f"test accuracy {right.mean():.2%}: {right.sum()} of {len(right)} images not trained on\n"
        f"{time.perf_counter() - began:.0f} s in all; results in {out}"
    )


if __name__ == "__main__":
    try:
        typer.run(main)
    except autopar.AutoparError as error:
        sys.exit(str(error))
