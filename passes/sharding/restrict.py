"""What each method lets the integer program choose from.

`shard` and `auto` leave everything open. The others use one mesh axis and are the textbook methods,
stated as restrictions of the same search space:

- `data`: the state is replicated; only the batch is cut, gradients are all-reduced.
- `zero1`: the optimizer's state is cut; gradients are all-reduced and then sliced.
- `zero2`: gradients are reduce-scattered to the slices of the optimizer's state.
- `zero3`: the parameters are stored cut as well, and gathered where they are used.

(ZeRO: Rajbhandari et al., SC 2020. With microbatches, each synchronises gradients once a step.)
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.arrays.typed_keys import is_key
from autopar.base.errors import BatchArgumentError, PinError
from autopar.base.units import without_rows
from autopar.passes.graph.graph import Atom, Graph
from autopar.passes.sharding.batch_dims import NONE, BatchDims, made_from_state, parameters
from autopar.passes.sharding.layout import Layout, all_layouts, divides, replicated
from autopar.passes.sharding.scopes import aval_shape, value_bytes
from autopar.passes.sharding.strategies import Shape, outer_factor

ONE_AXIS_METHODS = ("data", "zero1", "zero2", "zero3")
TINY_SHARE = 1000  # a state leaf smaller than the whole state over this stays replicated


@dataclass(frozen=True)
class Restriction:
    """The layouts and factors that a method, the pins and the devices allow."""

    graph: Graph
    method: str
    dims: BatchDims
    pins: Mapping[int, Layout]
    parameters: frozenset[int]
    state_bytes: int
    from_state: frozenset[Var]

    @property
    def reduce_scatter(self) -> bool:
        return self.method != "zero1"

    def input_layouts(self, index: int, mesh: tuple[int, ...]) -> tuple[Layout, ...]:
        """The layouts that an input leaf may be stored in, the replicated one first if allowed."""
        var, label = self.graph.jaxpr.invars[index], self.graph.inputs[index]
        shape = aval_shape(var)
        whole = replicated(len(shape))
        if index in self.pins:
            return (self.pins[index],)
        if math.prod(shape) <= 1 or is_key(var.aval.dtype):
            return (whole,)
        if label.role == "batch":
            if self.method in ONE_AXIS_METHODS:
                return (_cut_along(shape, label.batch_axis),)
            return all_layouts(shape, mesh)
        if label.role != "state":
            return (whole,)
        if self.method in ONE_AXIS_METHODS:
            stored_cut = self.method == "zero3" or (
                self.method != "data" and index not in self.parameters
            )
            return (largest_dim_cut(shape, mesh) if stored_cut else whole,)
        if value_bytes(var) * TINY_SHARE < self.state_bytes:
            return (whole,)
        return all_layouts(shape, mesh)

    def allowed_factors(self, eqn: JaxprEqn, shape: Shape) -> frozenset[int] | None:
        """Factors that an equation may cut; None: all of them."""
        if self.method not in ONE_AXIS_METHODS:
            return None
        factors = {
            factor
            for atom, value in zip(eqn.invars, shape.rule.operands, strict=True)
            for dim in self._dims(atom)
            if (factor := outer_factor(shape.rule, value, dim)) is not None
        }
        # Optimizers work on whole values in data parallelism; masks and random bits on any part.
        if not factors and (
            self.method != "data"
            or not any(not isinstance(v, Literal) and v in self.from_state for v in eqn.invars)
        ):
            return None
        return frozenset(factors)

    def must_divide(self, eqn: JaxprEqn) -> bool:
        """Whether an equation on the batch must cut it where it can: data parallelism and ZeRO."""
        return self.method in ONE_AXIS_METHODS and any(
            self._dims(atom) for atom in (*eqn.invars, *eqn.outvars)
        )

    def may_scatter(self, eqn: JaxprEqn) -> bool:
        """Whether a partial result may be reduce-scattered where it is made."""
        if self.method in ("data", "zero1"):
            return False
        return self.method not in ONE_AXIS_METHODS or not any(map(self._dims, eqn.outvars))

    def boundary_layouts(
        self, atom: Atom, mesh: tuple[int, ...], partial: bool
    ) -> tuple[Layout, ...]:
        """Layouts of what enters or leaves a loop or a branch."""
        shape = aval_shape(atom)
        if is_key(atom.aval.dtype):
            return (replicated(len(shape)),)
        partial = partial and jax.numpy.issubdtype(atom.aval.dtype, jax.numpy.floating)
        layouts = all_layouts(shape, mesh, partial=partial)
        if self.method not in ONE_AXIS_METHODS:
            if value_bytes(atom) * TINY_SHARE < self.state_bytes and not self._dims(atom):
                layouts = tuple(x for x in layouts if not any(x.dims))
            return layouts
        dims = self._dims(atom)
        if not dims and self.method != "data":
            return layouts
        layouts = tuple(
            x for x in layouts if all(d in dims for d, axes in enumerate(x.dims) if axes)
        )
        return tuple(x for x in layouts if any(x.dims)) or layouts if dims else layouts

    def accumulator_layouts(self, atom: Atom, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """Of a loop's accumulator: sums in data parallelism and ZeRO, reduced once a step."""
        if self.method not in ONE_AXIS_METHODS or self._dims(atom):
            return layouts
        return tuple(x for x in layouts if x.partial) or layouts

    def _dims(self, atom: Atom) -> frozenset[int]:
        return self.dims.get(atom, NONE) if isinstance(atom, Var) else NONE


def restriction(
    graph: Graph,
    method: str,
    dims: BatchDims,
    pins: Mapping[int, Layout],
) -> Restriction:
    """The restriction of a method on one program."""
    state_bytes = sum(
        value_bytes(var)
        for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True)
        if label.role == "state"
    )
    used = parameters(graph, dims)
    return Restriction(graph, method, dims, pins, used, state_bytes, made_from_state(graph))


