"""Kernels, whose rules are read from what they say of themselves, and grouped products."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax.extend.core import JaxprEqn

from autopar.passes.primitives.block_products import block_rule
from autopar.passes.primitives.cudnn_attention import cudnn_on_slices, cudnn_rule
from autopar.passes.primitives.exchanges import exchange_on_slices, exchange_rule
from autopar.passes.primitives.factor_rule import FactorRule
from autopar.passes.primitives.local_calls import local_on_slices, local_rule
from autopar.passes.primitives.local_rewrites import Rewrite
from autopar.passes.primitives.pallas_rules import pallas_on_slices, pallas_rule
from autopar.passes.primitives.partitioned_calls import partitioned_on_slices, partitioned_rule
from autopar.passes.primitives.ragged_products import ragged_on_slices, ragged_rule

KERNEL_RULES: Mapping[str, Callable[[JaxprEqn, frozenset[int]], FactorRule | None]] = {
    "block_product": block_rule,
    "custom_partitioning": partitioned_rule,
    "dot_product_attention_bwd_wrapper": cudnn_rule,
    "dot_product_attention_fwd_wrapper": cudnn_rule,
    "exchange": exchange_rule,
    "local_call": local_rule,
    "pallas_call": pallas_rule,
    "ragged_dot_general": ragged_rule,
}
KERNEL_REWRITES: Mapping[str, Rewrite] = {
    "custom_partitioning": partitioned_on_slices,
    "dot_product_attention_bwd_wrapper": cudnn_on_slices,
    "dot_product_attention_fwd_wrapper": cudnn_on_slices,
    "exchange": exchange_on_slices,
    "local_call": local_on_slices,
    "pallas_call": pallas_on_slices,
    "ragged_dot_general": ragged_on_slices,
}


def kernel_rule(eqn: JaxprEqn, unread: frozenset[int]) -> FactorRule | None:
    """The rule of a kernel's equation, or None where nothing of it can be cut.

    Args:
      eqn: the equation.
      unread: its results that nobody reads.
    """
    find = KERNEL_RULES.get(eqn.primitive.name)
    rule = find and find(eqn, unread)
    if rule is None or eqn.primitive.name == "local_call":
        return rule  # the user's rule is one, also where nothing is left to be cut
    return None if all(factor.kind == "replicated" for factor in rule.factors) else rule
