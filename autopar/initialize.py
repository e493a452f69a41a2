"""States that are born sharded: an init function compiled with the shardings that a step wants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from autopar.arrays.split_array import SplitArray, SplitSharding
from autopar.base.errors import TraceError
from autopar.mismatch import leaf_differences, suffixes
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import flatten
from autopar.passes.graph.logical import no_mesh, on_logical_shapes
from autopar.passes.trace.arguments import Argument
from autopar.passes.trace.graph_objects import objects_of, states_of
from autopar.passes.trace.shard_maps import without_shard_maps
from autopar.passes.trace.signature import Convention, Sealed, signature_of, traced_leaves, unsealed
from autopar.passes.trace.trace import Traced


@dataclass(frozen=True)
class _MadeLeaves:
    """What an init function makes: its structure, each leaf's path and shape (None: static)."""

    tree: Any
    paths: tuple[str, ...]
    leaves: tuple[Any, ...]


def initialize(
    traced: Traced,
    shardings: Sequence[Sharding | SplitSharding],
    init_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    make: Callable[..., list[Any]] | None = None,
) -> Any:
    """What `init_fn` makes, each array leaf in the sharding of the argument's leaf that it is for.

    The result has the structure of the step's arguments, their static leaves included: an optimizer
    that `init_fn` creates anew is another one to Python, and would make the step plan again.

    Args:
      traced: the step.
      shardings: of the array leaves of its arguments.
      init_fn: makes one of the arguments, or a tuple of several.
      args: its arguments.
      kwargs: its arguments by keyword.
      make: runs a function of arrays whose results shall lie in given shardings; arguments as those
        of `_on_meshes`, which is the default.

    Raises:
      TraceError: what `init_fn` makes is none of the step's arguments.
    """
    with jax_compat.jitted():  # what is not compiled lies where JAX likes
        return _initialize(traced, shardings, init_fn, args, kwargs, make or _on_meshes)


def _initialize(
    traced: Traced,
    shardings: Sequence[Sharding | SplitSharding],
    init_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    make: Callable[..., list[Any]],
) -> Any:
    signature = signature_of(Convention.of(init_fn), args, kwargs)
    made: list[_MadeLeaves] = []

    @functools.wraps(init_fn)
    def on_arrays(*args: Any, **kwargs: Any) -> list[Any]:
        args, kwargs = unsealed((args, kwargs))
        result = states_of(init_fn(*args, **kwargs), seal=lambda definition: definition)
        with_paths, tree = jax.tree_util.tree_flatten_with_path(result)
        paths = tuple(jax.tree_util.keystr(path) for path, _ in with_paths)
        flat = [leaf for _, leaf in with_paths]
        traced = zip(flat, traced_leaves(result, flat), strict=True)
        leaves = [leaf if is_traced else None for leaf, is_traced in traced]
        made.append(_MadeLeaves(tree, paths, tuple(leaves)))
        return [leaf for leaf in leaves if leaf is not None]

    flat = jax.tree.leaves((args, dict(kwargs)))
    args, kwargs = signature.arguments([flat[i] for i in signature.array_positions], seal=Sealed)
    closed = on_logical_shapes(
        lambda: jax.make_jaxpr(on_arrays)(*args, **kwargs), keep_constraints=False
    )
    shapes, first = iter(closed.out_avals), made[-1]
    program = jaxpr_as_fun(without_shard_maps(flatten(closed)))

    def evaluate(*args: Any, **kwargs: Any) -> list[Any]:
        results: list[Any] = program(*jax.tree.leaves((args, kwargs)))
        return results

    with no_mesh():
        shaped = tuple(None if leaf is None else next(shapes) for leaf in first.leaves)
        targets, is_tuple = _targets(traced, _MadeLeaves(first.tree, first.paths, shaped))
        wanted = [shardings[index] for target in targets for index, *_ in target.arrays()]
        values = iter(make(evaluate, wanted, args, kwargs))
    made.clear()  # it holds tracers
    result = []
    for target in targets:
        static = _static_leaves(traced, target)
        leaves = [next(static) if leaf is None else next(values) for leaf in target.leaves]
        result.append(target.tree.unflatten(leaves))
    return objects_of(tuple(result) if is_tuple else result[0])


