"""Pins: shardings of inputs and outputs that the user asks for, as layouts on one logical mesh."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autopar.base.cluster import axis_names
from autopar.base.errors import PinError
from autopar.base.units import without_rows
from autopar.passes.graph.graph import Atom, Graph
from autopar.passes.sharding.layout import Layout, divides
from autopar.passes.sharding.scopes import aval_shape


@dataclass(frozen=True)
class Pins:
    """Layouts that are asked for, by the numbers of inputs, and of outputs that replace no input.

    What replaces an input lies as that input does.
    """

    inputs: Mapping[int, Layout] = field(default_factory=dict)
    outputs: Mapping[int, Layout] = field(default_factory=dict)


NO_PINS = Pins()


@dataclass(frozen=True)
class _Leaf:
    """What a pin may be for: an input with the output that replaces it, or another output."""

    kind: Literal["inputs", "outputs"]
    index: int
    path: str
    var: Atom
    paths: tuple[str, ...]


def resolve_pins(
    graph: Graph,
    pins: Sequence[tuple[str, tuple[tuple[str, ...], ...]]],
    mesh: tuple[int, ...],
    names: tuple[str, ...],
) -> Pins:
    """The layout that each pinned input or output must have.

    Raises:
      PinError: a pattern matches nothing, a spec names an unknown axis, has too many dimensions or
        does not divide its tensor, or two pins disagree.
    """
    check_pins(graph, pins)
    found: dict[tuple[str, int], tuple[Layout, str]] = {}
    for pattern, spec in pins:
        for leaf in _pinned(graph, pattern):
            layout = _pinned_layout(leaf, pattern, spec, mesh, names)
            known, other = found.setdefault((leaf.kind, leaf.index), (layout, pattern))
            if known != layout:
                raise PinError(
                    f"The pins {other!r} and {pattern!r} give one tensor two shardings.",
                    where=leaf.path,
                    hint="make one of the patterns narrower.",
                )
    return Pins(
        *(
            {index: layout for (of, index), (layout, _) in found.items() if of == kind}
            for kind in ("inputs", "outputs")
        )
    )


def are_possible(
    graph: Graph, pins: Sequence[tuple[str, tuple[tuple[str, ...], ...]]], mesh: tuple[int, ...]
) -> bool:
    """Whether every pinned input and output can lie so on a mesh."""
    try:
        resolve_pins(graph, pins, mesh, axis_names(mesh))
    except PinError:
        return False
    return True


def check_pins(graph: Graph, pins: Sequence[tuple[str, Any]]) -> None:
    """Every pin is for an input or an output.

    Raises:
      PinError: a pattern matches none.
    """
    for pattern, _ in pins:
        if not _pinned(graph, pattern):
            some = [x.path for x in graph.inputs if x.role == "state"][:8]
            some += [x.path for x in graph.outputs if x.alias is None][:4]
            raise PinError(
                f"The pin {pattern!r} matches no input and no output.",
                why=f"paths look like {', '.join(some) or 'nothing: there are no leaves'}.",
                hint="use a shell pattern such as '*kernel*'.",
            )


def pins_of(graph: Graph, pins: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """The pins that are for leaves of this graph, one stage's for instance."""
    return tuple((pattern, spec) for pattern, spec in pins if _pinned(graph, pattern))


def _pinned(graph: Graph, pattern: str) -> list[_Leaf]:
    return [
        leaf
        for leaf in _leaves(graph)
        if any(matches_path(without_rows(path), pattern) for path in leaf.paths)
    ]


def _leaves(graph: Graph) -> Iterator[_Leaf]:
    for index, (var, label) in enumerate(zip(graph.jaxpr.invars, graph.inputs, strict=True)):
        later = () if label.alias is None else (graph.outputs[label.alias].path,)
        yield _Leaf("inputs", index, label.path, var, (label.path, *later))
    for index, (atom, output) in enumerate(zip(graph.jaxpr.outvars, graph.outputs, strict=True)):
        if output.alias is None:
            yield _Leaf("outputs", index, output.path, atom, (output.path,))


def matches_path(path: str, pattern: str) -> bool:
    """Whether a shell pattern matches a path, or its end; brackets and quotes count as slashes.

    A path as plans print it is a pattern too, with its keys in brackets; one that begins with `=`
    is that path alone.

    >>> matches_path("state.params['Dense_0']['kernel']", "Dense_0/kernel")
    True
    >>> matches_path("state['layers'][0]['down']", "*['down']")
    True
    >>> matches_path("state['embed']", "*['down']")  # not one of the letters between the brackets
    False
    """
    if pattern.startswith("="):
        return path == pattern[1:]
    plain = simple_path(path)
    literal = re.sub(r"\[(?=')", "[[]", pattern)
    return any(
        fnmatch.fnmatchcase(candidate, form)
        for candidate in (path, plain)
        for spelled in (literal, simple_path(pattern))
        for form in (spelled, f"*/{spelled}")
    )


def simple_path(path: str) -> str:
    """`state.params['Dense_0']['kernel']` as `state/params/Dense_0/kernel`."""
    for old, new in (("['", "/"), ("']", ""), ("[", "/"), ("]", ""), (".", "/")):
        path = path.replace(old, new)
    return path


def _pinned_layout(
    leaf: _Leaf,
    pattern: str,
    spec: tuple[tuple[str, ...], ...],
    mesh: tuple[int, ...],
    axis_names: tuple[str, ...],
) -> Layout:
    shape, path = aval_shape(leaf.var), leaf.path
    unknown = [a for axes in spec for a in axes if a not in axis_names]
    if unknown:
        raise PinError(
            f"The pin {pattern!r} names the mesh axis {unknown[0]!r}.",
            where=path,
            why=f"the axes of this mesh {mesh} are {', '.join(axis_names)}.",
            hint="set logical_mesh=... to the mesh that the pin means.",
        )
    if len(spec) > len(shape):
        raise PinError(
            f"The pin {pattern!r} has {len(spec)} dimensions, the tensor has {len(shape)}.",
            where=path,
        )
    dims = tuple(tuple(sorted(axis_names.index(a) for a in axes)) for axes in spec)
    layout = Layout(dims + ((),) * (len(shape) - len(dims)))
    if not divides(shape, layout, mesh):
        raise PinError(
            f"The pin {pattern!r} does not divide its tensor.",
            where=path,
            why=f"the shape is {shape}, the mesh is {dict(zip(axis_names, mesh, strict=True))}.",
            hint="pin a dimension whose size is a multiple of the mesh axes that cut it.",
        )
    return layout
