"""The user's lines of what a compiler says of a program, by the names that XLA has of operations.

A program travels to the processes that compile it without its lines, which are those of the file as
it is now.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.base.compiled_records import CompiledBuffer, ProgramFinding
from autopar.base.units import format_bytes
from autopar.passes.graph.graph import Graph, user_source
from autopar.passes.sharding.spmd_program import Block, Branch, Instruction, Loop, Relayout
from autopar.runtime.verification.failed_donations import donation_warnings

MOST_BUFFERS = 12
_NAMED = re.compile(r'op_name="([^"]*)"')
_MEMORY = re.compile(r"reduce memory|out of memory|RESOURCE_EXHAUSTED", re.IGNORECASE)


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

    def located(self, words: str, buffers: Sequence[CompiledBuffer]) -> str:
        """A compiler's words with the lines of the operations that they name.

        What speaks of memory and names none gets the largest buffer that was there.
        """
        named = dict.fromkeys(map(self.line, _NAMED.findall(words)))
        lines = [line for line in named if line]
        if lines:
            return f"{words} That is {'; '.join(lines)}."
        largest = next((x for x in buffers if x.source), None)
        if largest is None or not _MEMORY.search(words):
            return words
        size = format_bytes(largest.bytes * largest.count)
        return (
            f"{words} The largest there: {size} of {largest.shape}, by {largest.operation} of "
            f"{largest.source}."
        )

    def line(self, operation: str) -> str:
        """Of the operation with the longest end in common, if these are not many lines."""
        parts = operation.split("/")
        for start in range(len(parts) - 1):
            found = self.lines.get("/".join(parts[start:]))
            if found:
                return " or ".join(sorted(found)) if len(found) <= 2 else ""
        return ""


def with_lines(
    finding: ProgramFinding | None, sources: BufferSources, graph: Graph
) -> ProgramFinding | None:
    """A finding whose buffers, failure and warnings name the user's lines."""
    if finding is None:
        return None
    buffers = sources.told(finding.buffers)
    told = (*finding.warnings, *donation_warnings(graph, finding.not_taken))
    return replace(
        finding,
        buffers=buffers,
        warnings=tuple(sources.located(words, buffers) for words in told),
        failure=sources.located(finding.failure, buffers),
    )


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