def check_batch(graph: Graph, method: str, mesh: tuple[int, ...], count: int) -> None:
    """Refuse microbatches whose examples the devices of a data-parallel method cannot share evenly.

    Raises:
      BatchArgumentError: names the batch leaf, its size, and what would do.
    """
    if method not in ONE_AXIS_METHODS:
        return
    for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True):
        if label.batch_axis is None:
            continue
        size = aval_shape(var)[label.batch_axis]
        if size % (count * mesh[0]):
            each = "" if count == 1 else f" in {count} microbatches"
            raise BatchArgumentError(
                f"A batch of {size} examples{each} cannot be divided among {mesh[0]} devices.",
                where=label.path,
                why=f"method={method!r} gives every device an equal share of every microbatch.",
                hint=f"use a multiple of {count * mesh[0]} examples, or method='shard'.",
            )


def largest_dim_cut(shape: Sequence[int], mesh: tuple[int, ...]) -> Layout:
    """The largest dimension that one axis divides is cut (the first of equals), or none."""
    best = max(
        (d for d, size in enumerate(shape) if size % mesh[0] == 0 and size),
        key=lambda d: (shape[d], -d),
        default=None,
    )
    return _cut_along(shape, best)


def _cut_along(shape: Sequence[int], dim: int | None) -> Layout:
    return Layout(tuple((0,) if d == dim else () for d in range(len(shape))))


def resolve_pins(
    graph: Graph,
    pins: Sequence[tuple[str, tuple[tuple[str, ...], ...]]],
    mesh: tuple[int, ...],
    axis_names: tuple[str, ...],
) -> dict[int, Layout]:
    """The layout that each pinned input must have.

    Raises:
      PinError: a pattern matches no input, a spec names an unknown axis, has too many dimensions or
        does not divide its tensor, or two pins disagree.
    """
    check_pins(graph, pins)
    found: dict[int, tuple[Layout, str]] = {}
    for pattern, spec in pins:
        for index in _pinned(graph, pattern):
            layout = _pinned_layout(graph, index, pattern, spec, mesh, axis_names)
            if index in found and found[index][0] != layout:
                raise PinError(
                    f"The pins {found[index][1]!r} and {pattern!r} give one tensor two shardings.",
                    where=graph.inputs[index].path,
                    hint="make one of the patterns narrower.",
                )
            found[index] = (layout, pattern)
    return {index: layout for index, (layout, _) in found.items()}


def check_pins(graph: Graph, pins: Sequence[tuple[str, Any]]) -> None:
    """Every pin is for an input.

    Raises:
      PinError: a pattern matches none.
    """
    for pattern, _ in pins:
        if not _pinned(graph, pattern):
            some = [x.path for x in graph.inputs if x.role == "state"][:8]
            raise PinError(
                f"The pin {pattern!r} matches no input.",
                why=f"paths look like {', '.join(some) or 'nothing: there are no inputs'}.",
                hint="use a shell pattern such as '*kernel*'.",
            )


def pins_of(graph: Graph, pins: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """The pins that are for inputs of this graph, one stage's for instance."""
    return tuple((pattern, spec) for pattern, spec in pins if _pinned(graph, pattern))


def _pinned(graph: Graph, pattern: str) -> list[int]:
    return [i for i, x in enumerate(graph.inputs) if matches_path(without_rows(x.path), pattern)]


def matches_path(path: str, pattern: str) -> bool:
    """Whether a shell pattern matches a path, or its end; brackets and quotes count as slashes.

    A path as plans print it is a pattern too.

    >>> matches_path("state.params['Dense_0']['kernel']", "Dense_0/kernel")
    True
    """
    plain = simple_path(path)
    return any(
        fnmatch.fnmatchcase(candidate, form)
        for candidate in (path, plain)
        for spelled in (pattern, simple_path(pattern))
        for form in (spelled, f"*/{spelled}")
    )


def simple_path(path: str) -> str:
    """`state.params['Dense_0']['kernel']` as `state/params/Dense_0/kernel`."""
    for old, new in (("['", "/"), ("']", ""), ("[", "/"), ("]", ""), (".", "/")):
        path = path.replace(old, new)
    return path


def _pinned_layout(
    graph: Graph,
    index: int,
    pattern: str,
    spec: tuple[tuple[str, ...], ...],
    mesh: tuple[int, ...],
    axis_names: tuple[str, ...],
) -> Layout:
    shape, path = aval_shape(graph.jaxpr.invars[index]), graph.inputs[index].path
    unknown = [a for axes in spec for a in axes if a not in axis_names]
    if unknown:
        raise PinError(
            f"The pin {pattern!r} names the mesh axis {unknown[0]!r}.",
            where=path,
            why=f"the axes of this mesh {mesh} are {', '.join(axis_names)}.",
            hint="set logical_mesh=... to the mesh that the pin means.",
        )
    if len(spec) > len(shape):
        raise PinError(
            f"The pin {pattern!r} has {len(spec)} dimensions, the tensor has {len(shape)}.",
            where=path,
        )
    dims = tuple(tuple(sorted(axis_names.index(a) for a in axes)) for axes in spec)
    layout = Layout(dims + ((),) * (len(shape) - len(dims)))
    if not divides(shape, layout, mesh):
        raise PinError(
            f"The pin {pattern!r} does not divide its tensor.",
            where=path,
            why=f"the shape is {shape}, the mesh is {dict(zip(axis_names, mesh, strict=True))}.",
            hint="pin a dimension whose size is a multiple of the mesh axes that cut it.",
        )
    return layout
