"""Objects that a step changes in place as values: their arrays beside their definition.

`graph_objects` makes them of objects, and objects of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class ObjectDefinition:
    """Everything of an object but its arrays: a static leaf."""

    graphdef: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObjectDefinition):
            return NotImplemented
        return self.graphdef is other.graphdef or bool(self.graphdef == other.graphdef)

    def __hash__(self) -> int:
        try:
            return hash(self.graphdef)
        except TypeError:  # it holds what compares but has no hash, as configs often do
            return hash(tuple(getattr(node, "type", None) for node in self.graphdef.nodes))

    def __repr__(self) -> str:
        kind = getattr(self.graphdef.nodes[0], "type", None)
        return f"<definition of a {getattr(kind, '__name__', 'graph object')}>"


@dataclass(frozen=True)
class ObjectKey:
    """The way to a leaf from an object, or to what a step made of an argument."""

    text: str
    is_argument: bool = False

    def __str__(self) -> str:
        return self.text


@jax.tree_util.register_pytree_with_keys_class
class ObjectState:
    """An object's arrays and its definition.

    Args:
      number: which of the arguments' objects it is or was, from 0; None: a result's.
      definition: everything else.
      leaves: arrays (or pytrees of them, as a variable may hold), in the definition's order.
      paths: the keys that lead to each, where they are known.
      holders: what holds each of them, where that is a variable of its own for all.
    """

    def __init__(
        self,
        number: int | None,
        definition: Any,
        leaves: Sequence[Any],
        paths: Sequence[Sequence[Any]] | None = None,
        holders: Sequence[Any] | None = None,
    ):
        self.number, self.definition = number, definition
        self.leaves, self.paths, self.holders = tuple(leaves), paths, holders

    def tree_flatten(self) -> tuple[tuple[Any, ...], int | None]:
        """The definition and the leaves."""
        return (self.definition, *self.leaves), self.number

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[ObjectKey, Any], ...], int | None]:
        """The same, with keys that read as attributes."""
        paths = [(i,) for i in range(len(self.leaves))] if self.paths is None else self.paths
        keys = ["", *map(attributes, paths)]
        values = (self.definition, *self.leaves)
        return tuple((ObjectKey(k), v) for k, v in zip(keys, values, strict=True)), self.number

    @classmethod
    def tree_unflatten(cls, number: int | None, children: Sequence[Any]) -> ObjectState:
        """The inverse of `tree_flatten`."""
        definition, *leaves = children
        return cls(number, definition, leaves)

    def __repr__(self) -> str:
        return f"<state of {self.definition}, {len(self.leaves)} leaves>"


def attributes(path: Sequence[Any]) -> str:
    """Keys of an object and what is in it, as Python writes them."""
    return "".join(
        f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in path
    )


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class StepResult:
    """What a step returns, and what it made of each argument that holds objects, by its name.

    `is_alike` says that objects have only other arrays than before, and that `value` holds none.
    """

    value: Any
    updates: Mapping[str, Any]
    is_alike: bool = False

    def tree_flatten_with_keys(
        self,
    ) -> tuple[tuple[tuple[ObjectKey, Any], ...], tuple[tuple[str, ...], bool]]:
        """The value, whose leaves keep their paths, and the updates."""
        updates = ((ObjectKey(name, is_argument=True), x) for name, x in self.updates.items())
        return ((ObjectKey(""), self.value), *updates), (tuple(self.updates), self.is_alike)

    @classmethod
    def tree_unflatten(
        cls, told: tuple[tuple[str, ...], bool], children: Sequence[Any]
    ) -> StepResult:
        """The inverse."""
        (names, is_alike), (value, *updates) = told, children
        return cls(value, dict(zip(names, updates, strict=True)), is_alike)


def in_objects(tree: Any) -> list[bool]:
    """For each leaf, whether it is part of an object that was taken apart."""
    result: list[bool] = []
    for part in jax.tree.leaves(tree, is_leaf=is_state):
        if is_state(part):
            result += [True] * len(jax.tree.leaves(part))
        else:
            result.append(False)
    return result


def states_in(tree: Any) -> Iterator[ObjectState]:
    """The states in a tree, in order."""
    return (x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x))


def is_state(value: Any) -> bool:
    """Whether a value is an `ObjectState`."""
    return isinstance(value, ObjectState)
