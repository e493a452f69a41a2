"""Pipelines against the best plan on one mesh, measured and simulated, on virtual devices.

A GPT, a wide ResNet and a mixture of experts, on eight virtual devices: one mesh without
microbatches, two and four stages, each with 1F1B and with weight gradients apart (ZB-H1), and what
`stages="auto"` and `microbatches="auto"` choose. All plans of a model run in one
process and take turns, so that they meet the same machine.

    python benchmarks/pipeline.py --json
    python benchmarks/pipeline.py --models gpt --plans one-mesh 2-1f1b auto --repeats 30

For every plan:

- measured: the median of a step's seconds;
- simulated: the instruction list with the seconds that each instruction takes alone, where all
  virtual devices share the machine's cores; the deviation is (measured - simulated) / measured;
- bubble: of the same list with the same seconds, if every device worked for itself;
- peak memory of a device: what the plan expects, and what XLA allocates (of several stages: the
  values that the list keeps alive, and XLA's temporary memory of the piece that runs);
- planning: seconds of `autopar.plan`.

The last line is then a JSON object. Timings need a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from overhead import alternate
from rich.console import Console
from rich.table import Table

import autopar
from autopar.base.units import format_bytes

OPTIMIZER = optax.adam(1e-3)
PLANS: dict[str, dict[str, Any]] = {
    "one-mesh": {"stages": 1},
    "2-1f1b": {"stages": 2, "schedule": "1f1b"},
    "2-zb_h1": {"stages": 2, "schedule": "zb_h1"},
    "4-1f1b": {"stages": 4, "schedule": "1f1b"},
    "4-zb_h1": {"stages": 4, "schedule": "zb_h1"},
    "auto": {"stages": "auto", "microbatches": "auto"},
}


class Model(NamedTuple):
    """A train step, what makes its state, and a batch."""

    step: Any
    make: Any
    batch: Any


# The models, as they would be written for one device


def trained(loss_fn: Any, init: Any, batch: Any) -> Model:
    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, loss

    def make() -> Any:
        params = init(jax.random.key(0))
        return {"params": params, "opt_state": OPTIMIZER.init(params)}

    return Model(train_step, make, batch)


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def attention(params: Any, x: jax.Array) -> jax.Array:
    h = normalize(x, params["scale"])
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dche->bcthe", h, params["qkv"]), 1, 0)
    scores = jnp.einsum("bthe,bshe->bhts", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return x + jnp.einsum("bhts,bshe,hed->btd", weights, v, params["out"])


def perceptron(params: Any, x: jax.Array) -> jax.Array:
    h = normalize(x, params["scale"])
    return x + jax.nn.gelu(h @ params["up"]) @ params["down"]


def mixture(params: Any, x: jax.Array) -> jax.Array:
    """Each token goes to its likeliest expert, as far as that has room in this row."""
    h = normalize(x, params["scale"])
    probabilities = jax.nn.softmax(h @ params["router"])
    experts = probabilities.shape[-1]
    capacity = 2 * x.shape[1] // experts
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), experts)
    place = (jnp.cumsum(chosen, 1) - 1) * chosen
    slots = chosen[..., None] * jax.nn.one_hot(place.sum(-1).astype(int), capacity)[:, :, None]
    inside = jnp.einsum("btec,btd->becd", slots, h)
    inside = jax.nn.gelu(jnp.einsum("becd,edf->becf", inside, params["up"]))
    inside = jnp.einsum("becf,efd->becd", inside, params["down"])
    weights = (probabilities * chosen).sum(-1, keepdims=True)
    return x + jnp.einsum("btec,becd->btd", slots, inside) * weights


def language_model(
    layers: int, width: int, length: int, rows: int, vocabulary: int = 256, experts: int = 0
) -> Model:
    heads = max(width // 32, 1)

    def dense(key: jax.Array, *shape: int, fan: int = 0) -> jax.Array:
        return jax.random.normal(key, shape) * (fan or shape[0]) ** -0.5

    def init_feed_forward(key: jax.Array) -> Any:
        up, down, router = jax.random.split(key, 3)
        each = (experts,) if experts else ()
        params = {
            "scale": jnp.ones(width),
            "up": dense(up, *each, width, 4 * width, fan=width),
            "down": dense(down, *each, 4 * width, width, fan=4 * width),
        }
        return {**params, "router": dense(router, width, experts)} if experts else params

    def init_block(key: jax.Array) -> Any:
        qkv, out, rest = jax.random.split(key, 3)
        return {
            "attention": {
                "scale": jnp.ones(width),
                "qkv": dense(qkv, width, 3, heads, width // heads),
                "out": dense(out, heads, width // heads, width, fan=width),
            },
            "feed_forward": init_feed_forward(rest),
        }

    def init(key: jax.Array) -> Any:
        embed, positions, head, blocks = jax.random.split(key, 4)
        return {
            "embed": 0.02 * jax.random.normal(embed, (vocabulary, width)),
            "positions": 0.02 * jax.random.normal(positions, (length, width)),
            "head": dense(head, width, vocabulary),
            "blocks": [init_block(key) for key in jax.random.split(blocks, layers)],
        }

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens[:, :-1]] + params["positions"]
        for block in params["blocks"]:
            x = attention(block["attention"], x)
            x = (mixture if experts else perceptron)(block["feed_forward"], x)
        logits = x @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    tokens = np.random.default_rng(0).integers(0, vocabulary, (rows, length + 1), np.int32)
    return trained(loss_fn, init, tokens)


def wide_resnet(blocks: int, width: int, size: int, rows: int) -> Model:
    """Three groups of residual blocks, each twice as wide and half as large, with group norm."""

    def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        groups = x.reshape(*x.shape[:3], 4, -1)
        mean = groups.mean((1, 2, 4), keepdims=True)
        variance = ((groups - mean) ** 2).mean((1, 2, 4), keepdims=True)
        return ((groups - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape) * scale

    shapes = []
    channels = width
    for group in range(3):
        for number in range(blocks):
            wide = width * 2**group
            shapes.append((channels, wide, 2 if group and not number else 1))
            channels = wide

    def init(key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, 3 * len(shapes) + 2))

        def kernel(side: int, into: int, out: int) -> jax.Array:
            scale = (side * side * into / 2) ** -0.5
            return jax.random.normal(next(keys), (side, side, into, out)) * scale

        return {
            "stem": kernel(3, 3, width),
            "head": 0.01 * jax.random.normal(next(keys), (channels, 10)),
            "blocks": [
                {
                    "scale_1": jnp.ones(into),
                    "conv_1": kernel(3, into, out),
                    "scale_2": jnp.ones(out),
                    "conv_2": kernel(3, out, out),
                    **({"skip": kernel(1, into, out)} if into != out else {}),
                }
                for into, out, _ in shapes
            ],
        }

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = conv(batch["images"], params["stem"])
        for block, (_, _, stride) in zip(params["blocks"], shapes, strict=True):
            h = jax.nn.relu(norm(x, block["scale_1"]))
            skip = conv(h, block["skip"], stride) if "skip" in block else x
            h = jax.nn.relu(norm(conv(h, block["conv_1"], stride), block["scale_2"]))
            x = skip + conv(h, block["conv_2"])
        logits = jax.nn.relu(x).mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    random = np.random.default_rng(0)
    images = random.normal(size=(rows, size, size, 3)).astype(np.float32)
    return trained(
        loss_fn, init, {"images": images, "labels": random.integers(0, 10, rows, np.int32)}
    )


def model_of(name: str, arguments: argparse.Namespace) -> Model:
    width, rows = arguments.width, arguments.rows
    if name == "gpt":
        return language_model(arguments.layers, width, arguments.length, rows)
    if name == "moe":
        return language_model(4, width, arguments.length, rows, experts=8)
    return wide_resnet(1, width // 2, 32, rows)


# Measuring


def prepared(model: Model, plan: str, microbatches: int) -> tuple[Any, float]:
    """A compiled step, and the seconds of planning it."""
    shapes = jax.eval_shape(model.make)
    options = {"microbatches": microbatches, "progress": False, **PLANS[plan]}
    start = time.perf_counter()
    made = autopar.plan(model.step, shapes, model.batch, **options)
    seconds = time.perf_counter() - start
    return autopar.compile(model.step, shapes, model.batch, plan=made, **options), seconds


def xla_bytes(step: Any, profile: Any) -> int:
    """What a device needs by XLA's account."""
    if step.plan.pipeline is not None:
        return max(profile.timeline.peak_bytes)
    found = step.memory_analysis()
    size: int = found.argument_size_in_bytes + found.output_size_in_bytes
    return size + int(found.temp_size_in_bytes - found.alias_size_in_bytes)


