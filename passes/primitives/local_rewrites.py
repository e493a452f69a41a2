"""Equations whose params hold shapes or positions, on slices of their operands.

Each function takes such a call and returns its results. `REWRITES` has one for every primitive that
needs one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import SCATTERS
from autopar.passes.primitives.cuts import (
    Cuts,
    DimCut,
    LocalCall,
    NotLocalError,
    bind_with,
    local_shape,
    positions,
    take,
)
from autopar.passes.primitives.local_random import threefry_bits
from autopar.passes.primitives.shardings import (
    dtype_of,
    gather_picks,
    random_implementation,
    registrar,
    scatter_picks,
    scatter_windows,
    shape_of,
)

Rewrite = Callable[[LocalCall], list[Any]]
REWRITES: dict[str, Rewrite] = {}
_rewrites = registrar(REWRITES)


@_rewrites("device_put")
def _identity(call: LocalCall) -> list[Any]:
    return list(call.operands)


@_rewrites("broadcast_in_dim")
def _broadcast(call: LocalCall) -> list[Any]:
    shape = local_shape(call.eqn.params["shape"], call.result_cuts[0])
    return call.bind(shape=shape, sharding=None)


@_rewrites("reshape")
def _reshape(call: LocalCall) -> list[Any]:
    old, new = call.shapes
    if _flat_cuts(old, call.operand_cuts[0]) != _flat_cuts(new, call.result_cuts[0]):
        raise NotLocalError(f"operand and result of {call.eqn} are not cut alike")
    return call.bind(new_sizes=local_shape(new, call.result_cuts[0]), sharding=None)


def _flat_cuts(shape: Sequence[int], cuts: Cuts) -> list[tuple[int, int]]:
    """Parts and length of the contiguous pieces of each cut, in the row-major order."""
    flat, minor = [], 1
    for size, cut in zip(reversed(shape), reversed(cuts), strict=True):
        if cut is not None and cut.parts > 1:
            flat.append((cut.parts, cut.rest(size) * minor))
        minor *= size
    return flat


@_rewrites("tile")
def _tile(call: LocalCall) -> list[Any]:
    shape = local_shape(call.shapes[1], call.result_cuts[0])
    sizes = zip(shape, jnp.shape(call.operands[0]), strict=True)
    return call.bind(reps=tuple(size // local for size, local in sizes))


@_rewrites("iota")
def _iota(call: LocalCall) -> list[Any]:
    (cuts,) = call.result_cuts
    size, dim = call.eqn.params["shape"], call.eqn.params["dimension"]
    shape = local_shape(size, cuts)
    if cuts[dim] is None:
        return call.bind(shape=shape, sharding=None)
    if size[dim] >= 2**32:
        raise NotLocalError(f"iota over {size[dim]} positions")
    places = positions(size[dim], cuts[dim], np.uint32)
    places = lax.convert_element_type(places, dtype_of(call.eqn.outvars[0]))
    return [lax.broadcast_in_dim(places, shape, (dim,))]


# Cutting the dimension along which slice, pad, split and concatenate work: every boundary must be
# a multiple of a whole period (parts * rest), so that each piece is cut alike.


def _period(size: int, cut: DimCut) -> int:
    return cut.parts * cut.rest(size)


def _aligned(
    boundaries: Sequence[int], size: int, cut: DimCut, others: Sequence[tuple[int, DimCut | None]]
) -> list[int]:
    """Boundaries within the slice. `others` are the sizes and cuts of the pieces."""
    period = _period(size, cut)
    for other_size, other in others:
        if other is None or other.parts != cut.parts or _period(other_size, other) != period:
            raise NotLocalError(f"pieces of a dimension are not cut alike: {cut}, {other}")
    if any(boundary % period for boundary in boundaries):
        raise NotLocalError(f"{boundaries} are not multiples of {period}")
    return [int(boundary) // cut.parts for boundary in boundaries]


def _cut_dims(call: LocalCall) -> Iterator[tuple[int, int, DimCut, tuple[int, DimCut | None]]]:
    """(dimension, size, cut, (size, cut) of the result) of the operand's cut dimensions."""
    for dim, (size, new_size) in enumerate(zip(*call.shapes, strict=True)):
        cut = call.operand_cuts[0][dim]
        if cut is not None:
            yield dim, size, cut, (new_size, call.result_cuts[0][dim])


@_rewrites("slice")
def _slice(call: LocalCall) -> list[Any]:
    params = call.eqn.params
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    strides = params["strides"] or (1,) * len(starts)
    for dim, size, cut, piece in _cut_dims(call):
        if strides[dim] != 1:
            raise NotLocalError("a strided slice of a cut dimension")
        starts[dim], limits[dim] = _aligned((starts[dim], limits[dim]), size, cut, [piece])
    return call.bind(start_indices=tuple(starts), limit_indices=tuple(limits))


