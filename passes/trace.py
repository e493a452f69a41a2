"""From a user's function and its arguments to a `Graph`: one flat program with labelled inputs.

A `Signature` is what a trace depends on: equal signatures give the same program, as in the cache
of `jax.jit`. `Traced` knows how a call's arguments are taken apart into the graph's inputs, and how
its outputs are put together again.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from autopar.errors import OptionError, TraceError
from autopar.passes import graph as graphs
from autopar.passes import roles
from autopar.passes.graph import Graph

Key = int | str  # a positional argument's number, or a keyword


@dataclass(frozen=True)
class Convention:
    """How a function names its arguments, and which of them are static.

    `names` are its positional parameters, `variadic` the name of `*args` if it has one.
    """

    names: tuple[str, ...] = ()
    variadic: str | None = None
    static_argnums: tuple[int, ...] = ()

    @classmethod
    def of(cls, fn: Callable[..., Any], static_argnums: Sequence[int] = ()) -> Convention:
        """The convention of a function; one that has no signature has nameless arguments."""
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):
            return cls((), "args", tuple(static_argnums))
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = tuple(p.name for p in parameters if p.kind in positional)
        variadic = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
        return cls(names, variadic[0] if variadic else None, tuple(static_argnums))

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
        if not self.static_argnums:
            return args, dict(kwargs), {}
        numbers = self.numbers(self.static_argnums, len(args))
        static: dict[Key, Any] = {i: a for i, a in enumerate(args) if i in numbers}
        static |= {k: kwargs[k] for k in sorted(kwargs) if self.position(k) in numbers}
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

    def call(self, fn: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        """Call a function with array leaves in their places among everything static."""
        leaves: list[Any] = [None] * self.tree.num_leaves
        for position, leaf in zip(self.array_positions, arrays, strict=True):
            leaves[position] = leaf
        for position, _, leaf in self.statics:
            leaves[position] = leaf
        args, kwargs = self.tree.unflatten(leaves)
        args, kwargs = list(args), dict(kwargs)
        for key, _, value in self.static_arguments:  # positions in ascending order
            if isinstance(key, int):
                args.insert(key, value)
            else:
                kwargs[key] = value
        return fn(*args, **kwargs)


@dataclass(frozen=True)
class Traced:
    """A traced function: its program, and how its calls and results are put together.

    Args:
      graph: its first inputs are the array leaves of the arguments in order, then come constants;
        its outputs are the array leaves of the result in order.
      signature: of the arguments it was traced for.
      convention: of the function.
      out_tree: structure of the result.
      out_statics: (position among all leaves, leaf) of the result's leaves that are not arrays.
      batch_size: number of examples in the batch, or None where there is no batch.
      arguments: the traced arguments, in the order of their leaves.
    """

    graph: Graph
    signature: Signature
    convention: Convention
    out_tree: Any
    out_statics: tuple[tuple[int, Any], ...]
    batch_size: int | None
    arguments: tuple[roles.Argument, ...]

    @property
    def num_arrays(self) -> int:
        """Number of array leaves of the arguments."""
        return len(self.signature.shapes)

    def result(self, arrays: Sequence[Any]) -> Any:
        """The function's result from its array leaves."""
        if not self.out_statics:
            return self.out_tree.unflatten(arrays)
        leaves = list(arrays)
        for position, leaf in self.out_statics:
            leaves.insert(position, leaf)
        return self.out_tree.unflatten(leaves)


def trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    static_argnums: Sequence[int] = (),
    donate_argnums: Sequence[int] | str = "auto",
    batch_argnums: Sequence[int] | str = "auto",
    batch_axes: Any = None,
    microbatches: int | str = "auto",
    method: str = "auto",
) -> Traced:
    """Trace a function to a flat program whose inputs are labelled.

    Args:
      fn: the function; it is called once, with tracers.
      args: arrays, Python numbers, `jax.ShapeDtypeStruct`s, PRNG keys, in any pytrees; other leaves
        are static.
      kwargs: the same, by keyword.
      static_argnums: arguments that are passed through as they are.
      donate_argnums: arguments whose buffers may be reused; "auto": those found to be the state.
      batch_argnums: arguments that hold the batch along the first dimension of their leaves.
      batch_axes: a pytree prefix of the arguments, which names the batch dimension of their leaves.
      microbatches: to check that the batch divides.
      method: to check that there is a batch where the method needs one.

    Raises:
      TraceError: a leaf is neither an array nor hashable, or the result holds no array.
      BatchArgumentError: the batch is ambiguous, missing, or does not divide.
      OptionError: an argument number is out of range.
      Exception: whatever `fn` raises, as it is.
    """
    kwargs = {} if kwargs is None else kwargs
    convention = Convention.of(fn, static_argnums)
    _check_static_argnums(convention, args, kwargs)
    signature = signature_of(convention, args, kwargs)
    recorded: dict[str, Any] = {}

    def on_arrays(*arrays: Any) -> list[Any]:
        result = signature.call(fn, arrays)
        with_paths, recorded["tree"] = jax.tree_util.tree_flatten_with_path(result)
        recorded["paths"] = tuple("result" + jax.tree_util.keystr(path) for path, _ in with_paths)
        leaves = [leaf for _, leaf in with_paths]
        dynamic = [_is_result_array(leaf) for leaf in leaves]
        recorded["dynamic"] = dynamic
        recorded["statics"] = tuple(
            (i, _check_static_result(leaf, recorded["paths"][i]))
            for i, leaf in enumerate(leaves)
            if not dynamic[i]
        )
        return [leaf for leaf, is_array in zip(leaves, dynamic, strict=True) if is_array]

    with logical_shapes():
        closed = jax.make_jaxpr(on_arrays)(*signature.shapes)
    if not closed.out_avals:
        raise TraceError(
            f"{_name_of(fn)} returns no arrays.",
            where=_where(fn),
            why=f"its result is {recorded['tree']}.",
            hint="return the new state and the metrics; what is only printed or stored is lost.",
        )
    avals = iter(closed.out_avals)
    result = roles.Result(
        recorded["tree"],
        tuple(next(avals) if is_array else None for is_array in recorded["dynamic"]),
        recorded["paths"],
    )
    arguments = tuple(arguments_of(convention, args, kwargs))
    unlabelled = [graphs.Input(path, "other") for a in arguments for _, path, _ in a.arrays()]
    graph = graphs.from_closed_jaxpr(closed, unlabelled, ())
    request = roles.Request(
        _positions(donate_argnums, convention, len(args)),
        _positions(batch_argnums, convention, len(args)),
        batch_axes,
    )
    inputs, outputs = roles.assign(graph.jaxpr, arguments, result, request)
    constants = graph.inputs[len(inputs) :]
    size = roles.check_division(inputs, signature.shapes, microbatches=microbatches, method=method)
    return Traced(
        graph=Graph(graph.jaxpr, (*inputs, *constants), outputs, graph.constants),
        signature=signature,
        convention=convention,
        out_tree=recorded["tree"],
        out_statics=recorded["statics"],
        batch_size=size,
        arguments=tuple(replace(argument, value=None) for argument in arguments),
    )


