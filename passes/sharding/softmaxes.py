"""What XLA:TPU writes of softmaxes over rows.

Attention with a mask or a bias: one kernel multiplies queries and keys and writes the exponentials
in float32, which the backward pass reads. Of long rows the scores, masked and in float32, are
written before: of more than 2048, or 1024 where queries or keys are put together of halves
(rotary positions), which the kernel does then as well. Where queries or keys are in another order
than their products wrote them (`bthe` turned into `bhte`), a product alone writes the scores as it
has them, and the probabilities are written beside the gradient of the scores.

Where nothing but scales and casts is between the product and the softmax, it is no kernel, nor is
that of grouped attention, whose scores are in another order than the product wrote them, if no
halves are put together: exponentials are computed of the scores by all who read them.

Products make what is made of exponentials element by element themselves, also where they merge
dimensions of it (the gradients of scores of grouped attention).

Found by compiling single layers of attention with remat for eight chips of a v5e (libtpu 0.0.42):
seven ways to write it, with and without rotary positions, rows of 1024, 2048 and 4096, heads of 64
and 128, 8 sequences on a chip. With one sequence most is in VMEM, and is planned too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple

from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.sharding.compiler_rules import KERNEL_ROW_ELEMENTS, reduces_rows
from autopar.passes.sharding.epilogues import InstructionValues, V

WIDE = 4
"""Bytes of a float32."""
MOST_GROUPED = 2048 * 128
"""Elements of a head's keys with which grouped scores of fewer bytes are left as products wrote."""


class Softmaxes(NamedTuple, Generic[V]):
    """What softmaxes write, and what is made of their exponentials element by element.

    Args:
      written: buffers.
      made: of exponentials, buffers or not.
      beside: what is written beside the gradient of scores, by an operand of that.
    """

    written: set[V]
    made: set[V]
    beside: dict[V, frozenset[V]]


@dataclass(frozen=True)
class _Scores(Generic[V]):
    """Where scores come from: a product's result, and what happened to that and its operands."""

    product: V
    depth: int
    is_wide: bool
    has_batch: bool
    is_joined: bool
    is_crossed: bool
    is_turned: bool = False
    is_masked: bool = False

    def have_kernel(self, row: int) -> bool:
        """Whether their softmax over rows of so many is a kernel."""
        if not self.is_masked:
            return False
        if not self.is_turned:
            return True
        if self.is_joined and self.has_batch:
            return True
        return not self.is_wide and self.depth * row > MOST_GROUPED


@dataclass
class _Values(Generic[V]):
    """What is known of values, some by their buffers."""

    root: Callable[[V], V]
    num_elements: Callable[[V], int]
    joined: set[V] = field(default_factory=set)  # made of what is put together of parts
    turned: set[V] = field(default_factory=set)  # in another order than a product wrote them
    products: set[V] = field(default_factory=set)  # made of products' results alone
    scalars: set[V] = field(default_factory=set)  # one number everywhere
    scores: dict[V, _Scores[V]] = field(default_factory=dict)

    def note(self, made: InstructionValues[V]) -> None:
        """Follow an equation."""
        eqn, result = made.eqn, made.results[0]
        assert eqn is not None
        name, operands = eqn.primitive.name, {v for v in made.operands if v is not None}
        if name == "dot_general":
            is_joined, is_crossed = (
                not operands.isdisjoint(values) for values in (self.joined, self.turned)
            )
            aval = eqn.outvars[0].aval
            (summed, _), _ = eqn.params["dimension_numbers"]
            self.scores[result] = _Scores(
                product=self.root(result),
                depth=math.prod(eqn.invars[0].aval.shape[dim] for dim in summed),
                is_wide=aval.dtype.itemsize >= WIDE,
                has_batch=self.num_elements(result) > math.prod(aval.shape[1:]),
                is_joined=is_joined,
                is_crossed=is_crossed,
            )
            self.products.add(result)
        elif name == "concatenate":
            self.joined.add(result)
        elif name == "broadcast_in_dim":
            if eqn.invars[0].aval.size == 1:
                self.scalars.add(result)
        elif name == "transpose":
            for values in (self.joined, self.products, self.turned):
                values.update({result} if not operands.isdisjoint(values) else ())
            if is_turned(eqn) and (result in self.products or result in self.joined):
                self.turned.add(result)
            if (known := self._scores_of(made)) is not None:
                self.scores[result] = replace(known, is_turned=known.is_turned or is_turned(eqn))
        elif name in ELEMENTWISE or name == "reshape":
            for values in (self.joined, self.products, self.turned):
                values.update({result} if not operands.isdisjoint(values) else ())
            if (known := self._scores_of(made)) is not None:
                self.scores[result] = replace(
                    known, is_masked=known.is_masked or self._is_masked(made)
                )

    def _scores_of(self, made: InstructionValues[V]) -> _Scores[V] | None:
        known = (self.scores.get(v) for v in made.operands if v is not None)
        return next((x for x in known if x is not None), None)

    def _is_masked(self, made: InstructionValues[V]) -> bool:
        """Whether scores meet other values, not only numbers."""
        assert made.eqn is not None
        pairs = zip(made.operands, made.eqn.invars, strict=True)
        others = [v for v, atom in pairs if v is not None and atom.aval.size > 1]
        return sum(v not in self.scalars for v in others) > 1


