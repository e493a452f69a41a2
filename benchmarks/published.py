"""Step seconds that others measured, beside what the cost model expects of the same plans.

Every row is a plan as its authors describe it: the model, how many devices, how they are used, the
batch and its microbatches. autopar plans it under the same restrictions for the same cluster and
says what a step should take; nothing is fitted to the rows. They stand, with their sources, in
`published_alpa.py`, `published_megatron.py` and `published_fsdp.py`, their models in
`published_models.py`. Where they ran in other frameworks than XLA, what a step takes includes these
frameworks' own kernels and waits; how the plans of a set are ordered is what the model has to tell.

    python benchmarks/published.py [--only REGEX] [--json] [--whole]

Models are planned with a few of their layers, and what one more layer takes is added for the rest,
which is exact where layers are alike; pipelines with a few microbatches, and what one more takes is
added likewise, and so for stages where each is whole nodes, which is close and not exact (two
pipelines of five stages: 12.63 s for 12.79, 4.70 for 4.72). `--whole` plans everything as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import published_alpa
import published_fsdp
import published_megatron
from published_models import Row, train_step

import autopar

ROWS = [
    *published_alpa.ablation(),
    *published_alpa.end_to_end(),
    *published_megatron.dlperf(),
    *published_megatron.bigscience(),
    *published_megatron.narayanan(),
    *published_megatron.korthikanti(),
    *published_fsdp.mosaic(),
    *published_fsdp.llamas(),
]


def cluster_of(row: Row) -> autopar.Cluster:
    """Its cluster: nodes, devices of each, and a preset or one of `_NETWORKS`."""
    nodes, per_node, kind = re.fullmatch(r"(\d+)x(\d+) (.+)", row.cluster).groups()  # type: ignore[union-attr]
    preset, bandwidth, sharing = _NETWORKS.get(kind, (kind, 0.0, 0))
    cluster = autopar.Cluster.preset(preset, nodes=int(nodes), devices_per_node=int(per_node))
    if bandwidth:
        link = dataclasses.replace(cluster.inter_node, bandwidth=bandwidth / sharing)
        cluster = dataclasses.replace(cluster, inter_node=link, devices_per_card=sharing)
    return dataclasses.replace(cluster, overlap=row.overlap)


_NETWORKS: dict[str, tuple[str, float, int]] = {
    "v100-edr": ("dgx-v100", 12.5e9, 8),
    "jean-zay-a100": ("dgx-a100", 12.5e9, 2),
    "a100-400g": ("dgx-a100", 12.5e9, 2),
}
"""Other networks than a preset's: the preset, bytes per second of a card, devices that share it."""


