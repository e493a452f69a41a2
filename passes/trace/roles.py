"""What every argument leaf is used as: state, batch, or neither.

The state is found (`returned`), not declared. Of the other arguments, those that agree on a leading
dimension are the batch; where they do not, the program tells (`batch_guess`), or it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Var

from autopar.arrays.typed_keys import is_key
from autopar.base.errors import BatchArgumentError, DonationWarning, OptionError
from autopar.base.methods import BATCH_METHODS, LOOP_METHODS
from autopar.base.units import format_examples
from autopar.base.user_code import warn_at_call
from autopar.passes.graph.graph import Atom, Input, Output, variables
from autopar.passes.graph.primitives import REARRANGES
from autopar.passes.graph.scans import ScanParts, WhileParts
from autopar.passes.trace.arguments import Argument, Request, Result
from autopar.passes.trace.batch_guess import Leaf, guess_axes
from autopar.passes.trace.batch_lines import ambiguous
from autopar.passes.trace.returned import SCALED, UNCHANGED, Match, find_returned
from autopar.passes.trace.state_rows import rows_of_state


def assign(
    jaxpr: Jaxpr,
    arguments: Sequence[Argument],
    result: Result,
    request: Request,
    lost: frozenset[int] = frozenset(),
) -> tuple[tuple[Input, ...], tuple[Output, ...]]:
    """Label the inputs and outputs of a flat program.

    Its first inputs are the array leaves of `arguments` (all but static ones) in order, its outputs
    those of `result`. `lost` are inputs known to be state that does not come back.

    Raises:
      BatchArgumentError: which leaves hold the batch is ambiguous, or an axis is none of theirs.
      OptionError: a position that is no argument.
    """
    _check_positions(arguments, request)
    keys = _key_leaves(jaxpr, arguments)
    returned = find_returned(jaxpr, arguments, result, request, keys)
    owned = lost.union(*(argument.object_arrays() for argument in arguments))
    axes = _batch_axes(jaxpr, arguments, returned, request, keys | owned)
    if axes is None:
        raise ambiguous(arguments, _candidates(arguments, returned, keys | owned))
    labels: list[Input] = []
    aliases: dict[int, int] = {}
    for number, argument in enumerate(arguments):
        leaves = list(argument.arrays())
        has_batch = any(index in axes for index, *_ in leaves)
        has_tensors = any(index not in keys and leaf.shape for index, _, leaf in leaves)
        match = returned.get(number)
        if match is not None and not match.is_state and (has_batch or match.flow != UNCHANGED):
            match = None
        # Parameters that are only read, as in an evaluation step, are state too.
        is_state = match is not None or (has_tensors and not has_batch)
        is_auto = request.donate_argnums == "auto"
        is_donated = _is_consumed(match, has_tensors) if is_auto else request.donates(argument)
        kept = []
        for index, path, _ in leaves:
            alias = None if match is None else match.aliases.get(index)
            axis = axes.get(index)
            is_kept = is_state or index in owned
            role: Any = "batch" if axis is not None else "state" if is_kept else "other"
            labels.append(Input(path, role, axis, alias, is_donated and alias is not None))
            if alias is not None:
                aliases[alias] = index
            elif is_donated:
                kept.append(path)
        if kept:
            _warn_not_donated(argument, kept, match is not None)
    paths = [p for p, x in zip(result.paths, result.leaves, strict=True) if x is not None]
    outputs = tuple(Output(path, aliases.get(i)) for i, path in enumerate(paths))
    return tuple(labels), outputs


def _is_consumed(match: Match | None, has_tensors: bool) -> bool:
    """Whether an argument is donated where nobody says so: one that comes back.

    But not a number alone that comes back as it was, or times something: a learning rate among the
    metrics is no state, and to keep it costs nothing.
    """
    return match is not None and (has_tensors or match.flow not in (UNCHANGED, SCALED))


def _check_positions(arguments: Sequence[Argument], request: Request) -> None:
    known = {a.position for a in arguments} - {None}
    for name in ("donate_argnums", "batch_argnums"):
        numbers = getattr(request, name)
        for number in () if numbers == "auto" else numbers:
            if number not in known:
                described = (f"{a.position} ({a.name})" for a in arguments if a.position in known)
                raise OptionError(
                    f"{name}={numbers!r} names argument {number}, which the call does not have.",
                    why=f"its arguments are {', '.join(described) or 'none'}.",
                    hint="count them from 0; one that is only given by keyword has no number.",
                )


def _warn_not_donated(argument: Argument, paths: Sequence[str], is_returned: bool) -> None:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    why = (
        "no output of the same shape and dtype takes their place"
        if is_returned
        else "the argument does not come back in the result with the same structure"
    )
    warn_at_call(
        f"{', '.join(paths[:3])}{more} cannot be donated: {why}. The old buffers are kept alive "
        f"beside the new ones. Return {argument.name} with the shapes and dtypes it came with, or "
        "leave it out of donate_argnums.",
        DonationWarning,
    )


# PRNG keys are never a batch, unless there is one for each example.

_KEY_SHAPES = ((2,), (4,))


def _key_leaves(jaxpr: Jaxpr, arguments: Sequence[Argument]) -> frozenset[int]:
    """Array leaves that are one PRNG key, typed or raw."""
    used_as_keys = _raw_keys(jaxpr)
    used = {v for eqn in jaxpr.eqns for v in variables(eqn.invars)}

    def is_one_key(index: int, leaf: Any) -> bool:
        if is_key(leaf.dtype):
            return not leaf.shape
        var, is_raw = jaxpr.invars[index], leaf.dtype == np.uint32 and leaf.shape in _KEY_SHAPES
        return is_raw and (var in used_as_keys or var not in used)

    leaves = (leaf for argument in arguments for leaf in argument.arrays())
    return frozenset(index for index, _, leaf in leaves if is_one_key(index, leaf))


def _raw_keys(jaxpr: Jaxpr) -> set[Var]:
    """Variables whose bits become a typed key."""
    keys: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        name, operands = eqn.primitive.name, eqn.invars
        bodies: list[tuple[Jaxpr, Sequence[Atom]]] = []
        if name == "random_wrap" or (name in REARRANGES and any(v in keys for v in eqn.outvars)):
            keys.update(variables(operands[:1]))
        elif name == "cond":
            bodies = [(branch.jaxpr, operands[1:]) for branch in eqn.params["branches"]]
        elif name == "scan":
            bodies = [(ScanParts.of(eqn).body, operands)]
        elif name == "while":
            loop = WhileParts.of(eqn)
            bodies = [(loop.body, operands[loop.num_condition_consts :])]
        for body, outer in bodies:
            inner = _raw_keys(body)
            pairs = zip(body.invars, outer, strict=True)
            keys.update(variables(v for var, v in pairs if var in inner))
    return keys


# The batch: what agrees on a leading dimension among the rest, or what the user said.


def _batch_axes(
    jaxpr: Jaxpr,
    arguments: Sequence[Argument],
    returned: Mapping[int, Match],
    request: Request,
    keys: frozenset[int],
) -> dict[int, int] | None:
    """The batch dimension of every array leaf that has one; None: it is ambiguous."""
    if request.batch_axes is not None:
        return _named_axes(arguments, request.batch_axes)
    if request.batch_argnums == "auto":
        return _guessed_axes(jaxpr, arguments, returned, keys)
    named: list[Leaf] = []
    for number, argument in enumerate(arguments):
        if argument.position not in request.batch_argnums:
            continue
        leaves = [
            Leaf(i, number, tuple(x.shape))
            for i, _, x in argument.arrays()
            if x.shape and i not in keys
        ]
        named += leaves
        if not leaves:
            raise BatchArgumentError(
                f"Argument {argument.name} holds no batch.",
                where=f"batch_argnums={request.batch_argnums!r}",
                why="all its leaves are scalars, PRNG keys, or static.",
                hint="name the arguments that hold examples along their first dimension.",
            )
    if len({leaf.shape[0] for leaf in named}) < 2:
        return {leaf.index: 0 for leaf in named}
    known = {leaf.index for leaf in named}
    return guess_axes(jaxpr, named, [i for i in range(len(jaxpr.invars)) if i not in known])


def _candidates(
    arguments: Sequence[Argument], returned: Mapping[int, Match], keys: frozenset[int]
) -> list[Leaf]:
    """Leaves that may hold a batch: arrays, but for the state and PRNG keys."""
    return [
        Leaf(index, number, tuple(leaf.shape))
        for number, argument in enumerate(arguments)
        if not ((match := returned.get(number)) and match.is_state)
        for index, _, leaf in argument.arrays()
        if leaf.shape and index not in keys
    ]


def _guessed_axes(
    jaxpr: Jaxpr,
    arguments: Sequence[Argument],
    returned: Mapping[int, Match],
    keys: frozenset[int],
) -> dict[int, int] | None:
    """The leading dimension where all that may be a batch agrees on it; else what the program says.

    An inference's state may hold the batch (`state_rows`).
    Where no state is known, as in an evaluation step, parameters may agree with the batch by
    chance; and what a scan walks in order is time, whatever its size.
    """
    leaves = _candidates(arguments, returned, keys)
    rows, parameters = rows_of_state(jaxpr, leaves, _updates(returned, keys))
    if rows is not None:
        return rows
    leaves = [leaf for leaf in leaves if leaf.argument not in parameters]
    sizes = {leaf.shape[0] for leaf in leaves}
    has_state = any(match.is_state for match in returned.values())
    is_plain = has_state or len({leaf.argument for leaf in leaves}) < 2
    if len(sizes) < 2 and is_plain and not sizes & _scanned(jaxpr):
        return {leaf.index: 0 for leaf in leaves}
    numbers = [n for n, match in returned.items() if match.is_state]
    state = [i for n in numbers for i, *_ in arguments[n].arrays()]
    axes = guess_axes(jaxpr, leaves, state)
    if axes is None and len(sizes) < 2:
        return {leaf.index: 0 for leaf in leaves}
    if axes is None:  # What comes back as it was, as parameters of an inference do, is no batch.
        kept = {number for number, match in returned.items() if match.flow == UNCHANGED}
        others = [leaf for leaf in leaves if leaf.argument not in kept]
        if len({leaf.shape[0] for leaf in others}) == 1:
            return {leaf.index: 0 for leaf in others}
    return axes


def _updates(returned: Mapping[int, Match], keys: frozenset[int]) -> dict[int, int]:
    """Which output is the new value of each leaf of the state, but for keys."""
    states = (match.aliases for match in returned.values() if match.is_state)
    return {i: output for aliases in states for i, output in aliases.items() if i not in keys}


def _scanned(jaxpr: Jaxpr) -> set[int]:
    """How many iterations the program's scans have."""
    return {eqn.params["length"] for eqn in jaxpr.eqns if eqn.primitive.name == "scan"}


