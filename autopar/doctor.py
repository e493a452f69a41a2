"""What `autopar doctor` finds on this machine: versions, devices, Ray, wheels, what is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from autopar.base.cluster import Cluster
from autopar.base.hardware import machine_memory_bytes, num_cores
from autopar.base.units import format_bytes
from autopar.base.version import __version__
from autopar.report.rich_parts import add_row, captioned, new_table

EXTRAS = {
    "orbax-checkpoint": ("autopar.Checkpoints", "checkpoint"),
    "matplotlib": ("pictures of plans and timelines", "plots"),
    "ipykernel": ("notebooks", "notebook"),
    "typer": ("this command", "cli"),
}
"""What is good for one purpose: the purpose, and the extra that installs it."""

WHEELS = {
    "NVIDIA": (
        r"jax-cuda\d+-plugin",
        "NVIDIA GPUs, also to compile for some that are not here",
        "'jax[cuda13]', or only to compile 'autopar[gpu-check]'",
    ),
    "TPU": ("libtpu", "TPUs, also to compile for some that are not here", "'autopar[tpu-check]'"),
}
"""Compilers of accelerators: how their distributions are called, what for, what to install."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Args:
      name: what.
      found: its version, or what is known of it; "" if it is not there.
      state: "ok"; "needed": autopar does not work so; "optional": one thing does not.
      about: what it is for, or what to do.
    """

    name: str
    found: str
    state: str
    about: str = ""


def examine() -> tuple[Finding, ...]:
    """Looks at this machine and this Python; nothing is changed, and no Ray cluster is started."""
    return (
        *_machine(),
        *_packages(),
        *_devices(),
        *_wheels(),
        *_ray(),
    )


def findings_table(findings: Iterable[Finding]) -> Table:
    """One table of all that was found."""
    table = new_table(
        "autopar doctor", "", "what", "found", "about", right=(), plain=("found", "about")
    )
    table.columns[1].no_wrap = True
    marks = {"ok": ("✓", "green"), "needed": ("✗", "bold red"), "optional": ("○", "yellow")}
    states = set()
    for item in findings:
        mark, style = marks[item.state]
        states.add(item.state)
        found = item.found or "missing"
        add_row(
            table,
            Text(mark, style),
            item.name,
            Text(found, "" if item.found else style),
            item.about,
        )
    if "needed" in states:
        return captioned(table, "✗: autopar does not work without it.")
    if "optional" in states:
        return captioned(
            table, "All that is needed is here.  ○: only what stands beside it is missing."
        )
    return captioned(table, "Everything is here.")


def _machine() -> Iterator[Finding]:
    state = "ok" if sys.version_info >= (3, 11) else "needed"
    yield Finding("Python", platform.python_version(), state, sys.executable)
    cores = f"{num_cores()} cores, {format_bytes(machine_memory_bytes())}"
    yield Finding("machine", cores, "ok", platform.platform(terse=True))
    yield Finding("autopar", __version__, "ok", str(Path(__file__).resolve().parent))


def _packages() -> Iterator[Finding]:
    """What autopar names as its requirements, and what is good for one purpose."""
    required = dict(_requirements(None))
    for name, least in required.items():
        yield _package(name, least, "needed", "")
    for name, (purpose, extra) in EXTRAS.items():
        least = dict(_requirements(extra)).get(name, "")
        yield _package(name, least, "optional", purpose, f"pip install 'autopar[{extra}]'")
    versions = {_version(name) for name in ("jax", "jaxlib")} - {""}
    if len(versions) > 1:
        about = "jax and jaxlib belong together: pip install -U jax jaxlib"
        yield Finding("jax = jaxlib", " and ".join(sorted(versions)), "ok", about)


def _requirements(extra: str | None) -> Iterator[tuple[str, str]]:
    """The names and least versions that the installed package's metadata has."""
    try:
        lines = importlib.metadata.requires("autopar") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        lines = [] if extra else ["jax", "jaxlib", "flax", "numpy", "ortools", "ray", "rich"]
    for line in lines:
        wanted, _, marker = line.partition(";")
        named = re.search(r"extra\s*==\s*[\"']([\w-]+)[\"']", marker)
        if (named.group(1) if named else None) != extra:
            continue
        parts = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*(?:[>=]=\s*([\d.]+))?", wanted.strip())
        if parts and parts.group(1) != "autopar":
            yield parts.group(1), parts.group(2) or ""


def _package(name: str, least: str, missing: str, purpose: str, install: str = "") -> Finding:
    found = _version(name)
    if not found:
        about = f"for {purpose}: {install}" if purpose else f"pip install {name}"
        return Finding(name, "", missing, about)
    if least and _numbers(found) < _numbers(least):
        about = f"{least} or newer is needed: pip install -U {name}"
        return Finding(name, found, missing, about)
    return Finding(name, found, "ok", purpose)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> _numbers("0.10.2.dev3") == (0, 10, 2)
    True
    """
    numbers = []
    for part in version.split("."):
        if not (digits := re.match(r"\d+", part)):
            break
        numbers.append(int(digits.group()))
    return tuple(numbers)


def _devices() -> Iterator[Finding]:
    try:
        import jax

        devices = jax.devices()
    except (ImportError, RuntimeError) as error:
        yield Finding("devices", "", "needed", str(error).splitlines()[0])
        return
    kind, platform_name = devices[0].device_kind, devices[0].platform
    processes = len({device.process_index for device in devices})
    found = f"{len(devices)} x {kind}" + (f", {processes} processes" if processes > 1 else "")
    if platform_name == "cpu":
        about = 'virtual ones: jax.config.update("jax_num_cpu_devices", 8) before JAX is used'
        yield Finding("devices", found, "ok", about)
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cluster = Cluster.local()
    about = f"planned as {cluster.device.name}, {format_bytes(cluster.device.memory_bytes)} each"
    yield Finding("devices", found, "ok", str(told[0].message) if told else about)
    if platform_name in ("gpu", "cuda", "rocm"):
        share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
        about = "JAX's share of a GPU's memory; unset, it takes 0.75: 0.95 lets plans use more"
        yield Finding("XLA_PYTHON_CLIENT_MEM_FRACTION", share or "0.75", "ok", about)


def _wheels() -> Iterator[Finding]:
    names = {
        str(each.metadata["Name"]): each.version for each in importlib.metadata.distributions()
    }
    for name, (pattern, purpose, install) in WHEELS.items():
        found = [f"{known} {names[known]}" for known in names if re.fullmatch(pattern, known or "")]
        state, about = (
            ("ok", purpose) if found else ("optional", f"for {purpose}: pip install {install}")
        )
        yield Finding(f"{name} compiler", ", ".join(found), state, about)


def _ray() -> Iterator[Finding]:
    """Whether a cluster runs that `runtime="ray"` could join; none is needed."""
    if not _version("ray"):
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if address:
        yield Finding("Ray cluster", address, "ok", "from RAY_ADDRESS")
        return
    marker = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    if marker.is_file():
        yield Finding("Ray cluster", marker.read_text().strip(), "ok", "started on this machine")
    else:
        about = 'runtime="ray" starts one on this machine'
        yield Finding("Ray cluster", "none runs here", "ok", about)
