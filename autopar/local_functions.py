"""`autopar.local`: functions that compute independently along dimensions which the user names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.base.errors import OptionError
from autopar.base.loop_notation import LoopNotation, Term, parse_loops
from autopar.local_gradients import FlatFunction, called, differentiable


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
                where=called(function),
                why=f"it was given an array by keyword, of {sorted(options)}.",
            )
        held = tuple(sorted(options.items(), key=lambda item: item[0]))
        flat = FlatFunction(function, held, tree)
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
        return jax.tree.unflatten(out_tree, differentiable(flat, notation, shapes, sizes)(*leaves))

    functools.update_wrapper(call, function, updated=())
    return call


def _check_closed_over(constants: Sequence[Any], function: Callable[..., Any]) -> None:
    traced = next((x for x in constants if isinstance(x, jax.core.Tracer)), None)
    if traced is not None:
        raise OptionError(
            "A function of autopar.local takes values of the step as arguments.",
            where=called(function),
            why=f"it closes over one, {traced.aval.str_short()}, and is called again on slices when"
            " the step has been traced.",
            hint="make it an argument, with a term of its own in the rule; `_` is a dimension that"
            " stays whole.",
        )


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
            f"The rule of {called(function)} has {len(terms)} terms for its {what}s.",
            why=f"there are {len(values)} {what}s with {len(leaves)} arrays.",
            hint=f"write a term for each {what}, between commas.",
        )
    for number, (term, leaf) in enumerate(zip(found, leaves, strict=True)):
        if len(term) != len(jnp.shape(leaf)):
            raise OptionError(
                f"The rule of {called(function)} names {len(term)} dimensions of {what} {number}.",
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
                f"The rule of {called(function)} does not fit its arrays.",
                why=f"({' '.join(dim)}) is a dimension of {size}, and of the loops in it are known:"
                f" { ({n: sizes[n] for n in dim if n in sizes}) }.",
            )
    return tuple(sorted(sizes.items()))
