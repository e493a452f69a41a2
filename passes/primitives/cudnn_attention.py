"""The factor rule of attention by cuDNN, as JAX calls it.

JAX's own sharding rule ties no two arrays together; its partitioning function then asks for a batch
and heads that are cut alike everywhere. So the rule is written here. The call holds no shapes: on
slices it is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from autopar.passes.primitives.cuts import LocalCall
from autopar.passes.primitives.factor_rule import DimFactors, FactorRule
from autopar.passes.primitives.own_rules import Loops
from autopar.passes.primitives.shardings import shape_of


def cudnn_rule(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule | None:
    """Cut along the batch and the heads; None with packed sequences, pages, or dropout.

    With dropout, slices would draw the same bits.
    """
    shapes = [shape_of(var) for var in eqn.invars]
    query, key, value, bias = shapes[:4]
    if eqn.params["dropout_rate"] or any(math.prod(shape) for shape in shapes[6:10]):
        return None
    heads_first = eqn.params["layout"] == 1
    heads, length = (1, 2) if heads_first else (2, 1)
    batch_size, num_heads, shared = query[0], query[heads], key[heads]
    if num_heads % shared:
        return None
    has_bias = math.prod(bias) > 0
    # What a bias that all examples (or heads) share contributes to its gradient is added up.
    is_backward = eqn.primitive.name.startswith("dot_product_attention_bwd")
    has_gradient = is_backward and len(eqn.outvars) > 3
    loops = Loops()
    batch = loops.new(batch_size, "sum" if has_gradient and bias[0] == 1 else "pass")
    outer = loops.new(shared, "sum" if has_gradient and bias[1] == 1 else "pass")
    # Where each device has one head of keys, or all have the same, several share its queries. What
    # each adds to the gradients of keys and values is added up.
    inner = loops.new(num_heads // shared, "sum" if is_backward else "pass")
    all_heads = (*outer, *inner)

    def array(shape: Sequence[int], by_head: DimFactors) -> list[DimFactors]:
        rows, size = (loops.new(shape[dim], "replicated") for dim in (length, 3))
        return [batch, by_head, rows, size] if heads_first else [batch, rows, by_head, size]

    def bias_dims() -> list[DimFactors]:
        if not has_bias:
            return [loops.new(size, "replicated") for size in bias]
        dims = [() if bias[0] == 1 else batch, () if bias[1] == 1 else all_heads]
        return [*dims, *(loops.new(size, "replicated") for size in bias[2:])]

    def other(shape: Sequence[int]) -> list[DimFactors]:
        if tuple(shape) == (batch_size,):
            return [batch]
        return [loops.new(size, "replicated") for size in shape]

    def rows() -> list[DimFactors]:
        return [batch, all_heads, loops.new(query[length], "replicated")]

    operands = [array(query, all_heads), array(key, outer), array(value, outer), bias_dims()]
    operands += [other(shape) for shape in shapes[4:10]]
    result = (*query[:3], value[3])
    if is_backward:
        operands += [rows(), array(result, all_heads), array(result, all_heads)]
        results = [array(query, all_heads), array(key, outer), array(value, outer)]
        if has_gradient:
            results.append(bias_dims())
    else:
        results = [array(result, all_heads), rows()][: len(eqn.outvars)]
    return loops.rule(operands, results, inner)


def cudnn_on_slices(call: LocalCall) -> list[Any]:
    """The same call on slices."""
    return call.bind()
