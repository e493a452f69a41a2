"""Step seconds that others measured, beside what the cost model expects of the same plans.

Every row is a plan as its authors describe it: the model, how many devices, how they are used, the
batch and its microbatches. autopar plans it under the same restrictions for the same cluster and
says what a step should take; nothing is fitted to the rows. All are of Zheng et al., "Alpa:
Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning" (OSDI 2022), on AWS
p3.16xlarge, as the numbers stand in the authors' repository
(https://github.com/alpa-projects/alpa): `osdi22_artifact/results_intra_ablation.tsv` and
`results_e2e.tsv`, with the plans in `benchmark/alpa/exp_intra_ablation.py`, `exp_intra_only.py` and
`README.md`. The 39B row is theirs as TFLOP/s per GPU, by their count of operations.

Alpa's programs compute in float16 from float16 parameters, of which the optimizer keeps a float32
copy; the model here does as well, with recomputation in every block.

    python benchmarks/published.py [--only REGEX] [--json] [--whole]

Models are planned with a few of their layers, and what one more layer takes is added for the rest,
which is exact where layers are alike; pipelines with a few microbatches, and what one more takes is
added likewise. `--whole` plans everything as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured step.

    `mesh` is the logical mesh of each of `stages` equal stages; `microbatches` are of the whole
    batch.
    """

    name: str
    source: str
    cluster: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    microbatches: int
    method: str
    mesh: tuple[int, ...]
    stages: int
    seconds: float
    sequence: int = 1024


def alpa_seconds(layers: int, hidden: int, gpus: int, tflops: float) -> float:
    """Seconds of a step of 1024 sequences from TFLOP/s per GPU, as Alpa counts operations.

    96 B S L H^2 (1 + S / 6H + V / 16LH), with the forward pass computed twice.
    """
    sequence, vocabulary = 1024, 51200
    operations: float = 96 * 1024 * sequence * layers * hidden**2
    operations *= 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return operations / (gpus * tflops * 1e12)


def _ablation() -> list[Row]:
    measured = [
        # hidden, heads, GPUs: method, mesh, seconds
        (2048, 16, "shard", (1,), 0.4538),
        (3072, 24, "zero2", (2,), 0.5370),
        (3072, 24, "megatron", (1, 2), 0.5753),
        (3072, 24, "zero3", (2,), 0.6356),
        (4096, 32, "zero2", (4,), 0.4333),
        (4096, 32, "megatron", (2, 2), 0.5815),
        (4096, 32, "megatron", (1, 4), 0.4457),
        (4096, 32, "zero3", (4,), 0.4976),
        (5760, 40, "megatron", (4, 2), 0.5803),
        (5760, 40, "megatron", (2, 4), 0.5028),
        (5760, 40, "megatron", (1, 8), 0.4539),
        (5760, 40, "zero3", (8,), 0.5219),
    ]
    return [
        Row(
            f"GPT h{hidden} L8, {method} {mesh}",
            "Alpa, intra-operator ablation",
            f"{np.prod(mesh)}x v100-p3",
            hidden,
            8,
            heads,
            25600,
            8,
            1,
            method,
            mesh,
            1,
            seconds,
        )
        for hidden, heads, method, mesh, seconds in measured
    ]


def _end_to_end() -> list[Row]:
    def row(
        name: str, model: tuple[int, int, int], nodes: int, *plan: Any, batch: int = 1024
    ) -> Row:
        hidden, layers, heads = model
        microbatches, method, mesh, stages, seconds = plan
        per_node = int(np.prod(mesh)) * stages // nodes
        cluster = f"{nodes}x{per_node} p3.16xlarge"
        source = "Alpa, end to end"
        return Row(
            name, source, cluster, hidden, layers, heads, 51200, batch, microbatches, method, mesh,
            stages, seconds,
        )  # fmt: skip

    return [
        row("GPT-350M", (1024, 24, 16), 1, 64, "shard", (1,), 1, 71.13),
        row("GPT-760M", (1536, 24, 16), 1, 64, "zero2", (2,), 1, 57.38),
        row("GPT-1.3B", (2048, 24, 32), 1, 64, "zero2", (4,), 1, 49.94),
        row("GPT-2.6B", (2560, 32, 32), 1, 32, "megatron", (4, 2), 1, 57.42),
        row("GPT-6.7B", (4096, 32, 32), 2, 64, "megatron", (2, 8), 1, 74.29),
        row("GPT-2.6B", (2560, 32, 32), 1, 4, "megatron", (2, 2), 2, 2.425, batch=32),
        row("GPT-39B", (8192, 48, 64), 8, 1024, "megatron", (1, 4), 16,
            alpa_seconds(48, 8192, 64, 57.0)),
    ]  # fmt: skip


ROWS = [*_ablation(), *_end_to_end()]