def softmaxes_of(
    program: Sequence[InstructionValues[V]],
    root: Callable[[V], V],
    num_elements: Callable[[V], int],
) -> Softmaxes[V]:
    """Those over rows of a program whose instructions are in order.

    Args:
      program: its instructions.
      root: the value whose buffer one is.
      num_elements: of a device's part of a value.
    """
    values = _Values(root, num_elements)
    largest: dict[V, V] = {}  # of every row, however it is shaped: of which scores
    kernels: dict[V, _Scores[V] | None] = {}  # by scores whose softmax is a kernel
    long: set[V] = set()  # scores of long rows
    shifted: dict[V, V] = {}
    written, made_of = set[V](), set[V]()
    of_crossed: dict[V, V] = {}  # made of the exponentials of scores of such operands: of these
    probabilities: dict[V, set[V]] = {}  # by such exponentials
    gradients: dict[V, V] = {}  # what meets such exponentials
    for made in program:
        if made.eqn is None or len(made.results) != 1:
            continue
        values.note(made)
        name, result = made.eqn.primitive.name, root(made.results[0])
        operands = [None if v is None else root(v) for v in made.operands]
        first = operands[0] if operands else None
        if name in ELEMENTWISE:
            made_of.update({result} if made_of.intersection(operands) else ())
            found = [
                (v, of_crossed[x])
                for v, x in zip(made.operands, operands, strict=True)
                if x is not None and x in of_crossed
            ]
            others = [v for v in made.operands if v is not None and v in values.products]
            if found and name == "mul" and len(others) > 1:
                gradients.update((root(v), found[0][1]) for v in others if v != found[0][0])
            elif found and name in ("mul", "div"):
                of_crossed[result] = found[0][1]
            elif found and name == "convert_element_type":
                probabilities[found[0][1]].add(result)
                written.add(result)
        if name == "reduce_max" and first is not None and reduces_rows(made.eqn):
            largest[result] = first
            own = None if made.operands[0] is None else values.scores.get(made.operands[0])
            row = made.eqn.invars[0].aval.shape[-1]
            if own is None or own.have_kernel(row):
                kernels[first] = own
            most = KERNEL_ROW_ELEMENTS // (2 if own is not None and own.is_joined else 1)
            if row > most and made.eqn.invars[0].aval.dtype.itemsize >= WIDE:
                long.add(first)
        elif name in ("broadcast_in_dim", "max", "stop_gradient", "reshape"):
            of = {largest[v] for v in operands if v in largest}
            if len(of) == 1:
                largest[result] = of.pop()
        elif name == "sub" and first is not None and _get(largest, operands[1]) == first:
            shifted[result] = first
        elif name == "exp" and first in shifted:
            made_of.add(result)
            scores = shifted[first]
            if scores in kernels:
                written.add(result)
                written.update(long & {scores})
                own = kernels[scores]
                if own is not None and own.is_crossed:
                    written.add(own.product)
                    of_crossed[result] = result
                    probabilities[result] = {own.product}
    beside = {value: frozenset(probabilities[x]) for value, x in gradients.items()}
    return Softmaxes(written, made_of, beside)


def is_turned(eqn: JaxprEqn) -> bool:
    """Whether an equation puts dimensions into another order, those of one element aside."""
    if eqn.primitive.name != "transpose":
        return False
    shape = eqn.invars[0].aval.shape
    order = [dim for dim in eqn.params["permutation"] if shape[dim] > 1]
    return order != sorted(order)


def _get(values: Mapping[V, V], value: V | None) -> V | None:
    return None if value is None else values.get(value)
