"""The collectives that a compiled XLA program contains, in the canonical form of a plan's list.

Equivalences (what the canonical form abstracts from, and why):

- XLA combines neighbouring collectives of one kind and group into one with a tuple: bytes add up.
- A collective in a while loop runs `known_trip_count` times; where XLA does not say (on TPUs), as
  often as the number that the loop's condition compares with.
- `bytes` is the larger of operand and result, as in `autopar.plans.Collective`.
- A collective that begins and ends with two instructions counts where it begins.
- Of two branches of a conditional, both are counted, as the plan lists both.
- TPUs go on with a collective in several fusions of other work (`AsyncCollectiveStart`, steps, and
  `AsyncCollectiveDone`), each of which writes it again: it counts in that where it starts.
- TPUs write a reduce-scatter as a fusion of an all-reduce and the slice of its result, before
  which they pad what they are given: it is a reduce-scatter of that.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.base.plan_records import COLLECTIVE_KINDS

Canonical = Counter[tuple[str, tuple[str, ...], int]]
"""From kind, mesh axes and times to the bytes of one run."""

UNKNOWN_AXES = ("?",)
"""Of groups that no axes of the mesh have."""

_OPERATION = re.compile(
    rf"= (?P<type>\(?.*?\)?) (?P<kind>{'|'.join(COLLECTIVE_KINDS)})(?P<start>-start)?"
    r"\((?P<operands>[^)]*)\)(?P<rest>.*)"
)
_HEADER = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,]*)\]")
_STARTS = 'custom_call_target="AsyncCollectiveStart"'
_CHAIN = "chain_id="
_LAYOUT = re.compile(r"\{[^}]*\}|/\*.*?\*/")


def collectives(text: str, mesh: Sequence[int], names: Sequence[str]) -> Canonical:
    """Parse the text of a compiled module that runs on a mesh of that shape.

    Args:
      text: of `jax.stages.Compiled.as_text()`.
      mesh: the sizes of the mesh's axes.
      names: their names.
    """
    lines = computations(text)
    times = trips(lines)
    found: Canonical = Counter()
    for name, body in lines.items():
        starts = any(_STARTS in line for line in body)
        scattered = name.startswith("all-reduce-scatter")
        for line in body:
            match = _OPERATION.search(line)
            if match is None or (_CHAIN in line and not starts):
                continue
            result, operand = _bytes(match["type"]), _operand_bytes(match["operands"], body)
            axes = _axes(match["rest"], mesh, names)
            if scattered and match["kind"] == "all-reduce":
                given = sum(_bytes(x.split(" = ")[1].split(" ")[0]) for x in body if _is_array(x))
                found["reduce-scatter", axes, times.get(name, 1)] += given
                continue
            if match["start"] and match["kind"] != "all-reduce":
                result -= operand  # its type is that of operands and results together
            found[match["kind"], axes, times.get(name, 1)] += max(result, operand)
    return found


def computations(text: str) -> dict[str, list[str]]:
    """The lines of every computation of a module, by its name."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            name = header["name"]
            found[name] = []
        elif name:
            found[name].append(line.strip())
    return found


