"""What all devices of a mesh compute by one body, as one computation on whole arrays.

Like a value of the body has a type, it has a layout here: which mesh axes cut which of its
dimensions, and along which only the sum over the devices is known. `AllDevices` evaluates
equations on such values, by the factor rules.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from autopar.base.errors import UnknownPrimitiveWarning
from autopar.passes.graph import jax_compat, source_infos
from autopar.passes.graph.graph import inner_jaxprs, walk
from autopar.passes.graph.plain_equations import REDUCTIONS
from autopar.passes.graph.primitives import CONTROL_FLOW, DRAWS
from autopar.passes.primitives.cuts import bind_with
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.linearity import linear_operands
from autopar.passes.primitives.loop_sizes import LoopPlaces, changed_params, places_of_loop
from autopar.passes.primitives.populate import populate

AxisSizes = Mapping[str, int]
Cuts = tuple[tuple[str, ...], ...]
"""For each dimension the mesh axes that cut it, the outermost first."""

_AXES_PARAM = {
    **dict.fromkeys(("psum", "pmax", "pmin"), "axes"),
    **dict.fromkeys(("all_gather", "all_to_all", "axis_index", "ppermute"), "axis_name"),
    **dict.fromkeys(("ragged_all_to_all", "reduce_scatter"), "axis_name"),
}


class NotWholeError(Exception):
    """An equation cannot be evaluated for all devices of these axes at once."""

    def __init__(self, axes: set[str], why: str = ""):
        super().__init__(why)
        self.axes = axes


@dataclass(frozen=True)
class Blocks:
    """A value of the body on all devices.

    Args:
      array: its parts put together.
      cuts: the mesh axes that cut each dimension; along all others every device has the same.
      added: mesh axes along which every device has a summand, and `array` the sum.
    """

    array: Any
    cuts: Cuts
    added: frozenset[str] = frozenset()

    @property
    def axes(self) -> set[str]:
        """The mesh axes along which devices differ."""
        return {name for dim in self.cuts for name in dim} | self.added


def axes_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes along which an equation communicates, or asks where it is."""
    param = _AXES_PARAM.get(eqn.primitive.name)
    if param is None:
        return ()
    axes = eqn.params[param]
    return tuple(map(str, axes)) if isinstance(axes, (tuple, list)) else (str(axes),)


def relayout(x: Blocks, wanted: Cuts, sizes: AxisSizes, front: Sequence[str] = ()) -> Any:
    """The array of a value whose dimensions are cut by other axes, some in front.

    Where an axis is wanted that did not cut it, there are copies; where one is not, the first
    device's part is taken: the caller says that all are the same.
    """
    if x.added:
        raise NotWholeError({*x.added}, "the devices' summands are used before they are added")
    if x.cuts == wanted and not front:
        return x.array
    rank, array = len(x.cuts), x.array
    local = [
        size // math.prod(sizes[a] for a in axes)
        for size, axes in zip(array.shape, x.cuts, strict=True)
    ]
    have, target = _parts(x.cuts), [*front, *_parts(wanted)]
    length = dict[str | int, int](enumerate(local))
    length |= {axis: sizes[axis] for axis in (*have, *target) if isinstance(axis, str)}
    array = lax.reshape(array, [length[t] for t in have])
    for token in [t for t in have if t not in target]:
        array = lax.index_in_dim(array, 0, have.index(token), keepdims=False)
        have.remove(token)
    order = [t for t in target if t in have]
    if order != have:
        array = lax.transpose(array, [have.index(t) for t in order])
    if order != target:
        shape = [length[t] for t in target]
        array = lax.broadcast_in_dim(array, shape, [target.index(t) for t in order])
    joined = [math.prod(sizes[a] for a in wanted[d]) * local[d] for d in range(rank)]
    return lax.reshape(array, [*(sizes[a] for a in front), *joined])


def _parts(cuts: Cuts) -> list[str | int]:
    """Dimensions taken apart: the axes that cut each, and its number for what is left of it."""
    parts: list[str | int] = []
    for dim, axes in enumerate(cuts):
        parts += [*axes, dim]
    return parts


