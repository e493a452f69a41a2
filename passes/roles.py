"""What every argument leaf is used as: state, batch, or neither.

The state is found, not declared: an argument whose structure comes back in the result *and* whose
leaves flow there through updates (`p + u`, `where(ok, new, old)`). So gradients, which have the
parameters' structure too, or predictions of a batch's shape, are not mistaken for a new state. Of
the others, those that agree on a leading dimension are the batch. What is ambiguous is refused.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np
from jax.extend.core import Jaxpr, Var
from jax.extend.core import Literal as JaxprLiteral

from autopar.errors import BatchArgumentError, DonationWarning, OptionError
from autopar.passes import jax_compat
from autopar.passes.graph import Input, Output

Shaped = Any  # a value with `shape` and `dtype`, or None for a static leaf
Argnums = tuple[int, ...] | Literal["auto"]


@dataclass(frozen=True)
class Argument:
    """One argument of the step: its structure and its leaves, static ones (None) included.

    `position` is its index among the function's parameters (None: keyword-only), `start` the index
    of its first array leaf among all array leaves.
    """

    name: str
    position: int | None
    value: Any
    tree: Any
    leaves: tuple[Shaped | None, ...]
    paths: tuple[str, ...]
    start: int

    def arrays(self) -> Iterator[tuple[int, str, Shaped]]:
        """(index among all array leaves, path, shape and dtype) of each array leaf."""
        present = (p for p, x in zip(self.paths, self.leaves, strict=True) if x is not None)
        shaped = [x for x in self.leaves if x is not None]
        for offset, (path, leaf) in enumerate(zip(present, shaped, strict=True)):
            yield self.start + offset, path, leaf


@dataclass(frozen=True)
class Result:
    """The function's result: its structure, and its leaves with static ones (None) included."""

    tree: Any
    leaves: tuple[Shaped | None, ...]
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """What the user said about arguments (positions are those of the function's parameters)."""

    donate_argnums: Argnums = "auto"
    batch_argnums: Argnums = "auto"
    batch_axes: Any = None


def assign(
    jaxpr: Jaxpr, arguments: Sequence[Argument], result: Result, request: Request
) -> tuple[tuple[Input, ...], tuple[Output, ...]]:
    """Label the inputs and outputs of a flat program.

    Args:
      jaxpr: its first inputs are the array leaves of `arguments` in order.
      arguments: all arguments but static ones.
      result: its array leaves in order are the outputs of `jaxpr`.
      request: what the user said.

    Raises:
      BatchArgumentError: which leaves hold the batch is ambiguous, or they disagree on its size.
      OptionError: a position that is no argument.
    """
    _check_positions(arguments, request)
    keys = _key_leaves(jaxpr, arguments)
    returned = _returned(jaxpr, arguments, result, request, keys)
    axes = _batch_axes(arguments, returned, request, keys)
    labels: list[Input] = []
    twins: dict[int, int] = {}
    for number, argument in enumerate(arguments):
        leaves = list(argument.arrays())
        has_batch = any(index in axes for index, *_ in leaves)
        has_tensors = any(index not in keys and leaf.shape for index, _, leaf in leaves)
        match = returned.get(number)
        if match is not None and not match.is_state and (has_batch or match.flow != UNCHANGED):
            match = None
        # Parameters that are only read, as in an evaluation step, are state too.
        is_state = match is not None or (has_tensors and not has_batch)
        is_donated = _is_named(argument, request)
        if request.donate_argnums == "auto":
            is_donated = match is not None
        kept = []
        for index, path, _ in leaves:
            twin = None if match is None else match.twins.get(index)
            axis = axes.get(index)
            role: Any = "batch" if axis is not None else "state" if is_state else "other"
            labels.append(Input(path, role, axis, twin, is_donated and twin is not None))
            if twin is not None:
                twins[twin] = index
            elif is_donated:
                kept.append(path)
        if kept:
            _warn_not_donated(argument, kept, match is not None)
    paths = [p for p, x in zip(result.paths, result.leaves, strict=True) if x is not None]
    outputs = tuple(Output(path, twins.get(i)) for i, path in enumerate(paths))
    return tuple(labels), outputs


