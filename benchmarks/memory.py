"""The plan's estimate of a device's memory against what XLA allocates for the compiled step.

    python benchmarks/memory.py --json
    python benchmarks/memory.py --programs gpt --methods zero3 --microbatches 1 4 16

For an MLP, a GPT and a convolutional network, planned and compiled from abstract shapes: the plan's
peak, and XLA's `memory_analysis()` of one device: arguments, results that are not written into
donated arguments, and temporary memory, which XLA allocates as one block of the size of its own
peak. The last line is a JSON object with `--json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from planning import gpt_step
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autopar
from autopar.base.units import format_bytes

Built = tuple[Callable[..., Any], Any, Any]
"""A train step, and the shapes of its state and its batch."""


def train_step_of(loss_fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = ADAM.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


ADAM = optax.adam(1e-3)


def shapes_of(*shapes: tuple[int, ...]) -> Any:
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return params, jax.eval_shape(ADAM.init, params)


def mlp(layers: int = 4, width: int = 512, batch: int = 1024) -> Built:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        for weights in params:
            x = jax.nn.relu(x @ weights)
        return jnp.mean((x - y) ** 2)

    rows = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return train_step_of(loss_fn), shapes_of(*[(width, width)] * layers), (rows, rows)


def cnn(width: int = 32, batch: int = 256, classes: int = 10) -> Built:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, labels = batch
        *kernels, out = params
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(
                x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        logits = x.reshape(len(x), -1) @ out
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    channels = (3, width, 2 * width, 4 * width)
    kernels = [(3, 3, a, b) for a, b in itertools.pairwise(channels)]
    images = jax.ShapeDtypeStruct((batch, 32, 32, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    state = shapes_of(*kernels, (4 * 4 * channels[-1], classes))
    return train_step_of(loss_fn), state, (images, labels)


def gpt() -> Built:
    step, state, batch = gpt_step(layers=2, width=128, context=128, batch=64)
    return step, state, batch


PROGRAMS: dict[str, Callable[[], Built]] = {"mlp": mlp, "gpt": gpt, "cnn": cnn}


def measure(name: str, method: str, microbatches: int) -> dict[str, Any]:
    """Bytes of one device, planned and allocated."""
    step, state, batch = PROGRAMS[name]()
    made = autopar.compile(
        step, state, batch, method=method, microbatches=microbatches, progress=False
    )
    found = made.memory_analysis()
    kept = found.output_size_in_bytes - found.alias_size_in_bytes
    allocated = found.argument_size_in_bytes + kept + found.temp_size_in_bytes
    estimate = made.plan.estimates.peak_bytes_per_device
    return {
        "program": name,
        "method": method,
        "microbatches": microbatches,
        "state_bytes": made.plan.estimates.state_bytes_per_device,
        "estimate_bytes": estimate,
        "argument_bytes": found.argument_size_in_bytes,
        "temporary_bytes": found.temp_size_in_bytes,
        "allocated_bytes": allocated,
        "ratio": estimate / allocated,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--methods", nargs="+", default=["data", "zero1", "zero3"])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)

    cases = [
        (name, method, count)
        for name in options.programs
        for method in options.methods
        for count in options.microbatches
    ]
    results = [measure(*case) for case in track(cases, console=Console(stderr=True))]
    title = f"memory of one of {options.devices} devices"
    table = Table("program", "method", title=title)
    for heading in ("microbatches", "state", "estimate", "XLA", "estimate / XLA"):
        table.add_column(heading, justify="right")
    for row in results:
        table.add_row(
            row["program"],
            row["method"],
            str(row["microbatches"]),
            *(format_bytes(row[f"{name}_bytes"]) for name in ("state", "estimate", "allocated")),
            f"{row['ratio']:.2f}",
        )
    Console(width=max(Console().width, 90)).print(table)
    ratios = [row["ratio"] for row in results]
    print(
        f"estimate / XLA: median {statistics.median(ratios):.2f}, "
        f"from {min(ratios):.2f} to {max(ratios):.2f}"
    )
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        print(json.dumps({"benchmark": "memory", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
