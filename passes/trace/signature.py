"""What a trace depends on: how a function takes its arguments, and what these are.

Equal signatures give the same program, as in the cache of `jax.jit`.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from autopar.arrays.ray_array import RayArray
from autopar.arrays.sourced_leaf import SourcedLeaf
from autopar.arrays.split_array import SplitArray
from autopar.base.errors import TraceError
from autopar.passes.graph import jax_compat
from autopar.passes.trace.arguments import Argument
from autopar.passes.trace.object_states import in_objects

OWN_ARRAYS = (SplitArray, RayArray, SourcedLeaf)
"""Arrays that JAX does not know: leaves of a state between steps."""

Key = int | str  # a positional argument's number, or a keyword


@dataclass(frozen=True)
class Convention:
    """How a function names its arguments, and which of them are static.

    `names` are its positional parameters, `variadic` the name of `*args` if it has one,
    `static_argnames` those that are static where they are given by keyword alone.
    """

    names: tuple[str, ...] = ()
    variadic: str | None = None
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()

    @classmethod
    def of(cls, fn: Callable[..., Any], static_argnums: Sequence[int] = ()) -> Convention:
        """The convention of a function; one that has no signature has nameless arguments.

        What `jax.jit` was told to be static is static here too.
        """
        jitted = jax_compat.jit_arguments(fn)
        static_argnums = tuple(dict.fromkeys((*static_argnums, *jitted.static_argnums)))
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):
            return cls((), "args", static_argnums, jitted.static_argnames)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = tuple(p.name for p in parameters if p.kind in positional)
        variadic = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
        last = variadic[0] if variadic else None
        return cls(names, last, static_argnums, jitted.static_argnames)

    @property
    def has_static(self) -> bool:
        """Whether any argument is static."""
        return bool(self.static_argnums or self.static_argnames)

    def name(self, key: Key) -> str:
        """What to call an argument in a path."""
        if isinstance(key, str):
            return key
        if key < len(self.names):
            return self.names[key]
        return f"{self.variadic or 'args'}[{key - len(self.names)}]"

    def position(self, key: Key) -> int | None:
        """The number of an argument among the parameters; None for one that has only a name."""
        if isinstance(key, int):
            return key
        return self.names.index(key) if key in self.names else None

    def numbers(self, argnums: Sequence[int], num_args: int) -> frozenset[int]:
        """Argument numbers, with negative ones counted from the end as `jax.jit` does."""
        count = num_args if self.variadic else max(len(self.names), num_args)
        return frozenset(n + count if n < 0 else n for n in argnums)

    def split(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[Key, Any]]:
        """Arguments that are traced, positional and by keyword, and those that are static."""
        if not self.has_static:
            return args, dict(kwargs), {}
        numbers = self.numbers(self.static_argnums, len(args))
        static: dict[Key, Any] = {i: a for i, a in enumerate(args) if i in numbers}
        names = {*self.static_argnames, *(k for k in kwargs if self.position(k) in numbers)}
        static |= {k: kwargs[k] for k in sorted(names & kwargs.keys())}
        return (
            tuple(a for i, a in enumerate(args) if i not in static),
            {k: v for k, v in kwargs.items() if k not in static},
            static,
        )


@dataclass(frozen=True)
class Signature:
    """What a trace depends on.

    Args:
      tree: structure of the (positional, keyword) arguments without static ones.
      shapes: of the array leaves, in order, with dtype and weak type.
      statics: (position among all leaves, its type, the leaf) of each leaf that is not an array.
      static_arguments: (argument, its type, its value); a type tells 1 from True.
    """

    tree: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    statics: tuple[tuple[int, type, Any], ...] = ()
    static_arguments: tuple[tuple[Key, type, Any], ...] = ()

    @cached_property
    def array_positions(self) -> tuple[int, ...]:
        """Positions of the array leaves among all leaves."""
        static = {position for position, *_ in self.statics}
        return tuple(i for i in range(self.tree.num_leaves) if i not in static)

    def arguments(
        self, arrays: Sequence[Any], seal: Callable[[Any], Any] = lambda value: value
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments: arrays in their places among everything static.

        `seal` is applied to what is static.
        """
        leaves = list(arrays)
        for position, _, leaf in self.statics:  # positions in ascending order
            leaves.insert(position, seal(leaf))
        args, kwargs = self.tree.unflatten(leaves)
        args, kwargs = list(args), dict(kwargs)
        for key, _, value in self.static_arguments:  # likewise
            if isinstance(key, int):
                args.insert(key, seal(value))
            else:
                kwargs[key] = seal(value)
        return tuple(args), kwargs