@functools.cache
def _planned_seconds(plan: Row) -> float:
    row = plan
    step, state, batch = train_step(row)
    pipelined = row.stages > 1
    stages: Any = 1
    if pipelined:
        # For autopar every checkpointed block is two layers.
        pieces = row.stages * row.chunks
        stages = [2 * row.model.layers // pieces * i for i in range(1, pieces)]
    planned = autopar.plan(
        step,
        state,
        batch,
        cluster=cluster_of(row),
        method=row.method,
        logical_mesh=row.mesh,
        stages=stages,
        schedule=("1f1b" if row.chunks == 1 else "interleaved_1f1b") if pipelined else None,
        num_chunks=row.chunks if pipelined else "auto",
        microbatches=row.microbatches,
        memory_limit=10**13,  # what fitted there fitted: this asks for time alone
        progress=False,
    )
    return planned.estimates.step_seconds


def planned_seconds(row: Row) -> float:
    """What autopar expects of a step, planned as it is; once for equal plans."""
    return _planned_seconds(dataclasses.replace(row, name="", source="", seconds=0.0))


def resized(row: Row, layers: int, microbatches: int, stages: int) -> Row:
    """The same with another number of layers, microbatches and stages, each as large as it is."""
    nodes, rest = row.cluster.split("x", 1)
    if stages != row.stages:
        nodes = str(int(nodes) * stages // row.stages)
    return dataclasses.replace(
        row,
        cluster=f"{nodes}x{rest}",
        model=dataclasses.replace(row.model, layers=layers),
        batch=row.batch // row.microbatches * microbatches,
        microbatches=microbatches,
        stages=stages,
    )


def expected_seconds(row: Row, whole: bool = False) -> float:
    """What autopar expects of a step, from smaller ones."""
    if whole or (row.stages == 1 and row.model.layers <= 8) or row.model.inner:
        return planned_seconds(row)
    if row.stages == 1:
        few, more = (planned_seconds(resized(row, n, row.microbatches, 1)) for n in (2, 4))
        return few + (row.model.layers - 2) * (more - few) / 2
    pieces = row.stages * row.chunks
    layers = row.model.layers // pieces
    whole_nodes = math.prod(row.mesh) % 8 == 0
    stages = (2, 3) if whole_nodes and row.stages > 3 and row.microbatches > 18 else (row.stages,)
    counts = (12, 18) if len(stages) > 1 else (2 * row.stages, 3 * row.stages)
    is_long = row.microbatches > counts[1]
    depths = (1, 2) if layers > 2 else (layers,)

    def at(depth: int, count: int, number: int) -> float:
        return planned_seconds(resized(row, depth * number * row.chunks, count, number))

    def at_depth(depth: int) -> float:
        first = counts[0] if is_long else row.microbatches
        seconds = at(depth, first, stages[0])
        if is_long:
            each = (at(depth, counts[1], stages[0]) - seconds) / (counts[1] - counts[0])
            more = at(depth, first, stages[1]) - seconds if len(stages) > 1 else 0.0
            seconds += (row.microbatches - first) * each + (row.stages - stages[0]) * more
        return seconds

    found = [at_depth(depth) for depth in depths]
    if len(found) == 1:
        return found[0]
    return found[0] + (layers - depths[0]) * (found[1] - found[0])


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, of values that are all different."""
    one, other = (np.argsort(np.argsort(values)) for values in (first, second))
    return float(np.corrcoef(one, other)[0, 1])


def pairs_in_order(rows: Sequence[dict[str, Any]], by: float = 0.02) -> tuple[int, int]:
    """Pairs of plans of the same work on the same devices: in the measured order, and all.

    Pairs whose measured steps differ by less do not count.
    """
    kept = total = 0
    for one, other in itertools.combinations(rows, 2):
        same = all(one[k] == other[k] for k in ("cluster", "batch", "work"))
        quick, slow = sorted((one, other), key=lambda row: row["seconds"])
        if same and slow["seconds"] > (1 + by) * quick["seconds"]:
            total += 1
            kept += slow["expected"] > quick["expected"]
    return kept, total


def summary_of(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For every set: the rank correlation, pairs in order, and the ratios' range and mean."""
    found: dict[str, dict[str, Any]] = {}
    for source in dict.fromkeys(r["source"] for r in results):
        rows = [r for r in results if r["source"] == source]
        ratios = [r["ratio"] for r in rows]
        found[source] = {
            "rank_correlation": None,
            "pairs_in_order": pairs_in_order(rows),
            "ratios": (min(ratios), float(np.exp(np.log(ratios).mean())), max(ratios)),
        }
        if len(rows) > 2:
            seconds = ([r[key] for r in rows] for key in ("seconds", "expected"))
            found[source]["rank_correlation"] = rank_correlation(*seconds)
    return found


def main() -> None:
    """Print the table, or write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name, plan or source matches")
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
        work = dataclasses.replace(row.model, attention="", recomputed=False)
        plain = dataclasses.asdict(row) | {
            "work": dataclasses.astuple(work),
            "expected": seconds,
            "ratio": seconds / row.seconds,
            "planning_cpu_seconds": time.process_time() - started,
        }
        results.append(plain)
        if not args.json:
            ratio = f"{plain['ratio'] - 1:+.1%}"
            print(f"{row.seconds:9.3f} s  {seconds:9.3f} s  {ratio:>7}  {label}", flush=True)
    summary = summary_of(results)
    if args.json:
        print(json.dumps({"rows": results, "sets": summary}, indent=1))
        return
    for source, told in summary.items():
        correlation = told["rank_correlation"]
        least, mean, most = told["ratios"]
        kept, total = told["pairs_in_order"]
        print(
            "rank correlation " + ("  -  " if correlation is None else f"{correlation:5.2f}"),
            f"{kept} of {total} pairs of the same work in order",
            f"ratios {least:.2f} to {most:.2f}, mean {mean:.2f}",
            source,
            sep="; ",
        )


if __name__ == "__main__":
    main()
