"""Memory and collectives of plans against the compilers of devices that need not be there.

    python benchmarks/compilers.py --json
    python benchmarks/compilers.py --targets gpu:h100 --programs gpt --layers 4

Every program is planned for eight devices of a target and compiled for them by `autopar.verify`:
planned and compiled bytes of a device, whether the collectives are those of the plan (or a pass of
XLA accounts for what is not), seconds of compilation. Models are those of `benchmarks/models`, with
so many layers; targets whose compilers are not installed (`autopar[gpu-check]`,
`autopar[tpu-check]`) are an error. With `--tight` TPUs have no more memory than was planned: what
needs more is not compiled, and XLA's scheduler has nothing to spare. What was compiled once is kept
in the user's cache. The last line is a JSON object with `--json`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from typing import Any, NamedTuple

import jax
from models.other_kinds import OTHERS, build_other
from models.registry import TrainStep, build
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autopar
from autopar.base.errors import AutoparError, MemoryLimitError
from autopar.base.units import format_bytes

CLUSTERS = {"gpu:h100": "8xh100", "gpu:h200": "8xh200", "gpu:a100": "8xa100"}
"""For which cluster a target's programs are planned; those of TPUs by the slice's generation."""


class Case(NamedTuple):
    """A program, how many sequences (or images) a step has, and the options of its plan.

    Remat "dots": all is computed again but products.

    From those `held_out`, no rule of memory was read (`passes/sharding/compiler_rules.py`).
    """

    program: str
    batch: int
    remat: bool | str
    options: dict[str, Any]
    held_out: bool = False

    @property
    def name(self) -> str:
        more = " ".join(f"{key}={value}" for key, value in self.options.items())
        again = " remat" if self.remat is True else f" {self.remat}" if self.remat else ""
        return f"{self.program}{again} {more}"


def case(program: str, batch: int, remat: bool | str = False, **options: Any) -> Case:
    return Case(program, batch, remat, {"microbatches": 1, **options})


CASES = (
    case("gpt-125M", 64, method="data"),
    case("gpt-125M", 64, method="zero3"),
    case("gpt-125M", 64, method="zero1"),
    case("gpt-125M", 128, method="zero2", microbatches=4),
    case("gpt-125M", 64, remat=True, method="zero3"),
    case("gpt-125M", 64, remat="dots", method="zero3"),
    case("gpt-350M", 64, method="zero3"),
    case("gpt-350M", 128, remat=True, method="zero3", microbatches=4),
    case("gpt-350M", 32, method="megatron"),
    case("gpt-1.3B", 32, remat=True, method="zero3"),
    case("gpt-1.3B", 16, method="shard"),
    case("gpt-350M", 64, method="data", stages=2, microbatches=4),
    case("bert-base", 256, method="data", stages=2, microbatches=4),
    case("vit-base", 1024, method="zero2", stages=2, microbatches=4),
    case("unet-60M", 512, method="data", stages=2, microbatches=4),
    case("llama-7B", 16, method="zero3"),
    case("llama-scanned-7B", 16, remat=True, method="zero3"),
    case("gpt-350M", 64, remat=True, method="zero2"),
    case("llama-scanned-7B", 16, remat="dots", method="zero3"),
    case("moe-380M", 64, method="zero3"),
    case("moe-380M", 64, method="expert"),
    case("wide-resnet-250M", 64, method="data"),
    case("wide-resnet-250M", 128, method="zero2", microbatches=4),
    case("bert-large", 64, method="zero3"),
    case("vit-base", 512, method="data"),
    case("unet-60M", 256, method="data"),
    case("lstm-66M", 512, method="data"),
    case("graph-small", 256, method="data"),
    case("deepseek-16B", 32, remat=True, method="zero3"),
    case("unet-130M", 256, remat=True, method="zero3"),
    case("lstm-180M", 256, method="zero3"),
    case("graph-small", 512, method="zero2", microbatches=2),
)
HELD_OUT = (
    case("gpt-760M", 32, remat=True, method="zero3"),
    case("gpt-760M", 32, method="data"),
    case("gpt-350M", 128, method="zero2", microbatches=8),
    case("gpt-2.6B", 16, method="megatron"),
    case("gpt-125M", 128),
    case("gpt-760M", 32, remat="dots", method="data"),
    case("bert-large", 64, remat="dots", method="zero3"),
    case("gpt-760M", 32, method="zero2", stages=2, microbatches=4),
    case("bert-large", 128, method="zero2", stages=2, microbatches=8),
    case("vit-large", 512, method="data", stages=2, microbatches=4),
    case("unet-130M", 512, method="zero2", stages=2, microbatches=4),
    case("llama-7B", 16, method="zero2", microbatches=2),
    case("llama-scanned-7B", 8, method="data"),
    case("llama-scanned-7B", 8, remat=True, method="megatron"),
    case("moe-690M", 64, method="zero3"),
    case("moe-690M", 64, remat=True, method="expert"),
    case("wide-resnet-500M", 64, method="zero3"),
    case("wide-resnet-500M", 64, remat=True, method="data"),
    case("bert-base", 256, remat=True, method="zero2", microbatches=2),
    case("bert-large", 64, method="data"),
    case("vit-large", 512, remat=True, method="zero3"),
    case("vit-large", 512, method="zero2", microbatches=4),
    case("unet-130M", 512, method="zero2", microbatches=4),
    case("lstm-66M", 1024, method="zero2", microbatches=4),
    case("graph-large", 64, remat=True, method="zero3"),
)
ALL = (*CASES, *(item._replace(held_out=True) for item in HELD_OUT))


def cluster_of(target: str) -> str:
    kind = target.split(":")
    return CLUSTERS[target] if target in CLUSTERS else f"8xtpu-{kind[1]}"


def train_step(item: Case, layers: int | None) -> TrainStep:
    """The program of a case, with so many layers where its size has a number of them."""
    if item.program in OTHERS:
        return build_other(item.program, item.batch, item.remat, layers)
    whole = layers if "resnet" not in item.program else None
    return build(item.program, remat=item.remat, batch=item.batch, layers=whole)


def tight(target: str, plan: autopar.Plan) -> str:
    """A slice of TPUs whose devices have what the plan's worst stage needs, in whole MiB."""
    if not target.startswith("tpu:"):
        return target
    most = max(stage.peak_bytes_per_device for stage in plan.stages)
    return f"{target}:{-(-most // 2**20)}MiB"