@jax.tree_util.register_static
@dataclass(frozen=True)
class Sealed:
    """Something static on its way through a JAX transformation: a pytree without leaves."""

    value: Any


def unsealed(tree: Any) -> Any:
    """A pytree with what was sealed in it."""
    is_sealed = lambda x: isinstance(x, Sealed)  # noqa: E731
    return jax.tree.map(lambda x: x.value if is_sealed(x) else x, tree, is_leaf=is_sealed)


def signature_of(
    convention: Convention, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Signature:
    """What a call's trace depends on.

    Raises:
      TraceError: a leaf is neither an array nor hashable.
    """
    dynamic_args, dynamic_kwargs, static = convention.split(args, kwargs)
    leaves, tree = jax.tree.flatten((dynamic_args, dynamic_kwargs))
    traced = traced_leaves((dynamic_args, dynamic_kwargs), leaves)
    shapes, statics = [], []
    for position, (leaf, is_traced) in enumerate(zip(leaves, traced, strict=True)):
        if is_traced:
            try:
                shapes.append(shape_of(leaf))
            except OverflowError as error:
                path = _path_of(position, convention, args, kwargs)
                raise _no_array(leaf, path, error) from error
        elif is_hashable(leaf) and not _is_foreign_array(leaf):
            statics.append((position, type(leaf), leaf))
        else:
            raise _bad_leaf(leaf, _path_of(position, convention, args, kwargs))
    for key, value in static.items():
        if not is_hashable(value):
            raise TraceError(
                f"The static argument {convention.name(key)} is not hashable.",
                where=convention.name(key),
                why=f"it is {describe(value)}; a static argument is part of the key under which a "
                "compiled program is kept.",
                hint="pass a tuple for a list, a frozen dataclass for a dict, or do not make it "
                "static.",
            )
    static_arguments = tuple((key, type(value), value) for key, value in static.items())
    return Signature(tree, tuple(shapes), tuple(statics), static_arguments)


def traced_leaves(tree: Any, leaves: Sequence[Any]) -> list[bool]:
    """Whether each leaf of a pytree is traced: an array, a number, or what stands for one.

    Inside an Equinox module a Python number (`Dropout.p`, `Dropout.inference`) is part of the
    model's definition, and `equinox.filter_jit` does not trace it; nor is it traced here.
    """
    traced = [is_array(leaf) for leaf in leaves]
    module = getattr(sys.modules.get("equinox"), "Module", None)
    if module is not None:
        inside: list[bool] = []
        for part in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, module)):
            is_module = isinstance(part, module)
            inside += [is_module] * (len(jax.tree.leaves(part)) if is_module else 1)
        for position, (leaf, is_inside) in enumerate(zip(leaves, inside, strict=True)):
            if is_inside and type(leaf) in (bool, int, float, complex):
                traced[position] = False
    return traced


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, a number, or what stands for one."""
    if isinstance(leaf, (jax.Array, *OWN_ARRAYS, bool, int, float, complex, jax.ShapeDtypeStruct)):
        return True
    if isinstance(leaf, (np.ndarray, np.generic)):
        try:
            jax.typeof(leaf)
        except (TypeError, ValueError):
            return False
        return True
    return False


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype (as JAX will hold it) and weak type; how the leaf is sharded is left out."""
    aval = leaf if isinstance(leaf, OWN_ARRAYS) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False))
    )


