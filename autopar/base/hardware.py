"""What is known about hardware: the table of public numbers, and this machine."""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any


@functools.cache
def table() -> dict[str, Any]:
    """The hardware table, with plain numbers in place of numbers and their sources."""
    return _plain_numbers("hardware.toml")


@functools.cache
def gpu_targets() -> dict[str, Any]:
    """What XLA's GPU compiler is told of GPUs: `gpus` by their names, and `limits` of all.

    And the `capabilities` of kinds of GPUs.
    """
    return _plain_numbers("gpu_targets.toml")


def _plain_numbers(name: str) -> dict[str, Any]:
    """A table of `base/data`, with plain numbers in place of numbers and their sources."""
    file = resources.files("autopar").joinpath(f"base/data/{name}")

    def values(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if "value" in node:
            return node["value"]
        return {key: values(child) for key, child in node.items()}

    plain: dict[str, Any] = values(tomllib.loads(file.read_text(encoding="utf-8")))
    return plain


def device_names() -> dict[str, str]:
    """The name of the device of each preset."""
    data = table()
    systems = data["systems"] | {alias: data["systems"][x] for alias, x in data["aliases"].items()}
    return {name: data["devices"][system["device"]]["name"] for name, system in systems.items()}


_KINDS = (
    (r"V100", "v100"),
    (r"A100.*40 ?GB", "a100-40gb"),
    (r"A100", "a100-80gb"),
    (r"H200", "h200"),
    (r"H100", "h100"),
    (r"TPU v5 ?lite|TPU v5e", "tpu-v5e"),
    (r"TPU v5", "tpu-v5p"),
    (r"TPU v4", "tpu-v4"),
)


def known_capability(device_name: str) -> int:
    """The major compute capability of one of NVIDIA's GPUs by its name; 0: no such name is known.

    >>> [known_capability(x) for x in ("H100 SXM5 80GB", "NVIDIA A10", "Instinct H100", "mine")]
    [9, 8, 0, 0]
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & {"AMD", "INSTINCT", "INTEL", "TPU", "CPU"}:
        return 0
    known = gpu_targets()["capabilities"]
    return next((known[word] for word in sorted(words) if word in known), 0)


def preset_of(device_kind: str) -> str | None:
    """The preset for the `device_kind` that JAX reports, or None."""
    return next((name for pattern, name in _KINDS if re.search(pattern, device_kind)), None)


def num_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_memory_bytes() -> int:
    """The memory of this machine, or of the container in which this process runs, if less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def pair_bandwidth(system: dict[str, Any], size: int) -> tuple[tuple[float, ...], ...]:
    """Bandwidths of a node's direct links, where the table says how many there are."""
    links = system.get("pair_links", ())
    if size > len(links):
        return ()
    return tuple(tuple(n * system["link_bandwidth"] for n in row) for row in links)


def host_memory_bytes(system: dict[str, Any], size: int) -> int:
    """The memory of a node; one with more devices than usual has as much for each."""
    known, usual = system.get("host_memory_bytes", 0), system["devices_per_node"]
    return int(known * max(size, usual) // usual)


def allocator_bytes(devices: Sequence[Any]) -> int | None:
    """What the allocator of the first of these devices has that this process can ask."""
    for device in devices:
        try:
            stats = device.memory_stats()
        except RuntimeError:  # another process's, or not there at all
            continue
        return (stats or {}).get("bytes_limit")
    return None
