"""What each method lets the integer program choose from.

`shard` and `auto` leave everything open. The others are the textbook methods, stated as
restrictions of the same search space. Those of data parallelism cut the batch along all axes of the
mesh, one axis if nothing else is asked for:

- `data`: the state is replicated; only the batch is cut, gradients are all-reduced.
- `zero1`: the optimizer's state is cut; gradients are all-reduced and then sliced.
- `zero2`: gradients are reduce-scattered to the slices of the optimizer's state.
- `zero3`: the parameters are stored cut as well, and gathered where they are used.
- `hsdp`: zero3 along the last axis, the devices of a node; the nodes, along the first axis, are
  replicas. Gradients are reduce-scattered in the node, and their slices all-reduced across.

`megatron`, `megatron_sp` and `expert` say which loops the last axis cuts: see `loop_methods.py`.

(ZeRO: Rajbhandari et al., SC 2020; hybrid sharding: Zhao et al., "PyTorch FSDP", VLDB 2023. With
microbatches, gradients are synchronised once a step; `zero2`, `zero3` and `hsdp` may also reduce-
scatter those of each microbatch, so that a device has its slice of the sums alone.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.arrays.typed_keys import is_key
from autopar.base.errors import BatchArgumentError
from autopar.base.methods import BATCH_METHODS, GATHERED_PARAMETERS, LOOP_METHODS
from autopar.base.options import AS_COMPUTED
from autopar.base.units import format_examples
from autopar.passes.graph.graph import Atom, Graph
from autopar.passes.sharding.batch_dims import NONE, BatchDims, made_from_state, parameters
from autopar.passes.sharding.constraint_axes import AxisMatching, match_axes
from autopar.passes.sharding.gradient_sums import sum_dtypes
from autopar.passes.sharding.layout import (
    Layout,
    all_layouts,
    cuts_product,
    divides,
    in_host,
    num_parts,
    replicated,
    with_sums,
)
from autopar.passes.sharding.loop_kinds import LoopKinds
from autopar.passes.sharding.loop_methods import Allowed, LoopMethod
from autopar.passes.sharding.pins import NO_PINS, Pins
from autopar.passes.sharding.scopes import aval_shape, itemsize, value_bytes
from autopar.passes.sharding.strategies import Shape
from autopar.passes.sharding.tiny_leaves import tiny_bytes

SCATTERED = ("zero2", *GATHERED_PARAMETERS)  # methods whose gradients are reduce-scattered


@dataclass(frozen=True)
class Restriction:
    """The layouts and factors that a method, the pins and the devices allow.

    If it `adds_slices`, whole parameters of whose optimizer state devices have a slice are updated
    as slices and gathered then; else the updates are gathered. What is made of the state and is
    `repeated` for the rows of the batch may be cut along them or not; `dims` are cut.
    """

    graph: Graph
    method: str
    dims: BatchDims
    pins: Pins
    parameters: frozenset[int]
    tiny_bytes: int
    from_state: frozenset[Var]
    matching: AxisMatching
    repeated: Mapping[Var, frozenset[int]] = field(default_factory=dict)
    sum_dtypes: Mapping[Var, str] = field(default_factory=dict)
    loops: LoopMethod | None = None
    hosted: Mapping[int, str] = field(default_factory=dict)
    adds_slices: bool = True

    @cached_property
    def stored_itemsize(self) -> int:
        """Bytes of the widest floating-point numbers of the state; 0: it has none."""
        inputs = zip(self.graph.jaxpr.invars, self.graph.inputs, strict=True)
        floats = (
            itemsize(var.aval)
            for var, label in inputs
            if label.role == "state" and jnp.issubdtype(var.aval.dtype, jnp.floating)
        )
        return max(floats, default=0)

    @property
    def reduce_scatter(self) -> bool:
        return self.method != "zero1"

    def input_layouts(self, index: int, mesh: tuple[int, ...]) -> tuple[Layout, ...]:
        """The layouts that an input leaf may be stored in, the replicated one first if allowed.

        Those in the hosts' memory come last, or are the only ones.
        """
        layouts, how = self._cuts_of_input(index, mesh), self.hosted.get(index)
        if how is None:
            return layouts
        there = tuple(map(in_host, layouts))
        return there if how == "must" else (*layouts, *there)

    def _cuts_of_input(self, index: int, mesh: tuple[int, ...]) -> tuple[Layout, ...]:
        var, label = self.graph.jaxpr.invars[index], self.graph.inputs[index]
        shape = aval_shape(var)
        whole = replicated(len(shape))
        if index in self.pins.inputs:
            return (self.pins.inputs[index],)
        if math.prod(shape) <= 1 or is_key(var.aval.dtype):
            return (whole,)
        if self.loops is not None and label.role in ("batch", "state"):
            tiny = label.role == "state" and value_bytes(var) < self.tiny_bytes
            return self.loops.layouts(var, all_layouts(shape, mesh), True, tiny)
        if label.role == "batch":
            if self.method in BATCH_METHODS:
                cut = _cut_along(shape, label.batch_axis, _cutting(mesh))
                return (cut if divides(shape, cut, mesh) else whole,)
            return all_layouts(shape, mesh)
        if label.role == "received" and self.method not in BATCH_METHODS and self.loops is None:
            tiny = value_bytes(var) < self.tiny_bytes
            return (whole,) if tiny else all_layouts(shape, mesh)
        if label.role != "state":
            return (whole,)
        if self.method in BATCH_METHODS:
            stored_cut = self.method in GATHERED_PARAMETERS or (
                self.method != "data" and index not in self.parameters
            )
            axes = _cutting(mesh, len(mesh) - 1 if self.method == "hsdp" else 0)
            if self.adds_slices and self.method not in GATHERED_PARAMETERS and len(shape) == 2:
                shape = _rows_first(shape, num_parts(axes, mesh))
            return (largest_dim_cut(shape, mesh, axes) if stored_cut else whole,)
        if value_bytes(var) < self.tiny_bytes:
            return (whole,)
        return all_layouts(shape, mesh)

    def constrained_layouts(self, eqn: JaxprEqn, is_small: bool) -> tuple[Layout, ...] | None:
        """The layouts that the user allows for an equation's result; None: all, or what it has.

        What holds no batch is a parameter or the gradient of one. That may be unreduced as well, so
        that it is completed once a step. What `is_small` is whole on every device before.
        """
        layouts, (var,) = self.matching.layouts(eqn), eqn.outvars[:1]
        if layouts is not None and is_small:
            return None if replicated(len(aval_shape(var))) in layouts else layouts
        if layouts is None or self.batch_dims(var) or not _may_be_partial(var):
            return layouts
        mesh = self.matching.mesh
        return tuple(more for layout in layouts for more in with_sums(layout, mesh))

    def allowed_factors(self, eqn: JaxprEqn, shape: Shape) -> tuple[Allowed | None, frozenset[int]]:
        """Factors that an equation may cut along each axis (None: all of them).

        And the axes along which it must cut what it can: those of the batch where it has one, in
        data parallelism and ZeRO.
        """
        axes = range(len(self.matching.mesh))
        if self.loops is not None:
            return self.loops.equation(eqn, shape, self._reads_state(eqn))
        factors = self._batch_factors(eqn, shape)
        must = self.method in BATCH_METHODS and self.holds_batch(eqn)
        return (
            None if factors is None else (factors,) * len(axes),
            frozenset(axes) if must else frozenset(),
        )

    def _batch_factors(self, eqn: JaxprEqn, shape: Shape) -> frozenset[int] | None:
        if self.method not in BATCH_METHODS:
            return None
        factors = self._factors(eqn, shape, self.batch_dims)
        # Optimizers work on whole values in data parallelism; masks and random bits on any part.
        if not factors and (self.method != "data" or not self._reads_state(eqn)):
            return None
        return frozenset(factors or self._factors(eqn, shape, self.repeated_dims))

    def _factors(
        self, eqn: JaxprEqn, shape: Shape, dims: Callable[[Atom], frozenset[int]]
    ) -> set[int]:
        """The loops in some dimensions of an equation's operands and results."""
        values = (*shape.rule.operands, *shape.rule.results)
        return {
            factor
            for atom, value in zip((*eqn.invars, *eqn.outvars), values, strict=True)
            for dim in dims(atom)
            if (factor := shape.rule.outermost(value[dim])) is not None
        }

    def _reads_state(self, eqn: JaxprEqn) -> bool:
        return any(not isinstance(v, Literal) and v in self.from_state for v in eqn.invars)

    def holds_batch(self, eqn: JaxprEqn) -> bool:
        """Whether a dimension of an operand or of a result is the batch."""
        return any(self.batch_dims(atom) for atom in (*eqn.invars, *eqn.outvars))

    def adds_parts(self, eqn: JaxprEqn) -> bool:
        """Whether a sum of partial values may stay one, and be completed for all its readers.

        Of gradients, and where a loop that is no batch was summed over: Megatron's.
        """
        return self.loops is not None or not self.holds_batch(eqn)

    def may_scatter(self, eqn: JaxprEqn) -> bool:
        """Whether a partial result may be reduce-scattered where it is made."""
        if self.method in ("data", "zero1"):
            return False
        if self.method == "megatron":  # the residual stream is whole
            return not any(map(self.batch_dims, eqn.outvars))
        return self.method not in BATCH_METHODS or not any(map(self.batch_dims, eqn.outvars))

    def boundary_layouts(
        self, atom: Atom, mesh: tuple[int, ...], partial: bool, trips: int = 1
    ) -> tuple[Layout, ...]:
        """Layouts of what enters or leaves a loop or a branch.

        Of a slice of a stack, and of what a stack is made of, in a loop of so many `trips`: a layer
        may be small and the stack of all layers large.
        """
        shape = aval_shape(atom)
        if is_key(atom.aval.dtype):
            return (replicated(len(shape)),)
        partial = partial and _may_be_partial(atom)
        layouts = all_layouts(shape, mesh, partial=partial)
        if self.method not in BATCH_METHODS:
            # What is cast from a leaf of the state is as tiny as that.
            bytes_stored = trips * math.prod(shape) * max(itemsize(atom.aval), self.stored_itemsize)
            tiny = bytes_stored < self.tiny_bytes and not self.batch_dims(atom)
            if self.loops is not None:
                made = isinstance(atom, Var) and atom in self.from_state
                return self.loops.layouts(atom, layouts, made, tiny)
            return tuple(x for x in layouts if not any(x.dims)) if tiny else layouts
        dims = self.batch_dims(atom)
        if not dims and self.method != "data":
            return layouts
        may = dims or self.repeated_dims(atom)
        layouts = tuple(
            x for x in layouts if all(d in may for d, axes in enumerate(x.dims) if axes)
        )
        most = max(cuts_product(x, mesh) for x in layouts)
        return tuple(x for x in layouts if cuts_product(x, mesh) == most) if dims else layouts

    def accumulator_layouts(self, atom: Atom, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """Of a loop's accumulator: sums in data parallelism and ZeRO, reduced once a step.

        Or, where ZeRO's gradients are reduce-scattered, in every microbatch: a device has its slice
        of the sums then. With `hsdp`, a slice of those of its node.
        """
        if self.method not in BATCH_METHODS or self.batch_dims(atom):
            return layouts
        most = max(len(x.partial) for x in layouts)
        if most and self.method in SCATTERED:
            inside = len(self.matching.mesh) - 1 if self.method == "hsdp" else 0
            cuts = [(x, [axis for axes in x.dims for axis in axes]) for x in layouts]
            own = [(x, axes) for x, axes in cuts if min(axes, default=inside) >= inside]
            return tuple(x for x, axes in own if len(x.partial) + len(axes) == most)
        return tuple(x for x in layouts if len(x.partial) == most)

    def batch_dims(self, atom: Atom) -> frozenset[int]:
        """The dimensions of a value that hold the batch and that an axis of the mesh divides."""
        return self._divided(atom, self.dims)

    def repeated_dims(self, atom: Atom) -> frozenset[int]:
        """The same of what has as many rows as the batch, which may be cut there or not."""
        return self._divided(atom, self.repeated)

    def _divided(self, atom: Atom, known: Mapping[Var, frozenset[int]]) -> frozenset[int]:
        dims = known.get(atom, NONE) if isinstance(atom, Var) else NONE
        if not dims:
            return NONE
        shape, sizes = aval_shape(atom), [size for size in self.matching.mesh if size > 1]
        return frozenset(d for d in dims if any(shape[d] % size == 0 for size in sizes))


def _may_be_partial(atom: Atom) -> bool:
    return bool(jax.numpy.issubdtype(atom.aval.dtype, jax.numpy.floating))


def restriction(
    graph: Graph,
    method: str,
    dims: BatchDims,
    mesh: tuple[int, ...],
    pins: Pins = NO_PINS,
    reduce_dtype: str = AS_COMPUTED,
    kinds: LoopKinds | None = None,
    hosted: Mapping[int, str] = MappingProxyType({}),
    repeated: Mapping[Var, frozenset[int]] = MappingProxyType({}),
    adds_slices: bool = True,
) -> Restriction:
    """The restriction of a method on one program and a logical mesh.

    `kinds`: of the program's loops, for the methods that ask for them; `hosted`: leaves that may or
    must lie in the hosts' memory; `repeated`: where as many rows are as the batch has, of any value
    (`batch_dims.repeated_dims`); `adds_slices`: see `Restriction`.
    """
    used, tiny = parameters(graph, dims), tiny_bytes(graph, math.prod(mesh))
    from_state, matching = made_from_state(graph), match_axes(graph.jaxpr, mesh)
    sums = sum_dtypes(graph, dims, reduce_dtype)
    loops = None if kinds is None else LoopMethod(method, kinds, mesh)
    rows = {var: found for var, found in repeated.items() if var in from_state}
    return Restriction(
        graph,
        method,
        dims,
        pins,
        used,
        tiny,
        from_state,
        matching,
        rows,
        sums,
        loops,
        hosted,
        adds_slices=adds_slices,
    )


def check_batch(graph: Graph, method: str, mesh: tuple[int, ...], count: int) -> None:
    """Refuse microbatches whose examples the devices of a data-parallel method cannot share evenly.

    Raises:
      BatchArgumentError: names the batch leaf, its size, and what would do.
    """
    if method not in (*BATCH_METHODS, *LOOP_METHODS):
        return
    # Along the last axis Megatron's methods cut no batch.
    devices = math.prod(mesh[:-1] if method.startswith("megatron") else mesh)
    for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True):
        if label.batch_axis is None:
            continue
        size = aval_shape(var)[label.batch_axis]
        if size % (count * devices):
            each = "" if count == 1 else f" in {count} microbatches"
            multiple = count * devices
            padded = math.ceil(size / multiple) * multiple
            hint = f"use a multiple of {multiple} examples"
            if padded:
                hint += f" (pad it to {padded}, with rows that the loss leaves out)"
            hint += ", or method='shard'"
            fewer = 1 if size % count else _most_that_divide(size // count, devices)
            if fewer > 1 and len(mesh) == 1:
                idle = devices - fewer
                hint += f", or logical_mesh=({fewer},), which leaves {idle} of the devices idle"
            raise BatchArgumentError(
                f"A batch of {format_examples(size)}{each} cannot be divided among {devices} "
                "devices.",
                where=label.path,
                why=f"method={method!r} gives every device an equal share of every microbatch.",
                hint=f"{hint}.",
            )


def _most_that_divide(size: int, devices: int) -> int:
    """The largest number of devices, at most so many, among which rows are shared evenly."""
    return next(n for n in range(devices, 0, -1) if size % n == 0)


def largest_dim_cut(
    shape: Sequence[int], mesh: tuple[int, ...], axes: tuple[int, ...] = (0,)
) -> Layout:
    """The largest dimension that the axes divide is cut (the first of equals), or none."""
    parts = num_parts(axes, mesh)
    best = max(
        (d for d, size in enumerate(shape) if size % parts == 0 and size),
        key=lambda d: (shape[d], -d),
        default=None,
    )
    return _cut_along(shape, best, axes)


def _rows_first(shape: Sequence[int], parts: int) -> tuple[int, ...]:
    """The shape by which a matrix is cut: along its rows, if they can be divided.

    What is gathered along its columns, the new parameters, XLA writes column by column, and then
    once more as it is stored, so that both are there at the end of the step.
    """
    rows, columns = shape
    return (rows, 1 if rows % parts == 0 and rows else columns)


def _cutting(mesh: tuple[int, ...], first: int = 0) -> tuple[int, ...]:
    """The axes from the first one on that have several devices."""
    return tuple(axis for axis in range(first, len(mesh)) if mesh[axis] > 1)


def _cut_along(shape: Sequence[int], dim: int | None, axes: tuple[int, ...]) -> Layout:
    return Layout(tuple(axes if d == dim else () for d in range(len(shape))))