@contextlib.contextmanager
def logical_shapes() -> Iterator[None]:
    """Within it, all axes of a mesh that the user has set are Auto: values have no sharding."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        yield
        return
    auto = AbstractMesh(mesh.axis_sizes, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names))
    with jax.sharding.use_abstract_mesh(auto):
        yield


# Signatures.


def signature_of(
    convention: Convention, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Signature:
    """What a call's trace depends on.

    Raises:
      TraceError: a leaf is neither an array nor hashable.
    """
    dynamic_args, dynamic_kwargs, static = convention.split(args, kwargs)
    leaves, tree = jax.tree.flatten((dynamic_args, dynamic_kwargs))
    shapes, statics = [], []
    for position, leaf in enumerate(leaves):
        if is_array(leaf):
            shapes.append(shape_of(leaf))
        elif _is_hashable(leaf) and not _is_foreign_array(leaf):
            statics.append((position, type(leaf), leaf))
        else:
            arguments = arguments_of(convention, args, kwargs)
            path = [path for argument in arguments for path in argument.paths][position]
            raise _bad_leaf(leaf, path)
    for key, value in static.items():
        if not _is_hashable(value):
            raise TraceError(
                f"The static argument {convention.name(key)} is not hashable.",
                where=convention.name(key),
                why=f"it is {_describe(value)}; a static argument is part of the key under which a "
                "compiled program is kept.",
                hint="pass a tuple for a list, a frozen dataclass for a dict, or do not make it "
                "static.",
            )
    return Signature(
        tree,
        tuple(shapes),
        tuple(statics),
        tuple((key, type(value), value) for key, value in static.items()),
    )


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced: an array, a number, or what stands for one."""
    if isinstance(leaf, (jax.Array, bool, int, float, complex, jax.ShapeDtypeStruct)):
        return True
    if isinstance(leaf, (np.ndarray, np.generic)):
        try:
            jax.typeof(leaf)
        except TypeError:
            return False
        return True
    return False


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype (as JAX will hold it) and weak type; how the leaf is sharded is left out."""
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False))
    )


def _is_hashable(leaf: Any) -> bool:
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


def _bad_leaf(leaf: Any, path: str) -> TraceError:
    if isinstance(leaf, (np.ndarray, np.generic)):
        why = f"it is a NumPy array of dtype {leaf.dtype}, which JAX has no counterpart for."
    elif _is_foreign_array(leaf):
        why = f"it is {_describe(leaf)}, an array of another library."
    else:
        why = f"it is {_describe(leaf)}. A leaf must be an array or a number, or else hashable."
    return TraceError(
        f"The leaf {path} is neither an array nor a constant.",
        where=path,
        why=why,
        hint="convert it with numpy.asarray, register its class as a pytree, or give it a "
        "__hash__.",
    )


def arguments_of(
    convention: Convention, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[roles.Argument]:
    """The arguments that are traced, in the order of their leaves."""
    _, _, static = convention.split(args, kwargs)
    # Flattening a dict sorts its keys.
    keys: list[Key] = [*range(len(args)), *sorted(kwargs)]
    start = 0
    for key in keys:
        if key in static:
            continue
        value = args[key] if isinstance(key, int) else kwargs[key]
        with_paths, tree = jax.tree_util.tree_flatten_with_path(value)
        name = convention.name(key)
        leaves = tuple(shape_of(x) if is_array(x) else None for _, x in with_paths)
        paths = tuple(name + jax.tree_util.keystr(path) for path, _ in with_paths)
        yield roles.Argument(name, convention.position(key), value, tree, leaves, paths, start)
        start += sum(leaf is not None for leaf in leaves)


def _positions(
    argnums: Sequence[int] | str, convention: Convention, num_args: int
) -> tuple[int, ...] | Literal["auto"]:
    if isinstance(argnums, str):
        return "auto"
    return tuple(sorted(convention.numbers(argnums, num_args)))


def _check_static_argnums(
    convention: Convention, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    count = max(len(convention.names), len(args))
    for number in convention.numbers(convention.static_argnums, len(args)):
        if not 0 <= number < count:
            raise OptionError(
                f"static_argnums={convention.static_argnums!r} names argument {number}, which the "
                "function does not have.",
                why=f"it has {count} positional arguments, counted from 0.",
            )


# Results.


def _is_result_array(leaf: Any) -> bool:
    return is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct)


def _check_static_result(leaf: Any, path: str) -> Any:
    """A leaf that is returned as it is: it must not hide an array of the trace."""
    hidden = vars(leaf) if hasattr(leaf, "__dict__") and not callable(leaf) else ()
    if not _is_hashable(leaf) or any(
        isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(hidden)
    ):
        raise TraceError(
            f"The result has a leaf that is neither an array nor a constant: {path}.",
            where=path,
            why=f"it is {_describe(leaf)}.",
            hint="return pytrees of arrays; register the class as a pytree with "
            "jax.tree_util.register_dataclass.",
        )
    return leaf


def _describe(value: Any) -> str:
    kind = type(value)
    text = repr(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{text if len(text) <= 60 else text[:57] + '...'} of type {module}{kind.__qualname__}"


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


def _where(fn: Callable[..., Any]) -> str | None:
    try:
        code = inspect.unwrap(fn).__code__
    except AttributeError:
        return None
    return f"{code.co_filename}:{code.co_firstlineno} ({_name_of(fn)})"