def _check_positions(arguments: Sequence[Argument], request: Request) -> None:
    known = [a.position for a in arguments if a.position is not None]
    for name in ("donate_argnums", "batch_argnums"):
        numbers = getattr(request, name)
        for number in () if numbers == "auto" else numbers:
            if number not in known:
                described = [
                    f"{a.position} ({a.name})" for a in arguments if a.position is not None
                ]
                raise OptionError(
                    f"{name}={numbers!r} names argument {number}, which the call does not have.",
                    why=f"its arguments are {', '.join(described) or 'none'}.",
                )


def _is_named(argument: Argument, request: Request) -> bool:
    return request.donate_argnums != "auto" and argument.position in request.donate_argnums


def _warn_not_donated(argument: Argument, paths: Sequence[str], is_returned: bool) -> None:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    why = (
        "no output of the same shape and dtype takes their place"
        if is_returned
        else "the argument does not come back in the result with the same structure"
    )
    warnings.warn(
        f"{', '.join(paths[:3])}{more} cannot be donated: {why}. The old buffers are kept alive "
        f"beside the new ones. Return {argument.name} with the shapes and dtypes it came with, or "
        "leave it out of donate_argnums.",
        DonationWarning,
        stacklevel=2,
    )


# The state: arguments that come back.


@dataclass(frozen=True)
class _Match:
    """An argument and the part of the result that has its structure; `twins`: input to output."""

    twins: Mapping[int, int]
    outputs: range
    flow: int
    is_state: bool = False


UPDATED, UNCHANGED, SCALED, NONE = 3, 2, 1, 0  # how the argument's leaves flow to the match


def _returned(
    jaxpr: Jaxpr,
    arguments: Sequence[Argument],
    result: Result,
    request: Request,
    keys: frozenset[int],
) -> dict[int, _Match]:
    """For each argument (by its number), the part of the result that is its next value."""
    offsets = np.cumsum([0, *(x is not None for x in result.leaves)])
    flows = _Flows(jaxpr)
    found: dict[int, _Match] = {}
    taken: set[int] = set()
    # The largest first: an optimizer's state contains subtrees with the parameters' structure.
    for number in sorted(range(len(arguments)), key=lambda n: -len(arguments[n].leaves)):
        argument = arguments[number]
        explicit = _is_named(argument, request)
        matches = []
        for tree, start in _subtrees(result.tree, 0):
            outputs = range(start, start + tree.num_leaves)
            if tree.num_leaves == len(argument.leaves) and taken.isdisjoint(outputs):
                match = _match(argument, tree, result, outputs, offsets, flows, explicit)
                if match is not None:
                    matches.append(match)
        if matches:
            best = max(matches, key=lambda m: (m.flow, len(m.twins), -m.outputs.start))
            # A key is split, which is no update; that a key comes back is enough.
            is_key = all(index in keys for index, *_ in argument.arrays())
            is_state = explicit or is_key or best.flow == UPDATED
            found[number] = replace(best, is_state=is_state)
            if is_state or best.flow > NONE:
                taken.update(best.outputs)
    # Where something is updated, what is only scaled (momentum, running statistics) is state too.
    is_update = any(match.flow == UPDATED for match in found.values())
    return {
        number: replace(match, is_state=match.is_state or (is_update and match.flow == SCALED))
        for number, match in found.items()
    }


def _subtrees(tree: Any, start: int) -> Iterator[tuple[Any, int]]:
    yield tree, start
    for child in tree.children():
        yield from _subtrees(child, start)
        start += child.num_leaves


def _match(
    argument: Argument,
    tree: Any,
    result: Result,
    outputs: range,
    offsets: np.ndarray,
    flows: _Flows,
    explicit: bool,
) -> _Match | None:
    if tree != argument.tree:
        return None
    twins: dict[int, int] = {}
    total = 0
    index = argument.start
    for position, leaf in zip(outputs, argument.leaves, strict=True):
        other = result.leaves[position]
        if (leaf is None) != (other is None):
            return None
        if leaf is None or other is None:
            continue
        total += 1
        if leaf.shape == other.shape and leaf.dtype == other.dtype:
            twins[index] = int(offsets[position])
        index += 1
    # A single leaf has the structure of any other.
    is_likely = 2 * len(twins) > total or (explicit and total > 1)
    if not total or not is_likely:
        return None
    return _Match(twins, outputs, flows.strongest(twins))


