"""What people write for a cluster: "h100", "8xH100", "8x8 h100", or the path of a file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class NamedCluster(NamedTuple):
    """A preset, how many nodes, and how many devices each has; None: as many as usual."""

    preset: str
    nodes: int
    devices_per_node: int | None


def is_cluster_file(text: str | os.PathLike[str]) -> bool:
    """Whether it is the path of a cluster's file rather than a name."""
    return os.fspath(text).lower().endswith((".toml", ".json"))


def read_name(text: str, data: Mapping[str, Any]) -> NamedCluster | str:
    """What a name says, or why it says nothing.

    Numbers stand before the preset: "8x8 h100" is eight nodes of eight, "2x dgx-h100" two nodes,
    and "16xH100" sixteen devices in as many of the usual nodes as they fill.

    Args:
      text: of the user.
      data: the hardware table.
    """
    found = re.fullmatch(r"(?:(\d+)\s*[x*]\s*(?:(\d+)\s+(?:x\s*)?)?)?(\S+)", text.strip().lower())
    if not found:
        return "it is not of the form '8x8 h100', '8xH100' or 'h100'"
    first, second, preset = found.groups()
    if first is None or second is not None:
        return NamedCluster(preset, int(first or 1), None if second is None else int(second))
    count = int(first)
    system = data["systems"].get(data["aliases"].get(preset, preset))
    if system is None or not system["device"].startswith(preset):  # a kind of node
        return NamedCluster(preset, count, None)
    usual = system["devices_per_node"]
    if count <= usual:
        return NamedCluster(preset, 1, count)
    if count % usual:
        example = f"{count // usual}x{usual} {preset}"
        return f"{count} devices do not fill nodes of {usual}; say for example {example!r}"
    return NamedCluster(preset, count // usual, usual)
