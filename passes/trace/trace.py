"""From a user's function and its arguments to a `Graph`: one flat program with labelled inputs.

`Traced` knows how a call's arguments are taken apart into the graph's inputs, and how its outputs
are put together again.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from autopar.base.errors import BatchArgumentError, OptionError, TraceError
from autopar.base.rare_collections import rare_collections
from autopar.passes.graph import graph as graphs
from autopar.passes.graph import jax_compat
from autopar.passes.graph.counted_indices import with_batches
from autopar.passes.graph.counted_slices import with_slices_of_batch
from autopar.passes.graph.graph import Graph
from autopar.passes.graph.logical import on_logical_shapes
from autopar.passes.trace import roles
from autopar.passes.trace.annotations import with_annotations
from autopar.passes.trace.arguments import Argument, Request, Result
from autopar.passes.trace.batch_lines import tell_batch
from autopar.passes.trace.lost_checkpoints import warn_of_lost_checkpoints
from autopar.passes.trace.object_states import ObjectKey
from autopar.passes.trace.shard_maps import without_shard_maps
from autopar.passes.trace.side_effects import tell_unreturned, unreturned, watched
from autopar.passes.trace.signature import (
    Convention,
    Sealed,
    Signature,
    arguments_of,
    describe,
    is_hashable,
    signature_of,
    traced_leaves,
    unsealed,
)
from autopar.passes.trace.tracing_errors import check_constants, check_kind, in_our_words


@dataclass(frozen=True)
class Traced:
    """A traced function: its program, and how its calls and results are put together.

    The graph's first inputs are the array leaves of `arguments` in order, then come constants; its
    outputs are the array leaves of the result in order. `out_statics` are (position among all
    leaves, leaf) of the others; `batch_size` is None where there is no batch.
    """

    graph: Graph
    signature: Signature
    convention: Convention
    out_tree: Any
    out_statics: tuple[tuple[int, Any], ...]
    batch_size: int | None
    arguments: tuple[Argument, ...]

    @property
    def takes_objects(self) -> bool:
        """Whether an argument holds objects that the step changes in place."""
        return any(any(argument.in_object) for argument in self.arguments)

    @property
    def num_arrays(self) -> int:
        """Number of array leaves of the arguments."""
        return len(self.signature.shapes)

    def result(self, arrays: Sequence[Any]) -> Any:
        """The function's result from its array leaves."""
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
    constraints: str = "pin",
) -> Traced:
    """Trace a function to a flat program whose inputs are labelled.

    Args:
      fn: the function; it is called once, with tracers, or again if it needs a mesh of Explicit
        axes.
      args: arrays, Python numbers, `jax.ShapeDtypeStruct`s, PRNG keys, in any pytrees; other leaves
        are static.
      kwargs: the same, by keyword.
      static_argnums: arguments that are passed through as they are.
      donate_argnums: arguments whose buffers may be reused; "auto": what `jax.jit` was told, if
        it was, else those found to be the state.
      batch_argnums: arguments that hold the batch along the first dimension of their leaves.
      batch_axes: a pytree prefix of the arguments, which names the batch dimension of their leaves.
      microbatches: to check that the batch divides.
      method: to check that there is a batch where the method needs one.
      constraints: "ignore" leaves out what the function prescribes for values' shardings.

    Raises:
      TraceError: a leaf is neither an array nor hashable, or the result holds no array.
      BatchArgumentError: the batch is ambiguous, missing, or does not divide.
      OptionError: an argument number is out of range.
      TraceError: `fn` asks for a number that is not known when it is traced; JAX's own error is
        its cause.
      Exception: whatever else `fn` raises, as it is.
    """
    kwargs = {} if kwargs is None else kwargs
    check_kind(fn, _name_of(fn), _where(fn))
    convention = Convention.of(fn, static_argnums)
    _check_static_argnums(convention, args, kwargs)
    signature = signature_of(convention, args, kwargs)
    made: list[tuple[Any, tuple[Any, ...], tuple[str, ...], tuple[bool, ...]]] = []

    @functools.wraps(fn)
    def on_arrays(*args: Any, **kwargs: Any) -> list[Any]:
        watch.begin()
        args, kwargs = unsealed((args, kwargs))
        tree, leaves, paths, traced = _take_apart(fn(*args, **kwargs))
        statics = (None if is_traced else x for x, is_traced in zip(leaves, traced, strict=True))
        made.append((tree, tuple(statics), paths, traced))
        return list(itertools.compress(leaves, traced))

    # The function is traced under its own name and argument names, for JAX's error messages.
    args_, kwargs_ = signature.arguments(signature.shapes, seal=Sealed)
    name, arguments = _name_of(fn), tuple(arguments_of(convention, args, kwargs))
    with watched() as watch, rare_collections():
        try:
            closed = on_logical_shapes(
                lambda: jax.make_jaxpr(on_arrays)(*args_, **kwargs_),
                keep_constraints=constraints == "pin",
            )
        except Exception as error:
            told = in_our_words(error, name, arguments, _where(fn)) or _bad_call(error, fn)
            if told is None:
                raise
            raise told from error
    watch.tell(name)
    check_constants(closed.consts, name, _where(fn))
    tree, leaves, paths, traced = made[-1]
    if not closed.out_avals:
        raise TraceError(
            f"{name} returns no arrays.",
            where=_where(fn),
            why=f"its result is {None if tree == _NOTHING else tree}.",
            hint="return the new state and the metrics; what is only printed or stored is lost.",
        )
    avals = iter(closed.out_avals)
    shaped = tuple(next(avals) if is_traced else None for is_traced in traced)
    unlabelled = [graphs.Input(path, "other") for a in arguments for _, path, _ in a.arrays()]
    try:
        with rare_collections():
            flat = graphs.flatten(closed)
            warn_of_lost_checkpoints(closed, flat)
            whole = without_shard_maps(flat)
            graph = with_batches(graphs.from_closed_jaxpr(whole, unlabelled, ()))
    except TraceError as error:  # no line of the function's: it is itself a jax.pmap
        error.where = error.where or _where(fn)
        raise
    if donate_argnums == "auto":
        donate_argnums = jax_compat.jit_arguments(fn).donate_argnums or "auto"
    donated = _positions(donate_argnums, convention, len(args))
    request = Request(donated, _positions(batch_argnums, convention, len(args)), batch_axes)
    result = Result(tree, shaped, paths)
    lost = unreturned(closed, arguments)
    try:
        inputs, outputs = roles.assign(graph.jaxpr, arguments, result, request)
    except BatchArgumentError:
        if not lost:
            raise
        inputs, outputs = roles.assign(graph.jaxpr, arguments, result, request, frozenset(lost))
    tell_unreturned(lost, arguments, inputs, name)
    constants = graph.inputs[len(inputs) :]
    try:
        shapes = signature.shapes
        asked: dict[str, Any] = {"microbatches": microbatches, "method": method}
        size = roles.check_division(inputs, shapes, batch_axes=batch_axes, **asked)
    except BatchArgumentError as error:
        tell_batch(error, graph.jaxpr, inputs, arguments, batch_argnums, batch_axes)
        raise
    jaxpr = with_annotations(graph.jaxpr, arguments) if constraints == "pin" else graph.jaxpr
    graph = Graph(jaxpr, (*inputs, *constants), outputs, graph.constants)
    graph = with_slices_of_batch(graph)
    out_statics = tuple((i, leaf) for i, leaf in enumerate(leaves) if not traced[i])
    arguments = tuple(replace(argument, value=None) for argument in arguments)
    return Traced(graph, signature, convention, tree, out_statics, size, arguments)


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
                why=f"it has {count} positional arguments.",
                hint=f"use numbers from 0 to {count - 1}.",
            )


