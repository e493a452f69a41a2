"""A grouped product in blocks of groups: each block has its own rows, matrices and group sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import mlir

from autopar.passes.graph.primitives import BLOCK_PRODUCT
from autopar.passes.primitives.factor_rule import Factor, FactorRule
from autopar.passes.primitives.ragged_products import RaggedDims, ragged_rule_of
from autopar.passes.primitives.shardings import shape_of

block_product_p = Primitive(BLOCK_PRODUCT)


def block_product(left: Any, right: Any, sizes: Any, like: JaxprEqn) -> Any:
    """The product of each block: all operands and the result have the blocks as first dimension.

    Args:
      left: rows of one block after another.
      right: matrices, or further rows whose products with the first are summed.
      sizes: the number of rows of each group of each block.
      like: the equation for one block.
    """
    names = ("ragged_dot_dimension_numbers", "precision", "preferred_element_type")
    return block_product_p.bind(left, right, sizes, **{name: like.params[name] for name in names})


def _products(left: Any, right: Any, sizes: Any, **params: Any) -> Any:
    blocks = zip(left, right, sizes, strict=True)
    return jnp.stack([lax.ragged_dot_general(*block, **params) for block in blocks])


_names = ("ragged_dot_dimension_numbers", "precision", "preferred_element_type")
block_product_p.def_impl(jax.jit(_products, static_argnames=_names))
mlir.register_lowering(block_product_p, mlir.lower_fun(_products, multiple_results=False))


@block_product_p.def_abstract_eval
def _abstract(left: Any, right: Any, sizes: Any, **params: Any) -> Any:
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (left, right, sizes)]
    made = jax.eval_shape(lambda *xs: _products(*xs, **params), *structs)
    return jax.core.ShapedArray(made.shape, made.dtype)


def block_rule(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule | None:
    """That of one block, in which rows and groups stay whole, and the loop over blocks."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    left, right, sizes = (shape_of(atom)[1:] for atom in eqn.invars)
    dims = RaggedDims(numbers, len(left), len(right))
    one = ragged_rule_of(dims, left, right, sizes)
    whole = {
        *one.operands[0][dims.rows],
        *(() if dims.groups is None else one.operands[1][dims.groups]),
        *(one.results[0][0] if dims.sums_rows else ()),
    }
    factors = tuple(
        dataclasses.replace(factor, kind="replicated") if number in whole else factor
        for number, factor in enumerate(one.factors)
    )
    first = (len(factors),)
    return FactorRule(
        (*factors, Factor(shape_of(eqn.invars[0])[0], "pass")),
        tuple((first, *value) for value in one.operands),
        tuple((first, *value) for value in one.results),
    )
