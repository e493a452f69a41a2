"""Donated leaves of a step whose memory no result took, although it was planned so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from autopar.passes.graph.graph import Graph, user_source

_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
_LEAF = re.compile(r' parameter\((\d+)\).*op_name="first\[(\d+)\]"')  # as `LocalProgram` names them


def not_taken(text: str, donated: Sequence[int]) -> tuple[int, ...]:
    """Of the numbers of donated leaves, those that no result is written over.

    Args:
      text: of the compiled step.
      donated: the leaves that it was to take over, as its first argument.
    """
    header, _, rest = text.partition("\n")
    taken = {int(number) for number in _ALIAS.findall(header)}
    entry = rest.partition("\nENTRY ")[2]
    kept = {donated[int(place)] for number, place in _LEAF.findall(entry) if int(number) in taken}
    # Where XLA names no leaf, nothing is known.
    return tuple(i for i in donated if i not in kept) if 'op_name="first[' in entry else ()


def donation_warnings(graph: Graph, numbers: Sequence[int]) -> Iterator[str]:
    """What to say of leaves whose memory no result took, each with the line of its next value."""
    read = {id(var) for eqn in graph.jaxpr.eqns for var in eqn.invars}
    made = {id(var): eqn for eqn in graph.jaxpr.eqns for var in eqn.outvars}
    for number in numbers:
        leaf, label = graph.jaxpr.invars[number], graph.inputs[number]
        assert label.alias is not None
        result = graph.jaxpr.outvars[label.alias]
        eqn = made.get(id(result))
        where = f" ({user_source(eqn)})" if eqn is not None else ""
        why = (
            "XLA writes it elsewhere"
            if id(leaf) in read
            else "the step does not read it, so that XLA does not get it"
        )
        yield (
            f"The memory of {label.path} is not taken by its next value, "
            f"{graph.outputs[label.alias].path}{where}: {why}. Both are there at once."
        )
