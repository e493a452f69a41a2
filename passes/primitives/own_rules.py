"""Factor rules that Shardy's registry does not have, or has in a form that slices cannot use.

Each function takes an equation and returns its rule. Dimensions that `whole_dims` names are
replicated afterwards by `populate`, so the functions here need not repeat that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import (
    COMBINES,
    CUMULATIVE,
    MATRIX_FUNCTIONS,
    MONOID_REDUCTIONS,
    SCATTERS,
    FactorKind,
)
from autopar.passes.primitives.factor_rule import DimFactors, Factor, FactorRule
from autopar.passes.primitives.shardings import (
    dtype_of,
    gather_picks,
    gather_windows,
    matrix_batch_rank,
    random_implementation,
    registrar,
    scatter_picks,
    scatter_windows,
    shape_of,
    solved_dim,
)

Own = Callable[[JaxprEqn, frozenset[int]], FactorRule]
OWN: dict[str, Own] = {}
_own = registrar(OWN)


class Loops:
    """The factors of a rule that is being written."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []

    def new(self, size: int, kind: FactorKind = "pass") -> DimFactors:
        """A dimension that is one loop; of size 1, none."""
        if size == 1:
            return ()
        self.factors.append(Factor(size, kind))
        return (len(self.factors) - 1,)

    def value(self, shape: Sequence[int], kind: FactorKind = "pass") -> list[DimFactors]:
        return [self.new(size, kind) for size in shape]

    def rule(
        self,
        operands: Sequence[Sequence[DimFactors]],
        results: Sequence[Sequence[DimFactors]],
        inner: DimFactors = (),
    ) -> FactorRule:
        values, made = (tuple(map(tuple, values)) for values in (operands, results))
        return FactorRule(tuple(self.factors), values, made, inner)


def replicated(eqn: JaxprEqn) -> FactorRule:
    """Every dimension of every value is a loop that must not be cut."""
    loops = Loops()
    operands = [loops.value(shape_of(var), "replicated") for var in eqn.invars]
    results = [loops.value(shape_of(var), "replicated") for var in eqn.outvars]
    return loops.rule(operands, results)


def elementwise(eqn: JaxprEqn, _: frozenset[int] = frozenset()) -> FactorRule:
    """All values have the same dimensions; an operand may be a scalar or repeat a dimension."""
    shape = shape_of(eqn.outvars[0])
    if any(len(shape_of(var)) not in (0, len(shape)) for var in (*eqn.invars, *eqn.outvars)):
        return replicated(eqn)
    loops = Loops()
    dims = loops.value(shape)

    def value(var: Any) -> list[DimFactors]:
        return [() if size == 1 else dims[dim] for dim, size in enumerate(shape_of(var))]

    return loops.rule([value(var) for var in eqn.invars], [value(var) for var in eqn.outvars])


def same_dims(eqn: JaxprEqn, _: frozenset[int] = frozenset()) -> FactorRule:
    """Dimension i of all values is one loop where the sizes agree, else one for each size."""
    loops = Loops()
    loop = functools.cache(lambda dim, size: loops.new(size))

    def value(var: Any) -> list[DimFactors]:
        return [loop(dim, size) for dim, size in enumerate(shape_of(var))]

    return loops.rule([value(var) for var in eqn.invars], [value(var) for var in eqn.outvars])


for _name in (
    *CUMULATIVE,
    "sort",
    "rev",
    "top_k",
    "approx_top_k",
    "random_wrap",
    "random_unwrap",
    "random_split",
):
    OWN[_name] = same_dims
for _name in ("bitcast_convert_type", "random_gamma", "dynamic_slice", "dynamic_update_slice"):
    OWN[_name] = same_dims
for _name in ("random_seed", "random_fold_in", "device_put", "tie"):
    OWN[_name] = elementwise
# Elementwise, but their lowerings are long, or loops.
for _name in ("bessel_i0e", "bessel_i1e", "digamma", "erf_inv", "lgamma", "nextafter", "zeta"):
    OWN[_name] = elementwise
for _name in ("igamma", "igamma_grad_a", "igammac", "regularized_incomplete_beta", "polygamma"):
    OWN[_name] = elementwise
OWN["threefry2x32"] = OWN["polynomial"] = OWN["to_host"] = elementwise
OWN["empty2"] = OWN["platform_index"] = elementwise  # scalars: nothing to cut


