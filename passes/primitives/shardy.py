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
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.mlir import ir, passmanager

from autopar.passes.graph.primitives import FactorKind
from autopar.passes.primitives.factor_rule import FactorRule, ValueFactors
from autopar.passes.primitives.loop_algebra import (
    JoinedLoop,
    LoopDim,
    block,
    block_diagonals,
    finished_rule,
    join_dims,
    new_dim,
    set_kind,
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
            result = eqn.primitive.bind(*operands, **_on_any_device(eqn))
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


def _on_any_device(eqn: JaxprEqn) -> dict[str, Any]:
    """Parameters with which an equation is lowered for CPUs too.

    These do not have every algorithm of products that others have (`jax.nn.dot_product_attention`
    asks for `F16_F16_F32` in float16); what is walked in one loop is the same by all of them.
    """
    if isinstance(eqn.params.get("precision"), lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return {**eqn.params, "precision": None}
    return eqn.params


class _NoRule(Exception):
    """An operation has no rule, and none can be read from it."""


class _Composition:
    """Walks the operations of one equation from its results to its arguments."""

    def __init__(self, functions: Mapping[str, Any]):
        self.functions = functions
        self.dims: dict[Any, list[LoopDim]] = {}  # of each SSA value
        self.partial: dict[Any, list[JoinedLoop]] = {}  # loops over which a value is partial
        self.seen: list[list[LoopDim]] = []

    def rule(
        self, eqn: JaxprEqn, arguments: Sequence[Any], results: Sequence[Any]
    ) -> FactorRule | None:
        for argument, var in zip(arguments, eqn.invars, strict=True):
            # A typed key has trailing dimensions that its own shape does not show.
            dims = [new_dim(size) for size in _shape(argument)]
            for dim in dims[len(shape_of(var)) :]:
                block(dim)
            self.define(argument, dims)
        try:
            result_dims = [
                self.read(value)[: _rank(var)]
                for value, var in zip(results, eqn.outvars, strict=True)
            ]
        except _NoRule:
            return None
        for value in self.seen:
            block_diagonals(value)
        operand_dims = [
            self.dims[argument][: _rank(var)]
            for argument, var in zip(arguments, eqn.invars, strict=True)
        ]
        return finished_rule(operand_dims, result_dims)

    def define(self, value: Any, dims: list[LoopDim]) -> None:
        self.dims[value] = dims
        self.seen.append(dims)

    def read(self, value: Any) -> list[LoopDim]:
        if value not in self.dims:
            operation = value.owner
            if operation.name == "stablehlo.constant":
                return self.constant(operation)
            self.visit(operation.operation)
        return self.dims[value]

    def constant(self, operation: Any) -> list[LoopDim]:
        # Every use of a constant may be cut in its own way, if all its elements are equal.
        dims = [new_dim(size) for size in _shape(operation.results[0])]
        if not ir.DenseElementsAttr(operation.attributes["value"]).is_splat:
            for dim in dims:
                block(dim)
        return dims

    def visit(self, operation: Any) -> None:
        name = operation.name
        operands = [self.read(value) for value in operation.operands]
        if name == "func.call":
            self.call(operation, operands)
            return
        if name == "stablehlo.iota":
            dims = [new_dim(size) for size in _shape(operation.results[0])]
            block(dims[ir.IntegerAttr(operation.attributes["iota_dimension"]).value])
            self.define(operation.results[0], dims)
            return
        rule = operation_rule(operation)
        if rule is None:
            raise _NoRule(name)
        loops = [JoinedLoop(size) for size in rule.sizes]
        for index in (*rule.blocked, *_one_sided(rule, name)):
            loops[index].blocked = True
        for value, value_dims in zip(operands, rule.operands, strict=True):
            for dim, indices in zip(value, value_dims, strict=True):
                join_dims(dim, tuple(loops[i] for i in indices))
        carried = [loop for value in operation.operands for loop in self.partial.get(value, ())]
        if name not in _PASS_PARTIAL:
            block(carried)
        if rule.reduced:
            reduced = [loops[i] for i in rule.reduced]
            set_kind(reduced, _monoid(operation))
            carried += reduced
        for value, value_dims in zip(operation.results, rule.results, strict=True):
            self.define(value, _result_dims(value, value_dims, loops))
            if carried:
                self.partial[value] = carried

    def call(self, operation: Any, operands: list[list[LoopDim]]) -> None:
        callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
        callee_block = self.functions[callee]
        inner = _Composition(self.functions)
        for argument, value, dims in zip(
            callee_block.arguments, operation.operands, operands, strict=True
        ):
            inner.define(argument, dims)
            if value in self.partial:
                inner.partial[argument] = self.partial[value]
        returned = list(callee_block.operations)[-1].operands
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


def _result_dims(value: Any, dims: ValueFactors, loops: Sequence[JoinedLoop]) -> list[LoopDim]:
    found = []
    for size, indices in zip(_shape(value), dims, strict=True):
        dim = tuple(loops[i] for i in indices)
        if math.prod(loop.size for loop in dim) != size:
            # Shardy relates dimensions of different sizes (strided windows, real transforms).
            block(dim)
            dim = new_dim(size)
            block(dim)
        found.append(dim)
    return found


def operation_rule(operation: Any) -> OpRule | None:
    """An operation's rule, from Shardy or, for chlo's elementwise ones, our own."""
    attributes = operation.attributes
    if "sdy.sharding_rule" in attributes:
        return parse(str(attributes["sdy.sharding_rule"]))
    if not operation.name.startswith("chlo."):
        return None
    values = [*operation.operands, *operation.results]
    shape = _shape(values[0])
    if any(_shape(value) != shape for value in values):
        return None
    dims = tuple((i,) for i in range(len(shape)))
    operands, results = (dims,) * len(operation.operands), (dims,) * len(operation.results)
    return OpRule(tuple(shape), operands, results, (), ())


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


@dataclass(frozen=True)
class OpRule:
    """A rule as Shardy prints it."""

    sizes: tuple[int, ...]
    operands: tuple[ValueFactors, ...]
    results: tuple[ValueFactors, ...]
    reduced: tuple[int, ...]
    blocked: tuple[int, ...]


_TOKEN = re.compile(r"[i-z](?:_\d+)?")
_SIZE = re.compile(rf"({_TOKEN.pattern})=(\d+)")
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
    sizes = {name: int(size) for name, size in _SIZE.findall(tail)}
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