def _named_axes(arguments: Sequence[Argument], prefix: Any) -> dict[int, int]:
    """`batch_axes`, a pytree prefix of the arguments as `jax.vmap`'s `in_axes`, for each leaf."""
    axes: dict[int, int] = {}
    if not isinstance(prefix, (int, tuple, list)):
        raise OptionError(
            f"batch_axes={prefix!r} is not possible.",
            why="it must be an integer, or a tuple with an entry for each positional argument.",
        )
    size = None
    for argument in arguments:
        if argument.position is None:
            continue
        entry = prefix
        if not isinstance(prefix, int):
            if argument.position >= len(prefix):
                raise _too_few_axes(arguments, prefix)
            entry = prefix[argument.position]
        entries = zip(argument.arrays(), _entry_axes(argument, entry), strict=True)
        for (index, path, leaf), axis in entries:
            if axis is None:
                continue
            if isinstance(axis, bool) or not isinstance(axis, int):
                raise OptionError(
                    f"batch_axes has {axis!r} for {path}.", why="it must be an integer or None."
                )
            if not -len(leaf.shape) <= axis < len(leaf.shape):
                raise BatchArgumentError(
                    f"batch_axes names dimension {axis} of {path}.",
                    where=path,
                    why=f"its shape is {tuple(leaf.shape)}.",
                    hint="give None for leaves that hold no batch.",
                )
            axes[index] = axis % len(leaf.shape)
            size = leaf.shape[axes[index]]
    # Of keyword-only arguments the first dimension, where it is the batch's.
    named = (argument for argument in arguments if argument.position is None)
    leaves = (leaf for argument in named for leaf in argument.arrays())
    return axes | {i: 0 for i, _, leaf in leaves if leaf.shape and leaf.shape[0] == size}


