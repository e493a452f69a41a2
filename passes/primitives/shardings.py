"""Which dimensions of an equation's operands and results must stay whole.

`whole_dims` is read by `bind_local`, which refuses to cut such a dimension, and by `populate`,
which therefore never offers it: it is the one place where the two agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.lax import GatherDimensionNumbers, GatherScatterMode, ScatterDimensionNumbers

from autopar.passes.graph.primitives import (
    CUMULATIVE,
    CUT_ANYWHERE,
    DRAWS,
    ELEMENTWISE,
    MATRIX_FUNCTIONS,
    SCATTERS,
    WINDOWS,
)

Dims = tuple[int, ...]
ValueDims = tuple[Dims, ...]  # one entry per operand or result
Rule = TypeVar("Rule")


def registrar(table: dict[str, Rule]) -> Callable[..., Callable[[Rule], Rule]]:
    """A decorator that takes names of primitives, and files its function in `table` under them."""

    def named(*names: str) -> Callable[[Rule], Rule]:
        def register(function: Rule) -> Rule:
            table.update(dict.fromkeys(names, function))
            return function

        return register

    return named


def shape_of(var: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return var.aval.shape


def dtype_of(var: Any) -> Any:
    """The dtype of a variable or literal."""
    return var.aval.dtype


@cache
def is_tiny_float(dtype: Any) -> bool:
    """Whether sums in a dtype must be had at once: to round each part to eight bits would show."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 16


def random_implementation(aval: Any) -> str:
    """The name of the generator that a typed key array's dtype stands for."""
    return aval.dtype._impl.name


def _none(values: Sequence[Any]) -> ValueDims:
    return ((),) * len(values)


def _all(values: Sequence[Any], first: int = 0) -> ValueDims:
    """All dimensions of the values, but for those before the first one."""
    return tuple(tuple(range(first, len(shape_of(var)))) for var in values)


