"""Factor rules from Shardy's registry: lower equations to StableHLO, annotate, read, compose.

The MLIR pass `sdy-populate-op-sharding-rules` writes a rule on every StableHLO operation. Where an
equation lowers to several operations, their loops are joined value by value: a dimension is a
tuple of loops, and where one operation sees [6] and another [2,3], the loop of 6 is split. A loop
that any operation permutes, needs whole, or reduces before a nonlinear use is blocked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.extend.mlir import ir, passmanager

from autopar.passes.graph.primitives import FactorKind
from autopar.passes.primitives.factor_rule import (
    DimFactors,
    Factor,
    FactorRule,
    ValueFactors,
)
from autopar.passes.primitives.shardings import dtype_of, shape_of

_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
_MONOIDS: dict[str, FactorKind] = {
    "stablehlo.add": "sum",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.multiply": "prod",
    "stablehlo.and": "and",
    "stablehlo.or": "or",
}
# Operations that map partial results to partial results: they move or copy elements, or cast them.
_PASS_PARTIAL = frozenset(
    f"stablehlo.{name}" for name in ("reshape", "transpose", "broadcast_in_dim", "convert")
)


def lower_rules(eqns: Sequence[JaxprEqn]) -> list[FactorRule | None]:
    """The rule of each equation, or None where an operation has none.

    All equations are lowered in one module; if one cannot be lowered, each in its own.
    """
    if not eqns:
        return []
    try:
        return _lower_together(eqns)
    except Exception:  # a lowering may raise anything, and one equation must not spoil the others
        if len(eqns) == 1:
            return [None]
        return [rule for eqn in eqns for rule in lower_rules([eqn])]


def _lower_together(eqns: Sequence[JaxprEqn]) -> list[FactorRule | None]:
    def evaluate(*arguments: Any) -> list[list[Any]]:
        position, results = 0, []
        for eqn in eqns:
            operands = arguments[position : position + len(eqn.invars)]
            position += len(eqn.invars)
            result = eqn.primitive.bind(*operands, **eqn.params)
            results.append(list(result) if eqn.primitive.multiple_results else [result])
        return results

    structs = [
        jax.ShapeDtypeStruct(shape_of(var), dtype_of(var)) for eqn in eqns for var in eqn.invars
    ]
    traced = jax.jit(evaluate, keep_unused=True).trace(*structs)
    module = traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse(_PIPELINE).run(module.operation)
        functions = {
            ir.StringAttr(op.attributes["sym_name"]).value: op.regions[0].blocks[0]
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        main = functions["main"]
        returned = list(main.operations)[-1].operands
        arguments, results = iter(main.arguments), iter(returned)
        rules = []
        for eqn in eqns:
            own_arguments = [next(arguments) for _ in eqn.invars]
            own_results = [next(results) for _ in eqn.outvars]
            rules.append(_Composition(functions).rule(eqn, own_arguments, own_results))
    return rules


class _NoRule(Exception):
    """An operation has no rule, and none can be read from it."""


@dataclass
class _Loop:
    """One loop in the making: what it was split into or joined with, and what was done to it."""

    size: int
    parts: tuple[_Loop, ...] = ()  # outermost first; one part: joined with it
    blocked: bool = False
    kind: FactorKind = "pass"


_Dim = tuple[_Loop, ...]


class _Composition:
    """Walks the operations of one equation from its results to its arguments."""

    def __init__(self, functions: Mapping[str, Any]):
        self.functions = functions
        self.dims: dict[Any, list[_Dim]] = {}  # of each SSA value
        self.partial: dict[Any, list[_Loop]] = {}  # loops over which a value is a partial result
        self.seen: list[list[_Dim]] = []

    def rule(
        self, eqn: JaxprEqn, arguments: Sequence[Any], results: Sequence[Any]
    ) -> FactorRule | None:
        for argument, var in zip(arguments, eqn.invars, strict=True):
            # A typed key has trailing dimensions that its own shape does not show.
            dims = [_new(size) for size in _shape(argument)]
            for dim in dims[len(shape_of(var)) :]:
                _block(dim)
            self.define(argument, dims)
        try:
            result_dims = [
                self.read(value)[: _rank(var)]
                for value, var in zip(results, eqn.outvars, strict=True)
            ]
        except _NoRule:
            return None
        for value in self.seen:
            _block_diagonals(value)
        operand_dims = [
            self.dims[argument][: _rank(var)]
            for argument, var in zip(arguments, eqn.invars, strict=True)
        ]
        return _finish(operand_dims, result_dims)

    def define(self, value: Any, dims: list[_Dim]) -> None:
        self.dims[value] = dims
        self.seen.append(dims)

    def read(self, value: Any) -> list[_Dim]:
        if value not in self.dims:
            operation = value.owner
            if operation.name == "stablehlo.constant":
                return self.constant(operation)
            self.visit(operation.operation)
        return self.dims[value]

    def constant(self, operation: Any) -> list[_Dim]:
        # Every use of a constant may be cut in its own way, if all its elements are equal.
        dims = [_new(size) for size in _shape(operation.results[0])]
        if not ir.DenseElementsAttr(operation.attributes["value"]).is_splat:
            for dim in dims:
                _block(dim)
        return dims

    def visit(self, operation: Any) -> None:
        name = operation.name
        operands = [self.read(value) for value in operation.operands]
        if name == "func.call":
            self.call(operation, operands)
            return
        if name == "stablehlo.iota":
            dims = [_new(size) for size in _shape(operation.results[0])]
            _block(dims[ir.IntegerAttr(operation.attributes["iota_dimension"]).value])
            self.define(operation.results[0], dims)
            return
        text = operation_rule(operation)
        if text is None:
            raise _NoRule(name)
        rule = parse(text)
        loops = [_Loop(size) for size in rule.sizes]
        for index in (*rule.blocked, *_one_sided(rule, name)):
            loops[index].blocked = True
        for value, value_dims in zip(operands, rule.operands, strict=True):
            for dim, indices in zip(value, value_dims, strict=True):
                _join(dim, tuple(loops[i] for i in indices))
        carried = [loop for value in operation.operands for loop in self.partial.get(value, ())]
        if carried and name not in _PASS_PARTIAL:
            for loop in carried:
                _block((loop,))
        if rule.reduced:
            kind = _monoid(operation)
            for index in rule.reduced:
                _set_kind((loops[index],), kind)
                carried.append(loops[index])
        for value, value_dims in zip(operation.results, rule.results, strict=True):
            self.define(value, _result_dims(value, value_dims, loops))
            if carried:
                self.partial[value] = carried

    def call(self, operation: Any, operands: list[list[_Dim]]) -> None:
        callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
        block = self.functions[callee]
        inner = _Composition(self.functions)
        for argument, value, dims in zip(
            block.arguments, operation.operands, operands, strict=True
        ):
            inner.define(argument, dims)
            if value in self.partial:
                inner.partial[argument] = self.partial[value]
        returned = list(block.operations)[-1].operands
        for result, value in zip(operation.results, returned, strict=True):
            self.define(result, inner.read(value))
            if value in inner.partial:
                self.partial[result] = inner.partial[value]
        self.seen.extend(inner.seen)


def _one_sided(rule: OpRule, name: str) -> set[int]:
    """Loops of operands or of results only, which cannot be cut, except what is broadcast."""
    left, right = (
        {index for value in values for dim in value for index in dim}
        for values in (rule.operands, rule.results)
    )
    if name == "stablehlo.broadcast_in_dim":
        right &= left
    return (left ^ right) - set(rule.reduced)


def operation_rule(operation: Any) -> str | None:
    """The text of an operation's rule, from Shardy or, for chlo's elementwise ones, our own."""
    attributes = operation.attributes
    if "sdy.sharding_rule" in attributes:
        return str(attributes["sdy.sharding_rule"])
    if not operation.name.startswith("chlo."):
        return None
    values = [*operation.operands, *operation.results]
    shape = _shape(values[0])
    if any(_shape(value) != shape for value in values):
        return None
    letters = [_symbol(i) for i in range(len(shape))]
    value = "[" + ", ".join(letters) + "]"
    sizes = ", ".join(f"{a}={size}" for a, size in zip(letters, shape, strict=True))
    operands = ", ".join([value] * len(operation.operands))
    results = ", ".join([value] * len(operation.results))
    return f"<({operands})->({results}) {{{sizes}}}>"


def _symbol(index: int) -> str:
    return chr(ord("i") + index) if index < 18 else f"z_{index - 17}"


def _monoid(operation: Any) -> FactorKind:
    """What a reducing operation combines with; `replicated` if it is none of ours."""
    if operation.name in ("stablehlo.dot_general", "stablehlo.convolution", "stablehlo.dot"):
        return "sum"
    if operation.name != "stablehlo.reduce" or len(operation.results) != 1:
        return "replicated"
    body = list(operation.regions[0].blocks[0].operations)
    if len(body) != 2:
        return "replicated"
    return _MONOIDS.get(body[0].operation.name, "replicated")


def _shape(value: Any) -> list[int]:
    return ir.RankedTensorType(value.type).shape


def _rank(var: Any) -> int:
    return len(shape_of(var))


# The algebra of loops.


def _new(size: int) -> _Dim:
    return (_Loop(size),)


def _leaves(dim: Sequence[_Loop]) -> list[_Loop]:
    """The loops that a dimension's loops have been split into, without those of one iteration."""
    found: list[_Loop] = []
    for loop in dim:
        if loop.parts:
            found += _leaves(loop.parts)
        elif loop.size != 1:
            found.append(loop)
    return found


