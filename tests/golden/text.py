"""A plan as golden text: every decision in it, on lines that a unified diff shows well.

Estimates, seconds, names of nodes, hashes and versions are left out: they change without a
decision having changed. Repeated lines are counted, and paths that fill every combination of some
of their parts share a line (`params['Block_{0,1}']['{bias,scale}']`), which loses nothing.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar import AutoparError, Plan
    from autopar.plans import Candidate, Collective, StagePlan, StageTransfer, TensorPlan

TESTS = Path(__file__).resolve().parent.parent
PROGRAM_FILES = frozenset(path.name for path in (TESTS / "programs").glob("*.py"))

Spec = tuple[tuple[str, ...], ...]
Line = tuple[str, str]
"""What several leaves may have in common, and the path of one of them."""


def plan_text(plan: Plan) -> str:
    """Every decision of a plan, in lines."""
    return "".join(f"{line}\n" for line in _plan_lines(plan))


def error_text(error: AutoparError) -> str:
    """An error of planning: its class and its message, without folders of the machine."""
    error = copy.copy(error)
    for part in ("what", "where", "why", "hint"):  # before lines are wrapped
        for folder in (str(TESTS.parent), str(Path(os.__file__).parent)):
            text = getattr(error, part)
            setattr(error, part, text and text.replace(f"{folder}{os.sep}", ""))
    message = str(error)
    if hasattr(error, "would_fit"):  # what would fit is tried as long as there is time
        message = message.partition("\n  try:")[0]
    return "".join(f"{line}\n" for line in [type(error).__name__, *message.splitlines()])


def warning_text(warning: Warning | str) -> str:
    """A warning of planning, on one line."""
    return f"{type(warning).__name__}: {' '.join(str(warning).split())}\n"


def fold(paths: Iterable[str]) -> list[str]:
    """Paths under fewer names, in the order of their first members.

    >>> fold(["p['a_0'].w", "p['a_0'].b", "p['a_1'].w", "p['a_1'].b", "q[0]"])
    ["p['a_{0,1}'].{w,b}", 'q[0]']
    """
    entries = [tuple(_PARTS.findall(path)) for path in paths]
    for place in range(max(map(len, entries), default=0)):
        alike: dict[tuple[tuple[str, ...], tuple[str, ...], bool], dict[str, None]] = {}
        for parts in entries:
            here = parts[place : place + 1]
            # A path that has ended is another than one that ends here.
            group = (parts[:place], parts[place + 1 :], bool(here))
            alike.setdefault(group, {}).update(dict.fromkeys(here))
        entries = [
            (*before, _join(list(here)), *after) if here else before
            for (before, after, _), here in alike.items()
        ]
    return ["".join(parts) for parts in entries]


_PARTS = re.compile(r"\[[^\]]*\]|\.?[^.\[]+|.")


def _join(parts: Sequence[str]) -> str:
    """`['{bias,scale}']` for `['bias']` and `['scale']`."""
    if len(parts) == 1:
        return parts[0]
    start = re.sub(r"[A-Za-z0-9]+$", "", _common_start(parts))
    rests = [part[len(start) :] for part in parts]
    end = re.sub(r"^[A-Za-z0-9]+", "", _common_start([rest[::-1] for rest in rests])[::-1])
    middles = [rest[: len(rest) - len(end)] for rest in rests]
    return f"{start}{{{','.join(middles)}}}{end}"


def _common_start(texts: Sequence[str]) -> str:
    # The least and the greatest share no more than all do.
    pairs = zip(min(texts), max(texts), strict=False)
    return "".join(left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _plan_lines(plan: Plan) -> Iterator[str]:
    yield f"method {plan.method}"
    yield f"microbatches {plan.num_microbatches}: {plan.reason_for_microbatches}"
    for chosen in (True, False):
        candidates = [item for item in plan.candidates if item.chosen == chosen]
        yield from sorted(_candidate(item) for item in candidates)
    pipeline = plan.pipeline
    if len(plan.stages) > 1:
        backward = "split" if pipeline.splits_backward else "whole"
        yield (
            f"pipeline {pipeline.schedule}, {pipeline.num_meshes} meshes, "
            f"{pipeline.num_chunks} chunks, boundaries {list(pipeline.boundaries)}, "
            f"backward {backward}"
        )
    for number, stage in enumerate(plan.stages):
        yield _stage(number, stage)
        yield from _indented(_collective(item) for item in stage.collectives)
    if pipeline.transfers:
        yield "transfers"
        yield from _indented(_transfer(item) for item in pipeline.transfers)
    yield "inputs"
    yield from _indented(_tensor(item) for item in plan.inputs)
    how = Counter((entry.path, entry.how) for entry in plan.certificate)
    certified = dict(how)
    yield "outputs"
    outputs = []
    for item in plan.outputs:
        ways = [way for path, way in certified if path == item.path]
        outputs.append(_tensor(item, "+".join(ways) or "uncertified"))
    yield from _indented(outputs)
    strangers = {path for path, _ in how} - {item.path for item in plan.outputs}
    if strangers:
        yield "certificates of no output"
        yield from _indented((way, path) for path, way in how if path in strangers)


def _candidate(item: Candidate) -> str:
    words = [
        "chosen" if item.chosen else "considered",
        item.method,
        "x".join(map(str, item.logical_mesh)),
        f"with {item.num_microbatches} microbatches",
    ]
    return " ".join(words) + (f": {item.note}" if item.note else "")


def _stage(number: int, stage: StagePlan) -> str:
    names = list(stage.axis_names)
    sizes = list(stage.logical_mesh)
    axes = " ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    first, stop = stage.layers
    return (
        f"stage {number} on mesh {stage.mesh}: {axes}, {stage.num_devices} devices, "
        f"layers [{first}, {stop}), remat {stage.remat}"
    )


def _collective(item: Collective) -> Line:
    words = [item.kind, ",".join(item.axes), f"{item.bytes}B", f"times {item.times}", item.purpose]
    return " ".join([*words, *_source(item.source)]), item.path


def _source(source: str) -> list[str]:
    """The line of the test program; any other is the compiler's own, and moves with its edits."""
    file = source.partition(":")[0]
    return [source if file in PROGRAM_FILES else "elsewhere"] if source else []


def _transfer(item: StageTransfer) -> Line:
    shape = ",".join(map(str, item.shape))
    route = f"{item.source}->{item.target}"
    return f"{route} {item.dtype}[{shape}] {item.bytes}B times {item.times}", item.what


def _tensor(item: TensorPlan, how: str = "") -> Line:
    cut = ["/".join([str(size), *axes]) for size, axes in zip(item.shape, item.spec, strict=True)]
    words = [
        item.role,
        *(["donated"] if item.donated else []),
        *([how] if how else []),
        f"@{'+'.join(map(str, item.stages))}",
        f"{item.dtype}[{','.join(cut)}]",
        f"{item.bytes_per_device}B",
        *(["in the host"] if item.memory == "host" else []),
    ]
    return " ".join(words), item.path


def _indented(lines: Iterable[Line]) -> Iterator[str]:
    """Lines in the order of their first members, folded over paths and counted where equal."""
    groups: dict[tuple[str, int], list[str]] = {}
    for (text, path), count in Counter(lines).items():
        groups.setdefault((text, count), []).append(path)
    for (text, count), paths in groups.items():
        times = f"{count} x " if count > 1 else ""
        for name in fold(paths):
            yield f"  {times}{text} {name}".rstrip()
