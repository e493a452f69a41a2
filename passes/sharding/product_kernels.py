"""What XLA:GPU computes in the kernels of products and convolutions (`compiler_rules`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from autopar.passes.graph.primitives import CASTS, ELEMENTWISE
from autopar.passes.sharding.compiler_rules import EXPANDED, is_filter_gradient
from autopar.passes.sharding.epilogues import InstructionValues, V, name_of

NUMBERS = frozenset(("broadcast_in_dim", "iota"))
"""What is made of no array."""

SEVERAL = EXPANDED | {"integer_pow", "square"}
"""Elementwise primitives that are several operations, or read their operand twice."""


def mapped(
    program: Sequence[InstructionValues[V]], root: Callable[[V], V], num_bytes: Callable[[V], int]
) -> dict[V, V]:
    """What one operation makes elementwise of a value, and that value: products compute it.

    Of a value alone, if that has no more bytes (`IsInputWorthFusing`), or of a value and a number
    (`triton_tiling_propagation.cc`).
    """
    found: dict[V, V] = {}
    numbers: set[V] = set()
    for made in program:
        if len(made.results) != 1:
            continue
        name, operands, result = name_of(made), made.operands, made.results[0]
        if root(result) != result:  # the buffer of what it is made of, under another name
            continue
        own = {root(v) for v in operands if v is not None} - numbers
        if not own and (name in NUMBERS or name in CASTS):
            numbers.add(result)
        elif len(own) == 1 and name in ELEMENTWISE - SEVERAL:
            (value,) = own
            has_number = len(operands) == 2 and operands[0] != operands[1]
            if has_number or num_bytes(value) <= num_bytes(result):
                found[result] = value
    return found


def operand_of(value: V, maps: Mapping[V, V], refusing: Collection[V]) -> V:
    """The buffer that a product reads, which computes the operand from it."""
    while value in maps and value not in refusing:
        value = maps[value]
    return value


def sums_of_convolutions(
    program: Sequence[InstructionValues[V]],
    root: Callable[[V], V],
    num_elements: Callable[[V], int],
) -> dict[V, tuple[V, V]]:
    """By results of convolutions that are summands: the sum, and the other summand.

    Not those by a filter that is turned in front of them: XLA takes these for another kind of
    cuDNN's convolutions (`conv_rewriter.cc`), which adds nothing.
    """
    turned: set[V] = set()
    found: dict[V, tuple[V, V]] = {}
    convolved: set[V] = set()
    for made in program:
        if made.eqn is None or len(made.results) != 1:
            continue
        name, result = name_of(made), root(made.results[0])
        operands = [None if v is None else root(v) for v in made.operands]
        if name == "rev":
            turned.add(result)
        elif name == "conv_general_dilated":
            if operands[1] not in turned and not is_filter_gradient(made.eqn):
                convolved.add(result)
        elif name in ("add", "add_any"):
            for one, other in (operands, operands[::-1]):
                if one not in convolved or other is None or one == other:
                    continue
                if one is not None and num_elements(other) == num_elements(result):
                    found[one] = (result, other)
                    break
    return found
