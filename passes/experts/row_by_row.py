"""What equations do with rows, the first dimension: take, put, keep each for itself, add them."""

from __future__ import annotations

from collections.abc import Callable

from jax.extend.core import JaxprEqn

from autopar.passes.graph.graph import Atom
from autopar.passes.graph.primitives import ELEMENTWISE, MONOID_REDUCTIONS, REDUCTIONS
from autopar.passes.primitives.ragged_products import RaggedDims
from autopar.passes.primitives.shardings import shape_of

IsSo = Callable[[Atom], bool]


def is_grouped(eqn: JaxprEqn) -> bool:
    """Whether an equation multiplies rows, sorted in one list, by groups."""
    if eqn.primitive.name != "ragged_dot_general" or eqn.params["group_offset"] is not None:
        return False
    dims = RaggedDims.of(eqn)
    return len(shape_of(eqn.invars[2])) == 1 and dims.rows == 0 and not dims.left_batch


def takes_rows(eqn: JaxprEqn) -> bool:
    """Whether `x[indices]` takes whole rows of x, one for each index."""
    numbers, shape = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    return bool(
        numbers.collapsed_slice_dims == (0,)
        and numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == tuple(range(1, len(shape)))
        and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
        and len(shape_of(eqn.invars[1])) == 2
    )


def puts_rows(eqn: JaxprEqn) -> bool:
    """Whether whole rows are put to, or combined with, what is there, one for each index."""
    numbers = eqn.params["dimension_numbers"]
    shape, indices, rows = map(shape_of, eqn.invars)
    return bool(
        numbers.inserted_window_dims == (0,)
        and numbers.scatter_dims_to_operand_dims == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.update_window_dims) == tuple(range(1, len(shape)))
        and rows[1:] == shape[1:]
        and len(indices) == 2
    )


def adds_rows(eqn: JaxprEqn, is_local: IsSo, is_same_for_all: IsSo) -> bool:
    """Whether rows are summed, or combined by another monoid.

    Args:
      eqn: with operands that have these rows.
      is_local: whether an operand is one of them.
      is_same_for_all: whether all rows of another operand are equal.
    """
    name = eqn.primitive.name
    if name in MONOID_REDUCTIONS and "axes" in eqn.params:
        return 0 in eqn.params["axes"]
    if name == "dot_general":
        (left, right), _ = eqn.params["dimension_numbers"]
        return (0, 0) in zip(left, right, strict=True) and all(map(is_local, eqn.invars))
    if name == "scatter-add":  # rows to what they name themselves
        base, indices, updates = eqn.invars
        numbers = eqn.params["dimension_numbers"]
        is_plain = 0 not in numbers.update_window_dims and not numbers.operand_batching_dims
        are_rows = len(shape_of(indices)) > 1 and shape_of(indices)[:1] == shape_of(updates)[:1]
        return (
            is_plain
            and are_rows
            and not is_local(base)
            and is_local(indices)
            and (is_local(updates) or is_same_for_all(updates))
        )
    return False


def keeps_rows(eqn: JaxprEqn, is_local: IsSo, is_same_for_all: IsSo) -> bool:
    """Whether each row of the results is made of the same rows of operands; as `adds_rows`."""
    name, params = eqn.primitive.name, eqn.params
    rows = {shape_of(atom)[0] for atom in eqn.invars if is_local(atom)}
    if any(shape_of(var)[:1] != tuple(rows) for var in eqn.outvars):
        return False
    others = [atom for atom in eqn.invars if not is_local(atom)]
    if name == "gather":  # from what rows name themselves
        operand, indices = eqn.invars
        numbers = params["dimension_numbers"]
        is_plain = 0 not in numbers.offset_dims and not numbers.operand_batching_dims
        is_plain = is_plain and len(shape_of(indices)) > 1
        return is_plain and not is_local(operand) and is_local(indices)
    if name == "dot_general":
        (contracted, _), (batch, _) = params["dimension_numbers"]
        first, second = eqn.invars
        is_left = is_local(first) and not is_local(second)
        return is_left and 0 not in contracted and not batch
    if not all(map(is_same_for_all, others)):
        return False
    if name in ELEMENTWISE or name in ("reshape", "squeeze"):
        return True
    if name == "broadcast_in_dim":
        return tuple(params["broadcast_dimensions"])[:1] == (0,)
    if name in REDUCTIONS:
        return 0 not in params.get("axes", (0,))
    if name == "concatenate":
        return bool(params["dimension"] != 0)
    if name == "split":
        return bool(params["axis"] != 0)
    if name == "slice":
        return params["start_indices"][0] == 0 and (params["strides"] or (1,))[0] == 1
    if name == "pad":
        return tuple(params["padding_config"][0]) == (0, 0, 0)
    return name == "transpose" and params["permutation"][0] == 0