def measure(
    item: Case, target: str, layers: int | None, processes: int | None, is_tight: bool = False
) -> dict[str, Any]:
    """One program on one target; "refused": nothing was planned to fit."""
    row: dict[str, Any] = {"program": item.name, "target": target, "layers": layers}
    row["held_out"] = item.held_out
    made = train_step(item, layers)
    shapes = made.state, made.batch
    start = time.monotonic()
    try:
        plan = autopar.plan(made.step, *shapes, cluster=cluster_of(target), **item.options)
    except MemoryLimitError as error:
        return {**row, "refused": error.least_bytes}
    except AutoparError as error:
        return {**row, "error": str(error).splitlines()[0]}
    planned = time.monotonic()
    found = plan.verify(tight(target, plan) if is_tight else target, processes=processes)
    worst = max(
        (x for x in found.stages if x.compiled_bytes),
        key=lambda x: x.compiled_bytes or 0,
        default=None,
    )
    return {
        **row,
        "verdict": found.verdict,
        "planned_bytes": worst.planned_bytes if worst else None,
        "compiled_bytes": worst.compiled_bytes if worst else None,
        "ratio": worst.ratio if worst else None,
        "planned_collective_bytes": sum(x.planned_bytes * x.times for x in found.collectives),
        "compiled_collective_bytes": sum(x.compiled_bytes * x.times for x in found.collectives),
        "collectives_agree": not found.differences,
        "collectives_changed_by": list(found.changed_by),
        "warnings": sum(map(len, found.warnings.values())),
        "failures": dict(found.failures),
        "planning_seconds": planned - start,
        "compile_seconds": sum(
            x.finding.seconds for x in found.pieces if x.finding and not x.same_as
        ),
    }


def _told_of_collectives(row: dict[str, Any]) -> str:
    if row["failures"]:
        return "not compiled"
    if not row["collectives_agree"]:
        return "differ"
    return "changed by XLA" if row["collectives_changed_by"] else "as planned"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["gpu:h100", "tpu:v5e:2x4"])
    parser.add_argument("--programs", default="", help="a regular expression of cases to run")
    parser.add_argument("--layers", type=int, default=4, help="of each model; 0: its own number")
    parser.add_argument("--processes", type=int, default=None, help="that compile at a time")
    parser.add_argument("--tight", action="store_true", help="TPUs have what was planned")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")

    cases = [
        (item, target)
        for target in options.targets
        for item in ALL
        if re.search(options.programs, item.name)
    ]
    progress = Console(stderr=True)
    rows = [
        measure(item, target, options.layers or None, options.processes, options.tight)
        for item, target in track(cases, console=progress)
    ]
    table = Table("program", "target", title="planned and compiled, bytes of one device")
    for heading in ("planned", "compiled", "ratio", "compiled in"):
        table.add_column(heading, justify="right")
    table.add_column("collectives")
    for row in rows:
        if "verdict" not in row:
            table.add_row(row["program"], row["target"], row.get("error", "refused"))
            continue
        sizes = (row["planned_bytes"], row["compiled_bytes"])
        table.add_row(
            row["program"],
            row["target"],
            *("-" if size is None else format_bytes(size) for size in sizes),
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            f"{row['compile_seconds']:.0f} s",
            _told_of_collectives(row),
        )
    Console(width=max(Console().width, 120)).print(table)
    for target in options.targets:
        for held_out in (False, True):
            own = [r for r in rows if r["target"] == target and r["held_out"] == held_out]
            ratios = [r["ratio"] for r in own if r.get("ratio")]
            if options.tight and target.startswith("tpu:"):
                planned = [r for r in own if "verdict" in r]  # not refused
                failed = sum(1 for r in planned if r["failures"])
                print(f"{target}: {failed} of {len(planned)} were not compiled in what was planned")
            if ratios:
                middle, which = statistics.median(ratios), "held out" if held_out else "others"
                most = f"from {min(ratios):.2f} to {max(ratios):.2f}"
                print(f"{target}, {which}: median {middle:.2f}, {most} of {len(ratios)}")
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
