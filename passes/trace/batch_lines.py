"""The `batch_axes=` that a user could write, for errors about the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr

from autopar.base.errors import AutoparError, BatchArgumentError, InexactMicrobatchError
from autopar.base.units import format_examples
from autopar.passes.graph.graph import Input
from autopar.passes.trace.arguments import Argument
from autopar.passes.trace.batch_guess import DimensionLoops, Leaf, meet_themselves


def ambiguous(arguments: Sequence[Argument], leaves: Sequence[Leaf]) -> BatchArgumentError:
    """The error for a program that does not tell its batch, with the lines that would do.

    `leaves` are those that may hold it.
    """
    candidates = {leaf.index: leaf.shape[0] for leaf in leaves}
    paths = {i: path for argument in arguments for i, path, _ in argument.arrays()}
    counts = Counter(candidates.values())
    listed = sorted(candidates, key=lambda i: (counts[candidates[i]], i))
    lines = [f"- {paths[i]}: {candidates[i]}" for i in listed[:8]]
    if len(listed) > 8:
        lines.append(f"- ... {len(listed)} leaves in all")

    def line(size: int) -> str:
        axes = {
            leaf.index: leaf.shape.index(size) for leaf in leaves if leaf.shape.count(size) == 1
        }
        if len(axes) < len(leaves):
            axes = {i: 0 for i, own in candidates.items() if own == size}
        return axes_line(arguments, axes)

    # The sizes of most leaves, and for every argument that of most of its own.
    sizes = [size for size, _ in counts.most_common(3)]
    for number in dict.fromkeys(leaf.argument for leaf in leaves):
        own = Counter(leaf.shape[0] for leaf in leaves if leaf.argument == number)
        sizes.append(own.most_common(1)[0][0])
    choices = [f"- for {format_examples(size)}: {line(size)}" for size in dict.fromkeys(sizes)]
    if size := _shared_later(arguments, leaves):
        axes = {leaf.index: leaf.shape.index(size, 1) for leaf in leaves}
        choices.insert(0, f"- for {format_examples(size)}: {axes_line(arguments, axes)}")
    return BatchArgumentError(
        "The batch is ambiguous: leaves disagree on the number of examples.",
        where=paths[listed[0]],
        why="arguments that do not come back as the new state are taken for the batch, and the "
        "program does not tell which of these leading dimensions are examples:\n"
        + "\n".join(lines),
        hint="say it, as the in_axes of jax.vmap do (None: no batch), or name whole arguments with "
        "batch_argnums:\n" + "\n".join(choices),
    )


def _shared_later(arguments: Sequence[Argument], leaves: Sequence[Leaf]) -> int:
    """The one size that each leaf has once after its first dimension, and no other argument; or 0.

    Data with features first have their examples so.
    """
    indices = {leaf.index for leaf in leaves}
    others = (x.shape for a in arguments for i, _, x in a.arrays() if i not in indices)
    shared = set.intersection(*(set(leaf.shape[1:]) for leaf in leaves)) - {1}.union(*others)
    found = [size for size in shared if all(x.shape[1:].count(size) == 1 for x in leaves)]
    return found[0] if len(found) == 1 else 0


def tell_batch(
    error: AutoparError,
    jaxpr: Jaxpr,
    inputs: Sequence[Input],
    arguments: Sequence[Argument],
    batch_argnums: Sequence[int] | str,
    batch_axes: Any,
) -> None:
    """Let an error about the batch say what was taken for it, and how to say otherwise."""
    is_guess = batch_argnums == "auto" and batch_axes is None
    taken = _taken(jaxpr, inputs)
    if not taken:
        return
    line = f"The batch is {taken}"
    if is_guess:
        line += ", as autopar guessed: batch_argnums= or batch_axes= say otherwise"
    error.why = f"{error.why}\n{line}." if error.why else f"{line}."
    if batch_axes is None:
        _with_other_axes(error, jaxpr, inputs, arguments)


def _taken(jaxpr: Jaxpr, inputs: Sequence[Input]) -> str:
    """The dimensions that are the batch, and their sizes; "": there is none."""
    leaves: dict[tuple[int, int], list[str]] = {}
    for var, label in zip(jaxpr.invars, inputs, strict=False):  # constants have no labels yet
        if label.batch_axis is not None:
            place = label.batch_axis, var.aval.shape[label.batch_axis]
            leaves.setdefault(place, []).append(label.path)
    parts = []
    for (axis, size), paths in leaves.items():
        more = len(paths) - 2
        told = ", ".join(paths[:2]) if more > 0 else " and ".join(paths)
        told += f" and {more} more lea{'f' if more == 1 else 'ves'}" if more > 0 else ""
        parts.append(f"dimension {axis} of {told} ({size})")
    return "; ".join(parts)


def _with_other_axes(
    error: AutoparError, jaxpr: Jaxpr, inputs: Sequence[Input], arguments: Sequence[Argument]
) -> None:
    """Name the other dimension that may hold the examples.

    Time-major data look like a batch along time. Another loop of the program may hold the examples
    where every leaf of the batch has it, no state has it, no scan walks it in order (unless it was
    passed over for that, and the scan carries nothing of what was taken), and no value has it
    twice, as the scores of attention have time. Where rows of the batch meet, it looks like time if
    they do so in such scores.
    """
    labelled = inputs[: sum(1 for argument in arguments for _ in argument.arrays())]
    batch = [i for i, label in enumerate(labelled) if label.batch_axis is not None]
    if not batch:
        return
    loops = DimensionLoops.of(jaxpr)
    ranks = [len(var.aval.shape) for var in jaxpr.invars]
    held = [
        {loops.loop((var, d)): d for d in reversed(range(rank)) if var.aval.shape[d] > 1}
        for var, rank in zip(jaxpr.invars, ranks, strict=True)
    ]
    taken = {loops.loop((jaxpr.invars[i], labelled[i].batch_axis or 0)) for i in batch}
    state = {loop for i, x in enumerate(inputs) if x.role == "state" for loop in held[i]}
    shared = set.intersection(*(set(held[i]) for i in batch)) - taken - state
    met = meet_themselves(jaxpr, loops)
    passed_over, kept = all(labelled[i].batch_axis for i in batch), loops.carried_by()
    scanned = {loops.loop(dim) for dim in loops.scanned}
    shared -= met | {
        x for x in scanned if not passed_over or any((x, loop) in kept for loop in taken)
    }
    is_time = not isinstance(error, InexactMicrobatchError) or not taken.isdisjoint(met)
    if len(shared) != 1 or not is_time:
        return
    (loop,) = shared
    axes = {i: own[loop] for i, own in enumerate(held[: len(labelled)]) if loop in own}
    size = jaxpr.invars[batch[0]].aval.shape[axes[batch[0]]]
    told = f"if the {size} along another dimension are the examples, say so:\n"
    told += axes_line(arguments, axes)
    error.hint = f"{error.hint}\n{told}" if error.hint else told


def axes_line(arguments: Sequence[Argument], axes: Mapping[int, int]) -> str:
    """`batch_axes=...` as people write it, for the batch dimensions of these array leaves."""

    def text(value: object, start: int) -> tuple[str, int]:
        count = len(jax.tree.leaves(value))  # static leaves are None
        own = [str(axes.get(start + i)) for i in range(count)]
        if len(set(own)) <= 1:
            return own[0] if own else "None", start + count
        parts, at = [], start
        if type(value) is dict:
            for key in sorted(value):
                part, at = text(value[key], at)
                parts.append(f"{key!r}: {part}")
            return "{" + ", ".join(parts) + "}", at
        if type(value) in (tuple, list):
            for item in value:  # type: ignore[attr-defined]
                part, at = text(item, at)
                parts.append(part)
            inner = ", ".join(parts) + ("," if len(parts) == 1 and type(value) is tuple else "")
            return f"({inner})" if type(value) is tuple else f"[{inner}]", at
        return "...", start + count

    positional = {
        a.position: text(jax.tree.unflatten(a.tree, a.leaves), a.start)[0]
        for a in arguments
        if a.position is not None
    }
    entries = [positional.get(n, "None") for n in range(max(positional, default=-1) + 1)]
    return "batch_axes=(" + ", ".join(entries) + ("," if len(entries) == 1 else "") + ")"
