"""Train steps as their users write them: plans without a GPU, and what XLA makes of these.

One decoder in bfloat16 on float32 parameters, every layer under `jax.checkpoint`, for eight H100s
in one node; what changes is how the step is written around it. Optimizers that skip steps by
`jax.lax.cond` (`optax.apply_if_finite`), Muon, preconditioners that are refreshed every few steps,
gradients that are accumulated by hand over parts of the batch, ZeRO of unrolled layers, and one
sequence of many tokens whose heads of keys are fewer than the devices.

    python benchmarks/written_steps.py [--cases "zero1|muon"] [--layers 12] [--json] [--verify]

`--verify` compiles each plan for H100s as well (`autopar[gpu-check]`).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import autopar

WIDTH, HEADS, VOCABULARY = 2048, 16, 32000
ROWS, LENGTH = 8, 1024
REFRESHED, ITERATIONS, PARTS = 20, 10, 8

Optimizer = Any  # an `optax.GradientTransformation`


class Case(NamedTuple):
    """A way to write the step, and how it is planned.

    Args:
      optimizer: its optimizer.
      options: of `autopar.plan`.
      rows: sequences of a batch.
      length: tokens of a sequence.
      key_heads: heads of keys and values; attention by cuDNN, if they are fewer than those of
        queries.
      parts: of the batch, one after the other, by a scan.
    """

    optimizer: Callable[[], Optimizer]
    options: dict[str, Any]
    rows: int = ROWS
    length: int = LENGTH
    key_heads: int = HEADS
    parts: int = 1


def adamw() -> Optimizer:
    """AdamW on clipped gradients."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def unclipped() -> Optimizer:
    """AdamW: each parameter's update waits for its own gradient alone."""
    return optax.adamw(1e-3)


def muon() -> Optimizer:
    """Muon, five iterations of a loop for each matrix."""
    return optax.contrib.muon(1e-3)


def skipping(inner: Callable[[], Optimizer]) -> Callable[[], Optimizer]:
    """An optimizer that is left out where a gradient is not finite."""
    return lambda: optax.apply_if_finite(inner(), 5)


def preconditioned() -> Optimizer:
    """Both sides of every gradient times roots that Newton's iterations find now and then."""

    def init(parameters: Any) -> Any:
        def each(leaf: Any) -> Any:
            sides = [jnp.zeros((size, size)) for size in leaf.shape]
            return {"sums": sides, "roots": sides}

        return jax.tree.map(each, parameters), jnp.zeros((), jnp.int32)

    def root(x: jax.Array) -> jax.Array:
        x = x / (jnp.linalg.norm(x) + 1e-6)
        for _ in range(ITERATIONS):
            square = x @ x
            x = 1.5 * x - 0.5 * square @ x
        return x

    def update(gradients: Any, state: Any, parameters: Any = None) -> Any:
        del parameters
        sides, count = state

        def each(g: jax.Array, own: Any) -> tuple[jax.Array, Any]:
            pairs = zip(own["sums"], (g @ g.T, g.T @ g), strict=True)
            sums = [0.95 * total + square for total, square in pairs]
            roots = jax.lax.cond(
                count % REFRESHED == 0,
                lambda sums, roots: [root(x) for x in sums],
                lambda sums, roots: roots,
                sums,
                own["roots"],
            )
            return -1e-3 * roots[0] @ g @ roots[1], {"sums": sums, "roots": roots}

        leaves: list[jax.Array]
        tree: Any
        leaves, tree = jax.tree.flatten(gradients)
        made = [each(g, own) for g, own in zip(leaves, tree.flatten_up_to(sides), strict=True)]
        updates, sides = (tree.unflatten(x) for x in zip(*made, strict=True))
        return updates, (sides, count + 1)

    return optax.GradientTransformation(init, update)


CASES = {
    "zero1": Case(adamw, {"method": "zero1"}),
    "zero1, not clipped": Case(unclipped, {"method": "zero1"}),
    "zero2": Case(adamw, {"method": "zero2"}),
    "zero2, not clipped": Case(unclipped, {"method": "zero2"}),
    "zero3": Case(adamw, {"method": "zero3"}),
    "skipped": Case(skipping(adamw), {"method": "zero1"}),
    "muon": Case(muon, {"method": "zero1"}),
    "muon, zero2": Case(muon, {"method": "zero2"}),
    "muon, skipped": Case(skipping(muon), {"method": "zero1"}),
    "muon, skipped, zero2": Case(skipping(muon), {"method": "zero2"}),
    "preconditioned": Case(preconditioned, {"method": "zero1"}),
    "accumulated by hand": Case(adamw, {"method": "data"}, rows=64, parts=PARTS),
    "one sequence": Case(adamw, {}, rows=1, length=32768, key_heads=4),
}


