"""The collectives that a compiled XLA program contains, in the canonical form of a plan's list.

Equivalences (what the canonical form abstracts from, and why):

- XLA combines neighbouring collectives of one kind and group into one with a tuple: bytes add up.
- A collective in a while loop runs `known_trip_count` times.
- `bytes` is the larger of operand and result, as in `autopar.plans.Collective`.
- XLA:CPU keeps a reduce-scatter where the program has one; a GPU or TPU compiler may turn an
  all-reduce whose result is sliced into one, so compare on the CPU.
- Of two branches of a conditional, both are counted, as the plan lists both.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
BYTES |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}

Canonical = Counter[tuple[str, tuple[str, ...], int]]  # (kind, axes, times) -> bytes of one run

_OPERATION = re.compile(
    rf"= (?P<type>\(?.*?\)?) (?P<kind>{'|'.join(KINDS)})(?:-start)?"
    r"\((?P<operands>[^)]*)\)(?P<rest>.*)"
)
_HEADER = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def collectives(text: str, mesh: Sequence[int], names: Sequence[str]) -> Canonical:
    """Parse the text of a compiled module that runs on a mesh of that shape."""
    lines = _computations(text)
    times = _trips(lines)
    found: Canonical = Counter()
    for name, body in lines.items():
        for line in body:
            match = _OPERATION.search(line)
            if match is None:
                continue
            result, operand = _bytes(match["type"]), _operand_bytes(match["operands"], body)
            axes = _axes(match["rest"], mesh, names)
            key = (match["kind"], axes, times.get(name, 1))
            found[key] += max(result, operand)
    return found


def _computations(text: str) -> dict[str, list[str]]:
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


def _trips(lines: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs a step: the product of the loops around it."""
    callers: dict[str, tuple[str, int]] = {}
    for name, body in lines.items():
        for line in body:
            trip = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            for called in re.findall(
                r"(?:body|to_apply|calls|called_computations)=\{?%?([\w.\-]+)", line
            ):
                count = int(trip[1]) if trip and " while(" in line else 1
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


def _bytes(type_text: str) -> int:
    return sum(
        BYTES[dtype] * int(np.prod([int(n) for n in dims.split(",") if n], initial=1))
        for dtype, dims in _SHAPE.findall(re.sub(r"\{[^}]*\}|/\*.*?\*/", "", type_text))
        if dtype in BYTES
    )


def _operand_bytes(operands: str, body: Sequence[str]) -> int:
    total = 0
    for operand in operands.split(","):
        name = re.sub(r"/\*.*?\*/", "", operand).strip().split(" ")[-1].lstrip("%")
        definition = next(
            (x for x in body if re.match(rf"(?:ROOT )?%?{re.escape(name)} = ", x)), ""
        )
        if definition:
            total += _bytes(definition.split(" = ", 1)[1].split(" ", 1)[0])
    return total


def _axes(rest: str, mesh: Sequence[int], names: Sequence[str]) -> tuple[str, ...]:
    named = re.search(r"replica_groups=@?mesh\[[^\]]*\] ?\{([^}]*)\}", rest)
    if named:  # XLA of JAX 0.12 keeps the axes' names
        used = {name.strip().strip("'\"") for name in named[1].split(",")}
        return tuple(name for name in names if name in used)
    groups = frozenset(map(frozenset, _groups(rest)))
    ids = np.arange(int(np.prod(mesh))).reshape(mesh)
    for count in range(1, len(mesh) + 1):
        for axes in itertools.combinations(range(len(mesh)), count):
            size = int(np.prod([mesh[a] for a in axes]))
            moved = np.moveaxis(ids, axes, range(len(mesh) - count, len(mesh))).reshape(-1, size)
            if frozenset(map(frozenset, moved.tolist())) == groups:
                return tuple(names[a] for a in axes)
    raise AssertionError(f"no axes of {tuple(mesh)} have the groups of {rest[:200]}")


def _groups(rest: str) -> Iterator[list[int]]:
    explicit = re.search(r"replica_groups=\{(\{.*?\})\}", rest)
    if explicit:
        for group in re.findall(r"\{([\d,]*)\}", explicit[1]):
            yield [int(n) for n in group.split(",")]
        return
    compact = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    assert compact is not None, rest[:200]
    shape, source = ([int(n) for n in compact[i].split(",")] for i in (1, 2))
    ids = np.arange(int(np.prod(source))).reshape(source)
    if compact[3]:
        ids = ids.transpose([int(n) for n in compact[3].split(",")])
    yield from ids.reshape(shape).tolist()
