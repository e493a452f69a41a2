"""`autopar.local`: functions that compute independently along dimensions which the user names."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.base.errors import OptionError
from autopar.base.loop_notation import LoopNotation, Term, parse_loops
from autopar.passes.primitives.local_calls import LocalBody, Sizes, call_local

Structs = tuple[tuple[tuple[int, ...], Any], ...]  # shape and dtype of each array


def local(
    function: Callable[..., Any] | str,
    rule: str | None = None,
    *,
    cut: str = "",
    sum: str = "",
    max: str = "",
    min: str = "",
) -> Any:
    """A function that autopar may call on slices of its arguments, along loops that you name.

    autopar cuts what JAX is made of by itself. This is for what it cannot look into: a call of
    foreign code (`jax.ffi.ffi_call`), or a kernel whose block specs prove nothing. Forward and
    backward, each device and each microbatch then computes its own slice.

    The rule is written in the notation of einsum: for each argument, in their order, a name for
    each of its dimensions; after the arrow the same for each result. `_` stands for a dimension
    without a name, `(b h)` for one that holds two loops, the outer one first. An argument or a
    result may be a pytree, whose leaves have the same dimensions; or write one term for each leaf.

    Args:
      function: of arrays; constants that it closes over are whole on every device, values of the
        step it takes as arguments. It is traced again for each shape of slices.
        `local(rule, cut=...)` is a decorator.
      rule: the dimensions, as in `"b t h d, b s h d, b s h d -> b t h d"`.
      cut: loops along which it computes independently: a slice of the arguments gives the slice of
        the results. Every result has them.
      sum: loops of which each slice gives a part of the result, the parts being added up.
      max: the same, with the largest of the parts.
      min: the same, with the smallest.

    Returns:
      A function like it. It can be differentiated in reverse mode (also what has a `custom_vjp`)
      and mapped by `jax.vmap`. Keyword arguments are passed on as they are, and must not be arrays.

    Raises:
      OptionError: the rule cannot be read, or does not fit the arguments of a call.

    >>> import jax.numpy as jnp
    >>> @local("b t d, d -> b t d", cut="b t")
    ... def scaled(x, scale):
    ...     return x * scale / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))
    >>> scaled(jnp.ones((2, 3, 4)), jnp.ones(4)).shape
    (2, 3, 4)
    """
    kinds = {"cut": cut, "sum": sum, "max": max, "min": min}
    if isinstance(function, str):
        if rule is not None:
            raise OptionError("autopar.local was given two rules.")
        return functools.partial(_decorate, parse_loops(function, kinds))
    if rule is None:
        raise OptionError(
            "autopar.local was given no rule.",
            hint="write autopar.local(function, 'b t d -> b t d', cut='b t').",
        )
    return _decorate(parse_loops(rule, kinds), function)


def _decorate(loops: LoopNotation, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        if any(isinstance(x, jax.Array) for x in jax.tree.leaves(options)):
            raise OptionError(
                "A function of autopar.local takes arrays by position.",
                where=_name_of(function),
                why=f"it was given an array by keyword, of {sorted(options)}.",
            )
        held = tuple(sorted(options.items(), key=lambda item: item[0]))
        flat = _Flat(function, held, tree)
        structs = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
        closed, shape = jax.make_jaxpr(flat.whole, return_shape=True)(*structs)
        _check_closed_over(closed.consts, function)
        results, out_tree = jax.tree.flatten(shape)
        operand_terms = _terms(loops.operands, args, leaves, "argument", function)
        result_terms = _terms(
            loops.results,
            shape if isinstance(shape, tuple) else (shape,),
            results,
            "result",
            function,
        )
        notation = LoopNotation(operand_terms, result_terms, loops.kinds)
        sizes = _sizes(notation, structs, results, function)
        shapes = tuple((struct.shape, struct.dtype) for struct in structs)
        return jax.tree.unflatten(out_tree, _differentiable(flat, notation, shapes, sizes)(*leaves))

    functools.update_wrapper(call, function, updated=())
    return call


def _check_closed_over(constants: Sequence[Any], function: Callable[..., Any]) -> None:
    traced = next((x for x in constants if isinstance(x, jax.core.Tracer)), None)
    if traced is not None:
        raise OptionError(
            "A function of autopar.local takes values of the step as arguments.",
            where=_name_of(function),
            why=f"it closes over one, {traced.aval.str_short()}, and is called again on slices when"
            " the step has been traced.",
            hint="make it an argument, with a term of its own in the rule; `_` is a dimension that"
            " stays whole.",
        )


@dataclass(frozen=True)
class _Flat:
    """A function of the leaves of its arguments, with the leaves of its result."""

    function: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]
    tree: Any

    def whole(self, *leaves: Any) -> Any:
        return self.function(*jax.tree.unflatten(self.tree, leaves), **dict(self.options))

    def __call__(self, sizes: Sizes, leaves: Sequence[Any]) -> list[Any]:
        return jax.tree.leaves(self.whole(*leaves))


def _terms(
    terms: tuple[Term, ...],
    values: Sequence[Any],
    leaves: Sequence[Any],
    what: str,
    function: Callable[..., Any],
) -> tuple[Term, ...]:
    """The term of every leaf."""
    if len(terms) == len(values):
        found = [term for term, v in zip(terms, values, strict=True) for _ in jax.tree.leaves(v)]
    elif len(terms) == len(leaves):
        found = list(terms)
    else:
        raise OptionError(
            f"The rule of {_name_of(function)} has {len(terms)} terms for its {what}s.",
            why=f"there are {len(values)} {what}s with {len(leaves)} arrays.",
            hint=f"write a term for each {what}, between commas.",
        )
    for number, (term, leaf) in enumerate(zip(found, leaves, strict=True)):
        if len(term) != len(jnp.shape(leaf)):
            raise OptionError(
                f"The rule of {_name_of(function)} names {len(term)} dimensions of {what}"
                f" {number}.",
                why=f"its shape is {jnp.shape(leaf)}.",
            )
    return tuple(found)


def _sizes(
    loops: LoopNotation,
    operands: Sequence[Any],
    results: Sequence[Any],
    function: Callable[..., Any],
) -> tuple[tuple[str, int], ...]:
    """The size of every loop."""
    sizes: dict[str, int] = {}
    dims = [
        (dim, size)
        for term, value in zip(
            (*loops.operands, *loops.results), (*operands, *results), strict=True
        )
        for dim, size in zip(term, value.shape, strict=True)
    ]
    for dim, size in sorted(dims, key=lambda item: len(item[0])):
        unknown = [name for name in dim if name not in sizes]
        known = 1
        for name in dim:
            known *= sizes.get(name, 1)
        if len(unknown) == 1 and size % known == 0:
            sizes[unknown[0]] = size // known
        elif dim and (unknown or known != size):
            raise OptionError(
                f"The rule of {_name_of(function)} does not fit its arrays.",
                why=f"({' '.join(dim)}) is a dimension of {size}, and of the loops in it are known:"
                f" { ({n: sizes[n] for n in dim if n in sizes}) }.",
            )
    return tuple(sorted(sizes.items()))


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


# The backward pass. A loop that is cut forward is cut backward as well: the gradient of what has it
# is cut along it, the gradient of what has it not is a sum over it.


@dataclass(frozen=True)
class _Saving:
    """The function together with what its pullback needs beside its arguments."""

    flat: _Flat
    saved: tuple[int, ...]  # the places of these among the pullback's leaves

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

    flat: _Flat
    loops: LoopNotation
    structs: Structs
    arguments: tuple[int, ...]  # those that are operands
    sources: tuple[int, ...] | None
    num_saved: int
    wanted: tuple[int, ...]
    smooth: tuple[bool, ...]  # of each result, whether it has a gradient
    result_shapes: tuple[tuple[int, ...], ...]

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


def _linearized(flat: _Flat, sizes: Sizes, structs: Sequence[Any]) -> tuple[Any, Any]:
    """The function with its pullback's leaves as a program, and the pullback's structure."""
    trees = []

    def run(*leaves: Any) -> Any:
        results, pullback = jax.vjp(lambda *xs: flat(sizes, xs), *leaves)
        kept, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        return [*results, *kept]

    return jax.make_jaxpr(run)(*structs), trees[-1]


def _differentiable(
    flat: _Flat, loops: LoopNotation, structs: Structs, sizes: tuple[tuple[str, int], ...]
) -> Callable[..., Any]:
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
    flat: _Flat,
    loops: LoopNotation,
    sizes: dict[str, int],
    structs: Structs,
) -> Saved:
    """What the pullback's leaves are, which of them are saved, and the dimensions of these.

    A saved array has every loop in the dimension that gets smaller with it. Where that is not clear
    of one, nothing is saved, and the backward pass evaluates the function again.
    """
    again: Saved = (None, (), ())
    closed, _ = _linearized(flat, sizes, _local_structs(loops.operands, structs, sizes))
    jaxpr, count = closed.jaxpr, len(loops.results)
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
        smaller = {**sizes, name: size // parts}
        try:
            other, _ = _linearized(flat, smaller, _local_structs(loops.operands, structs, smaller))
        except Exception:  # it is the user's, and need not take arrays of this size
            return again
        others = other.jaxpr.outvars[count:]
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
    return tuple(sources), tuple(saved), tuple(map(tuple, terms))
