"""Parts of the batch that a loop takes one after the other, `dynamic_slice(x, i * rows, rows)`.

Gradients are often accumulated so by hand, with `jax.lax.fori_loop`, or a scan over numbers. Where
the loop's own count says that it takes all of `x`, each part once and in order, they are slices of
`x.reshape(count, rows, ...)`: every pass sees that a trip reads no other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from numpy.typing import NDArray

from autopar.passes.graph import jax_compat, source_infos
from autopar.passes.graph.graph import (
    Atom,
    Graph,
    eliminate_dead_code,
    makers_of,
    variables,
    with_jaxpr,
)
from autopar.passes.graph.scans import ScanParts

Numbers = NDArray[Any]
"""A scalar of a loop's body, in each trip."""


def with_slices_of_batch(graph: Graph) -> Graph:
    """The same program, whose loops over parts of the batch take slices of it."""
    labels = zip(graph.jaxpr.invars, graph.inputs, strict=True)
    axes = {var: label.batch_axis for var, label in labels if label.batch_axis is not None}
    counts, eqns = set[Var](), list[JaxprEqn]()
    for eqn in graph.jaxpr.eqns:
        name, read = eqn.primitive.name, [v for v in variables(eqn.invars) if v in axes]
        if name == "iota" and len(eqn.outvars[0].aval.shape) == 1:
            counts.update(eqn.outvars)
        elif name == "convert_element_type" and read:
            axes[eqn.outvars[0]] = axes[read[0]]
        if name == "scan" and read and not eqn.params["reverse"]:
            eqns += _sliced(eqn, axes, counts)
        else:
            eqns.append(eqn)
    changed = len(eqns) > len(graph.jaxpr.eqns)
    return with_jaxpr(graph, graph.jaxpr.replace(eqns=eqns)) if changed else graph


def _sliced(eqn: JaxprEqn, axes: Mapping[Var, int], counts: Collection[Var]) -> list[JaxprEqn]:
    """A loop, after what makes the stacks of what it takes by its count.

    Along the `axes` of its operands that hold the batch; `counts` are numbers from 0.
    """
    scan = ScanParts.of(eqn)
    body, count = scan.body, eqn.params["length"]
    consts, _, _ = scan.operands(body.invars)
    given = dict(zip(consts, eqn.invars, strict=False))
    numbers = _numbers(eqn, scan, counts)
    before, stacks, slices = list[JaxprEqn](), list[Var](), list[Var]()
    kept, instead = list[JaxprEqn](), dict[Var, Var]()
    known: dict[tuple[Var, int, int], Var] = {}
    for inner in body.eqns:
        part = _part(inner, numbers, count) if inner.primitive.name == "dynamic_slice" else None
        outer = given.get(inner.invars[0]) if part is not None else None
        if part is None or not isinstance(outer, Var) or axes.get(outer) != part[0]:
            kept.append(inner)
            continue
        key = (outer, *part)
        if key not in known:
            stack, made = _stacked(outer, *part, inner)
            before, stacks = [*before, *made], [*stacks, stack]
            known[key] = jax_compat.new_var(inner.outvars[0].aval)
            slices.append(known[key])
        instead[inner.outvars[0]] = known[key]
    if not slices:
        return [eqn]

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else instead.get(atom, atom)

    kept = [inner.replace(invars=[*map(read, inner.invars)]) for inner in kept]
    made = eliminate_dead_code(
        jax_compat.replace_jaxpr(
            body, eqns=kept, invars=[*body.invars, *slices], outvars=[*map(read, body.outvars)]
        )
    )
    still = {v for inner in made.eqns for v in variables(inner.invars)} | {*variables(made.outvars)}
    gone = [n for n, var in enumerate(consts) if var in given and var not in still]
    invars = [v for n, v in enumerate(made.invars) if n not in gone]
    operands = [v for n, v in enumerate([*eqn.invars, *stacks]) if n not in gone]
    closed = ClosedJaxpr(jax_compat.replace_jaxpr(made, invars=invars), eqn.params["jaxpr"].consts)
    counts = scan.num_consts - len(gone), scan.num_carry
    params = jax_compat.scan_params(eqn.params, closed, *counts)
    return [*before, eqn.replace(invars=operands, params=params)]


