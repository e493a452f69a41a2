"""Attention as people write it: a product of queries and keys, a softmax, a product with values.

It is what kernels of flash attention compute without writing the scores (Dao et al. 2022), as far
as they can: scores may be scaled by what is the same for all queries and keys, masked, and have a
bias added, and nothing but the product with values reads the probabilities. Whatever else reads any
of it (a softcap, dropout, another term of the softmax's sum, a loss of the probabilities) makes it
something else, but for the backward pass, which reads what the forward pass did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Atom, inner_jaxprs, variables
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
_OF_DERIVATIVES = {"scores": "eq", "largest": "eq", "sums": "integer_pow"}
"""What the forward pass computes of values for their derivatives alone."""
_MASKED = -100.0
"""Scores that are masked are less than this; what is more has a part in the softmax."""


@dataclass
class WrittenSoftmax:
    """Attention in one scope of a program.

    Args:
      product: what makes the scores.
      exponentials: of the scores less the largest of their rows.
      equations: all from the first product to the second.
      row: keys of a row.
      axis: along which they are, of the scores; -1: along several.
      values: the depth of the values; 0 as long as no product reads the probabilities.
      spoiled: whether something else is done with what it computes.
    """

    product: JaxprEqn
    exponentials: JaxprEqn | None = None
    equations: list[JaxprEqn] = field(default_factory=list)
    row: int = 0
    axis: int = -1
    values: int = 0
    spoiled: bool = False

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
    def heads(self) -> int:
        """Rows of queries and of keys that are multiplied with each other, of all sequences."""
        _, batch = self.product.params["dimension_numbers"]
        return math.prod(self.product.invars[0].aval.shape[dim] for dim in batch[0])

    @property
    def queries(self) -> int:
        """Rows of scores that have their keys in common; of grouped heads, those of all of them."""
        return self.elements // max(self.heads * self.row, 1)

    @property
    def is_grouped(self) -> bool:
        """Whether several heads of queries may have their keys in common."""
        _, batch = self.product.params["dimension_numbers"]
        return any(atom.aval.ndim != len(batch[0]) + 2 for atom in self.product.invars)

    @property
    def dtype(self) -> str:
        """That of queries and keys."""
        return str(self.product.invars[0].aval.dtype)


def written_attention(jaxpr: Jaxpr) -> Iterator[WrittenSoftmax]:
    """All of a program, also inside of control flow, in order; not what is computed again."""
    yield from _found(jaxpr, {*variables(jaxpr.outvars)}, {})


def _found(
    jaxpr: Jaxpr, kept: Set[Atom], outer: Mapping[Var, JaxprEqn | Literal]
) -> Iterator[WrittenSoftmax]:
    """Of a scope, whose results that are `kept` are read by more than a backward pass."""
    scope = _SoftmaxScope(outer)
    made = [*scope.softmaxes(jaxpr)]
    for atom in kept:
        if isinstance(atom, Var) and atom in scope.known:
            scope.known[atom].softmax.spoiled = True
    yield from (softmax for softmax in made if not softmax.spoiled)
    read = set(kept)
    for eqn in jaxpr.eqns:
        if _pass(eqn) not in _LATER:
            read.update(atom for atom in eqn.invars if isinstance(atom, Var))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in CONTROL_FLOW:
            continue
        given = scope.given(eqn)
        for body in inner_jaxprs(eqn):
            known = dict(zip(body.invars, given, strict=True)) if given else {}
            alike = len(body.outvars) == len(eqn.outvars)
            pairs = zip(body.outvars, eqn.outvars, strict=True) if alike else ()
            inner = {own for own, result in pairs if isinstance(own, Var) and result in read}
            inside = inner if alike else {*variables(body.outvars)}
            yield from _found(body, inside, {v: x for v, x in known.items() if x is not None})


_LATER = ("backward", "checkpoint", "again")


@dataclass(frozen=True)
class _Known:
    """What a value is of a softmax.

    They are "scores", the "largest" of a row, scores that are "shifted" by that, "exponentials",
    the "sums" of those, or "probabilities". Of scores, `pair` are the dimensions of queries and
    keys, of what is made of them that of keys alone; or () if that is not known.
    """

    softmax: WrittenSoftmax
    kind: str
    pair: tuple[int, ...] = ()


class _SoftmaxScope:
    """What is known of the values of one scope.

    `made` is what makes them; of what scopes around a scan give to it, what does so there.
    """

    def __init__(self, outer: Mapping[Var, JaxprEqn | Literal]) -> None:
        self.known: dict[Var, _Known] = {}
        self.made: dict[Var, JaxprEqn | Literal] = dict(outer)

    def softmaxes(self, jaxpr: Jaxpr) -> Iterator[WrittenSoftmax]:
        """Those whose probabilities a product reads."""
        for eqn in jaxpr.eqns:
            if is_barrier(eqn) and len(eqn.outvars) == len(eqn.invars):
                for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
                    if isinstance(operand, Var) and operand in self.known:
                        self.known[result] = self.known[operand]
                continue
            self.made.update(dict.fromkeys(eqn.outvars, eqn))
            there = [self.known.get(x) if isinstance(x, Var) else None for x in eqn.invars]
            owns = [x for x in there if x is not None]
            of_one = owns and all(x.softmax is owns[0].softmax for x in owns)
            result = self._of(eqn, there, owns[0].softmax) if of_one else None
            if result is not None:
                owns[0].softmax.equations.append(eqn)
                if result.kind == "mixed":
                    yield owns[0].softmax
                else:
                    self.known[eqn.outvars[0]] = result
                continue
            for own in owns:
                if _spoils(eqn, own):
                    own.softmax.spoiled = True
            if eqn.primitive.name == "dot_general":
                self._begin(eqn)

    def given(self, eqn: JaxprEqn) -> list[JaxprEqn | Literal | None]:
        """What made the operands of a scan that are the same in all trips."""
        if eqn.primitive.name != "scan":
            return []
        count, _ = jax_compat.scan_counts(eqn.params)
        made = [x if isinstance(x, Literal) else self.made.get(x) for x in eqn.invars]
        return [x if number < count else None for number, x in enumerate(made)]

    def _begin(self, eqn: JaxprEqn) -> None:
        """A product whose result may be scores."""
        summed, batch = eqn.params["dimension_numbers"]
        if not batch[0] or len(summed[0]) != 1:
            return
        number, softmax = len(batch[0]), WrittenSoftmax(eqn, equations=[eqn])
        pair = () if softmax.is_grouped else (number, number + 1)
        self.known[eqn.outvars[0]] = _Known(softmax, "scores", pair)

    def _of(
        self, eqn: JaxprEqn, there: Sequence[_Known | None], own: WrittenSoftmax
    ) -> _Known | None:
        """What an equation makes of values of one softmax; None: nothing that belongs to it."""
        name = eqn.primitive.name
        if len(eqn.outvars) != 1 or _pass(eqn) != _pass(own.product):
            return None
        kinds = [x.kind if x is not None else "" for x in there]
        if name in _MOVES:
            pair = there[0].pair if there[0] is not None else ()
            return _Known(own, kinds[0], _moved(eqn, pair)) if len(set(kinds)) == 1 else None
        match name, kinds:
            case "dot_general", _ if sorted(kinds) == ["", "probabilities"] and not own.values:
                place = kinds.index("probabilities")
                return self._mixed(eqn, place, own, there[place])
            case "reduce_max", ["scores"] if not own.row:
                axes = eqn.params["axes"]
                own.row = math.prod(eqn.invars[0].aval.shape[dim] for dim in axes)
                own.axis = axes[0] if len(axes) == 1 else -1
                return _Known(own, "largest")
            case "max", ["largest", ""] | ["", "largest"]:
                bound = self._number(eqn.invars[kinds.index("")])
                return _Known(own, "largest") if bound == -math.inf else None
            case "sub", ["scores", "largest"]:
                return _Known(own, "shifted", (own.axis,) if own.axis >= 0 else ())
            case "exp", ["shifted"] if own.exponentials is None:
                own.exponentials = eqn
                return replace(there[0], kind="exponentials") if there[0] else None
            case "reduce_sum", ["exponentials"]:
                sizes = (eqn.invars[0].aval.shape[dim] for dim in eqn.params["axes"])
                return _Known(own, "sums") if math.prod(sizes) == own.row else None
            case "div", ["exponentials", "sums"]:
                return replace(there[0], kind="probabilities") if there[0] else None
        if "scores" in kinds and kinds.count("") == len(kinds) - 1 and not own.row:
            scores = there[kinds.index("scores")]
            if scores is not None and self._may_be_done(eqn, kinds, scores):
                return scores
        return None

    def _may_be_done(self, eqn: JaxprEqn, kinds: Sequence[str], scores: _Known) -> bool:
        """Whether a kernel does that to scores, before their softmax."""
        others = [x for x, kind in zip(eqn.invars, kinds, strict=True) if not kind]
        match eqn.primitive.name:
            case "add":
                return True
            case "sub":
                return kinds[0] == "scores"
            case "mul":
                return self._is_same(others[0], scores.pair)
            case "div":
                return kinds[0] == "scores" and self._is_same(others[0], scores.pair)
            case "select_n":
                masked = [self._number(x) for x in others[1:]]
                return bool(masked) and kinds[0] == "" and all(x < _MASKED for x in masked)
        return False

    def _mixed(
        self, eqn: JaxprEqn, place: int, own: WrittenSoftmax, weights: _Known | None
    ) -> _Known | None:
        """The product with values, which sums over the keys."""
        summed, batch = eqn.params["dimension_numbers"]
        if not batch[0] or len(summed[0]) != 1:
            return None
        if weights is None or tuple(summed[place]) != weights.pair:
            return None
        other = eqn.invars[1 - place].aval
        own.values = other.size // (
            own.row * math.prod(other.shape[dim] for dim in batch[1 - place])
        )
        return _Known(own, "mixed")

    def _is_same(self, atom: Atom, dims: Sequence[int]) -> bool:
        """Whether a value is the same along some dimensions, or a number if there are none."""
        shape = getattr(atom.aval, "shape", ())
        if math.prod(shape) == 1 or (dims and all(shape[dim] == 1 for dim in dims)):
            return True
        made = self.made.get(atom) if isinstance(atom, Var) else None
        if not isinstance(made, JaxprEqn) or made.primitive.name not in _MOVES:
            return False
        (operand, *_), name = made.invars, made.primitive.name
        if math.prod(getattr(operand.aval, "shape", ())) == 1:
            return True
        if name == "broadcast_in_dim":
            into = made.params["broadcast_dimensions"]
            inner = [into.index(dim) for dim in dims if dim in into]
            return bool(dims) and (not inner or self._is_same(operand, inner))
        return name in ("convert_element_type", "copy") and self._is_same(operand, dims)

    def _number(self, atom: Atom) -> float:
        """The number that all of a value is, or NaN."""
        while isinstance(atom, Var):
            made = self.made.get(atom)
            if isinstance(made, JaxprEqn) and made.primitive.name in _MOVES:
                made = made.invars[0]
            if made is None or isinstance(made, JaxprEqn):
                return math.nan
            atom = made
        return float(atom.val) if math.prod(getattr(atom.aval, "shape", ())) == 1 else math.nan


def _spoils(eqn: JaxprEqn, own: _Known) -> bool:
    """Whether a softmax is more than attention because an equation reads a value of it."""
    if _pass(eqn) in _LATER and _pass(own.softmax.product) not in _LATER:
        return False
    return eqn.primitive.name != _OF_DERIVATIVES.get(own.kind)


def _moved(eqn: JaxprEqn, pair: tuple[int, ...]) -> tuple[int, ...]:
    """Where the dimensions of queries and keys are after a move, or ()."""
    if eqn.primitive.name == "transpose":
        return tuple(eqn.params["permutation"].index(dim) for dim in pair)
    same = eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    return pair if same else ()


def _pass(eqn: JaxprEqn) -> str:
    return _of_stack(str(eqn.source_info.name_stack))


_of_stack = cache(pass_of)
