"""Einsum's notation for the dimensions of a function's arrays: `b t h d, b s h d -> b t h d`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.base.errors import OptionError

LoopNames = tuple[str, ...]  # of one dimension, outermost first; none: nobody names it
Term = tuple[LoopNames, ...]  # of one array
KINDS = ("cut", "sum", "max", "min")

_ITEM = re.compile(r"\s*(?:\(([^()]*)\)|([A-Za-z]\w*)|(_|1))")


@dataclass(frozen=True)
class LoopNotation:
    """The dimensions of arguments and results by the loops in them, and what cutting one does.

    `kinds` has the loops that may be cut: "cut" ones are passed on to every result, of the others
    each slice makes a part of the result, and the parts are combined.
    """

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    kinds: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        def text(terms: Sequence[Term]) -> str:
            return ", ".join(" ".join(map(dim_text, term)) for term in terms)

        def dim_text(dim: LoopNames) -> str:
            return f"({' '.join(dim)})" if len(dim) > 1 else "".join(dim) or "_"

        kinds: dict[str, list[str]] = {}
        for name, kind in self.kinds:
            kinds.setdefault(kind, []).append(name)
        tail = "".join(f", {kind}={' '.join(names)!r}" for kind, names in kinds.items())
        return f"{text(self.operands)} -> {text(self.results)}{tail}"


def parse_loops(text: str, kinds: Mapping[str, str]) -> LoopNotation:
    """Read a rule.

    >>> print(parse_loops("b t d, d _ -> b t _", {"cut": "b t", "sum": "d"}))
    b t d, d _ -> b t _, cut='b t', sum='d'

    Raises:
      OptionError: the text is not of this form, or its loops contradict their kinds.
    """
    if text.count("->") != 1:
        raise _error(text, "it has to have one arrow, as in 'b t d -> b t d'.")
    operands, results = (
        tuple(_term(part, text) for part in side.split(",")) if side.strip() else ()
        for side in text.split("->")
    )
    if not operands or not results:
        raise _error(text, "it has to name the dimensions of an argument and of a result.")
    named = {name for term in operands for dim in term for name in dim}
    of_kind: dict[str, str] = {}
    for kind in KINDS:
        for name in kinds.get(kind, "").replace(",", " ").split():
            if name not in named:
                raise _error(
                    text,
                    f"{kind}={kinds[kind]!r} names the loop {name!r}, which no argument has.",
                )
            if name in of_kind:
                raise _error(text, f"the loop {name!r} is named in {of_kind[name]}= and {kind}=.")
            of_kind[name] = kind
    if not of_kind:
        raise _error(
            text,
            "no loop may be cut: name those along which the function computes independently,"
            " cut='b h' for instance.",
        )
    for name, kind in of_kind.items():
        having = [any(name in dim for dim in term) for term in results]
        if kind == "cut" and not all(having):
            raise _error(
                text,
                f"result {having.index(False)} has no dimension {name!r}. Where slices of {name!r}"
                f" make parts that are added up, write sum={name!r}.",
            )
        if kind != "cut" and all(having):
            raise _error(text, f"{kind}={name!r}, but every result has a dimension {name!r}.")
    return LoopNotation(operands, results, tuple(of_kind.items()))


def _term(part: str, text: str) -> Term:
    dims: list[LoopNames] = []
    place, part = 0, part.strip()
    while place < len(part):
        found = _ITEM.match(part, place)
        if found is None:
            raise _error(text, f"{part[place:]!r} cannot be read: write names between spaces.")
        merged, name, _ = found.groups()
        dims.append(tuple(merged.split()) if merged is not None else (name,) if name else ())
        place = found.end()
    names = [name for dim in dims for name in dim]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _error(text, f"{part!r} has the loop {twice!r} twice.")
    return tuple(dims)


def _error(text: str, why: str) -> OptionError:
    return OptionError(
        f"autopar.local cannot use the rule {text!r}.",
        why=why,
        hint="'b t h d, b s h d, b s h d -> b t h d' with cut='b h' is a rule of attention.",
    )
