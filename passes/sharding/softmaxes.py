"""What XLA:TPU writes of softmaxes over rows.

Attention with a mask or a bias: one kernel multiplies queries and keys and writes the exponentials
in float32, which the backward pass reads. Of long rows the scores, masked and in float32, are
written before: of more than 2048, or 1024 where queries or keys are put together of halves
(rotary positions), which the kernel does then as well. Where queries or keys are in another order
than their products wrote them, a product alone writes the scores as it has them, and the
probabilities are written beside the gradient of the scores: unless rows of them stayed rows
(`bthe` turned into `bhte`), and what comes of the probabilities is turned back.

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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple

from jax.extend.core import JaxprEqn

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.sharding.compiler_rules import KERNEL_ROW_ELEMENTS
from autopar.passes.sharding.epilogues import InstructionValues, V, name_of
from autopar.passes.sharding.row_exponentials import RowExponentials

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
    is_torn: bool
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
    """What is known of values, not of their buffers: orders are those of values."""

    first_size: Callable[[V], int]
    joined: set[V] = field(default_factory=set)  # made of what is put together of parts
    turned: set[V] = field(default_factory=set)  # in another order than a product wrote them
    torn: set[V] = field(default_factory=set)  # so that what were their rows are none
    products: set[V] = field(default_factory=set)  # made of a product's result
    scalars: set[V] = field(default_factory=set)  # one number everywhere
    scores: dict[V, _Scores[V]] = field(default_factory=dict)

    def note(self, made: InstructionValues[V]) -> None:
        """Follow an equation."""
        eqn = made.eqn
        assert eqn is not None
        if is_barrier(eqn):
            if len(made.results) == len(made.operands):
                for operand, result in zip(made.operands, made.results, strict=True):
                    self._passes({operand}, result)
            return
        if len(made.results) != 1:
            return
        name, (result,) = eqn.primitive.name, made.results
        operands = {v for v in made.operands if v is not None}
        if name == "dot_general":
            is_joined, is_crossed, is_torn = (
                not operands.isdisjoint(values) for values in (self.joined, self.turned, self.torn)
            )
            self.scores[result] = _Scores(
                product=result,
                depth=math.prod(eqn.invars[0].aval.shape[dim] for dim in summed_of(eqn)[0]),
                is_wide=eqn.outvars[0].aval.dtype.itemsize >= WIDE,
                has_batch=self.first_size(result) > 1,
                is_joined=is_joined,
                is_crossed=is_crossed,
                is_torn=is_torn,
            )
            self.products.add(result)
        elif name == "concatenate":
            self.joined.add(result)
        elif name == "broadcast_in_dim":
            if eqn.invars[0].aval.size == 1:
                self.scalars.add(result)
        elif name == "transpose" or name in ELEMENTWISE or name == "reshape":
            self._passes(made.operands, result)
            known = self.scores.get(result)
            if is_turned(eqn):
                if result in self.products or result in self.joined:
                    self.turned.add(result)
                    order = eqn.params["permutation"]
                    self.torn.update({result} if order[-1] != len(order) - 1 else ())
                if known is not None:
                    self.scores[result] = replace(known, is_turned=True)
            elif known is not None and not known.is_masked and self._is_masked(made):
                self.scores[result] = replace(known, is_masked=True)

    def _passes(self, operands: Collection[V | None], result: V) -> None:
        """What is known of operands is known of a result."""
        for values in (self.joined, self.products, self.turned, self.torn):
            if any(v in values for v in operands):
                values.add(result)
        known = (self.scores.get(v) for v in operands if v is not None)
        if (first := next((x for x in known if x is not None), None)) is not None:
            self.scores[result] = first

    def _is_masked(self, made: InstructionValues[V]) -> bool:
        """Whether scores meet other values, not only numbers."""
        assert made.eqn is not None
        pairs = zip(made.operands, made.eqn.invars, strict=True)
        others = [v for v, atom in pairs if v is not None and atom.aval.size > 1]
        return sum(v not in self.scalars for v in others) > 1


@dataclass
class _Crossed(Generic[V]):
    """The softmax of scores whose operands are turned, by its exponentials.

    Args:
      written: scores and probabilities.
      gradients: what meets the exponentials, made after them.
      is_torn: `_Values.torn`, the scores' operands.
      is_back: whether what a product makes of the rows of probabilities is turned back. None: no
        product makes something of them (they are computed again for the gradients alone).
    """

    written: set[V]
    is_torn: bool
    gradients: set[V] = field(default_factory=set)
    is_back: bool | None = None


class _Softmaxes(Generic[V]):
    """Those over rows of a program, followed equation by equation."""

    def __init__(
        self, root: Callable[[V], V], first_size: Callable[[V], int], turned_back: Collection[V]
    ):
        self.root, self.turned_back = root, turned_back
        self.values = _Values[V](first_size)
        self.rows = RowExponentials(root)
        self.kernels: dict[V, _Scores[V] | None] = {}  # by scores whose softmax is a kernel
        self.long: set[V] = set()  # scores of long rows
        self.written, self.made_of = set[V](), set[V]()
        self.crossed: dict[V, _Crossed[V]] = {}
        self.of_crossed: dict[V, V] = {}  # what is made of such exponentials: of which
        self.before: set[V] = set()  # products' results that are older than such exponentials

    def note(self, made: InstructionValues[V]) -> None:
        """Follow an equation."""
        self.values.note(made)
        eqn = made.eqn
        if eqn is None or len(made.results) != 1:
            return
        name, result = eqn.primitive.name, self.root(made.results[0])
        operands = [None if v is None else self.root(v) for v in made.operands]
        if name in ELEMENTWISE:
            self.made_of.update({result} if self.made_of.intersection(operands) else ())
            self.note_crossed(made, operands, result)
        elif name == "dot_general":
            for x, atom, dims in zip(operands, eqn.invars, summed_of(eqn), strict=True):
                if x is not None and x in self.of_crossed and atom.aval.ndim - 1 in dims:
                    is_back = made.results[0] in self.turned_back
                    self.crossed[self.of_crossed[x]].is_back = is_back
        scores = self.rows.scores_of(made)
        if result in self.rows.largest and name == "reduce_max":
            self.note_largest(made, self.rows.largest[result])
        elif scores is not None:
            self.note_exponentials(scores, result)

    def note_largest(self, made: InstructionValues[V], scores: V) -> None:
        """A softmax of scores begins."""
        assert made.eqn is not None and made.operands[0] is not None
        own, aval = self.values.scores.get(made.operands[0]), made.eqn.invars[0].aval
        row = aval.shape[-1]
        if own is None or own.have_kernel(row):
            self.kernels[scores] = own
        most = KERNEL_ROW_ELEMENTS // (2 if own is not None and own.is_joined else 1)
        if row > most and aval.dtype.itemsize >= WIDE:
            self.long.add(scores)

    def note_exponentials(self, scores: V, result: V) -> None:
        """Exponentials of scores."""
        self.made_of.add(result)
        if scores not in self.kernels:
            return
        self.written.update({result}, self.long & {scores})
        own = self.kernels[scores]
        if own is not None and own.is_crossed:
            self.crossed[result] = _Crossed({self.root(own.product)}, own.is_torn)
            self.of_crossed[result] = result
            self.before |= self.values.products

    def note_crossed(
        self, made: InstructionValues[V], operands: Sequence[V | None], result: V
    ) -> None:
        """What is made of the exponentials of such scores: probabilities, or gradients."""
        found = [x for x in operands if x is not None and x in self.of_crossed]
        if not found:
            return
        exponentials, name = self.of_crossed[found[0]], name_of(made)
        own = self.crossed[exponentials]
        later = [v for v in made.operands if v in self.values.products and v not in self.before]
        met = {self.root(v) for v in later if v is not None and self.root(v) not in found}
        if name == "mul" and met:
            own.gradients |= met
        elif name in ("mul", "div", "convert_element_type"):
            self.of_crossed[result] = exponentials
            own.written.update({result} if name == "convert_element_type" else ())

    def found(self) -> Softmaxes[V]:
        beside: dict[V, frozenset[V]] = {}
        is_back = False
        for own in self.crossed.values():
            is_back = is_back if own.is_back is None else own.is_back
            if own.is_torn or not is_back:
                self.written |= own.written
                beside.update(dict.fromkeys(own.gradients, frozenset(own.written)))
        return Softmaxes(self.written, self.made_of, beside)


def softmaxes_of(
    program: Sequence[InstructionValues[V]],
    root: Callable[[V], V],
    first_size: Callable[[V], int],
) -> Softmaxes[V]:
    """Those over rows of a program whose instructions are in order.

    Args:
      program: its instructions.
      root: the value whose buffer one is.
      first_size: of a device's part of a value, along its first dimension.
    """
    turns = (made for made in program if made.eqn is not None and is_turned(made.eqn))
    turned_back = {v for made in turns for v in made.operands if v is not None}
    softmaxes = _Softmaxes(root, first_size, turned_back)
    for made in program:
        if made.eqn is not None:
            softmaxes.note(made)
    return softmaxes.found()


def summed_of(eqn: JaxprEqn) -> tuple[Sequence[int], Sequence[int]]:
    """The dimensions over which a product sums, of either operand."""
    dims: tuple[Sequence[int], Sequence[int]] = eqn.params["dimension_numbers"][0]
    return dims


def is_turned(eqn: JaxprEqn) -> bool:
    """Whether an equation puts dimensions into another order, those of one element aside."""
    if eqn.primitive.name != "transpose":
        return False
    shape = eqn.invars[0].aval.shape
    order = [dim for dim in eqn.params["permutation"] if shape[dim] > 1]
    return order != sorted(order)
