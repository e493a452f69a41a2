"""All that one GPU can tell of plans, within ten minutes and without a network.

    python benchmarks/gpu.py --json
    python benchmarks/gpu.py --rows gpt-125M "gpt-125M flash" --minutes 3
    python benchmarks/gpu.py --size tiny        # the same on any CPU, with tiny models

Every row has a process of its own, with JAX's memory of the device for itself; one that fails or
takes too long says so in its words, and the rest goes on.

- calibrate: `autopar calibrate`, into a cluster's file (`--cluster-file`), with which all else is
  planned; and products of matrices that are square, tall, wide and thin, measured beside what that
  cluster prices them at (`product_shapes.py`);
- models: bytes of the device planned, compiled and measured (JAX counts them on GPUs alone), and
  seconds of a step planned and measured, beside those of plain `jax.jit` of the same function in
  turns if both fit (the goal is a ratio of at most 1.02), with the difference of their losses;
  those of steps in a row, of which only the last is waited for, and how long the device is busy in
  one (`gpu_profile.py`), which is what a plan promises; seconds of planning and of both
  compilations;
- grouped products: those of experts by our kernels, by loops, and by XLA, beside a plain product of
  as many operations (`grouped_products.py`);
- call: microseconds of the calling thread that a call of a step with many leaves takes;
- transport: GB/s from one process's device memory to another's (`transport.py`, tiles of 64 MB);
- 2 stages: a pipeline whose stages share the device: in one process (`devices=2 * [device]`), and
  as two Ray actors, where Ray is installed, with both ways of moving arrays between them.

The last line is then a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_profile import profiled, steps_in_a_row
from gpu_setting import Setting
from gpu_stages import on_ray, two_stages
from grouped_products import measured_groups
from models import gpt, llama, moe, registry, sparse, wide_resnet
from overhead import alternate, measure_call
from product_shapes import measured_products
from rich.console import Console
from rich.table import Table

import autopar
from autopar.base.units import format_bytes, format_seconds
from autopar.calibration import calibrate

LLAMA_1B = llama.LlamaSize(2048, 5632, 22, 32, 4, 2048)  # TinyLlama (Zhang et al., 2024)
SPARSE_1B = sparse.SparseSize(2048, 768, 4, 32, 4, 128, 64, 8, 2048, 32000)
"""Layers of Qwen3-30B with half of its experts."""
TINY = {
    "gpt": gpt.GPTSize(32, 2, 2, 16, 128),
    "llama": llama.LlamaSize(32, 64, 2, 2, 1, 16, 128),
    "moe": moe.MoESize(16, 2, 2, 2, 16, 64, 32),
    "wide": wide_resnet.WideResNetSize(14, 32, 1, 32, 10),
    "qwen3": sparse.SparseSize(32, 16, 2, 2, 1, 16, 4, 2, 16, 128),
}
WORD = "autopar-gpu-row "
"""How the line of a row's result begins, whatever else its process prints."""


@dataclass(frozen=True)
class Case:
    """A model, and how its step is planned; `override`: autopar chooses what is computed again."""

    model: str
    batch: int
    remat: bool = False
    microbatches: int = 1
    flash: bool = False
    offload: str = "none"
    override: bool = False
    size: Any = None

    def built(self, tiny: bool) -> registry.TrainStep:
        on_gpu = jax.default_backend() == "gpu"
        more: dict[str, Any] = {"attention": "cudnn" if on_gpu else "xla"} if self.flash else {}
        size = TINY[self.model.split("-")[0]] if tiny else self.size
        batch = 4 * self.microbatches if tiny else self.batch
        return registry.build(self.model, remat=self.remat, batch=batch, size=size, **more)


