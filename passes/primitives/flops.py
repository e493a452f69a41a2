"""How many floating-point operations an equation takes: the compute side of every cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from autopar.passes.graph import primitives
from autopar.passes.graph.graph import inner_jaxprs
from autopar.passes.primitives.factor_rule import FactorRule, Rules
from autopar.passes.primitives.kernel_flops import kernel_flops
from autopar.passes.primitives.shardings import shape_of

UPDATES = {
    "cholesky": 1 / 3,
    "eig": 25,
    "eigh": 9,
    "geqrf": 4 / 3,
    "hessenberg": 10 / 3,
    "lu": 2 / 3,
    "qr": 8 / 3,
    "schur": 25,
    "svd": 21,
    "tridiagonal": 4 / 3,
}
"""Operations of functions of square matrices, by n^3, with vectors where these are computed (Golub
and Van Loan, "Matrix Computations", 2013, sections 4.2, 3.2, 5.2, 7.4, 7.5, 8.3, 8.6)."""

SPECTRAL = frozenset({"eig", "eigh", "hessenberg", "schur", "svd", "tridiagonal"})
"""Those of them that walk a matrix column by column, one after the other."""

SPECTRAL_SHARE = 0.03
"""What these reach on GPUs of the peak of float64, which needs no matrix units, in any dtype: on an
H100 less than 3% (Wang et al., "Extracting the Potential of Emerging Hardware Accelerators for
Symmetric Eigenvalue Decomposition", 2024), on a V100 2.2% (16 matrices of 1,024 in 0.90 s: JAX's
issue 10180)."""


def flops(eqn: JaxprEqn, rule: FactorRule) -> int:
    """Floating-point operations of one evaluation of an equation that is not control flow.

    A contraction takes a multiplication and an addition per iteration of all its loops; a
    convolution likewise, as if no tap fell on padding. A reduction takes one per operand element,
    anything else one per result element, also a transcendental function. What only moves elements
    takes none, a kernel what `kernel_flops` counts. Sorts, transforms and matrix factorizations
    count their usual orders.

    Args:
      eqn: the equation.
      rule: its factor rule.
    """
    name = eqn.primitive.name
    if name in primitives.MOVES:
        return 0
    if name in primitives.KERNELS:
        return kernel_flops(eqn)
    results = sum(_size(var) for var in eqn.outvars)
    if name == "conv_general_dilated":
        kernel = shape_of(eqn.invars[1])
        out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * results * _size(eqn.invars[1]) // max(out_features, 1)
    if name in ("ragged_dot_general", primitives.BLOCK_PRODUCT):
        # Every row meets the matrix of its own group; in blocks, each is in one of them.
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, batch) = numbers.dot_dimension_numbers
        gone = (*contracted, *batch, *numbers.rhs_group_dimensions)
        left, right = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
        if name == primitives.BLOCK_PRODUCT:
            left, right = left[1:], right[1:]
        columns = [n for dim, n in enumerate(right) if dim not in gone]
        return 2 * math.prod(left) * math.prod(columns)
    if name in primitives.PRODUCTS:
        return 2 * math.prod(factor.size for factor in rule.factors)
    if name in primitives.REDUCTIONS or name in primitives.CUMULATIVE:
        return _size(eqn.invars[0])
    if name in primitives.SCATTERS:
        return _size(eqn.invars[2])
    if name in primitives.WINDOWS:
        window = math.prod(eqn.params["window_dimensions"])
        if name.startswith("select_and_scatter"):
            return window * _size(eqn.invars[0])
        return window * results
    if name in primitives.SORTS:
        length = max(shape_of(eqn.invars[0]), default=1)
        return _size(eqn.invars[0]) * max(1, math.ceil(math.log2(max(length, 1))))
    if name == "fft":
        length = math.prod(eqn.params["fft_lengths"])
        return 5 * results * max(1, math.ceil(math.log2(max(length, 1))))
    if name in primitives.MATRIX_FUNCTIONS:
        # Of n columns each updates the whole matrix so many times.
        updates = UPDATES.get(name, 1.0)
        return int(updates * _size(eqn.invars[-1]) * shape_of(eqn.invars[0])[-1])
    return results


def equation_flops(eqn: JaxprEqn, rules: Rules) -> int:
    """Floating-point operations of an equation and of what it holds.

    A scan's body counts as often as it runs, a while loop's body and condition once (how often
    they run is unknown), and of a cond the most expensive branch.
    """
    if eqn.primitive.name not in primitives.CONTROL_FLOW:
        return flops(eqn, rules[eqn])
    return sum_of_bodies(eqn, [total_flops(body, rules) for body in inner_jaxprs(eqn)])


def total_flops(jaxpr: Jaxpr, rules: Rules) -> int:
    """Floating-point operations of a whole program."""
    return sum(equation_flops(eqn, rules) for eqn in jaxpr.eqns)


def sum_of_bodies(eqn: JaxprEqn, bodies: Sequence[int]) -> int:
    """What control flow costs, if its bodies cost that."""
    if eqn.primitive.name == "cond":
        return max(bodies, default=0)
    return int(eqn.params.get("length", 1)) * sum(bodies)


def _size(var: Any) -> int:
    return math.prod(shape_of(var))