def trips(lines: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs a step: the product of the loops around it."""
    callers: dict[str, tuple[str, int]] = {}
    for name, body in lines.items():
        for line in body:
            count = _trip_count(line, lines) if " while(" in line else 1
            for called in re.findall(
                r"(?:body|to_apply|calls|called_computations)=\{?%?([\w.\-]+)", line
            ):
                callers[called] = (name, count)
            for group in re.findall(r"branch_computations=\{([^}]*)\}", line):
                for called in group.split(","):
                    callers[called.strip().lstrip("%")] = (name, 1)

    def times(name: str) -> int:
        product = 1
        while name in callers:
            name, count = callers[name]
            product *= count
        return product

    return {name: times(name) for name in lines}


def _trip_count(line: str, lines: dict[str, list[str]]) -> int:
    """Of a while loop; 1 where nothing tells."""
    told = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
    if told:
        return int(told[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    body = "\n".join(lines.get(condition[1], ())) if condition else ""
    limits = {int(x) for x in re.findall(r"= s(?:32|64)\[\]\S* constant\((\d+)\)", body)}
    return limits.pop() if len(limits) == 1 else 1


def _bytes(type_text: str) -> int:
    return sum(
        math.ceil(math.prod(int(n) for n in dims.split(",") if n) * _bits(dtype) / 8)
        for dtype, dims in _SHAPE.findall(_LAYOUT.sub("", type_text))
    )


def _is_array(line: str) -> bool:
    """Whether it is a parameter with data: a pass may add one that says where on the mesh it is."""
    return " parameter(" in line and "[]" not in line.partition(" parameter(")[0]


def _bits(dtype: str) -> int:
    """Of one element of XLA's type; 0 of what holds no data."""
    width = re.match(r"(?:bf|f|s|u|c)(\d+)", dtype)
    return int(width[1]) if width else 8 if dtype == "pred" else 0


def _operand_bytes(operands: str, body: Sequence[str]) -> int:
    total = 0
    for operand in operands.split(","):
        name = re.sub(r"/\*.*?\*/", "", operand).strip().split(" ")[-1].lstrip("%")
        if not name:
            continue
        beginnings = tuple(f"{root}{sign}{name} = " for root in ("", "ROOT ") for sign in ("%", ""))
        definition = next((x for x in body if x.startswith(beginnings)), "")
        if definition:
            total += _bytes(definition.split(" = ", 1)[1].split(" ", 1)[0])
    return total


def _axes(rest: str, mesh: Sequence[int], names: Sequence[str]) -> tuple[str, ...]:
    named = re.search(r"replica_groups=@?mesh\[[^\]]*\] ?\{([^}]*)\}", rest)
    if named:  # XLA of JAX 0.12 keeps the axes' names
        used = {name.strip().strip("'\"") for name in named[1].split(",")}
        return tuple(name for name in names if name in used)
    groups = frozenset(map(frozenset, _groups(rest, math.prod(mesh))))
    together = _pairs(rest)
    ids = np.arange(math.prod(mesh)).reshape(mesh)
    for count in range(1, len(mesh) + 1):
        for axes in itertools.combinations(range(len(mesh)), count):
            size = math.prod(mesh[a] for a in axes)
            moved = np.moveaxis(ids, axes, range(len(mesh) - count, len(mesh))).reshape(-1, size)
            own = frozenset(map(frozenset, moved.tolist()))
            is_around = bool(together) and all(any(p <= group for group in own) for p in together)
            if own == groups or is_around:
                return tuple(names[a] for a in axes)
    return UNKNOWN_AXES


def _pairs(rest: str) -> list[frozenset[int]]:
    """Which devices a collective-permute sends from and to."""
    text = re.search(r"source_target_pairs=\{(\{.*?\})\}", rest)
    pairs = re.findall(r"\{(\d+),(\d+)\}", text[1]) if text else []
    return [frozenset((int(a), int(b))) for a, b in pairs]


def _groups(rest: str, num_devices: int) -> Iterator[list[int]]:
    explicit = re.search(r"replica_groups=\{(\{.*?\})\}", rest)
    if explicit:
        for group in re.findall(r"\{([\d,]*)\}", explicit[1]):
            yield [int(n) for n in group.split(",")]
        return
    if "replica_groups={}" in rest:
        yield list(range(num_devices))
        return
    compact = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if compact is None:
        return
    shape, source = ([int(n) for n in compact[i].split(",")] for i in (1, 2))
    ids = np.arange(math.prod(source)).reshape(source)
    if compact[3]:
        ids = ids.transpose([int(n) for n in compact[3].split(",")])
    yield from ids.reshape(shape).tolist()