class Block(nn.Module):
    """A transformer block; heads are the outer part of the projection's features."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, sequence = x.shape[-1], x.shape[-2]
        dense = lambda size: nn.Dense(size, dtype=self.dtype, param_dtype=self.dtype)  # noqa: E731
        norm = lambda: nn.LayerNorm(dtype=self.dtype, param_dtype=self.dtype)  # noqa: E731
        qkv = dense(3 * width)(norm()(x))
        q, k, v = jnp.split(qkv.reshape(*qkv.shape[:-1], self.heads, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]).astype(self.dtype)
        mask = jnp.tril(jnp.ones((sequence, sequence), bool))
        scores = jnp.where(mask, scores.astype(jnp.float32), jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores).astype(self.dtype)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + dense(width)(y)
        return x + dense(width)(nn.gelu(dense(4 * width)(norm()(x))))


class PublishedGPT(nn.Module):
    """A decoder with learned positions and tied embeddings, recomputed block by block."""

    row: Row
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        row = self.row
        embed = nn.Embed(row.vocabulary, row.hidden, self.dtype, self.dtype)
        places = nn.Embed(row.sequence, row.hidden, self.dtype, self.dtype)
        x = embed(tokens) + places(jnp.arange(tokens.shape[-1]))
        for _ in range(row.layers):
            x = nn.remat(Block)(row.heads, self.dtype)(x)
        norm = nn.LayerNorm(dtype=self.dtype, param_dtype=self.dtype)
        return embed.attend(norm(x))


def train_step(row: Row, dtype: Any) -> tuple[Any, Any, Any]:
    """The step and the shapes of its state and batch."""
    model, optimizer = PublishedGPT(row, dtype), optax.adamw(1e-4)

    def loss_of(parameters: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": parameters}, batch["x"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def step(state: Any, batch: Any) -> Any:
        parameters, master, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        updates, moments = optimizer.update(gradients, moments, master)
        master = optax.apply_updates(master, updates)
        return (jax.tree.map(lambda p: p.astype(dtype), master), master, moments), loss

    tokens = jnp.zeros((1, row.sequence), jnp.int32)
    parameters = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens))["params"]
    master = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), parameters)
    moments = jax.eval_shape(optimizer.init, master)
    batch = jax.ShapeDtypeStruct((row.batch, row.sequence), jnp.int32)
    return step, (parameters, master, moments), {"x": batch, "y": batch}


def cluster_of(row: Row) -> autopar.Cluster:
    """Its cluster; "Nx v100-p3" is a part of one node."""
    part = re.fullmatch(r"(\d+)x v100-p3", row.cluster)
    if part:
        return autopar.Cluster.preset("p3.16xlarge", devices_per_node=int(part.group(1)))
    return autopar.Cluster.named(row.cluster)


def planned_seconds(row: Row) -> float:
    """What autopar expects of a step, planned as it is."""
    dtype = jnp.bfloat16 if "a100" in row.cluster else jnp.float16
    step, state, batch = train_step(row, dtype)
    per_stage = row.layers // row.stages
    # Every block is two layers for autopar.
    stages: Any = [2 * per_stage * i for i in range(1, row.stages)] if row.stages > 1 else 1
    plan = autopar.plan(
        step,
        state,
        batch,
        cluster=cluster_of(row),
        method=row.method,
        logical_mesh=row.mesh,
        stages=stages,
        schedule="1f1b" if row.stages > 1 else None,
        microbatches=row.microbatches,
        memory_limit=10**13,  # what fitted there fitted: this asks for time alone
        progress=False,
    )
    return plan.estimates.step_seconds


def expected_seconds(row: Row, whole: bool = False) -> float:
    """What autopar expects of a step; from smaller ones where that is exact."""
    if whole:
        return planned_seconds(row)
    if row.stages > 1:
        counts = (2 * row.stages, 3 * row.stages)
        if row.microbatches <= counts[1]:
            return planned_seconds(row)
        size = row.batch // row.microbatches
        few, more = (
            planned_seconds(dataclasses.replace(row, batch=size * n, microbatches=n))
            for n in counts
        )
        each = (more - few) / (counts[1] - counts[0])
        return few + (row.microbatches - counts[0]) * each
    if row.layers <= 8:
        return planned_seconds(row)
    few, more = (planned_seconds(dataclasses.replace(row, layers=n)) for n in (2, 4))
    return few + (row.layers - 2) * (more - few) / 2


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, of values that are all different."""
    one, other = (np.argsort(np.argsort(values)) for values in (first, second))
    return float(np.corrcoef(one, other)[0, 1])


def main() -> None:
    """Print the table, or write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name matches")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--whole", action="store_true", help="plan everything as it is")
    args = parser.parse_args()
    results = []
    for row in ROWS:
        label = f"{row.name}, {row.stages} x {row.mesh}, {row.source}"
        if not re.search(args.only, label):
            continue
        started = time.process_time()
        seconds = expected_seconds(row, args.whole)
        plain = dataclasses.asdict(row) | {
            "expected": seconds,
            "ratio": seconds / row.seconds,
            "planning_cpu_seconds": time.process_time() - started,
        }
        results.append(plain)
        if not args.json:
            ratio = f"{plain['ratio'] - 1:+.1%}"
            print(f"{row.seconds:9.3f} s  {seconds:9.3f} s  {ratio:>7}  {label}", flush=True)
    summary: dict[str, Any] = {}
    for source in dict.fromkeys(r["source"] for r in results):
        rows = [r for r in results if r["source"] == source]
        if len(rows) > 2:
            pairs = [[r[key] for r in rows] for key in ("seconds", "expected")]
            summary[source] = rank_correlation(*pairs)
    if args.json:
        print(json.dumps({"rows": results, "rank_correlation": summary}, indent=1))
    else:
        for source, value in summary.items():
            print(f"rank correlation {value:.2f}  {source}")


if __name__ == "__main__":
    main()