@_rewrites("pad")
def _pad(call: LocalCall) -> list[Any]:
    config = list(call.eqn.params["padding_config"])
    for dim, size, cut, piece in _cut_dims(call):
        low, high, interior = config[dim]
        if interior:
            raise NotLocalError("interior padding of a cut dimension")
        config[dim] = (*_aligned((low, high), size, cut, [piece]), 0)
    return call.bind(padding_config=tuple(config))


@_rewrites("split")
def _split(call: LocalCall) -> list[Any]:
    axis, sizes = call.eqn.params["axis"], call.eqn.params["sizes"]
    cut = call.operand_cuts[0][axis]
    if cut is not None:
        pieces = [(int(n), cuts[axis]) for n, cuts in zip(sizes, call.result_cuts, strict=True)]
        sizes = tuple(_aligned(sizes, call.shapes[0][axis], cut, pieces))
    return call.bind(sizes=sizes)


@_rewrites("concatenate")
def _concatenate(call: LocalCall) -> list[Any]:
    axis = call.eqn.params["dimension"]
    cut = call.result_cuts[0][axis]
    if cut is not None:
        sizes = [shape_of(var)[axis] for var in call.eqn.invars]
        pieces = [(size, cuts[axis]) for size, cuts in zip(sizes, call.operand_cuts, strict=True)]
        _aligned(sizes, call.shapes[1][axis], cut, pieces)
    return call.bind()


@_rewrites("gather")
def _gather(call: LocalCall) -> list[Any]:
    eqn, cuts = call.eqn, call.operand_cuts[0]
    numbers = eqn.params["dimension_numbers"]
    shape, slice_sizes = call.shapes[0], eqn.params["slice_sizes"]
    local = local_shape(shape, cuts)
    picked = {dim: cut for dim in gather_picks(eqn) if (cut := cuts[dim]) is not None}
    sizes = tuple(
        size if dim in picked or dim in numbers.operand_batching_dims else min(size, local[dim])
        for dim, size in enumerate(slice_sizes)
    )
    if not picked:
        return call.bind(slice_sizes=sizes)
    # Each place is in one part, which reads it; the others give zero. A filled place is in none,
    # and the first part fills it.
    operand, indices = call.operands[0], _counting(call.operands[1])
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


def _counting(indices: Any) -> Any:
    """Indices in a dtype that counts any dimension: `uint8` does not even say that of 256 rows."""
    small = jnp.iinfo(indices.dtype).bits < 32
    return lax.convert_element_type(indices, np.int32) if small else indices


def _global_places(
    eqn: JaxprEqn, indices: Any, dims: Sequence[int], shape: Sequence[int], window: Sequence[int]
) -> tuple[Any, Any]:
    """Indices within the whole operand, and which of them are discarded as they are outside.

    So are those of a scatter that are promised to be within (the gradient of a lookup), and are
    not: XLA drops these, where it clips what a gather reads.
    """
    last = np.array([shape[dim] - window[dim] for dim in dims])
    places = jnp.clip(indices, 0, last.astype(indices.dtype))
    outside = jnp.zeros(indices.shape[:-1], bool)
    promised = eqn.params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS
    is_dropped = promised and eqn.primitive.name in SCATTERS
    if is_dropped or eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        outside = jnp.any(places != indices, axis=-1)
    return places, outside