def _block(dim: Sequence[_Loop]) -> None:
    for loop in _leaves(dim):
        loop.blocked = True


def _set_kind(dim: Sequence[_Loop], kind: FactorKind) -> None:
    for loop in _leaves(dim):
        if kind == "replicated" or loop.kind not in ("pass", kind):
            loop.blocked = True
        loop.kind = kind


def _result_dims(value: Any, dims: ValueFactors, loops: Sequence[_Loop]) -> list[_Dim]:
    found = []
    for size, indices in zip(_shape(value), dims, strict=True):
        dim = tuple(loops[i] for i in indices)
        if math.prod(loop.size for loop in dim) != size:
            # Shardy relates dimensions of different sizes (strided windows, real transforms).
            _block(dim)
            dim = _new(size)
            _block(dim)
        found.append(dim)
    return found


def _join(one: _Dim, other: _Dim) -> None:
    """Make two descriptions of one dimension the same, splitting loops where they differ."""
    left, right = _leaves(one), _leaves(other)
    if math.prod(loop.size for loop in left) != math.prod(loop.size for loop in right):
        _block([*left, *right])
        return
    while left and right:
        a, b = left.pop(), right.pop()  # the innermost ones
        if a is b:
            continue
        if a.size < b.size:
            a, b, left, right = b, a, right, left
        outer, rest = divmod(a.size, b.size)
        if rest:
            _block([a, b, *left, *right])
            return
        if outer == 1:
            _link(a, b)
        else:
            a.parts = (
                _Loop(outer, blocked=a.blocked, kind=a.kind),
                _Loop(b.size, blocked=a.blocked, kind=a.kind),
            )
            left.append(a.parts[0])
            _link(a.parts[1], b)


