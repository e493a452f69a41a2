"""The program that is made of values in runs: its variables and equations, so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom
from autopar.passes.microbatch.run_steps import combine
from autopar.passes.primitives.cuts import bind_with
from autopar.passes.primitives.factor_rule import FactorRule
from autopar.passes.primitives.shardings import is_key, shape_of
from autopar.passes.slicing.layer_scans import Origins
from autopar.passes.slicing.run_rules import (
    RunCut,
    Runs,
    Sizes,
    Value,
    changed_params,
    how_to_cut,
    scaled,
    with_size,
)


class RunBuilder:
    """Variables, what is known of them, and equations.

    Args:
      origins: says which state leaf a value is made from.
      rules: the factor rules of the old program's equations.

    Attributes:
      env: for every variable of the old program its value.
      eqns: the new equations.
      wanted: leaves that are read in runs: along which dimension, and of which sizes.
    """

    def __init__(self, origins: Origins, rules: Mapping[JaxprEqn, FactorRule]) -> None:
        self.origins, self.rules = origins, rules
        self.wanted: dict[int, tuple[int, Sizes]] = {}
        self.env: dict[Var, Value] = {}
        self.eqns: list[JaxprEqn] = []
        self.made_by: dict[Var, JaxprEqn] = {}
        self.known: dict[Any, Any] = {}  # slices and concatenations that were made
        self.traced: dict[Any, Any] = {}

    # Values.

    def read(self, atom: Atom) -> Value:
        """What is known of a variable."""
        return atom if isinstance(atom, Literal) else self.env[atom]

    def fresh(self, aval: Any, axis: int, sizes: Sizes) -> Runs:
        """New variables for a value in runs."""
        avals = (with_size(aval, axis, size) for size in sizes)
        return Runs(axis, sizes, tuple(jax_compat.new_var(aval) for aval in avals))

    def join(self, value: Value) -> Atom:
        """A value in one piece."""
        if not isinstance(value, Runs):
            return value
        key = ("join", value)
        if key not in self.known:
            axis = value.axis
            (self.known[key],) = self.emit(
                lambda *xs: [lax.concatenate(xs, axis)], value.atoms, key=("join", axis)
            )
        return self.known[key]

    def split(self, value: Value, axis: int, sizes: Sizes) -> tuple[Atom, ...]:
        """A value in runs of these sizes; the leaf that it is made from is wanted so as well."""
        if isinstance(value, Runs):
            if (value.axis, value.sizes) == (axis, sizes):
                return value.atoms
            value = self.join(value)
        else:
            self.want(value, axis, sizes)
        return tuple(self.slice(value, axis, start, stop) for start, stop in ends(sizes))

    def want(self, value: Atom, axis: int, sizes: Sizes) -> None:
        """Ask for the leaf that a value is made from in runs of these sizes."""
        found = self.origins.of(value, axis)
        if found is not None and not is_key(value.aval):
            leaf, dim = found
            self.wanted.setdefault(leaf, (dim, sizes))

    def slice(self, atom: Atom, axis: int, start: int, stop: int) -> Atom:
        """A part of a value along one dimension; of what is broadcast, a smaller broadcast."""
        key = ("slice", atom, axis, start, stop)
        if key in self.known:
            return self.known[key]
        made = self.made_by.get(atom)
        if made is not None and made.primitive.name == "broadcast_in_dim":
            dims = made.params["broadcast_dimensions"]
            if axis not in dims or shape_of(made.invars[0])[dims.index(axis)] == 1:
                shape = with_size(atom.aval, axis, stop - start).shape
                changed = {"shape": shape, "sharding": None}
                self.known[key] = self.bound(made, [made.invars[0]], changed)[0]
                return self.known[key]
        (self.known[key],) = self.emit(
            lambda x: [lax.slice_in_dim(x, start, stop, axis=axis)],
            [atom],
            key=("slice", axis, start, stop),
        )
        return self.known[key]

    # New equations.

    def append(self, eqn: JaxprEqn) -> None:
        """One more equation."""
        self.eqns.append(eqn)
        self.made_by.update((var, eqn) for var in eqn.outvars)

    def bound(
        self, eqn: JaxprEqn, operands: Sequence[Atom], params: Mapping[str, Any]
    ) -> list[Atom]:
        """An equation with other operands and params."""
        return self.emit(
            lambda *xs: bind_with(eqn, xs, params), operands, key=bound_key(eqn, params), like=eqn
        )

    def emit(
        self,
        function: Callable[..., Sequence[Any]],
        operands: Sequence[Atom],
        *,
        key: Any,
        like: JaxprEqn | None = None,
    ) -> list[Atom]:
        """The equations of a traced function of these operands, with its results."""
        closed = self.trace(function, operands, key)
        env: dict[Var, Atom] = {}
        variables = [v for v in operands if not isinstance(v, Literal)]
        env.update(zip(closed.jaxpr.invars, variables, strict=True))

        def at(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        assert not closed.consts
        for eqn in closed.jaxpr.eqns:
            outvars = [jax_compat.new_var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            made = eqn.replace(invars=[at(v) for v in eqn.invars], outvars=outvars)
            if like is not None:
                made = made.replace(source_info=like.source_info)
            elif self.current is not None:
                made = made.replace(source_info=self.current.source_info)
            self.append(made)
        return [at(atom) for atom in closed.jaxpr.outvars]

    current: JaxprEqn | None = None

    def trace(
        self,
        function: Callable[..., Sequence[Any]],
        operands: Sequence[Atom],
        key: Any,
    ) -> ClosedJaxpr:
        """A function of values of these types, traced once for each key."""
        shapes = tuple(
            ("literal", str(v.val)) if isinstance(v, Literal) else str(_struct(v.aval))
            for v in operands
        )
        found = self.traced.get((key, shapes))
        if found is None:
            structs = [_struct(v.aval) for v in operands if not isinstance(v, Literal)]

            def whole(*arrays: Any) -> Sequence[Any]:
                given = iter(arrays)
                return function(*(v.val if isinstance(v, Literal) else next(given)
                                  for v in operands))  # fmt: skip

            found = self.traced[key, shapes] = jax.make_jaxpr(whole)(*structs)
        return found

    # Equations cut by their rules.

    def by_rule(self, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value] | None:
        """One equation per run, or None if the equation must see whole values."""
        cut = how_to_cut(eqn, self.rules.get(eqn), operands)
        if cut is None:
            return None
        changes = [changed_params(eqn, cut, place) for place in range(len(cut.sizes))]
        if any(change is None for change in changes):
            return None
        split = [
            self.split(value, dim, scaled(cut.sizes, inner)) if dim is not None
            else (self.join(value),) * len(cut.sizes)
            for value, (dim, inner) in zip(operands, cut.operands, strict=True)
        ]  # fmt: skip
        groups = [[group[place] for group in split] for place in range(len(cut.sizes))]
        if not all(
            self.fits(eqn, cut, place, groups[place], change or {})
            for place, change in enumerate(changes)
        ):
            return None
        made = [
            self.bound(eqn, group, change or {})
            for group, change in zip(groups, changes, strict=True)
        ]
        results: list[Value] = []
        for number, (dim, inner) in enumerate(cut.results):
            parts = tuple(atoms[number] for atoms in made)
            if dim is not None:
                results.append(Runs(dim, scaled(cut.sizes, inner), parts))
                continue
            combine = _combining(cut.kind)
            total = parts[0]
            for part in parts[1:]:
                (total,) = self.emit(combine, [total, part], key=("combine", cut.kind))
            results.append(total)
        return results

    def fits(
        self,
        eqn: JaxprEqn,
        cut: RunCut,
        place: int,
        operands: Sequence[Atom],
        changes: Mapping[str, Any],
    ) -> bool:
        """Whether the equation with these params takes a run, and gives results of its size.

        It may not if its params hold sizes that `changed_params` does not know of.
        """
        try:
            found = self.trace(
                lambda *xs: bind_with(eqn, xs, changes), operands, bound_key(eqn, changes)
            )
        except (TypeError, ValueError):
            return False
        for atom, var, (dim, inner) in zip(
            found.jaxpr.outvars, eqn.outvars, cut.results, strict=True
        ):
            aval = var.aval if dim is None else with_size(var.aval, dim, cut.sizes[place] * inner)
            if atom.aval.shape != aval.shape:
                return False
        return True


def _combining(kind: str) -> Callable[..., list[Any]]:
    return lambda one, other: [combine(kind, one, other)]


def bound_key(eqn: JaxprEqn, changes: Mapping[str, Any]) -> Any:
    """Equations are compared by identity; those that are bound are the program's, which is held."""
    return id(eqn), tuple(sorted((name, repr(value)) for name, value in changes.items()))


def ends(sizes: Sizes) -> list[tuple[int, int]]:
    """Where each run begins and ends."""
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
