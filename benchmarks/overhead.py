"""How much slower a step is under autopar than one whose shardings were written by hand.

Three measurements, each against `jax.jit` with `NamedSharding`s in the same process, in turns:

- `data`: a small GPT, batch split over all devices, state replicated;
- `megatron`: the same GPT on a (data, model) mesh with the layout of Megatron-LM: attention heads
  and hidden units of the MLP over `model`, two all-reduces a layer in each direction;
- `call`: a step that does little to a state of many leaves on one device, in CPU time of the
  calling thread: what a call costs in Python, whatever else the machine is doing.

    python benchmarks/overhead.py --json

The last line is then a JSON object. Times are medians, ratios are medians of neighbours' ratios.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding
from rich.console import Console
from rich.table import Table

import autopar

Step = Callable[..., tuple[Any, Any]]


# The model, as it would be written for one device


def init_params(key: jax.Array, layers: int, width: int, vocabulary: int, length: int) -> Any:
    def dense(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) * shape[0] ** -0.5

    keys = iter(jax.random.split(key, 4 * layers + 2))
    heads = width // 16
    return {
        "embed": 0.02 * jax.random.normal(next(keys), (vocabulary, width)),
        "positions": 0.02 * jax.random.normal(next(keys), (length, width)),
        "blocks": [
            {
                "scale_1": jnp.ones(width),
                "qkv": dense(next(keys), width, 3, heads, width // heads),
                "out": dense(next(keys), heads, width // heads, width),
                "scale_2": jnp.ones(width),
                "up": dense(next(keys), width, 4 * width),
                "down": dense(next(keys), 4 * width, width),
            }
            for _ in range(layers)
        ],
    }


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def block(params: Any, x: jax.Array) -> jax.Array:
    h = normalize(x, params["scale_1"])
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dche->bcthe", h, params["qkv"]), 1, 0)
    scores = jnp.einsum("bthe,bshe->bhts", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    mixed = jnp.einsum("bhts,bshe->bthe", weights, v)
    x = x + jnp.einsum("bthe,hed->btd", mixed, params["out"])
    h = normalize(x, params["scale_2"])
    return x + jax.nn.gelu(h @ params["up"]) @ params["down"]


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens[:, :-1]] + params["positions"]
    for layer in params["blocks"]:
        x = block(layer, x)
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


OPTIMIZER = optax.adam(1e-3)


def train_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_fn)(state["params"], tokens)
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def make_state(layers: int, width: int, vocabulary: int, length: int) -> Any:
    params = init_params(jax.random.key(0), layers, width, vocabulary, length)
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


MEGATRON: dict[str, P] = {
    "qkv": P(None, None, "y", None),
    "out": P("y", None, None),
    "up": P(None, "y"),
    "down": P("y", None),
}


# Measuring


def by_hand(step: Step, state: Any, shardings: Any, batch: NamedSharding, mesh: Mesh) -> Step:
    return jax.jit(
        step,
        in_shardings=(shardings, batch),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )


def alternate(
    steps: dict[str, Step], states: dict[str, Any], batch: dict[str, Any], repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Of each call until its results are there: seconds, and CPU seconds of all threads.

    The contestants take turns. Other work on the machine disturbs CPU seconds less.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for repeat in range(repeats + 3):
        order = list(steps) if repeat % 2 else list(steps)[::-1]
        for name in order:
            start, cpu_start = time.perf_counter(), time.process_time()
            states[name], loss = steps[name](states[name], batch[name])
            jax.block_until_ready((states[name], loss))
            if repeat >= 3:  # what comes before are compilation and warm-up
                taken = (time.perf_counter() - start, time.process_time() - cpu_start)
                seconds[name].append(taken)
    return seconds


def compare(
    name: str, seconds: dict[str, list[tuple[float, float]]], losses: dict[str, Any]
) -> dict[str, Any]:
    pairs = list(zip(seconds["autopar"], seconds["by hand"], strict=True))
    ratios = [a / b for (a, _), (b, _) in pairs]
    cpu_ratios = [a / b for (_, a), (_, b) in pairs]
    return {
        "name": name,
        "by_hand_ms": 1e3 * statistics.median(wall for wall, _ in seconds["by hand"]),
        "autopar_ms": 1e3 * statistics.median(wall for wall, _ in seconds["autopar"]),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "cpu_ratio": statistics.median(cpu_ratios),
        "cpu_ratio_quartiles": statistics.quantiles(cpu_ratios, n=4)[::2],
        "repeats": len(ratios),
        "loss_difference": abs(float(losses["autopar"]) - float(losses["by hand"])),
    }


def measure_gpt(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    devices = len(jax.devices())
    shape: tuple[int, ...] = (devices,)
    if name == "megatron":
        shape = (2, devices // 2) if devices > 1 else (1, 1)
    mesh = Mesh(
        np.asarray(jax.devices()).reshape(shape),
        ("x", "y")[: len(shape)],
        axis_types=(AxisType.Auto,) * len(shape),
    )
    length = arguments.length
    make = functools.partial(make_state, arguments.layers, arguments.width, 256, length)
    tokens = np.random.default_rng(0).integers(0, 256, (arguments.batch, length + 1), np.int32)
    options: dict[str, Any] = {"method": "data"}
    specs: dict[str, P] = {}
    if name == "megatron":
        specs = MEGATRON
        others = ("embed", "positions", "scale_1", "scale_2", "count", "tokens")
        pins = {f"*{key}": spec for key, spec in MEGATRON.items()}
        pins |= {f"*{key}": P() for key in others[:-1]} | {"tokens": P("x")}
        options = {"method": "shard", "logical_mesh": shape, "pins": pins}
    shardings = jax.tree_util.tree_map_with_path(
        lambda path, _: NamedSharding(mesh, specs.get(getattr(path[-1], "key", ""), P())),
        jax.eval_shape(make),
    )
    batch = NamedSharding(mesh, P("x"))
    planned = autopar.compile(
        train_step, jax.eval_shape(make), tokens, microbatches=1, progress=False, **options
    )
    steps: dict[str, Step] = {
        "by hand": by_hand(train_step, make(), shardings, batch, mesh),
        "autopar": planned,
    }
    states = {
        "by hand": jax.jit(make, out_shardings=shardings)(),
        "autopar": planned.initialize(make),
    }
    batches = {
        "by hand": jax.device_put(tokens, batch),
        "autopar": jax.device_put(tokens, planned.in_shardings[1]),
    }
    seconds = alternate(steps, states, batches, arguments.repeats)
    losses = {key: steps[key](states[key], batches[key])[1] for key in steps}
    return compare(name, seconds, losses)


def measure_call(arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of the calling thread for a call with a state of many leaves."""
    leaves = arguments.leaves
    shape = (8,)

    def make() -> Any:
        names = ("kernel", "bias", "scale", "mean", "count")
        return {f"layer_{i}": {n: jnp.zeros(shape) for n in names} for i in range(leaves // 5)}

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        return jax.tree.map(lambda leaf: leaf + 1, state), x.sum()

    x = np.ones((8, 4), np.float32)
    cluster = autopar.Cluster.local(jax.devices()[:1])
    planned = autopar.compile(
        step, make(), x, cluster=cluster, method="data", microbatches=1, progress=False
    )
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("x",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())
    hand = by_hand(step, make(), jax.tree.map(lambda _: whole, make()), whole, mesh)
    steps: dict[str, Step] = {"by hand": hand, "autopar": planned}
    placed = jax.device_put(x, planned.in_shardings[1])
    states = {"by hand": jax.device_put(make(), whole), "autopar": planned.initialize(make)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(10 * arguments.repeats + 3):
        for name, one in steps.items():
            start = time.thread_time()
            states[name], _ = one(states[name], placed)
            elapsed = time.thread_time() - start
            jax.block_until_ready(states[name])
            if repeat >= 3:
                seconds[name].append(elapsed)
    differences = [a - b for a, b in zip(seconds["autopar"], seconds["by hand"], strict=True)]
    return {
        "name": "call",
        "leaves": leaves // 5 * 5,
        "by_hand_us": 1e6 * statistics.median(seconds["by hand"]),
        "autopar_us": 1e6 * statistics.median(seconds["autopar"]),
        "added_us": 1e6 * statistics.median(differences),
        "repeats": len(differences),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8, help="virtual devices, on a CPU")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64, help="tokens of an example")
    parser.add_argument("--batch", type=int, default=32, help="examples")
    parser.add_argument("--leaves", type=int, default=500, help="of the state in `call`")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--only", choices=["data", "megatron", "call"])
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)

    # `call` first: a process that has compiled large programs is slower at everything.
    names = [arguments.only] if arguments.only else ["call", "data", "megatron"]
    results = [
        measure_call(arguments) if name == "call" else measure_gpt(name, arguments)
        for name in names
    ]
    console = Console(width=max(Console().width, 100))
    table = Table(title=f"{len(jax.devices())} x {jax.devices()[0].device_kind}")
    for heading in ("measurement", "by hand", "autopar", "autopar / by hand", "goal"):
        table.add_column(heading, justify="left" if heading == "measurement" else "right")
    for result in results:
        if result["name"] == "call":
            table.add_row(
                f"call, {result['leaves']} leaves",
                f"{result['by_hand_us']:.0f} us",
                f"{result['autopar_us']:.0f} us",
                f"{result['added_us']:+.0f} us",
                "< 200 us",
            )
        else:
            table.add_row(
                f"{result['name']}, GPT of {arguments.layers} layers",
                f"{result['by_hand_ms']:.1f} ms",
                f"{result['autopar_ms']:.1f} ms",
                f"{result['ratio']:.3f} ({result['cpu_ratio']:.3f} in CPU time)",
                "<= 1.03",
            )
    console.print(table)
    if arguments.json:
        settings = {k: v for k, v in vars(arguments).items() if k not in ("json", "only")}
        print(json.dumps({"benchmark": "overhead", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
