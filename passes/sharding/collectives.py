"""The collectives that a sharded program runs: the plan lists them, a test compares with HLO."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.base.plan_records import Collective
from autopar.passes.graph.graph import Atom, user_source
from autopar.passes.sharding.reshard import COLLECTIVES, ReshardStep
from autopar.passes.sharding.scopes import aval_shape, itemsize
from autopar.passes.sharding.spmd_program import Block, Branch, Compute, Loop, Relayout, SpmdProgram


def collectives(program: SpmdProgram) -> tuple[Collective, ...]:
    """Every collective of a step: `bytes` is the larger of what one device puts in and gets out.

    `times` counts a loop's trips; both branches of a cond are listed.
    """
    return tuple(_walk(program.block, 1, program))


def _walk(block: Block, times: int, program: SpmdProgram) -> Iterator[Collective]:
    sources = _sources(block)
    for instruction in block.instructions:
        if isinstance(instruction, Relayout):
            for step in instruction.steps:
                if step.kind in COLLECTIVES:
                    yield Collective(
                        kind=step.kind,
                        axes=tuple(program.axis_names[a] for a in step.axes),
                        bytes=step_bytes(step, instruction.source.atom),
                        times=times,
                        purpose=instruction.purpose,
                        source=sources.get(instruction.source.atom, ""),
                    )
        elif isinstance(instruction, Loop):
            yield from _walk(instruction.body, times * instruction.eqn.params["length"], program)
        elif isinstance(instruction, Branch):
            for inner in instruction.blocks:
                yield from _walk(inner, times, program)


def step_bytes(step: ReshardStep, atom: Atom) -> int:
    """Bytes of one device's buffer, before or after the step, whichever is larger."""
    return itemsize(atom.aval) * step.elements(math.prod(aval_shape(atom)))


def _sources(block: Block) -> dict[object, str]:
    """Where in the user's code each variable of a block is computed: `file.py:12`."""
    return {
        version.atom: short_source(user_source(i.eqn))
        for i in block.instructions
        if isinstance(i, (Compute, Loop, Branch))
        for version in i.results
    }


def short_source(source: str) -> str:
    """`/a/b/train.py:12 (step)` as `train.py:12`: a plan must not depend on where files lie."""
    return source.split(" (")[0].rsplit("/", 1)[-1]