def _on_meshes(
    on_arrays: Callable[..., list[Any]],
    wanted: Sequence[Sharding | SplitSharding],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> list[Any]:
    """Every leaf in its sharding. A jitted function lives on one mesh, so each mesh runs its own.

    It makes the leaves, and the parts of leaves, of that mesh alone: what the others hold is dead
    code in it.
    """
    items: list[tuple[int, Sharding, Any]] = []  # a leaf, where it or some rows of it are, which
    for number, sharding in enumerate(wanted):
        if isinstance(sharding, SplitSharding):
            cuts = zip(sharding.parts, sharding.indices(), strict=True)
            items += [(number, where, rows) for where, rows in cuts]
        else:
            items.append((number, sharding, None))
    groups: dict[Any, list[int]] = {}
    for place, (_, where, _) in enumerate(items):
        # In their order: stages may share devices in another one.
        mesh = tuple(where.mesh.devices.flat) if isinstance(where, NamedSharding) else None
        groups.setdefault(mesh or frozenset(where.device_set), []).append(place)
    values: dict[int, Any] = {}
    for places in groups.values():

        def part(*args: Any, _places: Sequence[int] = tuple(places), **kwargs: Any) -> list[Any]:
            made = on_arrays(*args, **kwargs)
            here = [items[place] for place in _places]
            return [made[leaf] if rows is None else made[leaf][rows] for leaf, _, rows in here]

        shardings = [items[place][1] for place in places]
        here = jax.tree.map(functools.partial(_beside, shardings[0]), (args, dict(kwargs)))
        results = jax.jit(part, out_shardings=shardings)(*here[0], **here[1])
        values |= zip(places, results, strict=True)
    left = (values[place] for place in range(len(items)))
    return [
        SplitArray([next(left) for _ in sharding.parts], sharding.axis)
        if isinstance(sharding, SplitSharding)
        else next(left)
        for sharding in wanted
    ]


def _beside(sharding: Sharding, leaf: Any) -> Any:
    """An argument on the devices of a sharding, if it is bound to others."""
    is_there = not isinstance(leaf, jax.Array) or not leaf.committed
    if is_there or leaf.sharding.device_set <= sharding.device_set:
        return leaf
    assert isinstance(sharding, NamedSharding)
    whole = PartitionSpec()  # type: ignore[no-untyped-call]
    return jax.device_put(leaf, NamedSharding(sharding.mesh, whole))


def _targets(traced: Traced, made: _MadeLeaves) -> tuple[list[Argument], bool]:
    """The arguments that were made: one, or as many as a tuple has."""
    for argument in traced.arguments:
        if _fits(argument, made.leaves, made.paths, ""):
            return [argument], False
    targets: list[Argument] = []
    start = 0
    for number, child in enumerate(made.tree.children()):
        part = slice(start, start + child.num_leaves)
        start += child.num_leaves
        for argument in traced.arguments:
            prefix = f"[{number}]"
            if argument not in targets and _fits(
                argument, made.leaves[part], made.paths[part], prefix
            ):
                targets.append(argument)
                break
        else:
            raise _fits_nothing(traced, made)
    if not targets:
        raise _fits_nothing(traced, made)
    return targets, True


def _fits(argument: Argument, leaves: Sequence[Any], paths: Sequence[str], prefix: str) -> bool:
    """Whether leaves have the paths, shapes and dtypes of an argument's."""
    if [prefix + suffix for suffix in suffixes(argument)] != list(paths):
        return False
    return all(
        (old is None) == (new is None)
        and (old is None or (old.shape == new.shape and old.dtype == new.dtype))
        for old, new in zip(argument.leaves, leaves, strict=True)
    )


def _fits_nothing(traced: Traced, made: _MadeLeaves) -> TraceError:
    inputs = traced.graph.inputs
    states = [a for a in traced.arguments if any(inputs[i].role == "state" for i, *_ in a.arrays())]
    lines = []
    for argument in states or traced.arguments:
        wanted = dict(zip(argument.paths, argument.leaves, strict=True))
        paths = (argument.name + path for path in made.paths)
        differing = leaf_differences(wanted, dict(zip(paths, made.leaves, strict=True)))
        lines += [f"{argument.name}, as the step takes it and as it was made:", *differing[:4]]
        if len(differing) > 4:
            lines.append(f"- ... {len(differing)} differences in all")
    return TraceError(
        "The init function makes none of the step's arguments.",
        where="initialize",
        why="\n".join(lines),
        hint="return the state as the step takes it, or a tuple of several arguments.",
    )


def _static_leaves(traced: Traced, target: Argument) -> Iterator[Any]:
    """The static leaves of one argument; their positions count all leaves of all arguments."""
    owners = [argument for argument in traced.arguments for _ in argument.leaves]
    statics = traced.signature.statics
    return (leaf for position, _, leaf in statics if owners[position] is target)
