"""The program that is made of values in runs: its variables and equations, so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from autopar.arrays.typed_keys import is_key
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom, variables
from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.microbatch.run_steps import combine, local_struct
from autopar.passes.primitives.cuts import bind_with
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.loop_sizes import changed_params
from autopar.passes.primitives.shardings import shape_of
from autopar.passes.slicing.layer_scans import Origins
from autopar.passes.slicing.run_rules import (
    How,
    Runs,
    Sizes,
    Value,
    atoms_of,
    how_to_cut,
    scaled,
    with_size,
)


class RunBuilder:
    """Variables, what is known of them, and equations. `rules` are those of the old program.

    Attributes:
      env: for every variable of the old program its value.
      eqns: the new equations.
      wanted: leaves that are read in runs: along which dimension, and of which sizes.
    """

    def __init__(self, origins: Origins, rules: Rules) -> None:
        self.origins, self.rules = origins, rules
        self.wanted: dict[int, How] = {}
        self.env: dict[Var, Value] = {}
        self.eqns: list[JaxprEqn] = []
        self.made_by: dict[Var, JaxprEqn] = {}
        self.known: dict[Hashable, Atom] = {}  # slices and concatenations that were made
        self.filled: dict[tuple[Var, int], bool] = {}
        self.traced: dict[Hashable, ClosedJaxpr] = {}
        self.current: JaxprEqn | None = None

    def read(self, atom: Atom) -> Value:
        """What is known of a variable."""
        return atom if isinstance(atom, Literal) else self.env[atom]

    def define(self, var: Var, how: How | None) -> tuple[Atom, ...]:
        """The variables that hold a value: new ones if it is in runs, else its own."""
        self.env[var] = var
        if how is not None:
            axis, sizes = how
            avals = (with_size(var.aval, axis, size) for size in sizes)
            self.env[var] = Runs(axis, sizes, tuple(jax_compat.new_var(aval) for aval in avals))
        return atoms_of(self.env[var])

    def join(self, value: Value) -> Atom:
        """A value in one piece."""
        if not isinstance(value, Runs):
            return value
        key, axis = ("join", value), value.axis
        if key not in self.known:
            (self.known[key],) = self.emit(
                lambda *x: [lax.concatenate(x, axis)], value.atoms, key=("join", axis)
            )
        return self.known[key]

    def split(self, value: Value, axis: int, sizes: Sizes) -> tuple[Atom, ...]:
        """A value in runs of these sizes; the leaf that it is made from is wanted so as well."""
        if isinstance(value, Runs):
            if value.how == (axis, sizes):
                return value.atoms
            value = self.join(value)
        else:
            self.want(value, axis, sizes)
        return tuple(self.slice(value, axis, start, stop) for start, stop in ends(sizes))

    def want(self, value: Atom, axis: int, sizes: Sizes) -> None:
        """Ask for the leaf that a value is made from in runs of these sizes."""
        found = self.origins.of(value, axis)
        if found is not None and not is_key(value.aval.dtype):
            leaf, dim = found
            self.wanted.setdefault(leaf, (dim, sizes))

    def slice(self, atom: Atom, axis: int, start: int, stop: int) -> Atom:
        """A part of a value along one dimension; of what is broadcast, a smaller broadcast.

        So all parts of one size are made alike, wherever they begin.
        """
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
        elif made is not None and self.is_filled(atom, axis):
            parts = [self.slice(x, axis, start, stop) if shape_of(x) else x for x in made.invars]
            self.known[key] = self.bound(made, parts, {})[0]
            return self.known[key]
        rows = ("slice", axis, start, stop)
        (self.known[key],) = self.emit(
            lambda x: [lax.slice_in_dim(x, start, stop, axis=axis)], [atom], key=rows
        )
        return self.known[key]

    def is_filled(self, atom: Atom, axis: int) -> bool:
        """Whether a value is made element by element of what is broadcast along a dimension."""
        if isinstance(atom, Literal) or not shape_of(atom):
            return True
        made, key = self.made_by.get(atom), (atom, axis)
        if made is None:
            return False
        if made.primitive.name == "broadcast_in_dim":
            return axis not in made.params["broadcast_dimensions"]
        if key not in self.filled:
            is_made_so = made.primitive.name in ELEMENTWISE
            self.filled[key] = is_made_so and all(self.is_filled(x, axis) for x in made.invars)
        return self.filled[key]

    def append(self, eqn: JaxprEqn) -> None:
        """One more equation."""
        self.eqns.append(eqn)
        for var in eqn.outvars:
            self.made_by[var] = eqn

    def bound(
        self, eqn: JaxprEqn, operands: Sequence[Atom], params: Mapping[str, Any]
    ) -> list[Atom]:
        """An equation with other operands and params."""
        key = _bound_key(eqn, params)
        return self.emit(lambda *xs: bind_with(eqn, xs, params), operands, key=key, like=eqn)

    def emit(
        self,
        function: Callable[..., Sequence[Any]],
        operands: Sequence[Atom],
        *,
        key: Hashable,
        like: JaxprEqn | None = None,
    ) -> list[Atom]:
        """The equations of a traced function of these operands, with its results."""
        return self.placed(self.trace(function, operands, key), operands, like)

    def placed(
        self, closed: ClosedJaxpr, operands: Sequence[Atom], like: JaxprEqn | None
    ) -> list[Atom]:
        """The equations of what was traced, with these operands, and its results."""
        assert not closed.consts
        env = dict(zip(closed.jaxpr.invars, variables(operands), strict=True))
        origin = like or self.current

        def at(atoms: Sequence[Atom]) -> list[Atom]:
            return [atom if isinstance(atom, Literal) else env[atom] for atom in atoms]

        for eqn in closed.jaxpr.eqns:
            outvars = [jax_compat.new_var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            info = eqn.source_info if origin is None else origin.source_info
            self.append(eqn.replace(invars=at(eqn.invars), outvars=outvars, source_info=info))
        return at(closed.jaxpr.outvars)

    def trace(
        self, function: Callable[..., Sequence[Any]], operands: Sequence[Atom], key: Hashable
    ) -> ClosedJaxpr:
        """A function of values of these types, traced once for each key."""
        types = tuple(
            ("literal", str(v.val)) if isinstance(v, Literal) else _type_key(v.aval)
            for v in operands
        )
        if (key, types) not in self.traced:

            def whole(*arrays: Any) -> Sequence[Any]:
                given = iter(arrays)
                return function(
                    *(v.val if isinstance(v, Literal) else next(given) for v in operands)
                )

            structs = [local_struct(var.aval) for var in variables(operands)]
            self.traced[key, types] = jax.make_jaxpr(whole)(*structs)
        return self.traced[key, types]

    def by_rule(self, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value] | None:
        """One equation per run, or None if the equation must see whole values."""
        cut = how_to_cut(eqn, self.rules.get(eqn), operands)
        if cut is None:
            return None
        found = [changed_params(eqn, [(cut, size)]) for size in cut.sizes]
        changes = [change for change in found if change is not None]
        if len(changes) < len(found):
            return None

        split = [
            self.split(value, dim, scaled(cut.sizes, inner)) if dim is not None
            else (self.join(value),) * len(cut.sizes)
            for value, (dim, inner) in zip(operands, cut.operands, strict=True)
        ]  # fmt: skip
        groups = [[atoms[place] for atoms in split] for place in range(len(cut.sizes))]
        keys = [_bound_key(eqn, change) for change in changes]
        try:
            traced = [
                self.trace(lambda *xs, change=change: bind_with(eqn, xs, change), group, key)
                for group, change, key in zip(groups, changes, keys, strict=True)
            ]
        except (TypeError, ValueError):  # its params hold sizes that are not known of
            return None
        # It may also take a run, and give results of other sizes.
        if not all(map(cut.fits, itertools.repeat(eqn), traced, cut.sizes)):
            return None
        made = [self.placed(*run, eqn) for run in zip(traced, groups, strict=True)]
        results: list[Value] = []
        for parts, (dim, inner) in zip(zip(*made, strict=True), cut.results, strict=True):
            if dim is not None:
                results.append(Runs(dim, scaled(cut.sizes, inner), parts))
                continue
            total = parts[0]
            for part in parts[1:]:
                key = ("combine", cut.kind)
                (total,) = self.emit(lambda a, b: [combine(cut.kind, a, b)], [total, part], key=key)
            results.append(total)
        return results


def _type_key(aval: Any) -> Hashable:
    return aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False))


def _bound_key(eqn: JaxprEqn, changes: Mapping[str, Any]) -> Hashable:
    """Equations are compared by identity; those that are bound are the program's, which is held."""
    return id(eqn), tuple(sorted((name, repr(value)) for name, value in changes.items()))


def ends(sizes: Sizes) -> list[tuple[int, int]]:
    """Where each run begins and ends."""
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
