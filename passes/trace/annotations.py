"""What Flax's variables say of their own sharding, as constraints where a step reads them.

An NNX variable may hold `out_sharding`, and a parameter of Linen be a box (`nn.Partitioned`). Where
a mesh is known that has the axes they name, a variable's value is constrained before all else that
the step does with it, as Linen's boxes do it under `jax.set_mesh`. Others are named in one warning.

Flax is not imported for this. Where it has not been, there is no such variable.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.extend.core import Jaxpr, Var
from jax.sharding import NamedSharding, PartitionSpec

from autopar.base.cluster import axis_names
from autopar.base.errors import ConstraintWarning
from autopar.base.user_code import warn_at_call
from autopar.passes.graph import jax_compat, source_infos
from autopar.passes.graph.constraints import Constraint, constrain_p, constraint_of
from autopar.passes.trace.arguments import Argument
from autopar.passes.trace.object_states import is_state

_SHOWN = 8  # of the variables that a warning names


def with_annotations(jaxpr: Jaxpr, arguments: Sequence[Argument]) -> Jaxpr:
    """A program in which what variables say of themselves is kept; a warning if it cannot be."""
    if "flax" not in sys.modules:
        return jaxpr
    wanted: dict[Var, tuple[str, Constraint]] = {}
    unknown: list[str] = []
    for argument in arguments:
        notes = [note for part in _parts(argument.value) for note in _notes(part)]
        present = (n for n, x in zip(notes, argument.leaves, strict=True) if x is not None)
        for note, (index, path, shaped) in zip(present, argument.arrays(), strict=True):
            spec = None if note is None else note.spec(len(shaped.shape))
            if note is None or spec is None or not any(spec):
                continue
            mesh = note.mesh({name for entry in spec for name in _names(entry)})
            if mesh is not None:
                constraint = constraint_of(NamedSharding(mesh, spec), shaped.shape)
                if constraint is not None:
                    wanted[jaxpr.invars[index]] = path, constraint
            elif not note.is_told:
                unknown.append(f"- {path}: {tuple(spec)}")
    if unknown:
        _warn_of(unknown)
    return _constrained(jaxpr, wanted) if wanted else jaxpr


class _Note:
    """What one variable says, with the array that it holds."""

    def __init__(self, names: Any, rules: Any, mesh: Any, array: Any) -> None:
        self._names, self._rules, self._mesh, self._array = names, rules, mesh, array

    def spec(self, rank: int) -> PartitionSpec | None:
        """Its mesh axes for each dimension; None: it says nothing that fits."""
        names = self._names.spec if isinstance(self._names, NamedSharding) else self._names
        if not isinstance(names, (tuple, PartitionSpec)) or len(names) > rank:
            return None
        spec = sys.modules["flax.core.spmd"].get_pspec(names, self._rules)
        return spec if isinstance(spec, PartitionSpec) else None

    def mesh(self, used: set[str]) -> Any:
        """The mesh that the axes are of: its own, its array's, or the one that is set."""
        own = self._names.mesh if isinstance(self._names, NamedSharding) else self._mesh
        lies = getattr(self._array_sharding, "mesh", None)
        for mesh in (own, lies, jax.sharding.get_abstract_mesh()):
            if mesh is not None and used <= {*mesh.axis_names}:
                return mesh
        return None

    @property
    def is_told(self) -> bool:
        """Whether its array lies as a plan says: when that was made, all was told."""
        lies = getattr(self._array_sharding, "mesh", None)
        return lies is not None and tuple(lies.axis_names) == axis_names(lies.axis_sizes)

    @property
    def _array_sharding(self) -> Any:
        sharding = getattr(self._array, "sharding", None)
        return sharding if isinstance(sharding, NamedSharding) else None


def _parts(value: Any) -> list[Any]:
    """An argument's objects, variables and boxes, and its other leaves."""
    kinds = tuple(
        kind
        for module, name in (("flax.nnx", "Variable"), ("flax.core.meta", "Partitioned"))
        if (kind := getattr(sys.modules.get(module), name, None)) is not None
    )
    return jax.tree.leaves(value, is_leaf=lambda x: is_state(x) or isinstance(x, kinds))


def _notes(part: Any) -> Iterator[_Note | None]:
    """What is said of each leaf of a part, in order."""
    if is_state(part):
        yield None  # its definition
        for leaf, holder in zip(part.leaves, part.holders or part.leaves, strict=True):
            yield from _of_leaves(leaf, _metadata(holder), leaf)
    elif "flax.core.meta" in sys.modules and isinstance(
        part, sys.modules["flax.core.meta"].Partitioned
    ):
        # With a mesh, what reads the box constrains it.
        is_kept = part.mesh is not None or not jax.sharding.get_abstract_mesh().empty
        said = {} if is_kept else {"out_sharding": part.names, **_rules(part)}
        yield from _of_leaves(part, said, part.value)
    else:
        yield from _of_leaves(part, _metadata(part), part)


def _rules(box: Any) -> Mapping[str, Any]:
    return {"sharding_rules": getattr(box, "rules", None)}


def _metadata(holder: Any) -> Mapping[str, Any]:
    get = getattr(holder, "get_metadata", None)
    return get() if "flax.nnx" in sys.modules and get is not None else {}


def _of_leaves(tree: Any, said: Mapping[str, Any], array: Any) -> Iterator[_Note | None]:
    leaves = jax.tree.leaves(tree)
    names = said.get("out_sharding")
    if len(leaves) == 1 and names:
        if array is tree:
            array = leaves[0]
        yield _Note(names, said.get("sharding_rules"), said.get("mesh"), array)
    else:
        yield from (None for _ in leaves)


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _warn_of(unknown: Sequence[str]) -> None:
    more = [f"- and {len(unknown) - _SHOWN} more"] if len(unknown) > _SHOWN else []
    warn_at_call(
        "The plan does not keep what these variables say of their sharding, because no mesh is "
        "known that has their axes:\n"
        + "\n".join([*unknown[:_SHOWN], *more])
        + "\nThe numbers are the same. Call the step under jax.set_mesh(mesh) with these axes, or "
        "write pins={'*kernel': (None, 'x')} by the axes x, y of the plan's mesh; "
        "constraints='ignore' leaves them out without this warning.",
        ConstraintWarning,
    )


def _constrained(jaxpr: Jaxpr, wanted: Mapping[Var, tuple[str, Constraint]]) -> Jaxpr:
    """The program with its inputs constrained where it reads them; what it hands on stays."""
    read = {var: jax_compat.new_var(var.aval) for var in wanted}
    eqns = [
        jex_core.new_jaxpr_eqn(
            [var],
            [read[var]],
            constrain_p,
            {"constraint": constraint},
            jex_core.no_effects,
            source_infos.source_named(path),
        )
        for var, (path, constraint) in wanted.items()
    ]

    def use(atom: Any) -> Any:
        return atom if isinstance(atom, jex_core.Literal) else read.get(atom, atom)

    eqns += [eqn.replace(invars=[use(v) for v in eqn.invars]) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns)
