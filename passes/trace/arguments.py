"""A step's arguments and its result, taken apart into leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Shaped = Any  # a value with `shape` and `dtype`, or None for a static leaf
Argnums = tuple[int, ...] | Literal["auto"]


@dataclass(frozen=True)
class Argument:
    """One argument of the step: its structure and its leaves, static ones (None) included.

    `position` is its index among the function's parameters (None: keyword-only), `start` the index
    of its first array leaf among all array leaves. `in_object` says of each leaf whether it is part
    of an object that the step may change in place (`graph_objects`).
    """

    name: str
    position: int | None
    value: Any
    tree: Any
    leaves: tuple[Shaped | None, ...]
    paths: tuple[str, ...]
    start: int
    in_object: tuple[bool, ...]

    def arrays(self) -> Iterator[tuple[int, str, Shaped]]:
        """(index among all array leaves, path, shape and dtype) of each array leaf."""
        present = (p for p, x in zip(self.paths, self.leaves, strict=True) if x is not None)
        shaped = [x for x in self.leaves if x is not None]
        for offset, (path, leaf) in enumerate(zip(present, shaped, strict=True)):
            yield self.start + offset, path, leaf

    def object_arrays(self) -> frozenset[int]:
        """Indices (among all array leaves) of those that are part of objects."""
        marks = zip(self.leaves, self.in_object, strict=True)
        present = [is_inside for leaf, is_inside in marks if leaf is not None]
        return frozenset(self.start + n for n, is_inside in enumerate(present) if is_inside)


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

    def donates(self, argument: Argument) -> bool:
        """Whether the user named this argument for donation."""
        return self.donate_argnums != "auto" and argument.position in self.donate_argnums