def step_of(case: Case, layers: int) -> tuple[Any, Any, Any]:
    """The step, and the shapes of its state and batch."""
    optimizer, size = case.optimizer(), WIDTH // HEADS
    keys = case.key_heads * size

    def layer(x: jax.Array, w: Any) -> jax.Array:
        def heads(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:2], -1, size)

        cast = {name: value.astype(x.dtype) for name, value in w.items()}
        q, k, v = jnp.split(norm(x) @ cast["qkv"], [WIDTH, WIDTH + keys], -1)
        by: Literal["cudnn"] | None = "cudnn" if case.key_heads < HEADS else None
        y = jax.nn.dot_product_attention(
            heads(q), heads(k), heads(v), is_causal=True, implementation=by
        )
        x = x + y.reshape(x.shape) @ cast["out"]
        return x + jax.nn.gelu(norm(x) @ cast["up"]) @ cast["down"]

    def loss_of(parameters: Any, tokens: jax.Array) -> jax.Array:
        x = parameters["table"].astype(jnp.bfloat16)[tokens]
        for w in parameters["layers"]:
            x = jax.checkpoint(layer)(x, w)
        logits = (norm(x) @ parameters["table"].T.astype(x.dtype)).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return jnp.mean(losses)

    def gradients_of(parameters: Any, tokens: jax.Array) -> Any:
        if case.parts == 1:
            return jax.value_and_grad(loss_of)(parameters, tokens)

        def add(total: Any, part: jax.Array) -> tuple[Any, None]:
            found = jax.value_and_grad(loss_of)(parameters, part)
            return jax.tree.map(lambda x, y: x + y / case.parts, total, found), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), parameters))
        return jax.lax.scan(add, zeros, tokens.reshape(case.parts, -1, case.length))[0]

    def step(state: Any, tokens: jax.Array) -> Any:
        parameters, own = state
        loss, gradients = gradients_of(parameters, tokens)
        updates, own = optimizer.update(gradients, own, parameters)
        return (optax.apply_updates(parameters, updates), own), loss

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    each = {
        "qkv": shape(WIDTH, WIDTH + 2 * keys),
        "out": shape(WIDTH, WIDTH),
        "up": shape(WIDTH, 4 * WIDTH),
        "down": shape(4 * WIDTH, WIDTH),
    }
    parameters = {"table": shape(VOCABULARY, WIDTH), "layers": [each] * layers}
    tokens = jax.ShapeDtypeStruct((case.rows, case.length), jnp.int32)
    return step, (parameters, jax.eval_shape(optimizer.init, parameters)), tokens


def norm(x: jax.Array) -> jax.Array:
    """Layer normalization without parameters."""
    return (x - jnp.mean(x, -1, keepdims=True)) * jax.lax.rsqrt(
        jnp.var(x, -1, keepdims=True) + 1e-5
    )


def planned(name: str, layers: int, verify: bool) -> dict[str, Any]:
    """One plan, as plain numbers."""
    case = CASES[name]
    begun = time.process_time()
    asked: dict[str, Any] = {"cluster": autopar.Cluster.preset("dgx-h100"), "stages": 1}
    asked |= {"microbatches": 1, "progress": False, **case.options}
    with autopar.tracing_for(asked["cluster"]):
        step, state, tokens = step_of(case, layers)
        plan = autopar.plan(step, state, tokens, **asked)
    row: dict[str, Any] = {
        "case": name,
        "layers": layers,
        "cpu_seconds": time.process_time() - begun,
        "mesh": list(plan.stages[0].logical_mesh),
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
    parser.add_argument("--cases", default="", help="a regular expression of cases to run")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--verify", action="store_true", help="compile each plan for H100s")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    options = parser.parse_args()
    table = Table(title=f"steps as they are written, {options.layers} layers on eight H100s")
    for heading in ("step", "mesh", "planned in", "step takes", "planned", "compiled", "ratio"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    rows = []
    for name in CASES:
        if not re.search(options.cases, name):
            continue
        row = planned(name, options.layers, options.verify)
        rows.append(row)
        sizes = row["planned_bytes"], row.get("compiled_bytes")
        table.add_row(
            name,
            "x".join(map(str, row["mesh"])),
            f"{row['cpu_seconds']:.1f} CPU s",
            f"{row['step_ms']:.1f} ms",
            *(f"{size / 2**30:.2f} GiB" if size else "-" for size in sizes),
            f"{sizes[0] / sizes[1]:.2f}" if sizes[1] else "-",
        )
    Console(width=max(Console().width, 90)).print(table)
    if options.json:
        print(json.dumps({"benchmark": "written_steps", "results": rows}))


if __name__ == "__main__":
    main()