CASES = {
    "gpt-125M": Case("gpt-125M", 8),
    "gpt-125M remat": Case("gpt-125M", 8, remat=True),
    "gpt-125M flash": Case("gpt-125M", 8, flash=True),
    "gpt-125M 4 microbatches": Case("gpt-125M", 16, microbatches=4),
    "gpt-350M": Case("gpt-350M", 4),
    "gpt-350M remat": Case("gpt-350M", 8, remat=True),
    "llama-1B remat": Case("llama-7B", 4, remat=True, size=LLAMA_1B),
    "moe-380M": Case("moe-380M", 8),
    "wide-resnet-250M": Case("wide-resnet-250M", 64),
    "gpt-350M flash remat": Case("gpt-350M", 8, remat=True, flash=True),
    "llama-1B scan remat": Case("llama-scanned-7B", 4, remat=True, size=LLAMA_1B),
    "llama-1B scan override": Case("llama-scanned-7B", 4, override=True, size=LLAMA_1B),
    "wide-resnet-250M remat": Case("wide-resnet-250M", 64, remat=True),
    "gpt-125M remat offload": Case("gpt-125M", 8, remat=True, offload="optimizer"),
    "sparse-1B remat": Case("qwen3-30B", 2, remat=True, flash=True, size=SPARSE_1B),
}
ROWS = (
    "calibrate",
    "call",
    "grouped products",
    *CASES,
    "transport",
    "2 stages",
    "2 stages on Ray",
    "2 stages by transfer",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all rows together")
    parser.add_argument("--row-minutes", type=float, default=2.5, help="for one row")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--cluster-file", type=Path, help="where to save the measured cluster")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        setting = Setting(options.size == "tiny", options.repeats, options.cluster_file)
        print(WORD + json.dumps(row(options.row, setting)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        options.cluster_file = options.cluster_file or Path(folder, "cluster.toml")
        options.cluster_file = options.cluster_file.resolve()
        found = all_rows(options)
    console = Console()
    console = console if console.is_terminal else Console(width=180)
    console.print(table(found["rows"]))
    if options.json:
        print(json.dumps(found))


def all_rows(options: argparse.Namespace) -> dict[str, Any]:
    """Every row in a process of its own, until the time is over."""
    start, rows = time.monotonic(), []
    for number, name in enumerate(options.rows, 1):
        left = 60 * options.minutes - (time.monotonic() - start)
        if left <= 0:
            rows.append({"row": name, "error": f"the {options.minutes:g} minutes are over"})
            continue
        print(f"[{number}/{len(options.rows)}] {name} ...", file=sys.stderr, flush=True)
        begun = time.monotonic()
        made = apart(name, options, min(left, 60 * options.row_minutes))
        made["row_seconds"] = time.monotonic() - begun
        words = f": {made['error']}" if "error" in made else ""
        print(f"    {made['row_seconds']:.0f} s{words}", file=sys.stderr, flush=True)
        rows.append(made)
    return {"jax": jax.__version__, "size": options.size, "rows": rows}


def apart(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """A row in a process of its own; what goes wrong is said in its place."""
    arguments = ["--row", name, "--size", options.size, "--repeats", str(options.repeats)]
    arguments += ["--cluster-file", str(options.cluster_file)]
    with tempfile.TemporaryFile("w+") as words:
        started = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            start_new_session=True,  # with all that it starts
        )
        with started as child:
            try:
                printed, _ = child.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                return {"row": name, "error": f"it took more than {seconds:.0f} s"}
            finally:
                end(child)
        for line in printed.splitlines():
            if line.startswith(WORD):
                found: dict[str, Any] = json.loads(line.removeprefix(WORD))
                return found
        words.seek(0)
        last = words.read().strip().splitlines()[-3:]
        why = " | ".join(last) or "it said nothing"
        return {"row": name, "error": f"it ended with code {child.returncode}: {why}"}


def end(child: subprocess.Popen[str]) -> None:
    """End a process and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def row(name: str, setting: Setting) -> dict[str, Any]:
    """One row, here; what goes wrong is said in its place."""
    start = time.monotonic()
    try:
        found = model(CASES[name], setting) if name in CASES else OTHERS[name](setting)
    except Exception as error:
        text = " ".join(str(error).split())
        return {"row": name, "error": f"{type(error).__name__}: {text[:600]}"}
    device = jax.devices()[0]
    about = {"platform": device.platform, "device": device.device_kind}
    return {"row": name, **about, "seconds": time.monotonic() - start, **found}


def calibrated(setting: Setting) -> dict[str, Any]:
    found = calibrate(devices=jax.devices()[:1], seconds=0.2 if setting.tiny else 20.0)
    found.cluster.save(setting.cluster_file)
    return {
        "cluster": found.cluster.to_dict(),
        "measured": {x.name: [x.value, x.before, x.unit] for x in found.numbers},
        "products": measured_products(found.cluster, setting.tiny),
    }


def model(case: Case, setting: Setting) -> dict[str, Any]:
    """One model under autopar beside plain `jax.jit`."""
    built = case.built(setting.tiny)
    batch = random_batch(built.batch, most_rows(built.state.params))
    asked: dict[str, Any] = {
        "cluster": setting.cluster,
        "microbatches": case.microbatches,
        "offload": case.offload,
        "progress": False,
        **({"remat": "override"} if case.override else {}),
    }
    start = time.perf_counter()
    plan = autopar.plan(built.step, built.state, built.batch, **asked)
    planned = time.perf_counter()
    step = autopar.compile(built.step, built.state, built.batch, plan=plan, **asked)
    compiled = time.perf_counter()
    plain = jax.jit(built.step, donate_argnums=0).lower(built.state, built.batch).compile()
    ended = time.perf_counter()

    steps: dict[str, Any] = {"autopar": step, "jit": plain}
    place = {"autopar": lambda: step.initialize(lambda: made(built.state))}
    place["jit"] = jax.jit(lambda: made(built.state))
    batches = {"autopar": jax.device_put(batch, step.in_shardings[1]), "jit": jax.device_put(batch)}
    # Autopar first: what JAX counts is the most since the process began.
    states = {"autopar": place["autopar"]()}
    states["autopar"], loss = step(states["autopar"], batches["autopar"])
    jax.block_until_ready(states["autopar"])
    losses = {"autopar": float(loss["loss"])}
    used = peak()
    total = sum(memory.total for memory in step.memory().values())
    needed, state_bytes = compiled_bytes(plain) or 0, total_bytes(built.state)
    if fits(needed):
        together = fits(max(total, needed) + state_bytes)
        if not together:
            states.clear()
        states["jit"] = place["jit"]()
        states["jit"], loss = plain(states["jit"], batches["jit"])
        losses["jit"] = float(loss["loss"])
    else:
        together = False
        del steps["jit"]
    if together:
        seconds = alternate(steps, states, batches, setting.repeats)
    else:
        seconds = {}
        for name, one in steps.items():
            states.clear()
            states[name] = place[name]()
            pair = {name: one}
            seconds |= alternate(pair, states, batches, setting.repeats)
    not_waited = not_waited_for(steps, states, place, batches)
    ours, theirs = ([x for x, _ in seconds.get(name, ())] for name in ("autopar", "jit"))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)] if theirs else []
    return {
        "planned_bytes": plan.estimates.peak_bytes_per_device,
        "compiled_bytes": total,
        "measured_bytes": used,
        "jit_compiled_bytes": compiled_bytes(plain),
        "planned_seconds": plan.estimates.step_seconds,
        "measured_seconds": statistics.median(ours),
        "jit_seconds": statistics.median(theirs) if theirs else None,
        "ratio": statistics.median(ratios) if ratios else None,
        "in_turns": together,
        **not_waited,
        "losses": losses,
        "plan_seconds": planned - start,
        "compile_seconds": compiled - planned,
        "jit_compile_seconds": ended - compiled,
        "tokens_per_step": built.tokens_per_step,
    }


def not_waited_for(
    steps: dict[str, Any],
    states: dict[str, Any],
    place: dict[str, Callable[[], Any]],
    batches: dict[str, Any],
) -> dict[str, Any]:
    """Steps in a row, one program after the other, and what the profiler sees of ours.

    States that are not there, because both would not fit, are made again in the others' place.
    """

    def state_of(name: str) -> Any:
        if name not in states:
            states.clear()
            states[name] = place[name]()
        return states.pop(name)

    seconds: dict[str, Any] = {}
    for name, key in (("jit", "jit_in_a_row_seconds"), ("autopar", "in_a_row_seconds")):
        if name in steps:
            states[name], seconds[key] = steps_in_a_row(steps[name], state_of(name), batches[name])
    try:
        _, seen = profiled(steps["autopar"], state_of("autopar"), batches["autopar"])
    except Exception as error:  # all else is measured
        seen = {"profiler_error": f"{type(error).__name__}: {error}"}
    return seconds | seen


def made(shapes: Any) -> Any:
    """A state: small weights, and zeros for all that an optimizer keeps."""

    def weights(number: int, shape: jax.ShapeDtypeStruct) -> jax.Array:
        # Random enough, and quickly compiled.
        places = jnp.arange(math.prod(shape.shape), dtype=jnp.float32).reshape(shape.shape)
        return (0.02 * jnp.sin((number + 1) * places)).astype(shape.dtype)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    leaves, tree = jax.tree.flatten(shapes.params)
    params = jax.tree.unflatten(tree, [weights(*pair) for pair in enumerate(leaves)])
    return zeros.replace(params=params)


def most_rows(params: Any) -> int:
    """How many rows the largest embedding has, that of tokens; without one, 10 classes."""
    flat = jax.tree_util.tree_leaves_with_path(params)
    tables = [x for path, x in flat if "embed" in jax.tree_util.keystr(path).lower()]
    return max((table.shape[0] for table in tables if table.ndim == 2), default=10)


def random_batch(shapes: Any, classes: int = 10) -> Any:
    """Tokens of all kinds: of few, rows of a gradient would be added to one after the other."""
    numbers = np.random.default_rng(0)

    def leaf(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return numbers.integers(0, classes, x.shape).astype(x.dtype)
        return numbers.normal(size=x.shape).astype(x.dtype)

    return jax.tree.map(leaf, shapes)


def peak() -> int | None:
    """The most bytes of the device that were in use, where JAX counts them."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def fits(needed: int) -> bool:
    """Whether the device has so much memory, where JAX tells, and a tenth more."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit is None or 1.1 * needed < limit


def total_bytes(shapes: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def compiled_bytes(compiled: Any) -> int | None:
    found = compiled.memory_analysis()
    if found is None:
        return None
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return int(found.argument_size_in_bytes + results + found.temp_size_in_bytes)


def grouped(setting: Setting) -> dict[str, Any]:
    return {"groups": measured_groups(setting.cluster, setting.tiny)}


def call(setting: Setting) -> dict[str, Any]:
    leaves = 20 if setting.tiny else 400
    return measure_call(argparse.Namespace(leaves=leaves, repeats=setting.repeats))


def transport(setting: Setting) -> dict[str, Any]:
    """Two processes that share the device."""
    size, rounds = ("1", "2") if setting.tiny else ("64", "8")
    arguments = ["--json", "--sizes", size, "--rounds", rounds]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("transport.py")), *arguments],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["rows"][0]
    return found


OTHERS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "calibrate": calibrated,
    "call": call,
    "grouped products": grouped,
    "transport": transport,
    "2 stages": two_stages,
    "2 stages on Ray": on_ray,
    "2 stages by transfer": functools.partial(on_ray, transport="transfer"),
}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    sizes = ("memory planned", "compiled", "measured")
    times = ("step planned", "busy", "in a row", "waited for", "jit", "ratio")
    shown = Table("", *sizes, *times, "compile", "remarks", title="one device")
    for x in rows:
        shown.add_row(x["row"], *cells(x))
    return shown


def cells(found: dict[str, Any]) -> list[str]:
    """The columns of a row; what it does not have stays empty."""

    def text(name: str, form: Callable[[Any], str]) -> str:
        return "" if found.get(name) is None else form(found[name])

    sizes = [text(f"{kind}_bytes", format_bytes) for kind in ("planned", "compiled", "measured")]
    kinds = ("planned", "busy", "in_a_row", "measured", "jit")
    times = [text(f"{kind}_seconds", format_seconds) for kind in kinds]
    return [
        *sizes,
        *times,
        text("ratio", "{:.3f}".format),
        text("compile_seconds", "{:.1f} s".format),
        remark(found),
    ]


def remark(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    if "measured" in found:
        parts = [f"{k}: {v[0]:.4g} {v[2]}" for k, v in found["measured"].items()]
        for x in found["products"]:
            share = x["seconds"] / x["priced_seconds"]
            parts.append(f"{x['shape']} products: {share:.2f} of the priced time")
        return ", ".join(parts)
    if "groups" in found:
        return ", ".join(
            f"{x['shape']} {x['kind']}: "
            + ", ".join(f"{way} {value:.3g}" for way, value in x["tflops"].items())
            + f" TFLOP/s, priced {format_seconds(x['priced_seconds'])}"
            for x in found["groups"]
        )
    if "added_us" in found:
        return f"{found['added_us']:.0f} us more a call than by hand ({found['leaves']} leaves)"
    if "gb_per_second" in found:
        ways = (f"{way} {value:.3g}" for way, value in found["gb_per_second"].items())
        return f"GB/s: {', '.join(ways)}; {found['share']:.2f} of bare sockets"
    if "losses" in found:
        ours, theirs = found["losses"]["autopar"], found["losses"].get("jit")
        unseen = f", no profile: {found['profiler_error']}" if "profiler_error" in found else ""
        if theirs is None:
            return f"loss {ours:.5g}; jit needs {format_bytes(found['jit_compiled_bytes'])}{unseen}"
        return f"loss {ours:.5g}, jit {theirs:.5g}{unseen}"
    return ""


if __name__ == "__main__":
    main()
