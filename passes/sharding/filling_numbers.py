"""The values of a program that are filled with a constant: no kernel reads them from memory."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.sharding.compiler_rules import IN_PLACE, CompilerRules
from autopar.passes.sharding.instruction_values import loop_counts
from autopar.passes.sharding.scopes import FILLS
from autopar.passes.sharding.spmd_program import (
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    is_literal,
    reads,
    writes,
)


def filling_numbers(
    instructions: Iterable[Instruction], rules: CompilerRules
) -> dict[ShardedValue, Any]:
    """What is made of constants alone by broadcasts and casts: with the number that fills it.

    In an array without dimensions, of the value's own dtype. None: it is not one number everywhere,
    or not known. A choice between the same number is no choice.
    """
    found: dict[ShardedValue, Any] = {}
    plain = FILLS if rules.counts_operations else FILLS | ELEMENTWISE

    def filling(value: ShardedValue) -> Any:
        return _number(value.atom) if is_literal(value) else found.get(value)

    for instruction in instructions:
        own = reads(instruction)
        number = None
        if isinstance(instruction, Compute):
            name = instruction.eqn.primitive.name
            if name == "select_n":
                cases = [filling(v) for v in instruction.operands[1:]]
                is_constant, number = _is_one(cases), cases[0]
            else:
                is_constant = name in plain and all(v in found for v in own)
                is_filled = name in FILLS and bool(instruction.operands)
                if is_filled:
                    dtype = instruction.results[0].atom.aval.dtype
                    number = _cast(filling(instruction.operands[0]), dtype)
        else:
            is_constant = isinstance(instruction, Relayout) and all(v in found for v in own)
            number = found.get(own[0]) if own else None
        if is_constant:
            found.update(dict.fromkeys(writes(instruction), number))
    return found


def beginnings(
    instruction: Instruction, constants: Container[ShardedValue]
) -> Iterator[tuple[ShardedValue, ShardedValue | None]]:
    """The results whose buffers are filled with a constant, and that (None: it has no name)."""
    if isinstance(instruction, Loop):
        consts, carry = loop_counts(instruction)
        starts = instruction.operands[consts : consts + carry]
        yield from ((v, None) for v in instruction.results[carry:])
        pairs = zip(instruction.results, starts, strict=False)
    elif isinstance(instruction, Compute) and instruction.eqn.primitive.name in IN_PLACE:
        pairs = zip(instruction.results, instruction.operands, strict=False)
    else:
        return
    yield from ((r, v) for r, v in pairs if not is_literal(v) and v in constants)


def _is_one(numbers: Sequence[Any]) -> bool:
    """Whether they are known and the same, as they are written: 0.0 and -0.0 are two."""
    known = [number for number in numbers if number is not None]
    return len(known) == len(numbers) and len({number.tobytes() for number in known}) == 1


def _number(literal: Any) -> Any:
    value = np.asarray(literal.val)
    return _cast(value.reshape(()), literal.aval.dtype) if value.size == 1 else None


def _cast(number: Any, dtype: Any) -> Any:
    """A number in another dtype, as XLA casts it; None where NumPy may do otherwise."""
    if number is None or not isinstance(dtype, np.dtype):
        return None
    with np.errstate(all="ignore"):
        made = number.astype(dtype)
        is_exact = made.astype(number.dtype) == number
    is_to_integer = jnp.issubdtype(dtype, jnp.integer) and not jnp.issubdtype(
        number.dtype, jnp.integer
    )
    return None if is_to_integer and not is_exact else made
