"""Memory and collectives of plans against the compilers of devices that need not be there.

    python benchmarks/compilers.py --json
    python benchmarks/compilers.py --targets gpu:h100 --programs gpt --layers 4

Every program is planned for eight devices of a target and compiled for them by `autopar.verify`:
planned and compiled bytes of a device, whether the collectives are those of the plan (or a pass of
XLA accounts for what is not), seconds of compilation. Models are those of `benchmarks/models`, with
so many layers; targets whose compilers are not installed (`autopar[gpu-check]`,
`autopar[tpu-check]`) are an error. With `--plain` the plain function is compiled too, by `jax.jit`
with the plan's shardings of arguments and results: its memory and what its collectives send stand
beside the plan's. With `--tight` TPUs have no more memory than was planned: what needs more is not
compiled, and XLA's scheduler has nothing to spare. With `--placed` TPUs' compiler is stopped when
it has placed all buffers, before it generates code: seconds instead of minutes for the same memory
and collectives.

What is refused for want of memory (with `--memory` devices have less: so many bytes, or a share of
what the program was planned with) is planned once more for devices that have what the refusal calls
the least, and compiled for the target: where that needs no more than the target has, the refusal
was a false alarm. What is planned and needs more than there is overflows. With `--fill` it is the
batch that changes: it is so large that the program, planned for devices with memory to spare, would
take that share of what they have, and then planned for the devices as they are. With `--confirm`
plans are made with `confirm=` the target, which has the last word about what fits: a row says how
many plans were compiled, and what is refused was compiled as well, if it was near.

What was compiled once is kept in the user's cache, with the seconds that it took then. The last
line is a JSON object with `--json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from compiler_cases import ALL, Case
from models.other_kinds import OTHERS, build_other
from models.registry import TrainStep, build
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autopar
from autopar.base.errors import AutoparError, MemoryLimitError
from autopar.base.units import format_bytes, parse_bytes
from autopar.report.verification_report import Verification
from autopar.runtime.verification import checking
from autopar.runtime.verification.compile_all import compile_all

CLUSTERS = {"gpu:h100": "8xh100", "gpu:h200": "8xh200", "gpu:a100": "8xa100", "cpu": "8xh100"}
"""For which cluster a target's programs are planned; those of TPUs by the slice's generation."""
UNDER = 0.05
"""By what share less than compiled a plan is counted as too small."""


def cluster_of(target: str) -> autopar.Cluster:
    kind = target.split(":")
    return autopar.Cluster.named(CLUSTERS.get(target) or f"8xtpu-{kind[1]}")


def with_memory(cluster: autopar.Cluster, size: int) -> autopar.Cluster:
    """The same, whose devices let programs fill so many bytes."""
    device = cluster.device
    whole = math.ceil(size / device.memory_fraction)
    return dataclasses.replace(cluster, device=dataclasses.replace(device, memory_bytes=whole))


def train_step(item: Case, layers: int | None) -> TrainStep:
    """The program of a case, with so many layers where its size has a number of them."""
    if item.program in OTHERS:
        return build_other(item.program, item.batch, item.remat, layers)
    whole = layers if "resnet" not in item.program else None
    return build(item.program, remat=item.remat, batch=item.batch, layers=whole, **item.fields)


def tight(target: str, size: int) -> str:
    """A slice of TPUs whose devices have so many bytes, in whole MiB."""
    return f"{target}:{-(-size // 2**20)}MiB" if target.startswith("tpu:") else target


@dataclasses.dataclass(frozen=True)
class Setting:
    """How programs are measured.

    Args:
      layers: of each model; None: its own number.
      processes: that compile at a time.
      plain: whether the plain function is compiled too.
      is_tight: whether TPUs have what was planned.
      memory: bytes that devices have for programs, where they shall have less (TPUs' compiler is
        told); below one, a share of those of the plan that has all of the device's.
      fill: the share of a device's memory that a program with all it keeps would take.
      cache: of what was compiled, as for `autopar.verify`.
      confirm: whether plans are made with `confirm=`.
    """

    layers: int | None = None
    processes: int | None = None
    plain: bool = False
    is_tight: bool = False
    memory: float | None = None
    fill: float | None = None
    cache: bool | str = True
    confirm: bool = False


def measure(made: TrainStep, item: Case, target: str, setting: Setting) -> dict[str, Any]:
    """One program on one target; "refused": nothing was planned to fit."""
    row: dict[str, Any] = {"program": item.name, "target": target, "layers": setting.layers}
    row["batch"] = item.batch
    row["held_out"] = item.held_out
    cluster, shapes = cluster_of(target), (made.state, made.batch)
    asked: dict[str, Any] = {"progress": False, **item.options}
    if setting.memory is not None:
        size = setting.memory
        if size < 1:
            size *= most_bytes(autopar.plan(made.step, *shapes, cluster=cluster, **asked))
        cluster = with_memory(cluster, int(size))
    limit = cluster.device.program_bytes
    how: dict[str, Any] = {"processes": setting.processes, "cache": setting.cache}
    if setting.confirm:
        asked["confirm"] = target if setting.memory is None else tight(target, limit)
    start = time.monotonic()
    try:
        plan = autopar.plan(made.step, *shapes, cluster=cluster, **asked)
    except MemoryLimitError as error:
        row["refused"] = error.least_bytes
        if setting.confirm:
            return {**row, "limit_bytes": limit, "said": str(error)}
        return {**row, **compiled_least(made, asked, how, target, limit, error)}
    except AutoparError as error:
        return {**row, "error": str(error).splitlines()[0]}
    planned = time.monotonic()
    on = target
    if setting.is_tight or setting.memory is not None:
        on = tight(target, most_bytes(plan) if setting.is_tight else limit)
    seen = plan.verify(on, plain=setting.plain, **how)
    worst = max(
        (x for x in seen.stages if x.compiled_bytes),
        key=lambda x: x.compiled_bytes or 0,
        default=None,
    )
    return {
        **row,
        "verdict": seen.verdict,
        "planned_bytes": worst.planned_bytes if worst else None,
        "compiled_bytes": worst.compiled_bytes if worst else None,
        "ratio": worst.ratio if worst else None,
        "limit_bytes": limit,
        "tries": [dataclasses.asdict(x) for x in plan.confirmed.tries] if plan.confirmed else [],
        "overflows": bool(worst and worst.compiled_bytes and worst.compiled_bytes > limit),
        "planned_collective_bytes": sum(x.planned_bytes * x.times for x in seen.collectives),
        "compiled_collective_bytes": sum(x.compiled_bytes * x.times for x in seen.collectives),
        "collectives_agree": not seen.differences,
        "collectives_changed_by": list(seen.changed_by),
        "warnings": sum(map(len, seen.warnings.values())),
        "failures": dict(seen.failures),
        "planning_seconds": planned - start,
        "compile_seconds": sum(
            x.finding.seconds for x in seen.pieces if x.finding and not x.same_as
        ),
        **beside_plain(seen),
    }


def filling(item: Case, target: str, setting: Setting) -> Case:
    """The case with the batch that fills so much of a device, by two plans on devices with plenty.

    What a program takes grows with its batch as a straight line, nearly.
    """
    assert setting.fill is not None
    cluster = cluster_of(target)
    plenty = with_memory(cluster, 2**50)
    step = 2 * math.lcm(cluster.num_devices, 8) * int(item.options["microbatches"])

    def taken(batch: int) -> int:
        made = train_step(item._replace(batch=batch), setting.layers)
        asked: dict[str, Any] = {"progress": False, **item.options}
        return most_bytes(autopar.plan(made.step, made.state, made.batch, cluster=plenty, **asked))

    small, large = item.batch, 2 * item.batch
    at_small, at_large = taken(small), taken(large)
    wanted = setting.fill * cluster.device.program_bytes
    batch = small + (wanted - at_small) * (large - small) / (at_large - at_small)
    return item._replace(batch=max(int(batch) // step, 1) * step)


def most_bytes(plan: autopar.Plan) -> int:
    """Of the device that has most."""
    return max(stage.peak_bytes_per_device for stage in plan.stages)


def memory_or_share(text: str) -> float:
    """Bytes, or a share of them: "4GiB", "80%"."""
    return float(text[:-1]) / 100 if text.endswith("%") else parse_bytes(text)


def compiled_least(
    made: TrainStep,
    asked: dict[str, Any],
    how: dict[str, Any],
    target: str,
    limit: int,
    error: MemoryLimitError,
) -> dict[str, Any]:
    """What the compiler makes of the least that a refusal speaks of, on devices with the limit."""
    least = error.least_bytes
    if least is None:
        return {}
    # With what was missing and no more; a TPU's compiler then still has the limit.
    cluster = with_memory(cluster_of(target), math.ceil(1.001 * least))
    try:
        plan = autopar.plan(made.step, made.state, made.batch, cluster=cluster, **asked)
    except AutoparError as again:
        return {"error": f"the least was refused as well: {str(again).splitlines()[0]}"}
    seen = plan.verify(tight(target, limit), **how)
    sizes = [x.compiled_bytes for x in seen.stages]
    known = [size for size in sizes if size is not None]
    fits = len(known) == len(sizes) and max(known) <= limit
    return {
        "limit_bytes": limit,
        "least_compiled_bytes": max(known, default=None),
        "failures": dict(seen.failures),
        "false_alarm": fits,
    }


def beside_plain(seen: Verification) -> dict[str, Any]:
    """The memory of a device and the bytes that are sent, of the plain function and of the plan."""
    plain, own = seen.plain, seen.pieces[0].finding
    if plain is None or own is None:
        return {}
    if plain.memory is None or own.memory is None:
        return {"plain_failure": plain.failure}
    return {
        "plain_compiled_bytes": plain.memory.total,
        "plain_sent_bytes": plain.traffic,
        "sent_bytes": own.traffic,
        "plain_compile_seconds": plain.seconds,
    }


def told_of_collectives(row: dict[str, Any]) -> str:
    if row["failures"]:
        return "not compiled"
    if not row["collectives_agree"]:
        return "differ"
    passes = row["collectives_changed_by"]
    return f"changed by {', '.join(passes)}" if passes else "agree"


def table(rows: Sequence[dict[str, Any]], plain: bool) -> Table:
    """A line of each program."""
    shown = Table("program", "target", title="planned and compiled, bytes of one device")
    headings = ["planned", "compiled", "ratio", "compiled in"]
    headings += ["plain jit", "sends", "plain jit sends"] if plain else []
    for heading in headings:
        shown.add_column(heading, justify="right")
    shown.add_column("collectives")
    shown.add_column("false alarm")
    for row in rows:
        shown.add_row(row["program"], row["target"], *_cells(row, plain))
    return shown


def _cells(row: dict[str, Any], plain: bool) -> list[str]:
    names = ("plain_compiled_bytes", "sent_bytes", "plain_sent_bytes") if plain else ()
    beside = [_size(row.get(name)) for name in names]
    if "verdict" in row:
        return [
            _size(row["planned_bytes"]),
            _size(row["compiled_bytes"]),
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            f"{row['compile_seconds']:.0f} s",
            *beside,
            told_of_collectives(row),
            "",
        ]
    if "refused" not in row:
        return [row["error"]]
    if "said" in row:  # by the compiler: confirm=
        return [f"refused: {_size(row['refused'])}", "-", "-", "-", *beside, "-", "no"]
    compiled = _size(row.get("least_compiled_bytes"))
    alarm = str(row.get("error", "unknown"))
    if "false_alarm" in row:
        alarm = "yes" if row["false_alarm"] else "no"
    return [f"refused: {_size(row['refused'])}", compiled, "-", "-", *beside, "-", alarm]


def _size(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far rows are off: shares of what was compiled, and how many collectives agree.

    A row agrees where its collectives are those of the plan, or passes of XLA say what they
    changed.
    """
    known = [row for row in rows if row.get("ratio")]
    errors = [abs(row["ratio"] - 1) for row in known]
    beside = [row for row in known if row.get("plain_compiled_bytes")]

    def middle(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    return {
        "programs": len(known),
        "median_error": middle(errors),
        "worst_error": max(errors, default=None),
        "under": sum(row["ratio"] < 1 - UNDER for row in known),
        "collectives_agree": sum(row["collectives_agree"] for row in known),
        "collectives_changed": sum(
            row["collectives_agree"] and bool(row["collectives_changed_by"]) for row in known
        ),
        "not_compiled": sum(bool(row.get("failures")) for row in rows if "verdict" in row),
        "overflows": sum(bool(row.get("overflows")) for row in rows),
        "planned_again": sum(len(row.get("tries", ())) > 1 for row in rows),
        "refused": sum("refused" in row for row in rows),
        "false_alarms": sum(bool(row.get("false_alarm")) for row in rows),
        "compared_with_plain": len(beside),
        "memory_of_plain": middle(
            [row["compiled_bytes"] / row["plain_compiled_bytes"] for row in beside]
        ),
        "sent_of_plain": middle(
            [row["sent_bytes"] / row["plain_sent_bytes"] for row in beside if row["sent_bytes"]]
        ),
    }


def in_words(name: str, found: dict[str, Any]) -> str:
    """A summary as one line."""
    count = found["programs"]
    told = [f"{name}: {count} programs compiled"]
    if count:
        told.append(f"median error {found['median_error']:.1%}, worst {found['worst_error']:.1%}")
        told.append(f"{found['under']} more than {UNDER:.0%} under")
        changed = found["collectives_changed"]
        by_xla = f" ({changed} changed by passes of XLA)" if changed else ""
        told.append(f"{found['collectives_agree']} of {count} collectives agree{by_xla}")
    if found["not_compiled"]:
        told.append(f"{found['not_compiled']} not compiled")
    if found["overflows"]:
        told.append(f"{found['overflows']} need more than there is")
    if found["planned_again"]:
        told.append(f"{found['planned_again']} planned more than once (confirm=)")
    if found["refused"]:
        told.append(f"{found['refused']} refused, of which {found['false_alarms']} false alarms")
    if found["memory_of_plain"] is not None:
        sent = found["sent_of_plain"]
        sends = "" if sent is None else f" and sends {sent:.2f} of it"
        told.append(
            f"at the median takes {found['memory_of_plain']:.2f} of plain jit's memory{sends} "
            f"({found['compared_with_plain']} compared)"
        )
    return "; ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["gpu:h100", "tpu:v5e:2x4"])
    parser.add_argument("--programs", default="", help="a regular expression of cases to run")
    parser.add_argument("--layers", type=int, default=4, help="of each model; 0: its own number")
    parser.add_argument("--processes", type=int, default=None, help="that compile at a time")
    parser.add_argument("--plain", action="store_true", help="compile plain jax.jit as well")
    parser.add_argument("--tight", action="store_true", help="TPUs have what was planned")
    parser.add_argument("--placed", action="store_true", help="TPUs: until buffers are placed")
    parser.add_argument(
        "--memory",
        type=memory_or_share,
        help='that programs may fill: "4GiB", or "80%%" of what they were planned with',
    )
    parser.add_argument(
        "--fill", type=memory_or_share, help='a share of devices, by larger batches: "110%%"'
    )
    parser.add_argument("--confirm", action="store_true", help="the target says what fits")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    parser.add_argument("--rows", type=Path, help="a file to write every row to when it is there")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")

    setting = Setting(
        options.layers or None,
        options.processes,
        options.plain,
        options.tight,
        options.memory,
        options.fill,
        confirm=options.confirm,
    )
    if options.fill is not None and options.memory is not None:
        parser.error("--fill takes devices as they are; --memory takes programs as they are")
    if options.placed:
        if not all(target.startswith("tpu:") for target in options.targets):
            parser.error("--placed is for targets that are TPUs")
        if options.plain:
            parser.error("--placed compiles one program of a step; --plain would be a second one")
        worker = (sys.executable, str(Path(__file__).with_name("placed_worker.py")))
        checking.compile_all = functools.partial(compile_all, worker=worker)  # type: ignore[attr-defined]
    cases = [
        (item, target)
        for target in options.targets
        for item in ALL
        if re.search(options.programs, item.name)
    ]
    rows = []
    for item, target in track(cases, console=Console(stderr=True)):
        if setting.fill is not None:
            item = filling(item, target, setting)
        rows.append(measure(train_step(item, setting.layers), item, target, setting))
        if options.rows:
            options.rows.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Console(width=max(Console().width, 160)).print(table(rows, options.plain))
    summaries = {}
    for target in options.targets:
        for name, held_out in (("fitted", False), ("held out", True)):
            own = [r for r in rows if r["target"] == target and r["held_out"] == held_out]
            if own:
                summaries[f"{target}, {name}"] = summary(own)
    for name, found in summaries.items():
        print(in_words(name, found))
    if options.json:
        print(json.dumps({"rows": rows, "summaries": summaries}))


if __name__ == "__main__":
    main()