class AllDevices:
    """Evaluates a body for all devices; mesh axes that no value is cut by may be mapped."""

    def __init__(self, body: ClosedJaxpr, sizes: AxisSizes) -> None:
        self.body, self.sizes = body, sizes
        self.rules = _rules(body.jaxpr)

    def run(self, values: Sequence[Blocks]) -> list[Blocks]:
        """The body's results."""
        jaxpr = self.body.jaxpr
        env: dict[Var, Blocks] = dict(zip(jaxpr.invars, values, strict=True))
        held = zip(jaxpr.constvars, self.body.consts, strict=True)
        env.update((var, _same(value)) for var, value in held)

        def read(atom: Any) -> Blocks:
            return _same(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            with source_infos.source_context(eqn):
                results = self.equation(eqn, [*map(read, eqn.invars)])
            env.update(zip(eqn.outvars, results, strict=True))
        return [
            dataclasses.replace(x, array=_typed(x.array, atom))
            for x, atom in zip(map(read, jaxpr.outvars), jaxpr.outvars, strict=True)
        ]

    def equation(self, eqn: JaxprEqn, operands: Sequence[Blocks]) -> list[Blocks]:
        """One equation's results."""
        name = eqn.primitive.name
        differ = {axis for x in operands for axis in x.axes}
        if axes_of(eqn):
            return [self.collective(eqn, operands, differ)]
        inside = {a for body in inner_jaxprs(eqn) for e in walk(body) for a in axes_of(e)}
        unmapped = {axis for axis in inside if not self.is_mapped(axis)}
        if not differ and unmapped:
            raise NotWholeError(unmapped, f"{name} holds what devices exchange")
        if not differ:
            return [*map(_same, _bind(eqn, [x.array for x in operands], {}))]
        if eqn not in self.rules:
            raise NotWholeError(differ | inside, f"{name} is not known by its loops")
        added = frozenset(axis for x in operands for axis in x.added)
        for axis in added:
            places = frozenset(i for i, x in enumerate(operands) if axis in x.added)
            is_linear = places in linear_operands(eqn)
            if not is_linear or any(axis in dim for x in operands for dim in x.cuts):
                raise NotWholeError({axis}, f"{name} is applied to summands")
        loops = self.loops(eqn, operands)
        grown = [(loop, loop.size * self.count(axes)) for loop, axes in loops.items()]
        params = changed_params(eqn, grown) if grown else {}
        if params is None:
            raise NotWholeError(differ, f"{name} depends on its size")
        arrays = []
        for i, x in enumerate(operands):
            cuts = _at({loop.operands[i][0]: axes for loop, axes in loops.items()}, len(x.cuts))
            arrays.append(relayout(dataclasses.replace(x, added=frozenset()), cuts, self.sizes))
        try:
            results = _bind(eqn, arrays, params)
        except (TypeError, ValueError) as error:  # a param of which nothing is known
            raise NotWholeError(differ, f"{name} does not fit") from error
        sums = frozenset(a for loop, axes in loops.items() if loop.kind == "sum" for a in axes)
        made = []
        for i, (array, var) in enumerate(zip(results, eqn.outvars, strict=True)):
            rank = len(var.aval.shape)
            cuts = _at({loop.results[i][0]: axes for loop, axes in loops.items()}, rank)
            shape = [n * self.count(axes) for n, axes in zip(var.aval.shape, cuts, strict=True)]
            if list(array.shape) != shape:
                raise NotWholeError(differ, f"{name} does not fit")
            made.append(Blocks(array, cuts, added | sums))
        return made

    def count(self, axes: Sequence[str]) -> int:
        """How many parts these axes cut a dimension in."""
        return math.prod(self.sizes[a] for a in axes)

    def loops(self, eqn: JaxprEqn, operands: Sequence[Blocks]) -> dict[LoopPlaces, tuple[str, ...]]:
        """The equation's loops that are cut, each by which axes."""
        loops: dict[LoopPlaces, tuple[str, ...]] = {}
        for place, x in enumerate(operands):
            for dim, axes in enumerate(x.cuts):
                if not axes:
                    continue
                loop = places_of_loop(eqn, self.rules[eqn], place, dim)
                if loop is None or loop.kind not in ("pass", "sum"):
                    raise NotWholeError({*axes}, f"{eqn.primitive} needs the whole dimension")
                known = loops.get(loop, ())
                longer, shorter = (known, axes) if len(known) > len(axes) else (axes, known)
                if [a for a in longer if a in shorter] != [*shorter]:
                    raise NotWholeError({*known, *axes}, f"{eqn.primitive} joins them")
                loops[loop] = longer
        every = [a for axes in loops.values() for a in axes]
        if len({*every}) < len(every):
            raise NotWholeError({*every}, f"{eqn.primitive} joins parts of different loops")
        return loops

    def collective(self, eqn: JaxprEqn, operands: Sequence[Blocks], differ: set[str]) -> Blocks:
        """What devices exchange."""
        name, params, axes = eqn.primitive.name, eqn.params, axes_of(eqn)
        mapped = tuple(a for a in axes if self.is_mapped(a))
        if not differ and len(mapped) == len(axes):
            (result,) = _bind(eqn, [x.array for x in operands], {})
            return _same(result)
        own = [a for a in axes if a not in mapped]
        if params.get("axis_index_groups") is not None or len(operands) != 1:
            raise NotWholeError({*axes} | differ, f"{name} asks for a device's own")
        (x,) = operands
        if name in REDUCTIONS and not (x.added and name != "psum"):
            copies = self.count([a for a in own if a not in x.axes]) if name == "psum" else 1
            cut = [a for dim in x.cuts for a in dim if a in own]
            cuts = tuple(tuple(a for a in dim if a not in own) for dim in x.cuts)
            bare = dataclasses.replace(x, added=frozenset())
            array = relayout(bare, cuts, self.sizes, front=cut)
            if cut:
                places = tuple(range(len(cut)))
                array = REDUCTIONS[name].bind(array, axes=places, out_sharding=None)
            array = _times(array, copies)
            if mapped:
                (array,) = _bind(eqn, [array], {"axes": mapped})
            return Blocks(array, cuts, x.added - {*own})
        if name == "all_gather" and not mapped and params["tiled"] and not x.added & {*own}:
            there = params["all_gather_dimension"]
            cuts = tuple(tuple(a for a in dim if a not in own) for dim in x.cuts)
            before = tuple((*dim, *own) if d == there else dim for d, dim in enumerate(cuts))
            bare = dataclasses.replace(x, added=frozenset())
            return Blocks(relayout(bare, before, self.sizes), cuts, x.added)
        is_cut = any(a in own for dim in x.cuts for a in dim)
        if name == "reduce_scatter" and not mapped and params["tiled"] and not is_cut:
            there = params["scatter_dimension"]
            cuts = tuple((*dim, *own) if d == there else dim for d, dim in enumerate(x.cuts))
            copies = self.count([a for a in own if a not in x.added])
            return Blocks(_times(x.array, copies), cuts, x.added - {*own})
        raise NotWholeError({*axes} | differ, f"{name} asks for a device's own")

    def is_mapped(self, axis: str) -> bool:
        """Whether `jax.vmap` has the axis."""
        return jax_compat.has_axis(axis)


def _times(array: Any, copies: int) -> Any:
    return array if copies == 1 else lax.mul(array, lax.full_like(array, copies))


def _same(array: Any) -> Blocks:
    return Blocks(array, ((),) * jnp.ndim(array))


def _at(found: Mapping[int | None, tuple[str, ...]], rank: int) -> Cuts:
    return tuple(found.get(dim, ()) for dim in range(rank))


def _bind(eqn: JaxprEqn, arrays: Sequence[Any], changes: Mapping[str, Any]) -> list[Any]:
    if eqn.primitive.name in DRAWS:
        return bind_with(eqn, arrays, changes)
    return jax_compat.bind(eqn, arrays, **changes)


def _typed(array: Any, atom: Any) -> Any:
    """An array with the type of an atom: literals are numbers."""
    if not isinstance(array, jax.Array):
        array = jnp.asarray(array, atom.aval.dtype)
    return jax_compat.with_type_of(array, atom.aval)


def _rules(jaxpr: Jaxpr) -> Rules:
    """The rules of equations; of what has none, the program with the results will tell."""
    eqns = [e for e in jaxpr.eqns if not axes_of(e) and e.primitive.name not in CONTROL_FLOW]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownPrimitiveWarning)
        return populate(jaxpr.replace(eqns=eqns))
