"""How the arguments of a call differ from those that a step was compiled for, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.passes.trace.arguments import Argument
from autopar.passes.trace.graph_objects import static_attributes, without_objects
from autopar.passes.trace.signature import arguments_of
from autopar.passes.trace.trace import Traced


def differences(traced: Traced, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """A line for each leaf that differs in presence, shape or dtype; else what else differs."""
    args, kwargs = without_objects(traced.convention, args, kwargs)
    now = tuple(arguments_of(traced.convention, args, kwargs))
    lines = leaf_differences(*map(_leaves, (traced.arguments, now)))
    if lines:
        return lines
    _, _, static = traced.convention.split(args, kwargs)
    before = {key: value for key, _, value in traced.signature.static_arguments}
    for key in dict.fromkeys((*before, *static)):
        if key not in before or key not in static or before[key] != static[key]:
            old, new = (repr(values.get(key, "nothing")) for values in (before, static))
            lines.append(f"- static argument {traced.convention.name(key)}: {old}, {new}")
    planned = traced.signature.arguments([None] * traced.num_arrays)
    olds, news = (static_attributes(traced.convention, *x) for x in (planned, (args, kwargs)))
    for path in dict.fromkeys((*olds, *news)):
        old, new = (repr(values.get(path, "nothing")) for values in (olds, news))
        if old != new:
            lines.append(f"- {path}: {old}, {new}")
    names = [traced.convention.name(i) for i in range(len(args))]
    before_args, before_kwargs = planned
    pairs = [*zip(names, before_args, args, strict=False)]
    pairs += [(name, before_kwargs.get(name), value) for name, value in kwargs.items()]
    lines += (f"- {line}" for pair in pairs for line in _static_differences(*pair))
    for argument, other in zip(traced.arguments, now, strict=False):
        if argument.tree != other.tree and not lines:
            lines.append(f"- {argument.name}: its structure differs in what is not a leaf")
    return lines or ["- a static leaf (a function, a string) differs"]


def leaf_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each path whose leaves (shapes with dtypes; None: static) are not the same."""
    lines = []
    for path in dict.fromkeys((*before, *now)):
        old, new = (_text(x[path]) if path in x else "nothing" for x in (before, now))
        if old != new:
            lines.append(f"- {path or 'the whole'}: {old}, {new}")
    return lines


def _static_differences(name: str, before: Any, now: Any) -> Iterator[str]:
    """A line for what is no leaf and is another object; leaves are None in what was planned."""
    if before is None or before is now or type(before) is not type(now):
        return
    if dataclasses.is_dataclass(before):
        for field in dataclasses.fields(before):
            old, new = getattr(before, field.name, None), getattr(now, field.name, None)
            path, about = f"{name}.{field.name}", field.metadata
            if about.get("pytree_node", True) and not about.get("static", False):
                yield from _static_differences(path, old, new)
            elif not _is_equal(old, new):
                yield f"{path}: {_kind(old)}, {_kind(new, old)}"
    elif isinstance(before, Mapping):
        for key in before:
            yield from _static_differences(f"{name}[{key!r}]", before[key], now.get(key))
    elif isinstance(before, (list, tuple)):
        keys = getattr(before, "_fields", range(len(before)))
        for key, old, new in zip(keys, before, now, strict=False):
            path = f"{name}.{key}" if isinstance(key, str) else f"{name}[{key}]"
            yield from _static_differences(path, old, new)


def _is_equal(before: Any, now: Any) -> bool:
    try:
        return bool(before == now)
    except Exception:  # of arrays and what compares itself otherwise
        return before is now


def _kind(value: Any, other: Any = None) -> str:
    """What people call an object; beside one that looks alike it is another one."""
    named = getattr(value, "__qualname__", None) or type(value).__name__
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else named
    return f"another {text}" if other is not None and text == _kind(other) else text


def suffixes(argument: Argument) -> list[str]:
    """The paths of an argument's leaves, without its name."""
    return [path.removeprefix(argument.name) for path in argument.paths]


def _leaves(arguments: Sequence[Argument]) -> dict[str, Any]:
    return {path: x for a in arguments for path, x in zip(a.paths, a.leaves, strict=True)}


def _text(leaf: Any) -> str:
    if leaf is None:
        return "a constant"
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