def _too_few_axes(arguments: Sequence[Argument], prefix: Sequence[Any]) -> OptionError:
    positional = [a for a in arguments if a.position is not None]
    wanted = 1 + max(a.position or 0 for a in positional)
    without = [a.name for a in positional if (a.position or 0) >= len(prefix)]
    entries = [str(x) for x in prefix] + ["None"] * (wanted - len(prefix))
    return OptionError(
        f"batch_axes has {len(prefix)} entr{'y' if len(prefix) == 1 else 'ies'}, and the call has "
        f"{wanted} positional arguments.",
        where=", ".join(without),
        why="there is one entry for every positional argument, in their order: the batch dimension "
        f"of its leaves, a structure like it, or None; {', '.join(without)} "
        f"ha{'s' if len(without) == 1 else 've'} none.",
        hint=f"batch_axes=({', '.join(entries)}) says that "
        f"{'it holds' if len(without) == 1 else 'they hold'} no batch; 0 in its place, that the "
        "first dimension is the batch.",
    )


def _entry_axes(argument: Argument, entry: Any) -> list[Any]:
    """One entry of `batch_axes` per array leaf of its argument."""
    # None is an empty subtree to JAX, so it travels as a value of its own.
    is_none = lambda x: x is None  # noqa: E731
    marked = jax.tree.map(lambda x: _NO_AXIS if x is None else x, entry, is_leaf=is_none)
    try:
        flat = jax.tree.leaves(jax.tree.broadcast(marked, argument.value))
    except ValueError as error:
        raise OptionError(
            f"batch_axes does not fit argument {argument.name}.",
            where=argument.name,
            why=str(error),
            hint="its entry must be a prefix of the argument's structure, as jax.vmap's in_axes.",
        ) from None
    axes = zip(flat, argument.leaves, strict=True)
    return [None if axis is _NO_AXIS else axis for axis, leaf in axes if leaf is not None]


