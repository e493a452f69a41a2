"""The backward pass of functions of `autopar.local`.

A loop that is cut forward is cut backward as well: the gradient of what has it is cut along it, the
gradient of what has it not is a sum over it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.base.loop_notation import LoopNotation, Term
from autopar.passes.primitives.local_calls import LocalBody, Sizes, call_local

Structs = tuple[tuple[tuple[int, ...], Any], ...]  # shape and dtype of each array


@dataclass(frozen=True)
class FlatFunction:
    """A function of the leaves of its arguments, with the leaves of its result."""

    function: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]
    tree: Any

    def whole(self, *leaves: Any) -> Any:
        """What the user's function returns, in its own structure."""
        return self.function(*jax.tree.unflatten(self.tree, leaves), **dict(self.options))

    def __call__(self, sizes: Sizes, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of the result; the function reads its sizes from its arguments."""
        return jax.tree.leaves(self.whole(*leaves))

    def __str__(self) -> str:
        return called(self.function)


def called(function: Callable[..., Any]) -> str:
    """How messages call a user's function."""
    return getattr(function, "__name__", None) or type(function).__name__


@dataclass(frozen=True)
class _Saving:
    """The function together with what its pullback needs beside its arguments."""

    flat: FlatFunction
    saved: tuple[int, ...]  # the places of these among the pullback's leaves

    def __str__(self) -> str:
        return str(self.flat)

    def __call__(self, sizes: Sizes, leaves: Sequence[Any]) -> list[Any]:
        results, pullback = jax.vjp(lambda *xs: self.flat(sizes, xs), *leaves)
        kept = jax.tree.leaves(pullback)
        return [*results, *(kept[place] for place in self.saved)]


@dataclass(frozen=True)
class _Pullback:
    """Gradients of arguments from arguments, what was saved, and gradients of results.

    `sources` say for every leaf of the pullback whether it is an argument (its number) or saved
    (the number as -1 - n); None: the function is evaluated again.
    """

    flat: FlatFunction
    loops: LoopNotation
    structs: Structs
    arguments: tuple[int, ...]  # those that are operands
    sources: tuple[int, ...] | None
    num_saved: int
    wanted: tuple[int, ...]
    smooth: tuple[bool, ...]  # of each result, whether it has a gradient
    result_shapes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"the gradient of {self.flat}"

    def __call__(self, sizes: Sizes, operands: Sequence[Any]) -> list[Any]:
        count = len(self.arguments)
        given = dict(zip(self.arguments, operands[:count], strict=True))
        saved = operands[count : count + self.num_saved]
        flowing = iter(operands[count + self.num_saved :])
        none = tuple((shape, jax.dtypes.float0) for shape in self.result_shapes)
        gradients = [
            next(flowing) if smooth else np.zeros(struct.shape, struct.dtype)
            for smooth, struct in zip(
                self.smooth, _local_structs(self.loops.results, none, sizes), strict=True
            )
        ]
        if self.sources is None:
            leaves = [given[i] for i in range(len(self.structs))]
            _, pullback = jax.vjp(lambda *xs: self.flat(sizes, xs), *leaves)
        else:
            structs = _local_structs(self.loops.operands, self.structs, sizes)
            _, tree = _linearized(self.flat, sizes, structs)
            leaves = [given[i] if i >= 0 else saved[-1 - i] for i in self.sources]
            pullback = jax.tree.unflatten(tree, leaves)
        found = pullback(gradients)
        return [found[i] for i in self.wanted]


def _local_structs(
    terms: Sequence[Term], structs: Structs, sizes: Sizes
) -> list[jax.ShapeDtypeStruct]:
    made = []
    for term, (shape, dtype) in zip(terms, structs, strict=True):
        dims = list(shape)
        for place, dim in enumerate(term):
            if dim:
                dims[place] = 1
            for name in dim:
                dims[place] *= sizes[name]
        made.append(jax.ShapeDtypeStruct(tuple(dims), dtype))
    return made


def _linearized(flat: FlatFunction, sizes: Sizes, structs: Sequence[Any]) -> tuple[Any, Any]:
    """The function with its pullback's leaves as a program, and the pullback's structure."""
    trees = []

    def run(*leaves: Any) -> Any:
        results, pullback = jax.vjp(lambda *xs: flat(sizes, xs), *leaves)
        kept, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        return [*results, *kept]

    return jax.make_jaxpr(run)(*structs), trees[-1]


def differentiable(
    flat: FlatFunction, loops: LoopNotation, structs: Structs, sizes: tuple[tuple[str, int], ...]
) -> Callable[..., Any]:
    """The function of flat arrays as one equation, whose gradient is one equation too."""
    body = LocalBody(flat, loops, sizes)

    def plan() -> tuple[Saved, tuple[int, ...]]:
        """What is saved, and which arguments the backward pass reads."""
        found = _saved(flat, loops, dict(sizes), structs)
        if found[0] is None:
            return found, tuple(range(len(structs)))
        return found, tuple(sorted({i for i in found[0] if i >= 0}))

    @jax.custom_vjp
    def call(*leaves: Any) -> list[Any]:
        return call_local(body, leaves)

    def forward(*leaves: Any) -> Any:
        (_, saved, terms), arguments = plan()
        names = LoopNotation(loops.operands, (*loops.results, *terms), loops.kinds)
        found = call_local(LocalBody(_Saving(flat, saved), names, sizes), leaves)
        count = len(loops.results)
        return found[:count], ([leaves[i] for i in arguments], found[count:])

    def backward(kept: Any, gradients: list[Any]) -> Any:
        given, saved = kept
        (sources, _, terms), arguments = plan()
        wanted = tuple(i for i, (_, dtype) in enumerate(structs) if _is_smooth(dtype))
        smooth = tuple(_is_smooth(g.dtype) for g in gradients)
        shapes = tuple(jnp.shape(g) for g in gradients)
        pullback = _Pullback(
            flat, loops, structs, arguments, sources, len(saved), wanted, smooth, shapes
        )
        results = tuple(loops.operands[i] for i in wanted)
        operands = (
            *(loops.operands[i] for i in arguments),
            *terms,
            *itertools.compress(loops.results, smooth),
        )
        kinds = tuple(
            (name, "cut" if all(any(name in dim for dim in term) for term in results) else "sum")
            for name, kind in loops.kinds
            if kind in ("cut", "sum")
        )
        values = [*given, *saved, *itertools.compress(gradients, smooth)]
        names = LoopNotation(operands, results, kinds)
        found = call_local(LocalBody(pullback, names, sizes), values)
        by_leaf = dict(zip(wanted, found, strict=True))
        return tuple(by_leaf.get(i) for i in range(len(structs)))

    call.defvjp(forward, backward)
    return call


def _is_smooth(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


Saved = tuple[tuple[int, ...] | None, tuple[int, ...], tuple[Term, ...]]


def _saved(
    flat: FlatFunction,
    loops: LoopNotation,
    sizes: dict[str, int],
    structs: Structs,
) -> Saved:
    """What the pullback's leaves are, which of them are saved, and the dimensions of these.

    A saved array has every loop in the dimension that gets smaller with it. Where that is not clear
    of one, nothing is saved, and the backward pass evaluates the function again. JAX's own
    functions drop dimensions of size 1 here and there, so slices of one are looked at as well.
    """
    again: Saved = (None, (), ())
    count = len(loops.results)

    def leaves_with(changed: dict[str, int]) -> Any:
        local = {**sizes, **changed}
        closed, _ = _linearized(flat, local, _local_structs(loops.operands, structs, local))
        return closed.jaxpr

    jaxpr = leaves_with({})
    numbers = {var: i for i, var in enumerate(jaxpr.invars)}
    kept = jaxpr.outvars[count:]
    sources: list[int] = []
    saved: list[int] = []
    for place, atom in enumerate(kept):
        number = numbers.get(atom) if not hasattr(atom, "val") else None
        sources.append(-1 - len(saved) if number is None else number)
        if number is None:
            saved.append(place)
    terms: list[list[tuple[str, ...]]] = [[() for _ in kept[place].aval.shape] for place in saved]
    for name, _ in loops.kinds:
        size = sizes[name]
        parts = next((p for p in range(2, size + 1) if size % p == 0), None)
        if parts is None:
            continue
        try:
            others = leaves_with({name: size // parts}).outvars[count:]
        except Exception:  # it is the user's, and need not take arrays of this size
            return again
        if len(others) != len(kept):
            return again
        for term, place in zip(terms, saved, strict=True):
            whole, part = kept[place].aval.shape, others[place].aval.shape
            if len(whole) != len(part):
                return again
            changed = [d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
            if len(changed) != 1:  # alike in every slice, or in several dimensions
                return again
            (dim,) = changed
            if term[dim] or whole[dim] != size or part[dim] != size // parts:
                return again
            term[dim] = (name,)
    names = [name for name, _ in loops.kinds]
    for ones in (*({name: 1} for name in names), dict.fromkeys(names, 1)):
        expected = [
            tuple(
                math.prod(ones.get(n, sizes[n]) for n in dim) if dim else whole
                for whole, dim in zip(kept[place].aval.shape, term, strict=True)
            )
            for term, place in zip(terms, saved, strict=True)
        ]
        try:
            others = leaves_with(ones).outvars[count:]
        except Exception:  # nobody may cut it so
            continue
        if len(others) != len(kept):
            return again
        if [others[place].aval.shape for place in saved] != expected:
            return again
    return tuple(sources), tuple(saved), tuple(map(tuple, terms))