_NOTHING: Any = jax.tree.structure(None)


def _bad_call(error: Exception, fn: Callable[..., Any]) -> TraceError | None:
    """The error for a call that the function does not take; None: it went wrong inside it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_call = frame.f_code.co_name in ("on_arrays", "_run_objects")
    if not isinstance(error, TypeError) or isinstance(error, TraceError) or not is_call:
        return None
    return TraceError(
        f"{_name_of(fn)} cannot be called in this way.",
        where=_where(fn),
        why=f"{error}.",
        hint="give all the arguments that the step takes, and no others.",
    )


def _take_apart(
    result: Any,
) -> tuple[Any, tuple[Any, ...], tuple[str, ...], tuple[bool, ...]]:
    """A result's structure, its leaves, their paths, and which of them are arrays."""
    with_paths, tree = jax.tree_util.tree_flatten_with_path(result)
    leaves = tuple(leaf for _, leaf in with_paths)
    paths = tuple(map(_result_path, (path for path, _ in with_paths)))
    traced = tuple(
        is_traced and not isinstance(leaf, jax.ShapeDtypeStruct)
        for leaf, is_traced in zip(leaves, traced_leaves(result, leaves), strict=True)
    )
    for leaf, path, is_traced in zip(leaves, paths, traced, strict=True):
        if not is_traced:
            _check_static_result(leaf, path)
    return tree, leaves, paths, traced


def _result_path(path: Any) -> str:
    """A leaf's path: in the result, or in the argument whose new value it is."""
    is_update = bool(path) and isinstance(path[0], ObjectKey) and path[0].is_argument
    return ("" if is_update else "result") + jax.tree_util.keystr(path)


def _check_static_result(leaf: Any, path: str) -> None:
    """A leaf that is returned as it is: it must not hide an array of the trace."""
    hidden = vars(leaf) if hasattr(leaf, "__dict__") and not callable(leaf) else ()
    if not is_hashable(leaf) or any(
        isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(hidden)
    ):
        raise TraceError(
            f"The result has a leaf that is neither an array nor a constant: {path}.",
            where=path,
            why=f"it is {describe(leaf)}.",
            hint="return pytrees of arrays; register the class as a pytree with "
            "jax.tree_util.register_dataclass.",
        )


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


def _where(fn: Callable[..., Any]) -> str | None:
    try:
        code = inspect.unwrap(fn).__code__
    except AttributeError:
        return None
    return f"{code.co_filename}:{code.co_firstlineno} ({_name_of(fn)})"
