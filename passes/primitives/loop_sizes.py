"""An equation where one of its loops has another size: a run of layers, or the blocks of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn

from autopar.passes.graph.primitives import MONOID_REDUCTIONS, POSITIONAL, PRODUCTS
from autopar.passes.primitives.factor_rule import FactorRule
from autopar.passes.primitives.shardings import shape_of


@dataclass(frozen=True)
class LoopPlaces:
    """A loop of an equation: its size, its kind, and where it is in each operand and result.

    A place is (dimension, length of one unit of the loop there), or (None, 1).
    """

    size: int
    kind: str
    operands: tuple[tuple[int | None, int], ...]
    results: tuple[tuple[int | None, int], ...]


def places_of_loop(eqn: JaxprEqn, rule: FactorRule, operand: int, dim: int) -> LoopPlaces | None:
    """Where the outermost loop of an operand's dimension is.

    None where the equation, with other params, does not compute what it computes of parts of it: it
    is no dimension's outermost one, or must not be cut.
    """
    dims = rule.operands[operand][dim]
    if not dims:
        return None
    factor = dims[0]
    kind = rule.factors[factor].kind
    if kind == "replicated":
        return None
    places: list[tuple[int | None, int]] = []
    for value_dims, atom in zip(
        (*rule.operands, *rule.results), (*eqn.invars, *eqn.outvars), strict=True
    ):
        found = [dim for dim, factors in enumerate(value_dims) if factor in factors]
        if len(found) > 1 or (found and value_dims[found[0]][0] != factor):
            return None
        length = shape_of(atom)[found[0]] // rule.factors[factor].size if found else 1
        places.append((found[0] if found else None, length))
    ins, outs = tuple(places[: len(eqn.invars)]), tuple(places[len(eqn.invars) :])
    here = {dim is not None for dim, _ in outs}
    if here != {kind == "pass"} or (kind != "pass" and eqn.primitive.name not in _REDUCTIONS):
        return None
    return LoopPlaces(rule.factors[factor].size, kind, ins, outs)


# Of a part of the operands, these compute a part of the sum (maximum, ...) with the same params. A
# gather does not, though its rule says "sum": its indices count from the whole operand's start.
_REDUCTIONS = PRODUCTS | MONOID_REDUCTIONS.keys()


def changed_params(eqn: JaxprEqn, loops: Sequence[tuple[LoopPlaces, int]]) -> dict[str, Any] | None:
    """The params that are others where loops have these sizes; None where they cannot be told."""
    name, params = eqn.primitive.name, eqn.params
    if name in POSITIONAL:
        return None
    operand = {p.operands[0][0]: size * p.operands[0][1] for p, size in loops if p.operands}
    result = {p.results[0][0]: size * p.results[0][1] for p, size in loops}

    def shape(values: Sequence[int], sizes: Mapping[Any, int]) -> tuple[int, ...]:
        return tuple(sizes.get(d, length) for d, length in enumerate(values))

    if name in ("broadcast_in_dim", "reshape"):
        key = "shape" if name == "broadcast_in_dim" else "new_sizes"
        return {key: shape(shape_of(eqn.outvars[0]), result), "sharding": None}
    if name == "dynamic_slice":
        return {"slice_sizes": shape(params["slice_sizes"], result)}
    if name == "slice":
        for dim in operand:
            assert dim is not None
            whole = shape_of(eqn.invars[0])[dim]
            if (params["start_indices"][dim], params["limit_indices"][dim]) != (0, whole):
                return None
            if params["strides"] is not None and params["strides"][dim] != 1:
                return None
        return {"limit_indices": shape(params["limit_indices"], operand)}
    if name == "gather":
        sizes, whole_sizes = params["slice_sizes"], shape_of(eqn.invars[0])
        windows = {
            d: n for d, n in operand.items() if d is not None and sizes[d] == whole_sizes[d] > 1
        }
        return {"slice_sizes": shape(sizes, windows)} if windows else {}
    if name == "conv_general_dilated":
        return {} if params["feature_group_count"] == params["batch_group_count"] == 1 else None
    return {}