@_own("optimization_barrier")
def _barrier(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule:
    loops = Loops()
    values = [loops.value(shape_of(var)) for var in eqn.invars]
    return loops.rule(values, values)


@_own("iota")
def _iota(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule:
    loops = Loops()
    return loops.rule([], [loops.value(shape_of(eqn.outvars[0]))])


@_own("random_bits")
def _random_bits(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule:
    # A generator other than threefry draws for all keys, and its bits are cut afterwards.
    loops = Loops()
    bits = loops.value(shape_of(eqn.outvars[0]))
    keys = shape_of(eqn.invars[0])
    if random_implementation(eqn.invars[0].aval) == "threefry2x32":
        return loops.rule([bits[: len(keys)]], [bits])
    return loops.rule([loops.value(keys, "replicated")], [bits])


@_own(*MATRIX_FUNCTIONS)
def _matrix_function(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule:
    loops = Loops()
    batch = loops.value(shape_of(eqn.invars[0])[: matrix_batch_rank(eqn)])

    def value(var: Any) -> list[DimFactors]:
        return [*batch, *loops.value(shape_of(var)[len(batch) :], "replicated")]

    operands, results = ([value(var) for var in vars_] for vars_ in (eqn.invars, eqn.outvars))
    free = solved_dim(eqn)
    if free is not None:
        operands[-1][free] = results[0][free] = loops.new(shape_of(eqn.outvars[0])[free])
    return loops.rule(operands, results)


# Pieces of a dimension: every boundary is a multiple of their greatest common divisor, so each
# piece is [some, divisor], and the inner loop runs alike in all of them.


def _pieces(loops: Loops, sizes: Sequence[int], divisor: int) -> list[DimFactors]:
    if 0 in sizes:  # which has no part in every slice
        return [loops.new(size, "replicated") for size in sizes]
    inner = loops.new(divisor)
    return [(*loops.new(size // divisor, "replicated"), *inner) for size in sizes]


@_own("concatenate")
def _concatenate(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule:
    axis = eqn.params["dimension"]
    sizes = [shape_of(var)[axis] for var in eqn.invars]
    return _joined(eqn, axis, eqn.outvars[0], eqn.invars, math.gcd(*sizes))


@_own("split")
def _split(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule:
    axis = eqn.params["axis"]
    divisor = math.gcd(*map(int, eqn.params["sizes"]))
    return _joined(eqn, axis, eqn.invars[0], eqn.outvars, divisor)


def _joined(eqn: JaxprEqn, axis: int, whole: Any, parts: Sequence[Any], divisor: int) -> FactorRule:
    loops = Loops()
    common = loops.value([size for dim, size in enumerate(shape_of(whole)) if dim != axis])
    values = [whole, *parts]
    pieces = _pieces(loops, [shape_of(var)[axis] for var in values], divisor)
    dims = {
        id(var): [*common[:axis], piece, *common[axis:]]
        for var, piece in zip(values, pieces, strict=True)
    }
    return loops.rule([dims[id(var)] for var in eqn.invars], [dims[id(var)] for var in eqn.outvars])


@_own("slice")
def _slice(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule:
    shape, params = shape_of(eqn.invars[0]), eqn.params
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(shape)
    return _resized(
        eqn,
        (
            1 if stride != 1 else math.gcd(size, int(start), int(limit))
            for size, start, limit, stride in zip(shape, starts, limits, strides, strict=True)
        ),
    )


@_own("pad")
def _pad(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule:
    pairs = zip(shape_of(eqn.invars[0]), eqn.params["padding_config"], strict=True)
    return _resized(
        eqn,
        (
            1 if interior else math.gcd(size, int(low), int(high))
            for size, (low, high, interior) in pairs
        ),
    )


def _resized(eqn: JaxprEqn, divisors: Iterable[int]) -> FactorRule:
    """Each dimension of the first operand and of the result, in pieces of a divisor."""
    loops = Loops()
    sizes = zip(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), divisors, strict=True)
    pairs = [_pieces(loops, (old, new), divisor) for old, new, divisor in sizes]
    scalars: list[list[DimFactors]] = [[] for _ in eqn.invars[1:]]
    return loops.rule([[old for old, _ in pairs], *scalars], [[new for _, new in pairs]])


@_own("stack", "unstack")
def _stack(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule:
    is_stack = eqn.primitive.name == "stack"
    parts = eqn.invars if is_stack else eqn.outvars
    loops, axis = Loops(), eqn.params["axis"]
    dims = loops.value(shape_of(parts[0]))
    stacked = [*dims[:axis], loops.new(len(parts), "replicated"), *dims[axis:]]
    apart, together = [dims] * len(parts), [stacked]
    return loops.rule(apart, together) if is_stack else loops.rule(together, apart)


@_own("tile")
def _tile(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule:
    loops = Loops()
    dims = loops.value(shape_of(eqn.invars[0]))
    repeats = loops.value(eqn.params["reps"])
    return loops.rule([dims], [[(*r, *d) for r, d in zip(repeats, dims, strict=True)]])


@_own("gather")
def _gather(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule:
    # Cutting a dimension of which each index picks one place leaves all parts but one zero there.
    numbers = eqn.params["dimension_numbers"]
    operand_shape, indices_shape = (shape_of(var) for var in eqn.invars)
    result_shape = shape_of(eqn.outvars[0])
    loops = Loops()
    indices = [*loops.value(indices_shape[:-1]), loops.new(indices_shape[-1], "replicated")]
    batch = iter(indices[:-1])
    result = [
        loops.new(size) if dim in numbers.offset_dims else next(batch)
        for dim, size in enumerate(result_shape)
    ]
    windows = gather_windows(numbers, len(operand_shape))
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    picked = gather_picks(eqn)
    one_of_all: FactorKind = "or" if jnp.issubdtype(dtype_of(eqn.outvars[0]), jnp.bool_) else "sum"
    operand = []
    for dim, size in enumerate(operand_shape):
        if dim in batching:
            operand.append(indices[batching[dim]])
        elif dim in windows and result_shape[windows[dim]] == size:
            operand.append(result[windows[dim]])
        else:
            operand.append(loops.new(size, one_of_all if dim in picked else "replicated"))
    return loops.rule([operand, indices], [result])


@_own(*SCATTERS)
def _scatter(eqn: JaxprEqn, zeros: frozenset[int]) -> FactorRule:
    # Cutting the updates gives partial results only if combining them counts the operand once:
    # maximum and minimum are idempotent, a sum needs an operand that is zero.
    numbers = eqn.params["dimension_numbers"]
    operand_shape, indices_shape, updates_shape = (shape_of(var) for var in eqn.invars)
    monoid = SCATTERS[eqn.primitive.name]
    kind: FactorKind = "replicated"
    if monoid in ("max", "min") or (monoid == "sum" and 0 in zeros):
        kind = monoid
    loops = Loops()
    indices: list[DimFactors] = [
        loops.new(size, "pass" if dim in numbers.scatter_indices_batching_dims else kind)
        for dim, size in enumerate(indices_shape[:-1])
    ]
    batch = iter(indices)
    updates = [
        loops.new(size) if dim in numbers.update_window_dims else next(batch)
        for dim, size in enumerate(updates_shape)
    ]
    windows = scatter_windows(numbers, len(operand_shape))
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    picked = scatter_picks(eqn)
    operand = []
    for dim, size in enumerate(operand_shape):
        if dim in batching:
            operand.append(indices[batching[dim]])
        elif dim in windows and updates_shape[windows[dim]] == size:
            operand.append(updates[windows[dim]])
        else:
            operand.append(loops.new(size, "pass" if dim in picked else "replicated"))
    indices.append(loops.new(indices_shape[-1], "replicated"))
    return loops.rule([operand, indices, updates], [operand])


@_own("reduce")
def _reduce(eqn: JaxprEqn, zeros: frozenset[int]) -> FactorRule:
    half = len(eqn.invars) // 2
    kind = _body_monoid(eqn.params["jaxpr"]) if half == 1 else "replicated"
    if kind == "prod" or (kind == "sum" and 1 not in zeros):
        kind = "replicated"  # each part would count the initial value
    return _reduced(eqn, eqn.params["dimensions"], kind, half)


def reduction(eqn: JaxprEqn) -> FactorRule:
    """A reduction by a monoid; Shardy does not see one in how complex numbers are lowered."""
    return _reduced(eqn, eqn.params["axes"], MONOID_REDUCTIONS[eqn.primitive.name], 1)


def _reduced(eqn: JaxprEqn, axes: Sequence[int], kind: FactorKind, half: int) -> FactorRule:
    loops = Loops()
    dims = [
        loops.new(size, kind if dim in axes else "pass")
        for dim, size in enumerate(shape_of(eqn.invars[0]))
    ]
    kept = [dim for i, dim in enumerate(dims) if i not in axes]
    initial: list[list[DimFactors]] = [[] for _ in eqn.invars[half:]]
    return loops.rule([dims] * half + initial, [kept] * half)


def _body_monoid(jaxpr: Any) -> FactorKind:
    """What the body of a reduction combines its two arguments with, if it is that alone."""
    if len(jaxpr.eqns) != 1:
        return "replicated"
    (eqn,) = jaxpr.eqns
    combines = set(map(id, eqn.invars)) == set(map(id, jaxpr.invars))
    if not combines or jaxpr.outvars[0] is not eqn.outvars[0]:
        return "replicated"
    return COMBINES.get(eqn.primitive.name, "replicated")