_NO_AXIS = object()


def check_division(
    inputs: Sequence[Input],
    shapes: Sequence[Any],
    *,
    microbatches: int | str,
    method: str,
    batch_axes: Any = None,
) -> int | None:
    """The batch size, once it is known to divide; `batch_axes` is what the user says of it.

    Raises:
      BatchArgumentError: there is no batch, or its size is not a multiple of `microbatches`.
    """
    sizes = [
        (label.path, shape.shape[label.batch_axis])
        for label, shape in zip(inputs, shapes, strict=True)
        if label.role == "batch" and label.batch_axis is not None
    ]
    several = isinstance(microbatches, int) and microbatches > 1
    if not sizes:
        if several or method in (*BATCH_METHODS, *LOOP_METHODS):
            asked = f"microbatches={microbatches}" if several else f"method={method!r}"
            if batch_axes is not None:
                raise BatchArgumentError(
                    f"{asked} needs a batch, and no argument holds one.",
                    where="batch_axes",
                    why="it names no dimension of any array.",
                    hint="name that of the examples, as the in_axes of jax.vmap do; or use "
                    "microbatches=1 and a method for steps without a batch, as 'auto'.",
                )
            named = [*dict.fromkeys(f"{x.path} ({x.role})" for x in inputs)]
            if len(named) > 6:  # data comes last, mostly
                named[3:-3] = [f"{len(named) - 6} more"]
            roles = ", ".join(named)
            raise BatchArgumentError(
                f"{asked} needs a batch, and no argument holds one.",
                why="the batch is looked for among arrays that are not returned as new state and "
                f"are neither scalars nor PRNG keys; there are {roles or 'no arguments'}.",
                hint="pass the data as an argument, or name it with batch_argnums.",
            )
        return None
    for path, size in sizes:
        if several and not size:
            raise BatchArgumentError(
                f"A batch without rows cannot be divided into {microbatches} microbatches.",
                where=path,
                why="its batch dimension has size 0.",
                hint="skip empty batches, or use microbatches=1.",
            )
        if isinstance(microbatches, int) and size % microbatches:
            fitting = [n for n in range(1, size + 1) if all(x % n == 0 for _, x in sizes)]
            raise BatchArgumentError(
                f"A batch of {format_examples(size)} cannot be divided into {microbatches} "
                "microbatches.",
                where=path,
                why="every microbatch holds the same number of examples.",
                hint=f"use microbatches in {', '.join(map(str, fitting[:12]))}, or another batch "
                "size.",
            )
    return int(max(size for _, size in sizes))