def measure(name: str, arguments: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    model = model_of(name, arguments)
    steps, planning, profiles, states, batches = {}, {}, {}, {}, {}
    for plan in arguments.plans:
        count = 1 if plan == "one-mesh" else arguments.microbatches
        with console.status(f"{name}: planning and compiling {plan}"):
            steps[plan], planning[plan] = prepared(model, plan, count)
        states[plan] = steps[plan].initialize(model.make)
        batches[plan] = model.batch
    with console.status(f"{name}: measuring"):
        taken = alternate(steps, states, batches, arguments.repeats)
        seconds = {plan: [wall for wall, _ in times] for plan, times in taken.items()}
        for plan in arguments.plans:
            found = [steps[plan].profile(states[plan], model.batch) for _ in range(3)]
            profiles[plan] = sorted(found, key=lambda one: one.expected.step_seconds)[1]
    losses = {p: float(steps[p](states[p], batches[p])[1]) for p in arguments.plans}
    rows = []
    for plan in arguments.plans:
        measured = statistics.median(seconds[plan])
        profile, made = profiles[plan], steps[plan].plan
        simulated = profile.expected.step_seconds
        row = {
            "model": name,
            "plan": plan,
            "meshes": [list(stage.logical_mesh) for stage in made.stages],
            "schedule": made.pipeline.schedule if made.pipeline else None,
            "measured_ms": 1e3 * measured,
            "quartiles_ms": [1e3 * q for q in statistics.quantiles(seconds[plan], n=4)[::2]],
            "simulated_ms": 1e3 * simulated,
            "deviation": (measured - simulated) / measured,
            "bubble": profile.on_own_devices.bubble_fraction,
            "planned_peak_bytes": made.estimates.peak_bytes_per_device,
            "xla_peak_bytes": xla_bytes(steps[plan], profile),
            "planning_seconds": planning[plan],
            "loss": losses[plan],
        }
        if "one-mesh" in seconds:
            pairs = zip(seconds[plan], seconds["one-mesh"], strict=True)
            row["ratio_to_one_mesh"] = statistics.median(a / b for a, b in pairs)
        rows.append(row)
    return rows


def table_of(results: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    headings = (
        "measured",
        "/ one mesh",
        "simulated",
        "deviation",
        "bubble",
        "peak memory",
        "XLA's",
    )
    table.add_column("model")
    table.add_column("plan")
    for heading in (*headings, "planning"):
        table.add_column(heading, justify="right")
    for number, row in enumerate(results):
        ratio = row.get("ratio_to_one_mesh")
        table.add_row(
            row["model"],
            row["plan"],
            f"{row['measured_ms']:.0f} ms",
            "" if ratio is None else f"{ratio:.2f}",
            f"{row['simulated_ms']:.0f} ms",
            f"{row['deviation']:+.1%}",
            f"{row['bubble']:.1%}",
            format_bytes(row["planned_peak_bytes"]),
            format_bytes(row["xla_peak_bytes"]),
            f"{row['planning_seconds']:.1f} s",
            end_section=row["model"] not in {x["model"] for x in results[number + 1 :]},
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8, help="virtual devices, on a CPU")
    parser.add_argument("--models", nargs="+", choices=["gpt", "resnet", "moe"])
    parser.add_argument("--plans", nargs="+", choices=list(PLANS))
    parser.add_argument("--layers", type=int, default=12, help="of the GPT")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="tokens of an example")
    parser.add_argument("--rows", type=int, default=64, help="examples of a batch")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    arguments = parser.parse_args()
    arguments.models = arguments.models or ["gpt", "resnet", "moe"]
    arguments.plans = arguments.plans or [name for name in PLANS if name != "auto"]
    jax.config.update("jax_num_cpu_devices", arguments.devices)

    progress = Console(stderr=True)
    results = [row for name in arguments.models for row in measure(name, arguments, progress)]
    title = f"{len(jax.devices())} x {jax.devices()[0].device_kind} on {os.cpu_count()} cores"
    Console(width=max(Console().width, 120)).print(table_of(results, title))
    if arguments.json:
        settings = {k: v for k, v in vars(arguments).items() if k != "json"}
        settings["cores"] = os.cpu_count()
        print(json.dumps({"benchmark": "pipeline", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
