"""Values in runs along one dimension, and how an equation is cut that reads one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom
from autopar.passes.primitives.factor_rule import FactorRule
from autopar.passes.primitives.loop_sizes import LoopPlaces, places_of_loop

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
class RunCut(LoopPlaces):
    """An equation's cut loop: the sizes of its runs."""

    sizes: Sizes

    def fits(self, eqn: JaxprEqn, made: ClosedJaxpr, size: int) -> bool:
        """Whether what was made of an equation gives results as long as a run of this size."""
        wanted = [
            tuple(size * inner if d == dim else n for d, n in enumerate(var.aval.shape))
            for var, (dim, inner) in zip(eqn.outvars, self.results, strict=True)
        ]
        return [atom.aval.shape for atom in made.jaxpr.outvars] == wanted


def how_to_cut(eqn: JaxprEqn, rule: FactorRule | None, operands: Sequence[Value]) -> RunCut | None:
    """How an equation is cut along the dimension in which an operand is in runs.

    None if it has to see whole values: no factor of its rule is that dimension's outermost one, or
    cutting it makes parts that the equation itself, with other params, does not compute.
    """
    place = next(i for i, value in enumerate(operands) if isinstance(value, Runs))
    runs = operands[place]
    places = None if rule is None else places_of_loop(eqn, rule, place, runs.axis)
    if places is None:
        return None
    inner = sum(runs.sizes) // places.size
    if any(size % inner for size in runs.sizes):
        return None
    sizes = tuple(size // inner for size in runs.sizes)
    return RunCut(places.size, places.kind, places.operands, places.results, sizes)