def _link(a: _Loop, b: _Loop) -> None:
    if a.kind != b.kind and "pass" not in (a.kind, b.kind):
        a.blocked = True
    b.blocked |= a.blocked
    if b.kind == "pass":
        b.kind = a.kind
    a.parts = (b,)


def _block_diagonals(value: Sequence[_Dim]) -> None:
    """Two dimensions of one value cannot be the same loop."""
    seen: set[int] = set()
    for dim in value:
        for loop in _leaves(dim):
            if id(loop) in seen:
                loop.blocked = True
            seen.add(id(loop))


def _finish(operands: Sequence[list[_Dim]], results: Sequence[list[_Dim]]) -> FactorRule:
    numbers: dict[int, int] = {}
    loops: list[_Loop] = []

    def number(dims: list[_Dim]) -> ValueFactors:
        value: list[DimFactors] = []
        for dim in dims:
            indices = []
            for loop in _leaves(dim):
                if id(loop) not in numbers:
                    numbers[id(loop)] = len(loops)
                    loops.append(loop)
                indices.append(numbers[id(loop)])
            value.append(tuple(indices))
        return tuple(value)

    result_factors = tuple(map(number, results))
    operand_factors = tuple(map(number, operands))
    in_all = [
        all(any(i in dim for dim in value) for value in result_factors) for i in range(len(loops))
    ]
    factors = []
    for i, loop in enumerate(loops):
        passes = loop.kind == "pass" and in_all[i]
        reduces = loop.kind != "pass" and not any(
            i in dim for value in result_factors for dim in value
        )
        kind = loop.kind if (passes or reduces) and not loop.blocked else "replicated"
        factors.append(Factor(loop.size, kind))
    return FactorRule(tuple(factors), operand_factors, result_factors)


# Reading Shardy's text.


@dataclass(frozen=True)
class OpRule:
    """A rule as Shardy prints it."""

    sizes: tuple[int, ...]
    operands: tuple[ValueFactors, ...]
    results: tuple[ValueFactors, ...]
    reduced: tuple[int, ...]
    blocked: tuple[int, ...]


_TOKEN = re.compile(r"[i-z](?:_\d+)?")
_VALUE = re.compile(r"\[([^\]]*)\]")
_SET = re.compile(r"(reduction|need_replication|permutation)=\{([^}]*)\}")


@lru_cache(maxsize=4096)
def parse(text: str) -> OpRule:
    """Read the text of an `#sdy.op_sharding_rule`.

    >>> parse("#sdy.op_sharding_rule<([i, k])->([i]) {i=8, k=4} reduction={k}>").reduced
    (1,)
    """
    body = text[text.index("<") + 1 : text.rindex(">")]
    arrow = body.index("->")
    end = body.index(")", arrow)
    left, right, tail = body[:arrow], body[arrow:end], body[end + 1 :]
    sizes: dict[str, int] = {}
    match = re.match(r"\s*\{([^}]*)\}", tail)
    if match:
        for item in match.group(1).split(","):
            name, size = item.strip().split("=")
            sizes[name] = int(size)
    index = {name: i for i, name in enumerate(sizes)}

    def values(part: str) -> tuple[ValueFactors, ...]:
        return tuple(
            tuple(
                tuple(index[token] for token in _TOKEN.findall(dim))
                for dim in inner.split(",")
                if dim.strip()
            )
            for inner in _VALUE.findall(part)
        )

    sets = {
        name: tuple(index[token] for token in _TOKEN.findall(inside))
        for name, inside in _SET.findall(tail)
    }
    blocked = (*sets.get("need_replication", ()), *sets.get("permutation", ()))
    return OpRule(
        tuple(sizes.values()), values(left), values(right), sets.get("reduction", ()), blocked
    )