def _local_place(place: Any, size: int, cut: DimCut) -> tuple[Any, Any]:
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
def _scatter(call: LocalCall) -> list[Any]:
    eqn, cuts = call.eqn, call.operand_cuts[0]
    numbers = eqn.params["dimension_numbers"]
    shape, updates_shape = (shape_of(eqn.invars[i]) for i in (0, 2))
    picked = {dim: cut for dim in scatter_picks(eqn) if (cut := cuts[dim]) is not None}
    if not picked:
        return call.bind()
    # Each place is in one part; in the others it is out of bounds, and its update is dropped. What
    # is one place is within bounds everywhere.
    operand, indices, updates = call.operands[0], _counting(call.operands[1]), call.operands[2]
    windows = scatter_windows(numbers, len(shape))
    window = [updates_shape[windows[dim]] if dim in windows else 1 for dim in range(len(shape))]
    dims = numbers.scatter_dims_to_operand_dims
    places, outside = _global_places(eqn, indices, dims, shape, window)
    changes = {"mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
    if math.prod(indices.shape[:-1]) == 1:
        *given, kept = _at_one_place(call, picked, places, outside)
        results = bind_with(eqn, given, changes)
        # What a function makes of what is there is something else in each part.
        return results if _replaces(eqn) else [jnp.where(kept, x, operand) for x in results]
    clipped = eqn.params["mode"] == lax.GatherScatterMode.CLIP
    columns = _columns(places if clipped else indices)
    for column, dim in enumerate(dims):
        if dim in picked:
            here, place = _local_place(_columns(places)[column], shape[dim], picked[dim])
            columns[column] = jnp.where(here & ~outside, place, operand.shape[dim])
    return bind_with(eqn, (operand, _rows(columns, indices.dtype), updates), changes)


def _at_one_place(
    call: LocalCall, picked: Mapping[int, DimCut], places: Any, outside: Any
) -> tuple[Any, Any, Any, Any]:
    """Operands of a scatter to one place within the part, and whether it is this part's.

    A part that is not asked writes what is there, or adds nothing.

    XLA makes an updated slice of it, with what is there if the place is outside, and reads that at
    another place if the operand is a slice itself: it does not clamp the sum of both starts.
    """
    eqn, operand, updates = call.eqn, call.operands[0], call.operands[2]
    numbers, shape = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    columns, kept = _columns(places), ~outside
    for column, dim in enumerate(numbers.scatter_dims_to_operand_dims):
        if dim in picked:
            here, place = _local_place(columns[column], shape[dim], picked[dim])
            columns[column], kept = jnp.where(here, place, 0), kept & here
    indices = _rows(columns, places.dtype)
    windows = scatter_windows(numbers, len(shape))
    there = lax.gather(
        operand,
        indices,
        lax.GatherDimensionNumbers(
            offset_dims=numbers.update_window_dims,
            collapsed_slice_dims=numbers.inserted_window_dims,
            start_index_map=numbers.scatter_dims_to_operand_dims,
            operand_batching_dims=numbers.operand_batching_dims,
            start_indices_batching_dims=numbers.scatter_indices_batching_dims,
        ),
        [updates.shape[windows[dim]] if dim in windows else 1 for dim in range(len(shape))],
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    neutral = {"scatter-add": 0, "scatter-sub": 0, "scatter-mul": 1}.get(eqn.primitive.name)
    there = there if neutral is None else jnp.full_like(there, neutral)
    kept = kept.reshape(())
    return operand, indices, jnp.where(kept, updates, there), kept


def _replaces(eqn: JaxprEqn) -> bool:
    """Whether a scatter writes, adds or compares its updates, and no function of what is there."""
    update = eqn.params.get("update_jaxpr")
    if eqn.primitive.name != "scatter" or update is None:
        return True
    return any(update.outvars[0] is given for given in update.invars)


@_rewrites("dynamic_slice")
def _dynamic_slice(call: LocalCall) -> list[Any]:
    sizes = local_shape(call.eqn.params["slice_sizes"], call.result_cuts[0])
    return call.bind(slice_sizes=sizes)


@_rewrites("conv_general_dilated")
def _convolution(call: LocalCall) -> list[Any]:
    # With groups, features are [groups, features of a group] (batches likewise): a cut whose pieces
    # hold whole groups divides the number of groups, any other cut is inside each group.
    lhs_spec = call.eqn.params["dimension_numbers"].lhs_spec
    changes = {}
    for count, dim in (("feature_group_count", lhs_spec[1]), ("batch_group_count", lhs_spec[0])):
        groups, cut = call.eqn.params[count], call.operand_cuts[0][dim]
        size = call.shapes[0][dim]
        if groups > 1 and cut is not None and cut.rest(size) % (size // groups) == 0:
            changes[count] = groups // cut.parts
    return call.bind(**changes)


@_rewrites("random_bits")
def _random_bits(call: LocalCall) -> list[Any]:
    eqn, (keys,), (cuts,) = call.eqn, call.operands, call.result_cuts
    (key_cuts,) = call.operand_cuts
    rank = len(key_cuts)
    partitionable = eqn.ctx.threefry_partitionable
    if random_implementation(eqn.invars[0].aval) == "threefry2x32" and partitionable:
        if [_parts(cut) for cut in cuts[:rank]] != [_parts(cut) for cut in key_cuts]:
            raise NotLocalError("keys and their bits are not cut alike")
        return [threefry_bits(keys, eqn.params["shape"], cuts[rank:], dtype_of(eqn.outvars[0]))]
    (bits,) = call.bind()
    # Keys that are cut have already cut their own dimensions of the bits.
    uncut = (cut if key is None else None for cut, key in zip(cuts, key_cuts, strict=False))
    return [take(bits, (*uncut, *cuts[rank:]))]


def _parts(cut: DimCut | None) -> tuple[int, int] | None:
    """How a dimension is cut, whichever part is held: a traced index cannot be compared."""
    return None if cut is None else (cut.major, cut.parts)
