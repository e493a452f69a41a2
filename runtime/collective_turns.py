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
        self._results: list[ShardedValue] = []
        self._before: list[int] = []
        self._loops = 0

    def take(self, env: MutableMapping[ShardedValue, Any], instruction: Instruction) -> None:
        """Lets an instruction wait, which is evaluated next; `env` has what it reads."""
        if not self._are_needed:
            return
        before = functools.reduce(
            lambda all_, value: all_ | self._after.get(value, 0), reads(instruction), 0
        )
        if goes_on := _goes_on(instruction):
            before |= self._wait(env, instruction, (1 << len(self._results)) - 1 & ~before)
        elif _communicates(instruction):
            before |= self._wait(env, instruction, self._loops & ~before)
        if goes_on or _communicates(instruction):
            number = len(self._results)
            self._results.append(writes(instruction)[0])
            self._before.append(before)
            self._loops |= goes_on << number
            before |= 1 << number
        self._after.update(dict.fromkeys(writes(instruction), before))

    def _wait(
        self, env: MutableMapping[ShardedValue, Any], instruction: Instruction, others: int
    ) -> int:
        """Lets an instruction wait for others; which these are, if it reads anything."""
        numbers = [n for n in range(len(self._results)) if others >> n & 1]
        implied = functools.reduce(lambda all_, n: all_ | self._before[n], numbers, 0)
        ends = [env[self._results[n]] for n in numbers if not implied >> n & 1]
        ends = [jnp.asarray(x) for x in ends if x.size]
        given = [v for v in reads(instruction) if v in env and _can_wait(env[v])]
        if not ends or not given:
            return 0
        value = min(given, key=lambda v: env[v].size)
        env[value] = _after_all(env[value], ends)
        return others


def _can_wait(value: Any) -> bool:
    return hasattr(value, "dtype") and not is_key(value.dtype) and value.size > 0


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
