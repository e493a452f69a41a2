"""Attention as people write it: a product of queries and keys, a softmax, a product with values.

It is what kernels of flash attention compute without writing the scores (Dao et al. 2022), as far
as they can: scores may be scaled, masked and have a bias, and the probabilities are what the second
product reads. What else happens to either (a softcap, dropout) makes it something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import inner_jaxprs, variables
from autopar.passes.graph.name_stacks import pass_of
from autopar.passes.graph.primitives import CONTROL_FLOW

_MOVES = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "expand_dims",
        "name",
        "optimization_barrier",
        "reduce_precision",
        "reshape",
        "squeeze",
        "stop_gradient",
        "transpose",
    }
)
_OF_SCORES = _MOVES | {"add", "div", "max", "mul", "neg", "select_n", "sub"}
_OF_WEIGHTS = _MOVES | {"div", "mul"}
_OF_ROWS = _MOVES | {"add", "div", "integer_pow", "is_finite", "max", "mul", "select_n"}


@dataclass
class WrittenSoftmax:
    """Attention in one scope of a program.

    Args:
      product: what makes the scores.
      exponentials: of the scores less the largest of their rows.
      equations: all from the first product to the second.
      row: keys of a row.
      values: the depth of the values; 0 as long as no product reads the probabilities.
    """

    product: JaxprEqn
    exponentials: JaxprEqn | None = None
    equations: list[JaxprEqn] = field(default_factory=list)
    row: int = 0
    values: int = 0

    @property
    def elements(self) -> int:
        """How many scores there are."""
        return int(self.product.outvars[0].aval.size)

    @property
    def depth(self) -> int:
        """That of queries and keys."""
        (dim,) = self.product.params["dimension_numbers"][0][0]
        return int(self.product.invars[0].aval.shape[dim])

    @property
    def dtype(self) -> str:
        """That of queries and keys."""
        return str(self.product.invars[0].aval.dtype)


def written_attention(jaxpr: Jaxpr) -> Iterator[WrittenSoftmax]:
    """All of a program, also inside of control flow, in order; not what is computed again."""
    yield from _SoftmaxScope().found(jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CONTROL_FLOW:
            for body in inner_jaxprs(eqn):
                yield from written_attention(body)


class _SoftmaxScope:
    """What is known of the values of one scope: of which softmax they are, and what of it.

    They are "scores", the "largest" of a row, scores that are "shifted" by that, "weights"
    (exponentials, then probabilities), or the "sums" of those.
    """

    def __init__(self) -> None:
        self.known: dict[Var, tuple[WrittenSoftmax, str]] = {}

    def found(self, jaxpr: Jaxpr) -> Iterator[WrittenSoftmax]:
        """Those whose probabilities a product reads."""
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                own = self._of_product(eqn)
                if own is not None:
                    yield own
            elif len(eqn.outvars) == 1:
                self._passed(eqn, variables(eqn.invars), eqn.outvars[0])
            elif is_barrier(eqn) and len(eqn.outvars) == len(eqn.invars):
                for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
                    self._passed(eqn, variables([operand]), result)

    def _of_product(self, eqn: JaxprEqn) -> WrittenSoftmax | None:
        """The softmax whose probabilities a product reads, or None; its result may be scores."""
        summed, batch = eqn.params["dimension_numbers"]
        if not batch[0] or len(summed[0]) != 1:
            return None
        row = eqn.invars[0].aval.shape[summed[0][0]]
        for atom, other, dims in zip(eqn.invars, eqn.invars[::-1], batch[::-1], strict=True):
            own, what = self.known.get(atom, (None, "")) if isinstance(atom, Var) else (None, "")
            if own is None or what != "weights" or own.row != row:
                continue
            if _pass(eqn) == _pass(own.product):
                shared = math.prod(other.aval.shape[dim] for dim in dims)
                own.values = other.aval.size // (shared * row)
                own.equations.append(eqn)
                return own
        self.known[eqn.outvars[0]] = WrittenSoftmax(eqn, equations=[eqn]), "scores"
        return None

    def _passed(self, eqn: JaxprEqn, operands: Sequence[Var], result: Var) -> None:
        """What an equation makes that is no product."""
        there = [self.known[v] for v in operands if v in self.known]
        if not there or any(own is not there[0][0] for own, _ in there):
            return  # of no softmax, or of several
        own = there[0][0]
        alone = all(v in self.known for v in operands)
        what = _what(eqn.primitive.name, {kind for _, kind in there}, alone)
        if not what:
            return
        if eqn.primitive.name == "reduce_max":
            own.row = math.prod(eqn.invars[0].aval.shape[dim] for dim in eqn.params["axes"])
        elif eqn.primitive.name == "exp":
            own.exponentials = eqn
        own.equations.append(eqn)
        self.known[result] = own, what


def _what(name: str, kinds: Set[str], alone: bool) -> str:
    """What an operation makes of values of a softmax, `alone` if it reads nothing else, or ""."""
    if "weights" in kinds:
        if name == "reduce_sum":
            return "sums"
        return "weights" if alone and name in _OF_WEIGHTS else ""
    if "shifted" in kinds:
        return "weights" if name == "exp" else "shifted" * (name in _MOVES)
    if "scores" in kinds:
        if name == "reduce_max":
            return "largest"
        if "largest" in kinds:
            return "shifted" * (name == "sub")
        return "scores" * (name in _OF_SCORES)
    (kind,) = kinds if len(kinds) == 1 else ("",)
    return kind * (name in _OF_ROWS)


def _pass(eqn: JaxprEqn) -> str:
    return pass_of(str(eqn.source_info.name_stack))