def is_hashable(leaf: Any) -> bool:
    """Whether a leaf can be part of a signature."""
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


def _is_foreign_array(leaf: Any) -> bool:
    """An array of another library is hashable by identity, but it is data."""
    if isinstance(leaf, type):
        return False
    return hasattr(leaf, "__jax_array__") or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _path_of(
    position: int, convention: Convention, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """The path of one of the leaves of a call's traced arguments."""
    values = _traced_values(convention, args, kwargs)
    paths = (
        convention.name(key) + jax.tree_util.keystr(path)
        for key, value in values
        for path, _ in jax.tree_util.tree_leaves_with_path(value)
    )
    return next(itertools.islice(paths, position, None))


def _no_array(leaf: Any, path: str, error: Exception) -> TraceError:
    """The error for a leaf that JAX takes for an array, and cannot make one of."""
    told = textwrap.shorten(str(error).rstrip("."), 100, placeholder="...")
    is_wide = isinstance(leaf, int) and -(2**63) <= leaf < 2**63
    wider = "; or set jax_enable_x64" if is_wide and not jax.config.read("jax_enable_x64") else ""
    return TraceError(
        f"The leaf {path} cannot be made an array.",
        where=path,
        why=f"it is {describe(leaf)}, of which JAX says: {told}.",
        hint=f"pass a smaller number, a float, or an array{wider}.",
    )


def _bad_leaf(leaf: Any, path: str) -> TraceError:
    hint = "convert it with numpy.asarray, register its class as a pytree, or give it a __hash__."
    if isinstance(leaf, np.ma.MaskedArray):
        why = "it is a masked NumPy array, which JAX has no counterpart for."
        hint = "pass its numbers (.filled(...)) and its mask as two arrays."
    elif isinstance(leaf, (np.ndarray, np.generic)):
        why = f"it is a NumPy array of dtype {leaf.dtype}, which JAX has no counterpart for."
        hint = "leave it out of what the step takes, or encode it as numbers."
    elif _is_foreign_array(leaf):
        why = f"it is {describe(leaf)}, an array of another library."
    else:
        why = f"it is {describe(leaf)}. A leaf must be an array or a number, or else hashable."
    return TraceError(
        f"The leaf {path} is neither an array nor a constant.",
        where=path,
        why=why,
        hint=hint,
    )


def arguments_of(
    convention: Convention, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Argument]:
    """The arguments that are traced, in the order of their leaves."""
    start = 0
    for key, value in _traced_values(convention, args, kwargs):
        with_paths, tree = jax.tree_util.tree_flatten_with_path(value)
        name = convention.name(key)
        flat = [leaf for _, leaf in with_paths]
        traced = traced_leaves(value, flat)
        leaves = tuple(shape_of(x) if t else None for x, t in zip(flat, traced, strict=True))
        paths = tuple(name + jax.tree_util.keystr(path) for path, _ in with_paths)
        owned, position = tuple(in_objects(value)), convention.position(key)
        yield Argument(name, position, value, tree, leaves, paths, start, owned)
        start += sum(leaf is not None for leaf in leaves)


def _traced_values(
    convention: Convention, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Key, Any]]:
    _, _, static = convention.split(args, kwargs)
    # Flattening a dict sorts its keys.
    keys: list[Key] = [*range(len(args)), *sorted(kwargs)]
    for key in keys:
        if key not in static:
            yield key, args[key] if isinstance(key, int) else kwargs[key]


def describe(value: Any) -> str:
    """A value and its type, for a message."""
    kind = type(value)
    text = " ".join(repr(value).split())
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{text if len(text) <= 60 else text[:57] + '...'} of type {module}{kind.__qualname__}"