# fmt: off
_UPDATES = frozenset({
    "add", "add_any", "sub", "max", "min", "clamp", "select_n", "and", "or", "xor", "not",
    "convert_element_type", "reduce_precision", "copy", "copy_p", "optimization_barrier",
    "reshape", "squeeze", "transpose", "rev", "concatenate", "slice", "split", "pad",
    "dynamic_slice", "dynamic_update_slice", "scatter", "scatter-add", "scatter_add",
})
_SCALINGS = _UPDATES | {
    "mul", "div", "rem", "neg", "sign", "abs", "square", "sqrt", "rsqrt", "cbrt", "pow",
    "integer_pow", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "round", "floor",
    "ceil", "sin", "cos", "erf",
}
# fmt: on
_FIRST_OPERAND = ("dynamic_slice", "dynamic_update_slice", "scatter", "scatter-add", "scatter_add")


@dataclass
class _Flows:
    """Which inputs an output is an update of, walking backwards through its equations."""

    jaxpr: Jaxpr
    known: dict[int, tuple[dict[Var, int], dict[Var, tuple[Any, int]]]] = field(
        default_factory=dict
    )

    def strongest(self, twins: Mapping[int, int]) -> int:
        """The strongest way in which one of the inputs flows to its twin."""
        best = NONE
        for allowed, flow in ((_UPDATES, UPDATED), (_SCALINGS, SCALED)):
            for index, output in twins.items():
                atom = self.jaxpr.outvars[output]
                if atom is self.jaxpr.invars[index]:
                    best = max(best, UNCHANGED)
                elif best < flow and index in self.origins(self.jaxpr, {output}, allowed):
                    return max(best, flow)
            if best:
                break
        return best

    def origins(self, jaxpr: Jaxpr, outputs: set[int], allowed: frozenset[str]) -> set[int]:
        """The inputs from which these outputs are made by `allowed` operations alone."""
        if id(jaxpr) not in self.known:
            self.known[id(jaxpr)] = (
                {var: i for i, var in enumerate(jaxpr.invars)},
                {var: (eqn, i) for eqn in jaxpr.eqns for i, var in enumerate(eqn.outvars)},
            )
        numbers, producers = self.known[id(jaxpr)]
        pending = [jaxpr.outvars[i] for i in outputs]
        seen: set[Var] = set()
        found: set[int] = set()
        while pending:
            atom = pending.pop()
            if isinstance(atom, JaxprLiteral) or atom in seen:
                continue
            seen.add(atom)
            if atom in numbers:
                found.add(numbers[atom])
            elif atom in producers:
                pending += self._sources(*producers[atom], allowed)
        return found

    def _sources(self, eqn: Any, output: int, allowed: frozenset[str]) -> list[Any]:
        name, params, operands = eqn.primitive.name, eqn.params, eqn.invars
        if name == "cond":
            return [
                operands[1 + i]
                for branch in params["branches"]
                for i in self.origins(branch.jaxpr, {output}, allowed)
            ]
        if name == "scan":
            first, num_carry = jax_compat.scan_counts(params)
            if output >= num_carry:
                return []
            return self._carried(params["jaxpr"].jaxpr, output, first, operands, allowed)
        if name == "while":
            outer = operands[params["cond_nconsts"] :]
            first = params["body_nconsts"]
            return self._carried(params["body_jaxpr"].jaxpr, output, first, outer, allowed)
        if name not in allowed:
            return []
        if name == "select_n":
            return list(operands[1:])
        return list(operands[:1] if name in _FIRST_OPERAND else operands)

    def _carried(
        self, body: Jaxpr, output: int, first: int, operands: Any, allowed: frozenset[str]
    ) -> list[Any]:
        """Operands that reach one carried value of a loop, over any number of iterations."""
        num_carry = len(body.invars) - first
        reached, carries = {first + output}, {output}
        while True:
            reached |= self.origins(body, carries, allowed)
            more = {i - first for i in reached if i >= first and i - first < num_carry}
            more = {i for i in more if i < len(body.outvars)}
            if more <= carries:
                return [operands[i] for i in sorted(reached)]
            carries |= more


