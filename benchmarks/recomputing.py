"""What steps cost that do not fit, by how they are written: plans without a GPU.

One decoder of 16 layers for eight H100s on one mesh, 64 sequences of 1,024, in bfloat16 with AdamW:
layers unrolled or one scan, without `jax.checkpoint` or with it around every layer. Each is planned
within several memory limits, also without computing anything again that the program does not.

    python benchmarks/recomputing.py [--limits 8 5 3] [--forms scan unrolled] [--json] [--verify]

`--verify` compiles each chosen plan for H100s as well (`autopar[gpu-check]`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.base.errors import MemoryLimitError

LAYERS, WIDTH, HEADS, LENGTH, ROWS, VOCABULARY = 16, 1024, 8, 1024, 64, 32000
WAYS = {  # whether layers have `jax.checkpoint`, and the option
    "auto": (False, "auto"),
    "jax.checkpoint": (True, "auto"),
    "override": (True, "override"),
    "none": (False, "none"),
}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS normalization, computed in float32."""
    x = x.astype(jnp.float32)
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
    return y.astype(jnp.bfloat16)


def layer(h: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    """Attention and a gated feed-forward block, each after a normalization."""
    w = {name: value.astype(jnp.bfloat16) for name, value in weights.items()}
    x = norm(h, weights["g1"])
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w[name]) for name in "qkv")
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    h = h + jnp.einsum("bshe,hed->bsd", y, w["o"])
    x = norm(h, weights["g2"])
    return h + (jax.nn.silu(x @ w["w1"]) * (x @ w["w3"])) @ w["w2"], None


def trained(loss_of: Callable[[Any, Any], jax.Array], parameters: Any, *rows: int) -> Any:
    """A step with AdamW, and the shapes of its state and of batches of so many tokens."""
    optimizer = optax.adamw(1e-4)

    def step(state: Any, batch: Any) -> Any:
        parameters, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), loss

    tokens = jax.ShapeDtypeStruct(rows, jnp.int32)
    state = parameters, jax.eval_shape(optimizer.init, parameters)
    return step, state, {"x": tokens, "y": tokens}


def step_of(form: str, checkpoint: bool) -> tuple[Any, Any, Any]:
    """The step, and the shapes of its state and batch."""
    block = jax.checkpoint(layer) if checkpoint else layer

    def loss_of(parameters: Any, batch: Any) -> jax.Array:
        h = parameters["embedding"][batch["x"]].astype(jnp.bfloat16)
        if form == "scan":
            h, _ = jax.lax.scan(block, h, parameters["layers"])
        else:
            for weights in parameters["layers"]:
                h, _ = block(h, weights)
        logits = (h @ parameters["head"].astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((LAYERS,) * (form == "scan") + sizes, jnp.float32)

    heads = (WIDTH, HEADS, WIDTH // HEADS)
    wide, narrow = shape(WIDTH, 4 * WIDTH), shape(4 * WIDTH, WIDTH)
    layers: Any = {"g1": shape(WIDTH), "g2": shape(WIDTH), "o": shape(*heads[1:], WIDTH)}
    layers |= {name: shape(*heads) for name in "qkv"} | {"w1": wide, "w3": wide, "w2": narrow}
    layers = layers if form == "scan" else [layers] * LAYERS
    table = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32)
    head = jax.ShapeDtypeStruct((WIDTH, VOCABULARY), jnp.float32)
    parameters = {"embedding": table, "head": head, "layers": layers}
    return trained(loss_of, parameters, ROWS, LENGTH)


def planned(form: str, way: str, limit: float, verify: bool) -> dict[str, Any]:
    """One plan, as plain numbers."""
    checkpoint, remat = WAYS[way]
    row: dict[str, Any] = {"form": form, "way": way, "limit_gib": limit}
    begun = time.process_time()
    try:
        plan = autopar.plan(
            *step_of(form, checkpoint),
            cluster=autopar.Cluster.preset("dgx-h100"),
            memory_limit=int(limit * 2**30),
            remat=remat,
            stages=1,
            progress=False,
        )
    except MemoryLimitError as error:
        return row | {"refused": error.what}
    row |= {
        "cpu_seconds": time.process_time() - begun,
        "microbatches": plan.num_microbatches,
        "step_ms": 1e3 * plan.estimates.step_seconds,
        "planned_bytes": plan.estimates.peak_bytes_per_device,
    }
    if verify:
        (stage,) = plan.verify("gpu:h100").stages
        row["compiled_bytes"] = stage.compiled_bytes
    return row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limits", nargs="+", type=float, default=[8.0, 5.0, 3.0], help="GiB")
    parser.add_argument("--forms", nargs="+", default=["scan", "unrolled"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--verify", action="store_true", help="compile each plan for H100s")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    options = parser.parse_args()
    table = Table(title="a step that does not fit, on eight H100s")
    for heading in ("form", "computed again", "GiB", "microbatches", "step", "planned", "compiled"):
        table.add_column(heading, justify="left" if heading == "form" else "right")
    rows = []
    for limit in options.limits:
        for form in options.forms:
            for way in options.ways:
                row = planned(form, way, limit, options.verify)
                rows.append(row)
                sizes = (row.get(f"{name}_bytes") for name in ("planned", "compiled"))
                table.add_row(
                    form,
                    way,
                    f"{limit:g}",
                    str(row.get("microbatches", "-")),
                    f"{row['step_ms']:.1f} ms" if "step_ms" in row else "refused",
                    *(f"{size / 2**30:.2f} GiB" if size else "-" for size in sizes),
                )
    Console(width=max(Console().width, 90)).print(table)
    if options.json:
        print(json.dumps({"benchmark": "recomputing", "results": rows}))


if __name__ == "__main__":
    main()
