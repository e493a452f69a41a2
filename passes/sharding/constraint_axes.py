"""Which axes of the plan's logical mesh stand for those that the user's constraints name.

The names of the user's axes mean nothing to a plan; their sizes do. Axes that always cut the same
dimensions together are one axis here. An axis of the user's is matched with one or several axes
of the logical mesh of the same size in all, and no two with the same one. So `data=4, model=2`
is `x=4, y=2` or `x=2, y=2, z=2` but not `x=8`, and `data=2, fsdp=4` is `x=8` where both always cut
one dimension.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import Jaxpr, JaxprEqn

from autopar.base.cluster import axis_names
from autopar.base.errors import ConstraintWarning
from autopar.base.units import format_mesh
from autopar.base.user_code import warn_at_call
from autopar.passes.graph.constraints import Constraint, constrain_p, constrained
from autopar.passes.graph.graph import user_source
from autopar.passes.sharding.layout import Layout, all_layouts, divides
from autopar.passes.sharding.scopes import aval_shape

UserMesh = tuple[tuple[str, int], ...]
Atoms = Mapping[frozenset[str], tuple[int, ...] | None]
"""Axes of the user's that always cut together, and the plan's axes that stand for them, if any."""


@dataclass(frozen=True)
class AxisMatching:
    """For each mesh that the user's constraints name, what stands for its axes on `mesh`."""

    mesh: tuple[int, ...]
    atoms: Mapping[UserMesh, Atoms]

    def layouts(self, eqn: JaxprEqn) -> tuple[Layout, ...] | None:
        """The layouts that a constraint allows; None: it is none, or cannot be kept."""
        if eqn.primitive is not constrain_p or self.why_not(eqn):
            return None
        cuts, shape = self._cuts(eqn.params["constraint"]), aval_shape(eqn.outvars[0])
        assert cuts is not None
        if None not in cuts:
            return (Layout(tuple(axes or () for axes in cuts)),)
        return tuple(
            layout
            for layout in all_layouts(shape, self.mesh)
            if all(c is None or c == axes for c, axes in zip(cuts, layout.dims, strict=True))
        )

    def why_not(self, eqn: JaxprEqn) -> str:
        """Why a constraint cannot be kept; empty if it can."""
        constraint: Constraint = eqn.params["constraint"]
        if not constraint.mesh:
            return "its mesh has one device"
        cuts, shape = self._cuts(constraint), aval_shape(eqn.outvars[0])
        if cuts is None:
            used = {name for names in constraint.spec for name in names or ()}
            wanted = " ".join(f"{name}={size}" for name, size in constraint.mesh if name in used)
            own = format_mesh(self.mesh, axis_names(self.mesh))
            return f"it cuts by {wanted}, for which the plan's mesh {own} has no axes"
        layout = Layout(tuple(axes or () for axes in cuts))
        if not divides(shape, layout, self.mesh):
            cut = f"{eqn.outvars[0].aval.str_short()} by {constraint}"
            return f"it cuts {cut} unevenly"
        return ""

    def _cuts(self, constraint: Constraint) -> list[tuple[int, ...] | None] | None:
        """For each dimension the plan's axes that cut it, None where that is open."""
        atoms = self.atoms.get(constraint.mesh, {})
        found: list[tuple[int, ...] | None] = []
        for names in constraint.spec:
            if names is None:
                found.append(None)
                continue
            axes = [atoms[atom] for atom in atoms if atom <= {*names}]
            if any(x is None for x in axes):
                return None
            found.append(tuple(sorted(axis for x in axes for axis in x or ())))
        return found


def match_axes(jaxpr: Jaxpr, mesh: tuple[int, ...]) -> AxisMatching:
    """The matching that keeps the most of a program's constraints; of equal ones the first."""
    by_mesh: dict[UserMesh, list[Constraint]] = defaultdict(list)
    for eqn, _ in constrained(jaxpr):
        constraint = eqn.params["constraint"]
        by_mesh[constraint.mesh].append(constraint)
    found = {user: _match(user, given, mesh) for user, given in by_mesh.items() if user}
    return AxisMatching(mesh, found)


def most_kept(
    jaxpr: Jaxpr, meshes: Sequence[tuple[int, ...]], usual: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """The logical shapes that keep the most of a program's constraints, the usual ones if any do.

    Without constraints, and where no shape keeps any, all the usual ones.
    """
    if next(constrained(jaxpr), None) is None:
        return tuple(usual)
    kept = {mesh: sum(not why for _, why in _verdicts(jaxpr, mesh)) for mesh in meshes}
    best = [mesh for mesh in meshes if kept[mesh] == max(kept.values()) > 0]
    return tuple(mesh for mesh in usual if mesh in best) or tuple(best) or tuple(usual)


def warn_of_lost(programs: Iterable[tuple[Jaxpr, tuple[int, ...]]]) -> None:
    """One warning, if any of these programs on their logical meshes does not keep a constraint."""
    whys: dict[str, str] = {}
    for jaxpr, mesh in programs:
        for eqn, why in _verdicts(jaxpr, mesh):
            if why:
                whys.setdefault(user_source(eqn), why)
    lost = [f"- {line}: {why}" for line, why in whys.items()]
    if lost:
        warn_at_call(
            "The plan does not keep these sharding constraints of the step:\n"
            + "\n".join(lost)
            + "\nThe numbers are the same. logical_mesh=... sets the plan's mesh; "
            "constraints='ignore' leaves them out without this warning.",
            ConstraintWarning,
        )


def _verdicts(jaxpr: Jaxpr, mesh: tuple[int, ...]) -> Iterator[tuple[JaxprEqn, str]]:
    matching = match_axes(jaxpr, mesh)
    for eqn, in_while in constrained(jaxpr):
        why = "it is inside a while loop, which every device runs whole" if in_while else ""
        yield eqn, why or matching.why_not(eqn)


def _match(user: UserMesh, given: Sequence[Constraint], mesh: tuple[int, ...]) -> Atoms:
    sizes, places = dict(user), defaultdict[str, set[tuple[Constraint, int]]](set)
    for constraint in given:
        for dim, names in enumerate(constraint.spec):
            for name in names or ():
                places[name].add((constraint, dim))
    together: dict[frozenset[tuple[Constraint, int]], list[str]] = defaultdict(list)
    for name in sizes:
        if name in places:
            together[frozenset(places[name])].append(name)
    atoms = [frozenset(names) for names in together.values()]
    wanted = [math.prod(sizes[name] for name in names) for names in atoms]
    needs = [
        {i for i, atom in enumerate(atoms) for names in c.spec if names and atom <= {*names}}
        for c in given
    ]

    def kept(axes: Sequence[tuple[int, ...] | None]) -> int:
        return sum(all(axes[i] is not None for i in need) for need in needs)

    best = max(_assignments(wanted, mesh), key=kept)
    return dict(zip(atoms, best, strict=True))


def _assignments(
    wanted: Sequence[int], mesh: tuple[int, ...], used: Iterable[int] = ()
) -> Iterator[tuple[tuple[int, ...] | None, ...]]:
    """Every way to give each size axes of the mesh that no other one has, or none."""
    if not wanted:
        yield ()
        return
    free = [axis for axis, size in enumerate(mesh) if size > 1 and axis not in {*used}]
    groups: list[tuple[int, ...] | None] = [
        group
        for count in range(1, len(free) + 1)
        for group in itertools.combinations(free, count)
        if math.prod(mesh[axis] for axis in group) == wanted[0]
    ]
    for group in (*groups, None):
        for rest in _assignments(wanted[1:], mesh, (*used, *(group or ()))):
            yield group, *rest