# PRNG keys are never a batch, unless there is one for each example.

_KEY_SHAPES = ((2,), (4,))
# fmt: off
_MOVES = frozenset({
    "slice", "squeeze", "reshape", "dynamic_slice", "gather", "transpose", "broadcast_in_dim",
    "concatenate", "split", "copy", "copy_p", "rev",
})
# fmt: on


def _key_leaves(jaxpr: Jaxpr, arguments: Sequence[Argument]) -> frozenset[int]:
    """Array leaves that are one PRNG key, typed or raw."""
    used_as_keys = _raw_keys(jaxpr)
    used = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, JaxprLiteral)}
    found = set()
    for argument in arguments:
        for index, _, leaf in argument.arrays():
            var = jaxpr.invars[index]
            if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                is_key = not leaf.shape
            else:
                is_raw = leaf.dtype == np.uint32 and leaf.shape in _KEY_SHAPES
                is_key = is_raw and (var in used_as_keys or var not in used)
            if is_key:
                found.add(index)
    return frozenset(found)


def _raw_keys(jaxpr: Jaxpr) -> set[Var]:
    """Variables whose bits become a typed key."""
    keys: set[Var] = set()

    def mark(atom: Any) -> None:
        if not isinstance(atom, JaxprLiteral):
            keys.add(atom)

    for eqn in reversed(jaxpr.eqns):
        name, params, operands = eqn.primitive.name, eqn.params, eqn.invars
        if name == "random_wrap" or (name in _MOVES and any(v in keys for v in eqn.outvars)):
            mark(operands[0])
        elif name == "cond":
            for branch in params["branches"]:
                inner = _raw_keys(branch.jaxpr)
                for var, operand in zip(branch.jaxpr.invars, operands[1:], strict=True):
                    if var in inner:
                        mark(operand)
        elif name in ("scan", "while"):
            body = params["jaxpr" if name == "scan" else "body_jaxpr"].jaxpr
            outer = operands if name == "scan" else operands[params["cond_nconsts"] :]
            inner = _raw_keys(body)
            for var, operand in zip(body.invars, outer, strict=True):
                if var in inner:
                    mark(operand)
    return keys


# The batch: what agrees on a leading dimension among the rest, or what the user said.


def _batch_axes(
    arguments: Sequence[Argument],
    returned: Mapping[int, _Match],
    request: Request,
    keys: frozenset[int],
) -> dict[int, int]:
    """The batch dimension of every array leaf that has one."""
    if request.batch_axes is not None:
        axes = _named_axes(arguments, request.batch_axes)
        _check_sizes(arguments, axes)
        return axes
    candidates = {}
    for number, argument in enumerate(arguments):
        match = returned.get(number)
        leaves = [
            (index, path, leaf.shape[0])
            for index, path, leaf in argument.arrays()
            if leaf.shape and index not in keys
        ]
        if request.batch_argnums != "auto":
            if argument.position in request.batch_argnums:
                if not leaves:
                    raise BatchArgumentError(
                        f"Argument {argument.name} holds no batch.",
                        where=f"batch_argnums={request.batch_argnums!r}",
                        why="all its leaves are scalars, PRNG keys, or static.",
                        hint="name the arguments that hold examples along their first dimension.",
                    )
                candidates[number] = leaves
        elif leaves and not (match is not None and match.is_state):
            candidates[number] = leaves
    if request.batch_argnums == "auto":
        candidates = _without_parameters(arguments, candidates)
    axes = {index: 0 for leaves in candidates.values() for index, *_ in leaves}
    _check_sizes(arguments, axes)
    return axes


def _without_parameters(
    arguments: Sequence[Argument], candidates: Mapping[int, list[tuple[int, str, int]]]
) -> dict[int, list[tuple[int, str, int]]]:
    """Drop what cannot be a batch: the parameters of an evaluation step have many leading sizes.

    The others must agree on a size. An argument of several sizes is dropped if that is none of
    them; the first argument, where functions take their parameters, even if one happens to be.
    """
    sizes = {number: {size for *_, size in leaves} for number, leaves in candidates.items()}
    agreed = {next(iter(s)) for s in sizes.values() if len(s) == 1}
    if len(agreed) != 1:
        return dict(candidates)
    return {
        number: leaves
        for number, leaves in candidates.items()
        if len(sizes[number]) == 1 or (agreed & sizes[number] and arguments[number].position != 0)
    }