def _numbers(eqn: JaxprEqn, scan: ScanParts, counts: Collection[Var]) -> Mapping[Var, Numbers]:
    """What the scalars of a loop's body are that follow from its count alone."""
    body, trips = scan.body, np.arange(eqn.params["length"])
    values: dict[Var, Numbers] = {}
    _, carries, slices = scan.operands(body.invars)
    _, first, stacks = scan.operands(eqn.invars)
    following, _ = scan.results(body.outvars)
    own_makers = makers_of(body.eqns)
    for inner, outer, after in zip(carries, first, following, strict=True):
        maker = None if isinstance(after, Literal) else own_makers.get(after)
        step = None if maker is None else _step(body.eqns[maker], inner)
        if step is not None and isinstance(outer, Literal) and inner.aval.shape == ():
            values[inner] = (np.asarray(outer.val) + step * trips).astype(inner.aval.dtype)
    for inner, outer in zip(slices, stacks, strict=True):
        if not isinstance(outer, Literal) and outer in counts:
            values[inner] = trips.astype(inner.aval.dtype)
    for own in body.eqns:
        rule = _RULES.get(own.primitive.name)
        if rule is None or own.outvars[0].aval.shape:
            continue
        known = [_known(atom, values) for atom in own.invars]
        if all(value is not None for value in known):
            with np.errstate(all="ignore"):  # what wraps is meant to
                made = np.broadcast_to(rule(*known), trips.shape)
            values[own.outvars[0]] = made.astype(own.outvars[0].aval.dtype)
    return values


def _step(eqn: JaxprEqn, carry: Var) -> int | None:
    """By how much an equation increases what a loop carries, in every trip."""
    if eqn.primitive.name != "add" or not np.issubdtype(carry.aval.dtype, np.integer):
        return None
    for one, other in (eqn.invars, eqn.invars[::-1]):
        if one is carry and isinstance(other, Literal):
            return int(other.val)
    return None


def _known(atom: Atom, values: Mapping[Var, Numbers]) -> Numbers | None:
    if not jnp.issubdtype(atom.aval.dtype, jnp.integer) and atom.aval.dtype != jnp.bool_:
        return None
    return np.asarray(atom.val) if isinstance(atom, Literal) else values.get(atom)


def _select(which: Numbers, *cases: Numbers) -> Numbers:
    return np.asarray(np.choose(which.astype(np.int64), cases, mode="clip"))


_RULES: Mapping[str, Callable[..., Numbers]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "lt": np.less,
    "ge": np.greater_equal,
    "convert_element_type": np.asarray,
    "select_n": _select,
}
"""Of integers, which wrap as their types do, and of what compares them."""


def _part(eqn: JaxprEqn, numbers: Mapping[Var, Numbers], count: int) -> tuple[int, int] | None:
    """(dimension, rows) of which a slice takes part after part in so many trips, to the end."""
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    starts = [_known(atom, numbers) for atom in eqn.invars[1:]]
    cut = [dim for dim, size in enumerate(sizes) if size != shape[dim]]
    if len(cut) != 1 or len(starts) != len(shape):
        return None
    (dim,) = cut
    begins = starts[dim]
    rows = sizes[dim]
    if begins is None or begins.ndim != 1 or rows * count != shape[dim]:
        return None
    return (dim, rows) if np.array_equal(begins, rows * np.arange(count)) else None


def _stacked(operand: Var, dim: int, rows: int, at: JaxprEqn) -> tuple[Var, list[JaxprEqn]]:
    """The parts of a value along a dimension as a stack, and the equations that make it."""
    shape = operand.aval.shape

    def stack(x: Any) -> Any:
        parts = jnp.reshape(x, (*shape[:dim], shape[dim] // rows, rows, *shape[dim + 1 :]))
        return jnp.moveaxis(parts, dim, 0)

    struct = jax.ShapeDtypeStruct(shape, operand.aval.dtype, weak_type=operand.aval.weak_type)
    with source_infos.source_context(at):
        traced: Jaxpr = jax.make_jaxpr(stack)(struct).jaxpr
    named = {traced.invars[0]: operand}
    made = [
        e.replace(
            invars=[a if isinstance(a, jex_core.Literal) else named.get(a, a) for a in e.invars]
        )
        for e in traced.eqns
    ]
    (result,) = traced.outvars
    return result, made
