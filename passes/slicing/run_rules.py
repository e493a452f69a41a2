"""Values in runs along one dimension, and how an equation is cut that reads one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom
from autopar.passes.graph.primitives import MONOID_REDUCTIONS, POSITIONAL, PRODUCTS
from autopar.passes.primitives.factor_rule import FactorRule
from autopar.passes.primitives.shardings import shape_of

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Runs:
    """A value as consecutive runs along one dimension, of these sizes."""

    axis: int
    sizes: Sizes
    atoms: tuple[Atom, ...]


Value = Atom | Runs


def scaled(sizes: Sizes, inner: int) -> Sizes:
    """Sizes of runs in a dimension that has `inner` places for each of the factor's."""
    return tuple(size * inner for size in sizes)


def with_size(aval: Any, axis: int, size: int) -> Any:
    """The type of an array with another size along one dimension."""
    shape = (*aval.shape[:axis], size, *aval.shape[axis + 1 :])
    return jax_compat.array_type(shape, aval.dtype, bool(getattr(aval, "weak_type", False)))


@dataclass(frozen=True)
class RunCut:
    """An equation's cut factor: the sizes of its runs; where it is in each operand and result.

    A place is (dimension, length of one unit of the factor there), or (None, 1).
    """

    sizes: Sizes
    kind: str
    operands: tuple[tuple[int | None, int], ...]
    results: tuple[tuple[int | None, int], ...]


def how_to_cut(eqn: JaxprEqn, rule: FactorRule | None, operands: Sequence[Value]) -> RunCut | None:
    """How an equation is cut along the dimension in which an operand is in runs.

    None if it has to see whole values: no factor of its rule is that dimension's outermost one, or
    cutting it makes parts that the equation itself, with other params, does not compute.
    """
    if rule is None:
        return None
    place = next(i for i, value in enumerate(operands) if isinstance(value, Runs))
    runs = operands[place]
    dims = rule.operands[place][runs.axis]
    if not dims:
        return None
    factor = dims[0]
    kind = rule.factors[factor].kind
    inner = sum(runs.sizes) // rule.factors[factor].size
    if kind == "replicated" or any(size % inner for size in runs.sizes):
        return None
    sizes = tuple(size // inner for size in runs.sizes)

    def where(values: Any, shape: Sequence[int]) -> tuple[int | None, int] | None:
        found = [dim for dim, factors in enumerate(values) if factor in factors]
        if not found:
            return None, 1
        if len(found) > 1 or values[found[0]][0] != factor:
            return None
        return found[0], shape[found[0]] // rule.factors[factor].size

    ins = [where(v, shape_of(x)) for v, x in zip(rule.operands, eqn.invars, strict=True)]
    outs = [where(v, shape_of(x)) for v, x in zip(rule.results, eqn.outvars, strict=True)]
    if any(item is None for item in (*ins, *outs)):
        return None
    here = {item is not None and item[0] is not None for item in outs}
    if here != {kind == "pass"} or (kind != "pass" and eqn.primitive.name not in _REDUCTIONS):
        return None
    return RunCut(
        sizes,
        kind,
        tuple(item for item in ins if item is not None),
        tuple(item for item in outs if item is not None),
    )


# Of a part of the operands, these compute a part of the sum (maximum, ...) with the same params. A
# gather does not, though its rule says "sum": its indices count from the whole operand's start.
_REDUCTIONS = PRODUCTS | MONOID_REDUCTIONS.keys()


def changed_params(eqn: JaxprEqn, cut: RunCut, place: int) -> dict[str, Any] | None:
    """The params that one run needs otherwise, or None where they cannot be told."""
    name, params = eqn.primitive.name, eqn.params
    if name in POSITIONAL:
        return None
    size = cut.sizes[place]

    def shape(values: Any, where: tuple[int | None, int]) -> tuple[int, ...]:
        found = list(values)
        if where[0] is not None:
            found[where[0]] = size * where[1]
        return tuple(found)

    if name in ("broadcast_in_dim", "reshape"):
        key = "shape" if name == "broadcast_in_dim" else "new_sizes"
        return {key: shape(shape_of(eqn.outvars[0]), cut.results[0]), "sharding": None}
    if name == "dynamic_slice":
        return {"slice_sizes": shape(params["slice_sizes"], cut.results[0])}
    if name == "slice":
        dim, inner = cut.operands[0]
        assert dim is not None
        whole = shape_of(eqn.invars[0])[dim]
        if (params["start_indices"][dim], params["limit_indices"][dim]) != (0, whole):
            return None
        if params["strides"] is not None and params["strides"][dim] != 1:
            return None
        limits = list(params["limit_indices"])
        limits[dim] = size * inner
        return {"limit_indices": tuple(limits)}
    if name == "gather":
        dim, inner = cut.operands[0]
        if dim is None:
            return {}
        whole = shape_of(eqn.invars[0])[dim]
        sizes = list(params["slice_sizes"])
        if sizes[dim] == whole and whole > 1:
            sizes[dim] = size * inner
        return {"slice_sizes": tuple(sizes)}
    if name == "conv_general_dilated":
        plain = params["feature_group_count"] == params["batch_group_count"] == 1
        return {} if plain else None
    return {}
