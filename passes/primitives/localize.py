"""Evaluate one equation on slices of its operands: what a microbatch or a device computes.

`bind_local` takes local operands and how each dimension is cut, rewrites the params that hold
shapes or positions, and binds the primitive: the result is the slice of the global result, or,
where a reduced dimension is cut, its partial sum (maximum, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p

from autopar.passes.graph import jax_compat
from autopar.passes.graph.primitives import DRAWS, SCATTERS
from autopar.passes.primitives import products
from autopar.passes.primitives.factor_rule import DimFactors, FactorRule
from autopar.passes.primitives.shardings import (
    dtype_of,
    gather_picks,
    random_implementation,
    scatter_picks,
    scatter_windows,
    shape_of,
    whole_dims,
)


class NotLocalError(Exception):
    """An equation cannot be evaluated on these slices. A rule never offers such a cut."""


@dataclass(frozen=True)
class Cut:
    """A dimension of `major * parts * rest` seen as [major, parts, rest]; we hold [:, index, :].

    `index` is a Python int or a traced int32 scalar. The local size is `major * rest`.
    """

    parts: int
    index: Any
    major: int = 1

    def rest(self, size: int) -> int:
        """The length of the contiguous pieces in which a dimension of `size` is cut."""
        rest, left = divmod(size, self.major * self.parts)
        if left:
            raise NotLocalError(
                f"a dimension of {size} is not {self.major} x {self.parts} x an integer"
            )
        return rest


Cuts = tuple[Cut | None, ...]  # one entry per dimension of a value


def local_shape(shape: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """The shape of a slice."""
    return tuple(
        size if cut is None else cut.major * cut.rest(size)
        for size, cut in zip(shape, cuts, strict=True)
    )


def rule_cuts(
    rule: FactorRule, factors: Mapping[int, Cut]
) -> tuple[tuple[Cuts, ...], tuple[Cuts, ...]]:
    """How operands and results are cut when some factors of a rule are.

    Args:
      rule: an equation's rule.
      factors: the cut factors; a cut's `major` counts within the factor (1: contiguous pieces).

    Returns:
      The cuts of the operands and of the results, as `bind_local` takes them.

    Raises:
      NotLocalError: two of the factors are in one dimension, which one `Cut` cannot express.
    """

    def dim_cut(dim: DimFactors) -> Cut | None:
        inside = [place for place, factor in enumerate(dim) if factor in factors]
        if not inside:
            return None
        if len(inside) > 1:
            raise NotLocalError(f"factors {dim} of one dimension are cut together in {rule}")
        outer = math.prod(rule.factors[factor].size for factor in dim[: inside[0]])
        return replace(cut := factors[dim[inside[0]]], major=outer * cut.major)

    operands, results = (
        tuple(tuple(map(dim_cut, dims)) for dims in values)
        for values in (rule.operands, rule.results)
    )
    return operands, results


def take(value: Any, cuts: Cuts) -> Any:
    """The slice of a whole array that `cuts` describes."""
    for dim, cut in enumerate(cuts):
        if cut is None:
            continue
        shape = value.shape
        viewed = (*shape[:dim], cut.major, cut.parts, cut.rest(shape[dim]), *shape[dim + 1 :])
        value = lax.dynamic_index_in_dim(
            value.reshape(viewed), cut.index, axis=dim + 1, keepdims=False
        ).reshape(local_shape(shape, (*(None,) * dim, cut, *(None,) * (len(shape) - dim - 1))))
    return value


def bind_local(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_cuts: Sequence[Cuts],
    result_cuts: Sequence[Cuts],
) -> list[Any]:
    """Evaluate an equation on slices.

    Args:
      eqn: the global equation (not control flow).
      operands: its local operands, a literal as its value.
      operand_cuts: how each operand is cut, one entry per dimension.
      result_cuts: how each result shall be cut.

    Returns:
      The local results. Where a reduced dimension is cut, they are partial: combining those of
      all indices with the reduction's monoid gives the whole.

    Raises:
      NotLocalError: these slices do not determine the local results.
    """
    if not any(cut for cuts in (*operand_cuts, *result_cuts) for cut in cuts):
        return bind_with(eqn, operands, {})
    whole_operands, whole_results = whole_dims(eqn)
    for cuts, dims in zip(
        (*operand_cuts, *result_cuts), (*whole_operands, *whole_results), strict=True
    ):
        if any(cuts[dim] for dim in dims):
            raise NotLocalError(f"{eqn.primitive} needs dimensions {dims} whole: {eqn}")
    rewrite = _REWRITES.get(eqn.primitive.name)
    shapes = [
        local_shape(shape_of(var), cuts) for var, cuts in zip(eqn.outvars, result_cuts, strict=True)
    ]
    try:
        if rewrite is None:
            results = bind_with(eqn, operands, {})
        else:
            results = rewrite(eqn, operands, operand_cuts, result_cuts)
    except (TypeError, ValueError) as error:
        raise NotLocalError(f"{eqn.primitive} does not fit these slices: {error}") from error
    for result, shape in zip(results, shapes, strict=True):
        if jnp.shape(result) != shape:
            raise NotLocalError(f"{eqn.primitive} gives {jnp.shape(result)} instead of {shape}")
    return results


def bind_with(eqn: JaxprEqn, operands: Sequence[Any], changes: Mapping[str, Any]) -> list[Any]:
    """Evaluate an equation on other operands and with some params changed."""
    if eqn.primitive.name == "dot_general":
        return [products.multiply(eqn.primitive.bind, operands, {**eqn.params, **changes})]
    if eqn.primitive.name in DRAWS:
        with jax.threefry_partitionable(eqn.ctx.threefry_partitionable):
            return jax_compat.bind(eqn, operands, **changes)
    return jax_compat.bind(eqn, operands, **changes)


# Params that hold shapes. Each function takes bind_local's arguments and returns its results.

_Rewrite = Callable[[JaxprEqn, Sequence[Any], Sequence[Cuts], Sequence[Cuts]], list[Any]]
_REWRITES: dict[str, _Rewrite] = {}


def _rewrites(*names: str) -> Callable[[_Rewrite], _Rewrite]:
    def register(function: _Rewrite) -> _Rewrite:
        _REWRITES.update(dict.fromkeys(names, function))
        return function

    return register


@_rewrites("device_put")
def _identity(
    eqn: JaxprEqn, operands: Sequence[Any], _: Sequence[Cuts], __: Sequence[Cuts]
) -> list[Any]:
    return list(operands)


@_rewrites("broadcast_in_dim")
def _broadcast(
    eqn: JaxprEqn, operands: Sequence[Any], _: Sequence[Cuts], result_cuts: Sequence[Cuts]
) -> list[Any]:
    shape = local_shape(eqn.params["shape"], result_cuts[0])
    return bind_with(eqn, operands, {"shape": shape, "sharding": None})


@_rewrites("reshape")
def _reshape(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_cuts: Sequence[Cuts],
    result_cuts: Sequence[Cuts],
) -> list[Any]:
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if _flat_cuts(old, operand_cuts[0]) != _flat_cuts(new, result_cuts[0]):
        raise NotLocalError(f"operand and result of {eqn} are not cut alike")
    return bind_with(
        eqn, operands, {"new_sizes": local_shape(new, result_cuts[0]), "sharding": None}
    )


def _flat_cuts(shape: Sequence[int], cuts: Cuts) -> list[tuple[int, int]]:
    """Parts and length of the contiguous pieces of each cut, in the row-major order."""
    flat, minor = [], 1
    for size, cut in zip(reversed(shape), reversed(cuts), strict=True):
        if cut is not None and cut.parts > 1:
            flat.append((cut.parts, cut.rest(size) * minor))
        minor *= size
    return flat


@_rewrites("tile")
def _tile(
    eqn: JaxprEqn, operands: Sequence[Any], _: Sequence[Cuts], result_cuts: Sequence[Cuts]
) -> list[Any]:
    shape = local_shape(shape_of(eqn.outvars[0]), result_cuts[0])
    reps = tuple(size // local for size, local in zip(shape, jnp.shape(operands[0]), strict=True))
    return bind_with(eqn, operands, {"reps": reps})


def positions(size: int, cut: Cut | None, dtype: Any = np.int32) -> Any:
    """Where the elements of a slice are in the whole dimension, an array of the local size."""
    if cut is None:
        return lax.iota(dtype, size)
    rest = cut.rest(size)
    shape = (cut.major, rest)
    index = lax.convert_element_type(cut.index, dtype)
    place = lax.broadcasted_iota(dtype, shape, 1) + index * np.array(rest, dtype)
    if cut.major > 1:
        place += lax.broadcasted_iota(dtype, shape, 0) * np.array(cut.parts * rest, dtype)
    return place.reshape(cut.major * rest)


@_rewrites("iota")
def _iota(
    eqn: JaxprEqn, operands: Sequence[Any], _: Sequence[Cuts], result_cuts: Sequence[Cuts]
) -> list[Any]:
    (cuts,) = result_cuts
    size, dim = eqn.params["shape"], eqn.params["dimension"]
    shape = local_shape(size, cuts)
    if cuts[dim] is None:
        return bind_with(eqn, operands, {"shape": shape, "sharding": None})
    if size[dim] >= 2**32:
        raise NotLocalError(f"iota over {size[dim]} positions")
    places = positions(size[dim], cuts[dim], np.uint32)
    places = lax.convert_element_type(places, dtype_of(eqn.outvars[0]))
    return [lax.broadcast_in_dim(places, shape, (dim,))]


# Cutting the dimension along which slice, pad, split and concatenate work: every boundary must be
# a multiple of a whole period (parts * rest), so that each piece is cut alike.


def _period(size: int, cut: Cut) -> int:
    return cut.parts * cut.rest(size)


def _aligned(
    boundaries: Sequence[int], size: int, cut: Cut, others: Sequence[tuple[int, Cut | None]]
) -> list[int]:
    """Boundaries within the slice. `others` are the sizes and cuts of the pieces."""
    period = _period(size, cut)
    for other_size, other in others:
        if other is None or other.parts != cut.parts or _period(other_size, other) != period:
            raise NotLocalError(f"pieces of a dimension are not cut alike: {cut}, {other}")
    if any(boundary % period for boundary in boundaries):
        raise NotLocalError(f"{boundaries} are not multiples of {period}")
    return [int(boundary) // cut.parts for boundary in boundaries]


@_rewrites("slice")
def _slice(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_cuts: Sequence[Cuts],
    result_cuts: Sequence[Cuts],
) -> list[Any]:
    starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    strides = eqn.params["strides"] or (1,) * len(starts)
    for dim, cut in enumerate(operand_cuts[0]):
        size, new_size = shape_of(eqn.invars[0])[dim], shape_of(eqn.outvars[0])[dim]
        if cut is None:
            continue
        if strides[dim] != 1:
            raise NotLocalError("a strided slice of a cut dimension")
        starts[dim], limits[dim] = _aligned(
            (starts[dim], limits[dim]), size, cut, [(new_size, result_cuts[0][dim])]
        )
    changes = {"start_indices": tuple(starts), "limit_indices": tuple(limits)}
    return bind_with(eqn, operands, changes)


@_rewrites("pad")
def _pad(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_cuts: Sequence[Cuts],
    result_cuts: Sequence[Cuts],
) -> list[Any]:
    config = list(eqn.params["padding_config"])
    for dim, cut in enumerate(operand_cuts[0]):
        size, new_size = shape_of(eqn.invars[0])[dim], shape_of(eqn.outvars[0])[dim]
        low, high, interior = config[dim]
        if cut is None:
            continue
        if interior:
            raise NotLocalError("interior padding of a cut dimension")
        low, high = _aligned((low, high), size, cut, [(new_size, result_cuts[0][dim])])
        config[dim] = (low, high, 0)
    return bind_with(eqn, operands, {"padding_config": tuple(config)})


@_rewrites("split")
def _split(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_cuts: Sequence[Cuts],
    result_cuts: Sequence[Cuts],
) -> list[Any]:
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    cut = operand_cuts[0][axis]
    if cut is not None:
        pieces = [(int(size), cuts[axis]) for size, cuts in zip(sizes, result_cuts, strict=True)]
        sizes = tuple(_aligned(sizes, shape_of(eqn.invars[0])[axis], cut, pieces))
    return bind_with(eqn, operands, {"sizes": sizes})


@_rewrites("concatenate")
def _concatenate(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_cuts: Sequence[Cuts],
    result_cuts: Sequence[Cuts],
) -> list[Any]:
    axis = eqn.params["dimension"]
    cut = result_cuts[0][axis]
    if cut is not None:
        sizes = [shape_of(var)[axis] for var in eqn.invars]
        pieces = [(size, cuts[axis]) for size, cuts in zip(sizes, operand_cuts, strict=True)]
        _aligned(sizes, shape_of(eqn.outvars[0])[axis], cut, pieces)
    return bind_with(eqn, operands, {})


@_rewrites("gather")
def _gather(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_cuts: Sequence[Cuts],
    result_cuts: Sequence[Cuts],
) -> list[Any]:
    numbers = eqn.params["dimension_numbers"]
    shape, slice_sizes = shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
    local = local_shape(shape, operand_cuts[0])
    picked = {dim: cut for dim in gather_picks(eqn) if (cut := operand_cuts[0][dim]) is not None}
    sizes = tuple(
        size if dim in picked or dim in numbers.operand_batching_dims else min(size, local[dim])
        for dim, size in enumerate(slice_sizes)
    )
    if not picked:
        return bind_with(eqn, operands, {"slice_sizes": sizes})
    # Each place is in one part, which reads it; the others give zero. A filled place is in none,
    # and the first part fills it.
    operand, indices = operands
    places, outside = _global_places(eqn, indices, numbers.start_index_map, shape, slice_sizes)
    held, first = ~outside, outside
    columns = _columns(indices)
    for column, dim in enumerate(numbers.start_index_map):
        if dim not in picked:
            continue
        here, place = _local_place(_columns(places)[column], shape[dim], picked[dim])
        held &= here
        first &= picked[dim].index == 0
        columns[column] = jnp.where(outside, local[dim], jnp.where(here, place, 0))
    changes = {"slice_sizes": sizes, "indices_are_sorted": False, "unique_indices": False}
    (result,) = bind_with(eqn, (operand, _rows(columns, indices.dtype)), changes)
    batch_dims = tuple(d for d in range(result.ndim) if d not in numbers.offset_dims)
    keep = lax.broadcast_in_dim(held | first, result.shape, batch_dims)
    return [jnp.where(keep, result, jnp.zeros((), result.dtype))]


def _global_places(
    eqn: JaxprEqn, indices: Any, dims: Sequence[int], shape: Sequence[int], window: Sequence[int]
) -> tuple[Any, Any]:
    """Indices within the whole operand, and which of them a filling or dropping mode discards."""
    last = np.array([shape[dim] - window[dim] for dim in dims])
    places = jnp.clip(indices, 0, last.astype(indices.dtype))
    outside = jnp.zeros(indices.shape[:-1], bool)
    if eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        outside = jnp.any(places != indices, axis=-1)
    return places, outside


def _local_place(place: Any, size: int, cut: Cut) -> tuple[Any, Any]:
    """Whether a place of the whole dimension is in the slice, and where."""
    rest = cut.rest(size)
    piece, within = place // rest, place % rest
    if cut.major == 1:
        return piece == cut.index, within
    return piece % cut.parts == cut.index, piece // cut.parts * rest + within


def _columns(indices: Any) -> list[Any]:
    """The coordinates of a gather's or scatter's indices, one array for each."""
    last = indices.ndim - 1
    count = indices.shape[last]
    return [lax.index_in_dim(indices, i, axis=last, keepdims=False) for i in range(count)]


def _rows(columns: Sequence[Any], dtype: Any) -> Any:
    return jnp.stack([column.astype(dtype) for column in columns], axis=-1)


@_rewrites(*SCATTERS)
def _scatter(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_cuts: Sequence[Cuts],
    result_cuts: Sequence[Cuts],
) -> list[Any]:
    numbers = eqn.params["dimension_numbers"]
    shape, updates_shape = (shape_of(eqn.invars[i]) for i in (0, 2))
    picked = {dim: cut for dim in scatter_picks(eqn) if (cut := operand_cuts[0][dim]) is not None}
    if not picked:
        return bind_with(eqn, operands, {})
    # Each place is in one part; in the others it is out of bounds, and its update is dropped.
    operand, indices, updates = operands
    windows = scatter_windows(numbers, len(shape))
    window = [updates_shape[windows[dim]] if dim in windows else 1 for dim in range(len(shape))]
    dims = numbers.scatter_dims_to_operand_dims
    places, outside = _global_places(eqn, indices, dims, shape, window)
    clipped = eqn.params["mode"] == lax.GatherScatterMode.CLIP
    columns = _columns(places if clipped else indices)
    for column, dim in enumerate(dims):
        if dim in picked:
            here, place = _local_place(_columns(places)[column], shape[dim], picked[dim])
            columns[column] = jnp.where(here & ~outside, place, operand.shape[dim])
    changes = {"mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
    return bind_with(eqn, (operand, _rows(columns, indices.dtype), updates), changes)


@_rewrites("dynamic_slice")
def _dynamic_slice(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_cuts: Sequence[Cuts],
    result_cuts: Sequence[Cuts],
) -> list[Any]:
    sizes = local_shape(eqn.params["slice_sizes"], result_cuts[0])
    return bind_with(eqn, operands, {"slice_sizes": sizes})


@_rewrites("conv_general_dilated")
def _convolution(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_cuts: Sequence[Cuts],
    result_cuts: Sequence[Cuts],
) -> list[Any]:
    # With groups, features are [groups, features of a group] (batches likewise): a cut whose pieces
    # hold whole groups divides the number of groups, any other cut is inside each group.
    lhs_spec = eqn.params["dimension_numbers"].lhs_spec
    changes = {}
    for count, dim in (("feature_group_count", lhs_spec[1]), ("batch_group_count", lhs_spec[0])):
        groups, cut = eqn.params[count], operand_cuts[0][dim]
        size = shape_of(eqn.invars[0])[dim]
        if groups > 1 and cut is not None and cut.rest(size) % (size // groups) == 0:
            changes[count] = groups // cut.parts
    return bind_with(eqn, operands, changes)


@_rewrites("random_bits")
def _random_bits(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    operand_cuts: Sequence[Cuts],
    result_cuts: Sequence[Cuts],
) -> list[Any]:
    (keys,), (cuts,) = operands, result_cuts
    rank = len(operand_cuts[0])
    partitionable = eqn.ctx.threefry_partitionable
    if random_implementation(eqn.invars[0].aval) == "threefry2x32" and partitionable:
        if [_parts(cut) for cut in cuts[:rank]] != [_parts(cut) for cut in operand_cuts[0]]:
            raise NotLocalError("keys and their bits are not cut alike")
        return [_threefry_bits(keys, eqn.params["shape"], cuts[rank:], dtype_of(eqn.outvars[0]))]
    (bits,) = bind_with(eqn, operands, {})
    # Keys that are cut have already cut their own dimensions of the bits.
    wanted = list(cuts)
    for dim, cut in enumerate(operand_cuts[0]):
        if cut is not None:
            wanted[dim] = None
    return [take(bits, tuple(wanted))]


def _parts(cut: Cut | None) -> tuple[int, int] | None:
    """How a dimension is cut, whichever part is held: a traced index cannot be compared."""
    return None if cut is None else (cut.major, cut.parts)


def _threefry_bits(keys: Any, shape: Sequence[int], cuts: Cuts, dtype: Any) -> Any:
    """The bits that each key draws for `shape`, of which only a slice is computed.

    With `jax_threefry_partitionable` an element's bits are a function of the key and of its
    position in the row-major order of `shape`, as a 64-bit counter.
    """
    local = local_shape(shape, cuts)
    data = jax.random.key_data(keys)
    out_shape = (*keys.shape, *local)
    high, low = _counters(shape, cuts)
    key_dims = tuple(range(keys.ndim))
    counter_dims = tuple(range(keys.ndim, len(out_shape)))
    first, second = threefry2x32_p.bind(
        lax.broadcast_in_dim(data[..., 0], out_shape, key_dims),
        lax.broadcast_in_dim(data[..., 1], out_shape, key_dims),
        lax.broadcast_in_dim(high, out_shape, counter_dims),
        lax.broadcast_in_dim(low, out_shape, counter_dims),
    )
    if np.dtype(dtype).itemsize == 8:
        wide = lax.convert_element_type(first, dtype)
        return (wide << np.array(32, dtype)) | lax.convert_element_type(second, dtype)
    return lax.convert_element_type(first ^ second, dtype)


def _counters(shape: Sequence[int], cuts: Cuts) -> tuple[Any, Any]:
    """High and low words of the row-major positions of a slice's elements."""
    local = local_shape(shape, cuts)
    high = low = jnp.zeros((1,) * len(shape), np.uint32)
    stride = math.prod(shape)
    for dim, (size, cut) in enumerate(zip(shape, cuts, strict=True)):
        stride //= max(size, 1)
        new_high, new_low = _multiply(positions(size, cut, np.uint32), stride)
        alone = tuple(local[dim] if d == dim else 1 for d in range(len(shape)))
        total = low + new_low.reshape(alone)
        carry = lax.convert_element_type(total < low, np.uint32)
        high, low = high + new_high.reshape(alone) + carry, total
    return jnp.broadcast_to(high, local), jnp.broadcast_to(low, local)


def _multiply(x: Any, stride: int) -> tuple[Any, Any]:
    """High and low words of the product of 32-bit numbers with a constant of up to 64 bits."""
    word, half = np.uint32(0xFFFFFFFF), np.uint32(16)
    mask = np.uint32(0xFFFF)
    stride_low = np.uint32(stride & 0xFFFFFFFF)
    stride_high = np.uint32(stride >> 32 & int(word))
    low = x * stride_low
    a, b = x >> half, x & mask
    c, d = stride_low >> half, stride_low & mask
    middle = a * d + (b * d >> half)  # below 2^32: (2^16 - 1)^2 + 2^16 - 1
    other = b * c + (middle & mask)
    high = a * c + (middle >> half) + (other >> half)
    return high + x * stride_high, low
