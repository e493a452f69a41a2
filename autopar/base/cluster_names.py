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
    and "16xH100" sixteen devices in as many of the usual nodes as they fill. "16 h100s", "h100:16"
    "2 nodes of 8 h100", "8 nodes h100" and slices of TPUs ("v5e-256") are understood as well.

    Args:
      text: of the user.
      data: the hardware table.
    """
    text = text.strip().lower()
    if swapped := re.fullmatch(r"([a-z].*?)\s*[:*x]\s*(\d+)", text):
        text = f"{swapped[2]}x{swapped[1]}"
    if in_words := re.fullmatch(r"(\d+)\s*nodes?\s*(?:of|with|x)\s*(\d+)\s*x?\s*(\S.*)", text):
        text = f"{in_words[1]}x{in_words[2]} {in_words[3]}"
    if nodes := re.fullmatch(r"(\d+)\s*nodes?\s+(?:(?:of|with)\s+)?([a-z]\S*(?:\s\S+)*)", text):
        preset = _known(nodes[2], data)
        if preset in data["systems"] or preset in data["aliases"]:
            return NamedCluster(preset, int(nodes[1]), None)
    if slice_of := re.fullmatch(r"(?:tpu[\s-]*)?(v\d(?:\w(?!\w))?|v5litepod)-(\d+)", text):
        kind, number = slice_of[1].replace("litepod", "e"), int(slice_of[2])
        if kind in _COUNTED_IN_CORES:
            example = f"{max(number // 2, 1)}xtpu-{kind}"
            return f"names of {kind} slices count cores, two to a chip; say for example {example!r}"
        text = f"{number}xtpu-{kind}"
    form = r"(?:(\d+)(?:\s*[x*]\s*(?:(\d+)\s+(?:x\s*)?)?|\s+))?([a-z]\S*(?:\s\S+)*)"
    found = re.fullmatch(form, text)
    first, second, preset = found.groups() if found else (None, None, " ")
    preset = _known(preset, data)
    if " " in preset:
        return "it is not of the form '8x8 h100', '8xH100' or 'h100'"
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


def _known(name: str, data: Mapping[str, Any]) -> str:
    """The preset that a name means: "nvidia h100 80gb", "h100s", "v5e"; the name, if none."""
    names = {*data["systems"], *data["aliases"]}
    short = re.sub(r"^nvidia[\s-]+|[\s-]+(?:gpus?|chips?|sxm\d?)\b", "", name)
    short = re.sub(r"\s+", "-", short)
    bare = re.sub(r"-\d+gb$", "", short)
    for each in (name, short, bare, f"tpu-{short}"):
        for known in (each, each.removesuffix("s")):
            if known in names and (each is not bare or _has_memory(short, known, data)):
                return known
    return name


def _has_memory(asked: str, preset: str, data: Mapping[str, Any]) -> bool:
    """Whether a preset's device has the memory that a name says."""
    said = re.search(r"-(\d+)gb$", asked)
    system = data["systems"][data["aliases"].get(preset, preset)]
    size = data["devices"][system["device"]]["memory_bytes"]
    return said is None or abs(int(said[1]) * 1e9 / size - 1) < _SAME_MEMORY


_COUNTED_IN_CORES = ("v2", "v3", "v4", "v5p")
_SAME_MEMORY = 0.1  # of datasheets in decimal and binary units
