"""The user's lines of a compiled program's buffers, by the names that XLA has of operations.

A program travels to the processes that compile it without its lines, which are those of the file as
it is now.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.base.compiled_records import CompiledBuffer, ProgramFinding
from autopar.passes.graph.graph import user_source
from autopar.passes.sharding.spmd_program import Block, Branch, Instruction, Loop, Relayout

MOST_BUFFERS = 12


class BufferSources:
    """Lines by the names of operations, of everything that a plan runs."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.lines: dict[str, set[str]] = defaultdict(set)
        for block in blocks:
            for name, line in _operations(block.instructions):
                parts = name.split("/")
                for start in range(len(parts)):
                    self.lines["/".join(parts[start:])].add(line)

    def told(self, buffers: Sequence[CompiledBuffer]) -> tuple[CompiledBuffer, ...]:
        """The largest buffers, with their lines where these are known; those alike as one."""
        counts: Counter[tuple[int, str, str, str]] = Counter()
        for x in buffers:
            kind = x.operation.rpartition("/")[2]
            counts[x.bytes, x.shape, kind, self.line(x.operation)] += x.count
        made = (
            CompiledBuffer(size, shape, kind, count, line)
            for (size, shape, kind, line), count in counts.items()
        )
        return tuple(sorted(made, key=lambda x: (-x.bytes * x.count, x.source))[:MOST_BUFFERS])

    def line(self, operation: str) -> str:
        """Of the operation with the longest end in common, if these are not many lines."""
        parts = operation.split("/")
        for start in range(len(parts) - 1):
            found = self.lines.get("/".join(parts[start:]))
            if found:
                return " or ".join(sorted(found)) if len(found) <= 2 else ""
        return ""


def with_lines(finding: ProgramFinding | None, sources: BufferSources) -> ProgramFinding | None:
    """A finding whose buffers have their lines."""
    return finding and replace(finding, buffers=sources.told(finding.buffers))


def _operations(instructions: Sequence[Instruction]) -> Iterator[tuple[str, str]]:
    for instruction in instructions:
        if isinstance(instruction, Relayout):
            continue
        line = user_source(instruction.eqn)
        if line:
            stack = str(instruction.eqn.source_info.name_stack)
            yield f"{stack}/{instruction.eqn.primitive.name}", line
        bodies: tuple[Block, ...] = (instruction.body,) if isinstance(instruction, Loop) else ()
        if isinstance(instruction, Branch):
            bodies = instruction.blocks
        for body in bodies:
            yield from _operations(body.instructions)
