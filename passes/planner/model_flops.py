"""The FLOPs that a model needs, whatever a plan makes of it: its matrix products, once each."""

from __future__ import annotations

from collections import Counter

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from autopar.passes.graph.graph import inner_jaxprs
from autopar.passes.graph.name_stacks import REMATERIALIZED
from autopar.passes.graph.primitives import KERNELS, PRODUCTS
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.flops import flops
from autopar.passes.sharding.scopes import dtype_bytes


def model_flops(jaxpr: Jaxpr, rules: Rules) -> Counter[str]:
    """By the dtype of their operands, the FLOPs of a step's products, convolutions and kernels.

    What `jax.checkpoint` computes again does not count, as in PaLM's model FLOPs utilization
    (Chowdhery et al. 2022, appendix B); loops count their trips, of branches the largest counts.

    Args:
      jaxpr: the traced step, before its batch is split and its dimensions are padded.
      rules: the factor rules of its equations.
    """
    total: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        if REMATERIALIZED in str(eqn.source_info.name_stack):
            continue
        name = eqn.primitive.name
        if name in PRODUCTS or name in KERNELS:
            total[_dtype(eqn)] += flops(eqn, rules[eqn])
        elif bodies := [model_flops(inner, rules) for inner in inner_jaxprs(eqn)]:
            if name == "cond":
                bodies = [max(bodies, key=Counter.total)]
            times = eqn.params["length"] if name == "scan" else 1
            for body in bodies:
                total.update({dtype: times * count for dtype, count in body.items()})
    return total


def _dtype(eqn: JaxprEqn) -> str:
    """That of the two first operands; of different ones, the one in which products are made."""
    dtypes = [atom.aval.dtype for atom in eqn.invars[:2] if hasattr(atom.aval, "dtype")]
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    # The widest: float8s of two kinds, for one, have no common type.
    return str(max(floats or dtypes, key=lambda dtype: (dtype_bytes(dtype), str(dtype))))
