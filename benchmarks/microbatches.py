"""What automatic microbatches take within the memory, beside each number that is asked for.

    python benchmarks/microbatches.py [--cases small scan unrolled] [--json]

`small` is a Transformer of 12 unrolled layers of width 64 on eight CPU devices, whose links have
latency more than anything; the others are the decoder of `recomputing.py` on eight H100s. All on
one mesh, within several limits. The ratio is what the automatic plan takes over the best of those
that were asked for: 1 is as good; what is above it the search has missed. The last line is JSON
with `--json`. A limit of `small` takes minutes: numbers that do not fit are tried in every way.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import recomputing
from rich.console import Console
from rich.table import Table

import autopar
from autopar.base.errors import AutoparError

ASKED = (1, 2, 4, 8, 16, 32)
LIMITS = {  # MiB of a device
    "small": (8, 5, 3),
    "scan": (8192, 5120, 3072),
    "unrolled": (8192, 5120, 3072),
}
LAYERS, WIDTH, HEADS, LENGTH, ROWS, VOCABULARY = 12, 64, 4, 64, 64, 256


def layer(h: jax.Array, w: Any) -> jax.Array:
    """Attention with a mask, and a block of two products, each after a normalization."""

    def normed(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w["g"]

    x = normed(h)
    q, k, v = ((x @ w[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)
    h = h + y.reshape(x.shape) @ w["o"]
    return h + jax.nn.gelu(normed(h) @ w["up"]) @ w["down"]


def small() -> tuple[Any, Any, Any]:
    """The step of the small Transformer, and the shapes of its state and batch."""

    def loss_of(parameters: Any, batch: Any) -> jax.Array:
        h = parameters["embedding"][batch["x"]]
        for weights in parameters["layers"]:
            h = layer(h, weights)
        logits = h @ parameters["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    weights: Any = {name: shape(WIDTH, WIDTH) for name in "qkvo"} | {"g": shape(WIDTH)}
    weights |= {"up": shape(WIDTH, 4 * WIDTH), "down": shape(4 * WIDTH, WIDTH)}
    parameters = {"embedding": shape(VOCABULARY, WIDTH), "layers": [weights] * LAYERS}
    return recomputing.trained(loss_of, parameters, ROWS, LENGTH)


def planned(case: str, limit: int, microbatches: Any) -> dict[str, Any]:
    """One plan, as plain numbers; without a time where nothing fits."""
    program = small() if case == "small" else recomputing.step_of(case, checkpoint=False)
    options: dict[str, Any] = {"cluster": "8 cpu" if case == "small" else "8xh100", "stages": 1}
    options |= {"memory_limit": limit << 20, "microbatches": microbatches, "progress": False}
    begun, found = time.process_time(), {"case": case, "limit_mib": limit, "asked": microbatches}
    try:
        plan = autopar.plan(*program, **options)
        found["microbatches"] = plan.num_microbatches
        found["step_ms"] = 1e3 * plan.estimates.step_seconds
    except AutoparError as error:
        found["refused"] = error.what
    return {**found, "cpu_seconds": time.process_time() - begun}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=[*LIMITS], choices=[*LIMITS])
    parser.add_argument("--limits", nargs="+", type=int, help="MiB, instead of a case's own")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    options = parser.parse_args()
    table = Table(title="one mesh: step of an automatic plan, and with microbatches asked for")
    for heading in ("case", "MiB", "auto", "step", "ratio", *map(str, ASKED), "CPU s of auto"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    rows, progress = list[dict[str, Any]](), Console(stderr=True)
    for case in options.cases:
        for limit in options.limits or LIMITS[case]:
            found = list[dict[str, Any]]()
            for count in ("auto", *ASKED):
                with progress.status(f"{case} within {limit} MiB: {count} microbatches"):
                    found.append(planned(case, limit, count))
            auto, *others = found
            rows += [auto, *others]
            best = min((x["step_ms"] for x in others if "step_ms" in x), default=math.inf)
            own = auto.get("step_ms", math.inf)
            ratio = f"{own / best:.3f}" if own < math.inf and best < math.inf else ""
            times = [f"{x['step_ms']:.1f} ms" if "step_ms" in x else "-" for x in (auto, *others)]
            count, seconds = str(auto.get("microbatches", "-")), f"{auto['cpu_seconds']:.0f}"
            table.add_row(case, str(limit), count, times[0], ratio, *times[1:], seconds)
    Console(width=130).print(table)
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
