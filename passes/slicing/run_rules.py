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
How = tuple[int, Sizes]  # the dimension in which a value is in runs, and their sizes


@dataclass(frozen=True)
class Runs:
    """A value as consecutive runs along one dimension, of these sizes."""

    axis: int
    sizes: Sizes
    atoms: tuple[Atom, ...]

    @property
    def how(self) -> How:
        """The dimension and the sizes."""
        return self.axis, self.sizes


Value = Atom | Runs


def atoms_of(value: Value) -> tuple[Atom, ...]:
    """A value's runs, or itself."""
    return value.atoms if isinstance(value, Runs) else (value,)


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
    return RunCut(sizes, kind, ins, outs)


# Of a part of the operands, these compute a part of the sum (maximum, ...) with the same params. A
# gather does not, though its rule says "sum": its indices count from the whole operand's start.
_REDUCTIONS = PRODUCTS | MONOID_REDUCTIONS.keys()


def changed_params(eqn: JaxprEqn, cut: RunCut, size: int) -> dict[str, Any] | None:
    """The params that a run of this size needs otherwise, or None where they cannot be told."""
    name, params = eqn.primitive.name, eqn.params
    if name in POSITIONAL:
        return None

    def shape(values: Sequence[int], where: tuple[int | None, int]) -> tuple[int, ...]:
        dim, inner = where
        return tuple(size * inner if d == dim else length for d, length in enumerate(values))

    if name in ("broadcast_in_dim", "reshape"):
        key = "shape" if name == "broadcast_in_dim" else "new_sizes"
        return {key: shape(shape_of(eqn.outvars[0]), cut.results[0]), "sharding": None}
    if name == "dynamic_slice":
        return {"slice_sizes": shape(params["slice_sizes"], cut.results[0])}
    if name == "slice":
        dim = cut.operands[0][0]
        assert dim is not None
        whole = shape_of(eqn.invars[0])[dim]
        if (params["start_indices"][dim], params["limit_indices"][dim]) != (0, whole):
            return None
        if params["strides"] is not None and params["strides"][dim] != 1:
            return None
        return {"limit_indices": shape(params["limit_indices"], cut.operands[0])}
    if name == "gather":
        dim, sizes = cut.operands[0][0], params["slice_sizes"]
        if dim is not None and sizes[dim] == shape_of(eqn.invars[0])[dim] > 1:
            return {"slice_sizes": shape(sizes, cut.operands[0])}
        return {}
    if name == "conv_general_dilated":
        return {} if params["feature_group_count"] == params["batch_group_count"] == 1 else None
    return {}
