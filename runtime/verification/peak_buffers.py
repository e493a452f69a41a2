"""What is in a compiled program's temporary memory at its worst moment.

Read from what XLA writes of its buffer assignment (`xla_dump_to`): the values of the allocation for
temporaries with their places in it, where each is made and read, and the scheduled module. TPUs
write it too; there a colour marks what is in another memory than the device's (VMEM, flags).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from autopar.base.compiled_records import CompiledBuffer

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_VALUE = re.compile(
    r"<(?P<id>\d+) (?P<name>\S+?)(?:\{[\d,]*\})? @\d+>\n positions:\n(?P<positions>.*?)\n"
    r" uses:\n(?P<uses>.*?)\n from instruction:",
    re.DOTALL,
)
_PLACED = re.compile(
    r"^ value: <(\d+) (\S+?)(?:\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$"
)
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*):$")
_BODIES = re.compile(r"\b(?:condition|body)=%?([\w.\-]+)")


class _Placed(NamedTuple):
    name: str
    size: int
    offset: int
    shape: str
    first: int
    last: int


def temporary_bytes(folder: Path) -> int | None:
    """The memory for temporaries on a TPU; None where nothing was written.

    `memory_analysis` adds what is lost between buffers a second time there (libtpu 0.0.42).
    """
    assignment = _assignment(folder)
    if assignment is None:
        return None
    found = map(_ALLOCATION.match, assignment.read_text(encoding="utf-8").splitlines())
    return sum(int(x[1]) for x in found if x and _is_temporary(x[2], is_tpu=True))


def peak_buffers(folder: Path, is_tpu: bool = False) -> tuple[CompiledBuffer, ...]:
    """The largest buffers at the worst moment, those alike as one; none where XLA wrote nothing."""
    assignment = _assignment(folder)
    if assignment is None:
        return ()
    stem = assignment.name.removesuffix("-buffer-assignment.txt")
    module = folder / f"{stem}.txt"
    values = folder / f"{stem}-buffer-assignment-values.txt"
    if not module.exists() or not values.exists():
        return ()
    text = module.read_text(encoding="utf-8")
    lines = _computations(text)
    times = {name: time for time, name in enumerate(_order(lines, next(iter(reversed(lines)))))}
    alive = _worst(list(_placed(assignment, values, times, is_tpu)))
    told = {name: rest for body in lines.values() for name, rest in body.items()}
    counts: Counter[tuple[int, str, str]] = Counter()
    for x in alive:
        rest = told.get(x.name, "")
        operation = re.search(r'op_name="([^"]*)"', rest)
        label = operation[1].rpartition("shard_map/")[2] if operation else x.name
        counts[x.size, x.shape, label] += 1
    buffers = (CompiledBuffer(*key, count) for key, count in counts.items())
    return tuple(sorted(buffers, key=lambda x: (-x.bytes * x.count, x.operation)))


def _assignment(folder: Path) -> Path | None:
    found = folder.glob("*buffer-assignment.txt")
    # Constants and small helpers are modules of their own: the step's is the largest.
    return max(found, key=lambda path: path.stat().st_size, default=None)


def _is_temporary(allocation: str, is_tpu: bool) -> bool:
    return "preallocated-temp" in allocation and not (is_tpu and "color" in allocation)


def _computations(text: str) -> dict[str, dict[str, str]]:
    """Every computation's instructions in the order in which they run; the entry is the last."""
    found: dict[str, dict[str, str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if line and not line[0].isspace() and line.endswith("{") and "HloModule" not in line:
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            entry = name if line.startswith("ENTRY") else entry
            found[name] = {}
        elif line.startswith("}"):
            name = ""
        elif name and (match := _INSTRUCTION.match(line)):
            found[name][match[1]] = match[2]
    if entry:
        found[entry] = found.pop(entry)
    return found


def _order(lines: Mapping[str, Mapping[str, str]], computation: str) -> Iterator[str]:
    for name, rest in lines.get(computation, {}).items():
        if " while(" in rest:
            for body in _BODIES.findall(rest):
                yield from _order(lines, body)
        yield name


def _placed(
    assignment: Path, values: Path, times: Mapping[str, int], is_tpu: bool
) -> Iterator[_Placed]:
    """The values in the memory for temporaries, from when to when."""
    uses: dict[str, list[str]] = {}
    for match in _VALUE.finditer(values.read_text(encoding="utf-8")):
        names = [line.strip().split(" ")[0] for line in match["positions"].splitlines()]
        names += [line.strip().split(",")[0] for line in match["uses"].splitlines()]
        uses[match["id"]] = [name.partition("{")[0] for name in names]
    is_temporary = False
    for line in assignment.read_text(encoding="utf-8").splitlines():
        allocation = _ALLOCATION.match(line)
        if allocation:
            is_temporary = _is_temporary(allocation[2], is_tpu)
        value = _PLACED.match(line) if is_temporary else None
        if value is None or value[2] not in times:
            continue
        read = [times[name] for name in uses.get(value[1], ()) if name in times]
        first = times[value[2]]
        shape = value[5].strip().partition("{")[0]
        yield _Placed(
            value[2], int(value[3]), int(value[4]), shape, first, max(read, default=first)
        )


def _worst(placed: list[_Placed]) -> list[_Placed]:
    """Those at the worst moment, one for each place."""
    begins: dict[int, list[_Placed]] = defaultdict(list)
    ends: dict[int, list[_Placed]] = defaultdict(list)
    for x in placed:
        begins[x.first].append(x)
        ends[x.last].append(x)
    alive: dict[int, dict[str, _Placed]] = defaultdict(dict)  # by place: one buffer's values
    best, worst = 0, list[_Placed]()
    total = 0
    for time in sorted({*begins, *ends}):
        for x in begins[time]:
            before = max((y.size for y in alive[x.offset].values()), default=0)
            alive[x.offset][x.name] = x
            total += max(x.size - before, 0)
        if total > best:
            best = total
            worst = [max(at.values(), key=lambda y: y.size) for at in alive.values() if at]
        for x in ends[time]:
            before = max((y.size for y in alive[x.offset].values()), default=0)
            alive[x.offset].pop(x.name, None)
            total -= before - max((y.size for y in alive[x.offset].values()), default=0)
    return worst
