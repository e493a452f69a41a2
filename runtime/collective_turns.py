"""Collectives in loops, and those beside them, one after the other on CPUs.

XLA on CPUs starts the collectives of a program in one order, and takes the next one when the last
has started (`communicators make scheduling edges only
<https://github.com/openxla/xla/blob/main/xla/backends/cpu/runtime/resource_use.h>`_). Those that
stand alone end before they return; a loop goes on in other threads. Then its collectives meet those
beside it, which have the same key: the process ends ("Check failed: id < num_threads") or hangs. So
what communicates waits for the results of loops that do, and these for what did before them, where
the program does not say so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.arrays.typed_keys import is_key
from autopar.passes.graph.primitives import EXCHANGE
from autopar.passes.sharding.reshard import COLLECTIVES
from autopar.passes.sharding.spmd_program import (
    Block,
    Branch,
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    is_literal,
    reads,
    writes,
)


class CollectiveTurns:
    """Which of a block's instructions that communicate each of its values depends on."""

    def __init__(self, block: Block | None = None) -> None:
        """With no block, or one in which no loop communicates, nothing waits."""
        instructions = block.instructions if block is not None else ()
        self._are_needed = any(map(_goes_on, instructions))
        # Sets of these instructions are the bits of a number.
        self._after: dict[ShardedValue, int] = {}
        self._results: list[tuple[ShardedValue, ...]] = []
        self._before: list[int] = []
        self._loops = 0

    def take(self, env: MutableMapping[ShardedValue, Any], instruction: Instruction) -> None:
        """Lets an instruction wait, which is evaluated next; `env` has what it reads.

        What has no results (a loop that prints) is waited for by nothing.
        """
        if not self._are_needed:
            return
        before = functools.reduce(
            lambda all_, value: all_ | self._after.get(value, 0), reads(instruction), 0
        )
        goes_on, communicates = _goes_on(instruction), _communicates(instruction)
        if goes_on:
            before |= self._wait(env, instruction, (1 << len(self._results)) - 1 & ~before)
        elif communicates:
            before |= self._wait(env, instruction, self._loops & ~before)
        if goes_on or communicates:
            number = len(self._results)
            self._results.append(writes(instruction))
            self._before.append(before)
            self._loops |= goes_on << number
            before |= 1 << number
        self._after.update(dict.fromkeys(writes(instruction), before))

    def _wait(
        self, env: MutableMapping[ShardedValue, Any], instruction: Instruction, others: int
    ) -> int:
        """Lets an instruction wait for others; which it does wait for, with all before these.

        Of a loop, all results are waited for: XLA knows some without running it, as a counter.
        """
        given = [v for v in _used(instruction) if v in env and _can_wait(env[v])]
        ends, found, left = list[Any](), 0, others if given else 0
        while left:
            number = left.bit_length() - 1  # the last ones say what they have waited for
            own = [jnp.asarray(env[v]) for v in self._results[number] if v in env]
            there = [x for x in own if x.size]
            ends += there
            found |= (1 << number | self._before[number]) if there else 0
            left &= ~(1 << number | found)
        if ends:
            value = min(given, key=lambda v: env[v].size)
            env[value] = _after_all(env[value], ends)
        return found


def _can_wait(value: Any) -> bool:
    return hasattr(value, "dtype") and not is_key(value.dtype) and value.size > 0


def _used(instruction: Instruction) -> tuple[ShardedValue, ...]:
    """What an instruction reads; of a loop, what its body does."""
    if not isinstance(instruction, Loop):
        return reads(instruction)
    inside = {v for x in instruction.body.instructions for v in reads(x)}
    pairs = zip(instruction.body.inputs, instruction.operands, strict=True)
    return tuple(outer for inner, outer in pairs if inner in inside and not is_literal(outer))


def _after_all(value: Any, ends: Iterable[Any]) -> Any:
    """The same value, which is there when others are.

    It is chosen by them from two that are equal, which compilers do not see through a barrier. A
    barrier alone orders nothing when a program runs.
    """
    firsts = [jnp.ravel(_bits(end))[0] for end in ends]
    chosen = functools.reduce(jnp.logical_xor, [first != 0 for first in firsts])
    value = jnp.asarray(value)
    return lax.select_n(chosen, value, lax.optimization_barrier(value))


def _bits(value: Any) -> Any:
    return jax.random.key_data(value) if is_key(value.dtype) else value


def _goes_on(instruction: Instruction) -> bool:
    """Whether it is a loop, or holds one, that communicates in trips."""
    if isinstance(instruction, Loop):
        return _has_collectives(instruction.body)
    if isinstance(instruction, Branch):
        return any(map(_has_collectives, instruction.blocks))
    return isinstance(instruction, Compute) and instruction.eqn.primitive.name == EXCHANGE


def _communicates(instruction: Instruction) -> bool:
    steps = instruction.steps if isinstance(instruction, Relayout) else ()
    return any(step.kind in COLLECTIVES for step in steps)


def _has_collectives(block: Block) -> bool:
    return any(_goes_on(x) or _communicates(x) for x in block.instructions)
