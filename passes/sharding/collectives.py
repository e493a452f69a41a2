"""The collectives that a sharded program runs: the plan lists them, a test compares with HLO."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from autopar.base.plan_records import Collective
from autopar.passes.graph.graph import user_source
from autopar.passes.primitives.exchanges import EXPECTED_ROUNDS
from autopar.passes.sharding.exchange_rounds import exchange_round
from autopar.passes.sharding.reshard import COLLECTIVES
from autopar.passes.sharding.spmd_program import (
    Block,
    Branch,
    Compute,
    Loop,
    Relayout,
    SpmdProgram,
    is_literal,
)


def collectives(program: SpmdProgram) -> tuple[Collective, ...]:
    """Every collective of a whole program, run once: see `collectives_of`."""
    return tuple(collectives_of(program, [(program.block, 1, "")]))


def collectives_of(
    program: SpmdProgram, runs: Iterable[tuple[Block, int, str]]
) -> Iterator[Collective]:
    """The collectives of a step: `bytes` is the larger of what one device puts in and gets out.

    `times` counts a loop's trips; both branches of a cond are listed, and of an exchange of rows as
    many rounds as are expected.

    Args:
      program: gives the mesh, and where in the user's code values are made.
      runs: blocks of it, how often each runs in a step, and the task that it belongs to.
    """
    source_of = dict(_sources(program.block))
    for block, times, task in runs:
        yield from map(partial(replace, task=task), _walk(block, times, program, source_of))


def _walk(
    block: Block, times: int, program: SpmdProgram, source_of: Mapping[object, str]
) -> Iterator[Collective]:
    for instruction in block.instructions:
        if isinstance(instruction, Relayout):
            for step, dtype, size in instruction.moves():
                if step.kind in COLLECTIVES:
                    atom = instruction.source.atom
                    yield Collective(
                        kind=step.kind,
                        axes=tuple(program.axis_names[a] for a in step.axes),
                        bytes=size,
                        times=times,
                        purpose=instruction.purpose,
                        source="" if is_literal(instruction.source) else source_of.get(atom, ""),
                        dtype=str(dtype),
                    )
        elif isinstance(instruction, Compute):
            operands, results = instruction.layouts
            found = exchange_round(instruction.eqn, operands, results, program.mesh)
            if found is not None:
                step, size = found
                yield Collective(
                    kind=step.kind,
                    axes=tuple(program.axis_names[a] for a in step.axes),
                    bytes=size,
                    times=times * EXPECTED_ROUNDS,
                    purpose="activation",
                    source=short_source(user_source(instruction.eqn)),
                    dtype=str(instruction.eqn.invars[0].aval.dtype),
                )
        elif isinstance(instruction, Loop):
            trips = instruction.eqn.params["length"]
            yield from _walk(instruction.body, times * trips, program, source_of)
        elif isinstance(instruction, Branch):
            for inner in instruction.blocks:
                yield from _walk(inner, times, program, source_of)


def _sources(block: Block) -> Iterator[tuple[object, str]]:
    """Where in the user's code each variable is computed, also inside of loops: `file.py:12`."""
    for i in block.instructions:
        if isinstance(i, (Compute, Loop, Branch)):
            source = short_source(user_source(i.eqn))
            yield from ((version.atom, source) for version in i.results)
        if isinstance(i, (Loop, Branch)):
            for inner in (i.body,) if isinstance(i, Loop) else i.blocks:
                yield from _sources(inner)


def short_source(source: str) -> str:
    """`/a/b/train.py:12 (step)` as `train.py:12`: a plan must not depend on where files lie."""
    return source.split(" (")[0].rsplit("/", 1)[-1]