def _uncut(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    return _all(eqn.invars), _all(eqn.outvars)


def _cut_anywhere(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    return _none(eqn.invars), _none(eqn.outvars)


def whole_dims(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    """Dimensions of each operand and of each result that `bind_local` cannot cut."""
    name = eqn.primitive.name
    return _WHOLE.get(name, _cut_anywhere if is_known(name) else _uncut)(eqn)


def is_known(name: str) -> bool:
    """Whether there is a way to evaluate the primitive on slices."""
    return name in ELEMENTWISE or name in CUT_ANYWHERE or name in _WHOLE


_Whole = Callable[[JaxprEqn], tuple[ValueDims, ValueDims]]
_WHOLE: dict[str, _Whole] = {}
_whole = registrar(_WHOLE)


_WHOLE["random_seed"] = _cut_anywhere


@_whole(*DRAWS)
def _random(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    # Generators other than threefry may draw one stream for a whole batch of keys.
    name, key = eqn.primitive.name, eqn.invars[0].aval
    rank, out_rank = len(key.shape), len(shape_of(eqn.outvars[0]))
    local_keys = random_implementation(key) == "threefry2x32"
    if name == "random_fold_in":
        return (_cut_anywhere if local_keys else _uncut)(eqn)
    if name == "random_bits":
        return (((),) if local_keys else _all(eqn.invars)), ((),)
    keys: Dims = () if local_keys else tuple(range(rank))
    drawn = tuple(range(rank, out_rank))
    if name == "random_gamma":
        return (keys, (*keys, *drawn)), ((*keys, *drawn),)
    return (keys,), ((*keys, *drawn),)


@_whole("random_wrap")
def _random_wrap(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    return _all(eqn.invars, len(shape_of(eqn.outvars[0]))), ((),)


@_whole("random_unwrap")
def _random_unwrap(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    return ((),), _all(eqn.outvars, len(shape_of(eqn.invars[0])))


def _along(dims_of: Callable[[JaxprEqn], Sequence[int]], results: bool = True) -> _Whole:
    """The same dimensions of every operand (and result)."""

    def function(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
        dims = tuple(dims_of(eqn))
        return (dims,) * len(eqn.invars), (dims if results else (),) * len(eqn.outvars)

    return function


_WHOLE.update(dict.fromkeys(CUMULATIVE, _along(lambda eqn: (eqn.params["axis"],))))
_WHOLE["sort"] = _along(lambda eqn: (eqn.params["dimension"],))
_WHOLE["rev"] = _along(lambda eqn: eqn.params["dimensions"])
_WHOLE["argmax"] = _WHOLE["argmin"] = _along(lambda eqn: eqn.params["axes"], results=False)
_WHOLE["reduce_xor"] = _along(lambda eqn: eqn.params["axes"], results=False)


@_whole("reshape")
def _reshape(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    permutes = eqn.params["dimensions"] is not None  # which slices do not show
    return (_uncut if permutes else _cut_anywhere)(eqn)


@_whole("approx_top_k", "top_k")
def _top_k(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    rank, along = len(shape_of(eqn.invars[0])), eqn.params.get("reduction_dimension", -1)
    axis = eqn.params.get("axis", along) % rank
    return ((axis,),), ((axis,),) * 2


@_whole("stack")
def _stack(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    return _none(eqn.invars), ((eqn.params["axis"],),)


@_whole("unstack")
def _unstack(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    return ((eqn.params["axis"],),), _none(eqn.outvars)


@_whole("fft")
def _fft(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    rank = len(shape_of(eqn.outvars[0]))
    dims = tuple(range(rank - len(eqn.params["fft_lengths"]), rank))
    return (dims,), (dims,)


@_whole("bitcast_convert_type")
def _bitcast(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    common = min(len(shape_of(eqn.invars[0])), len(shape_of(eqn.outvars[0])))
    return _all(eqn.invars, common), _all(eqn.outvars, common)


def _matrix(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    batch = matrix_batch_rank(eqn)
    operands, results = _all(eqn.invars, batch), _all(eqn.outvars, batch)
    free = solved_dim(eqn)
    if free is None:
        return operands, results
    solved = tuple(dim for dim in results[0] if dim != free)
    return (*operands[:-1], solved), (solved,)


def solved_dim(eqn: JaxprEqn) -> int | None:
    """The dimension of the right-hand sides of a triangular solve, each of which is for itself."""
    if eqn.primitive.name != "triangular_solve":
        return None
    rank = len(shape_of(eqn.outvars[0]))
    return rank - 1 if eqn.params["left_side"] else rank - 2


def matrix_batch_rank(eqn: JaxprEqn) -> int:
    """How many leading dimensions of a matrix function are a batch."""
    vectors = ("lu_pivots_to_permutation", "tridiagonal_solve")
    trailing = 1 if eqn.primitive.name in vectors else 2
    return len(shape_of(eqn.invars[0])) - trailing


_WHOLE.update(dict.fromkeys(MATRIX_FUNCTIONS, _matrix))


@_whole("gather")
def _gather(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    numbers: GatherDimensionNumbers = eqn.params["dimension_numbers"]
    operand, indices = (shape_of(var) for var in eqn.invars)
    sizes = eqn.params["slice_sizes"]
    windows = gather_windows(numbers, len(operand))
    picked = gather_picks(eqn)
    whole = tuple(
        dim
        for dim in range(len(operand))
        if dim not in numbers.operand_batching_dims
        and sizes[dim] != operand[dim]
        and dim not in picked
    )
    # A window that is smaller than its dimension cannot be cut even where the dimension can.
    result = tuple(place for dim, place in windows.items() if sizes[dim] != operand[dim])
    return (whole, (len(indices) - 1,)), (result,)


def gather_windows(numbers: GatherDimensionNumbers, operand_rank: int) -> dict[int, int]:
    """The result dimension of each operand dimension that a gather takes a window of."""
    taken = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    dims = [dim for dim in range(operand_rank) if dim not in taken]
    return dict(zip(dims, numbers.offset_dims, strict=True))


_CHECKED_MODES = (
    GatherScatterMode.CLIP,
    GatherScatterMode.FILL_OR_DROP,
    GatherScatterMode.PROMISE_IN_BOUNDS,
)


def gather_picks(eqn: JaxprEqn) -> Dims:
    """Operand dimensions of which each index picks one place: cut, all but one part give zero."""
    shape, dtype = shape_of(eqn.invars[0]), dtype_of(eqn.invars[0])
    if eqn.params["mode"] not in _CHECKED_MODES or jnp.issubdtype(dtype, jax.dtypes.extended):
        return ()
    return tuple(
        dim
        for dim in eqn.params["dimension_numbers"].start_index_map
        if eqn.params["slice_sizes"][dim] == 1 and shape[dim] > 1
    )


@_whole(*SCATTERS)
def _scatter(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    numbers: ScatterDimensionNumbers = eqn.params["dimension_numbers"]
    operand, indices, updates = (shape_of(var) for var in eqn.invars)
    windows = scatter_windows(numbers, len(operand))
    picked = scatter_picks(eqn)
    partial = [
        dim
        for dim in range(len(operand))
        if dim not in numbers.operand_batching_dims
        and (dim not in windows or updates[windows[dim]] != operand[dim])
    ]
    whole = tuple(dim for dim in partial if dim not in picked)
    window = tuple(place for dim, place in windows.items() if dim in partial)
    return (whole, (len(indices) - 1,), window), (whole,)


def scatter_windows(numbers: ScatterDimensionNumbers, operand_rank: int) -> dict[int, int]:
    """The dimension of the updates that holds the window of each operand dimension."""
    taken = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    dims = [dim for dim in range(operand_rank) if dim not in taken]
    return dict(zip(dims, numbers.update_window_dims, strict=True))


def scatter_picks(eqn: JaxprEqn) -> Dims:
    """Operand dimensions in which each index names one place: cut, other parts drop the update."""
    numbers: ScatterDimensionNumbers = eqn.params["dimension_numbers"]
    shape, updates = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    if eqn.params["mode"] not in _CHECKED_MODES:
        return ()
    windows = scatter_windows(numbers, len(shape))
    return tuple(
        dim
        for dim in numbers.scatter_dims_to_operand_dims
        if shape[dim] > 1 and (dim not in windows or updates[windows[dim]] == 1)
    )


@_whole("dynamic_slice")
def _dynamic_slice(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    dims = _differing(eqn.invars[0], eqn.outvars[0])
    return (dims, *_none(eqn.invars[1:])), (dims,)


@_whole("dynamic_update_slice")
def _dynamic_update_slice(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    dims = _differing(eqn.invars[0], eqn.invars[1])
    return (dims, dims, *_none(eqn.invars[2:])), (dims,)


def _differing(one: Any, other: Any) -> Dims:
    pairs = zip(shape_of(one), shape_of(other), strict=True)
    return tuple(dim for dim, (a, b) in enumerate(pairs) if a != b)


@_whole("conv_general_dilated")
def _convolution(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    numbers = eqn.params["dimension_numbers"]
    return (numbers.lhs_spec[2:], numbers.rhs_spec[2:]), (numbers.out_spec[2:],)


@_whole(*WINDOWS)
def _windowed(eqn: JaxprEqn) -> tuple[ValueDims, ValueDims]:
    params = eqn.params
    rank = len(params["window_dimensions"])
    ones = (1,) * rank
    dims = tuple(
        dim
        for dim in range(rank)
        if params["window_dimensions"][dim] != 1
        or params["window_strides"][dim] != 1
        or tuple(params["padding"][dim]) != (0, 0)
        or params.get("base_dilation", ones)[dim] != 1
        or params.get("window_dilation", ones)[dim] != 1
    )
    operands = tuple(dims if len(shape_of(var)) == rank else () for var in eqn.invars)
    return operands, (dims,) * len(eqn.outvars)


# Known, and never cut: their effect or their single stream of bits belongs to the whole.
_WHOLE.update(
    dict.fromkeys(("rng_bit_generator", "rng_uniform", "debug_callback", "debug_print"), _uncut)
)
_WHOLE["empty2"] = _uncut  # the scalar that a scan's stacks start from (JAX 0.12)