def _named_axes(arguments: Sequence[Argument], prefix: Any) -> dict[int, int]:
    """`batch_axes`, a pytree prefix of the arguments as `jax.vmap`'s `in_axes`, for each leaf."""
    axes: dict[int, int] = {}
    if not isinstance(prefix, (int, tuple, list)):
        raise OptionError(
            f"batch_axes={prefix!r} is not possible.",
            why="it must be an integer, or a tuple with an entry for each positional argument.",
        )
    size = None
    later = []
    for argument in arguments:
        if argument.position is None:
            later.append(argument)  # keyword-only: the first dimension, where it is the batch's
            continue
        entry = prefix
        if not isinstance(prefix, int):
            if argument.position >= len(prefix):
                raise OptionError(
                    f"batch_axes has {len(prefix)} entries.",
                    where=argument.name,
                    why=f"the argument is number {argument.position}, counted from 0.",
                    hint="give an entry for every positional argument; None says: no batch.",
                )
            entry = prefix[argument.position]
        for (index, path, leaf), axis in zip(
            argument.arrays(), _entry_axes(argument, entry), strict=True
        ):
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
    for argument in later:
        for index, _, leaf in argument.arrays():
            if leaf.shape and leaf.shape[0] == size:
                axes[index] = 0
    return axes


def _entry_axes(argument: Argument, entry: Any) -> list[Any]:
    """One entry of `batch_axes` per array leaf of its argument."""
    # None is an empty subtree to JAX, so it travels as a value of its own.
    marked = jax.tree.map(
        lambda x: _NO_AXIS if x is None else x, entry, is_leaf=lambda x: x is None
    )
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


def _check_sizes(arguments: Sequence[Argument], axes: Mapping[int, int]) -> None:
    sizes = [
        (path, leaf.shape[axes[index]])
        for argument in arguments
        for index, path, leaf in argument.arrays()
        if index in axes
    ]
    counts = Counter(size for _, size in sizes)
    if len(counts) < 2:
        return
    usual = counts.most_common(1)[0][0]
    odd = next(path for path, size in sizes if size != usual)
    listed = sorted(sizes, key=lambda item: item[1] == usual)[:8]
    lines = [f"- {path}: {size}" for path, size in listed]
    if len(sizes) > 8:
        lines.append(f"- ... {len(sizes)} leaves in all")
    raise BatchArgumentError(
        "The batch is ambiguous: its leaves disagree on the number of examples.",
        where=odd,
        why="arguments that do not come back as the new state are taken for the batch, and their "
        "batch dimensions are of different sizes:\n" + "\n".join(lines),
        hint="name the arguments that hold the batch with batch_argnums, or give batch_axes, a "
        "pytree prefix of the arguments as jax.vmap's in_axes, with None for what holds no batch: "
        "batch_axes=(None, {'x': 0, 'mask': None}).",
    )


def check_division(
    inputs: Sequence[Input], shapes: Sequence[Any], *, microbatches: int | str, method: str
) -> int | None:
    """The batch size, once it is known to divide.

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
        if several or method in ("data", "zero1", "zero2", "zero3"):
            asked = f"microbatches={microbatches}" if several else f"method={method!r}"
            roles = ", ".join(dict.fromkeys(f"{x.path} ({x.role})" for x in inputs[:6]))
            raise BatchArgumentError(
                f"{asked} needs a batch, and no argument holds one.",
                why="the batch is looked for among arrays that are not returned as new state and "
                f"are neither scalars nor PRNG keys; there are {roles or 'no arguments'}.",
                hint="pass the data as an argument, or name it with batch_argnums.",
            )
        return None
    path, size = sizes[0]
    if isinstance(microbatches, int) and size % microbatches:
        fitting = [n for n in range(1, size + 1) if size % n == 0]
        raise BatchArgumentError(
            f"A batch of {size} examples cannot be divided into {microbatches} microbatches.",
            where=path,
            why="every microbatch holds the same number of examples.",
            hint=f"use microbatches in {', '.join(map(str, fitting[:12]))}, or another batch size.",
        )
    return int(size)
