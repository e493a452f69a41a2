"""Which arguments are the state: those that come back in the result as their own update.

The structure alone does not tell: gradients have the parameters' structure too, and predictions may
have the batch's shape. So each output is followed backwards, through additions, selections and the
like, to the inputs that it is an update of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal, Var

from autopar.passes.graph.primitives import SCALES, SCATTERS, UPDATES
from autopar.passes.graph.scans import ScanParts, WhileParts
from autopar.passes.trace.arguments import Argument, Request, Result


@dataclass(frozen=True)
class Match:
    """An argument and the part of the result that has its structure; `aliases`: input to output."""

    aliases: Mapping[int, int]
    outputs: range
    flow: int
    is_state: bool = False


UPDATED, UNCHANGED, SCALED, NONE = 3, 2, 1, 0  # how the argument's leaves flow to the match


def find_returned(
    jaxpr: Jaxpr,
    arguments: Sequence[Argument],
    result: Result,
    request: Request,
    keys: frozenset[int],
) -> dict[int, Match]:
    """For each argument (by its number), the part of the result that is its next value."""
    offsets = np.cumsum([0, *(x is not None for x in result.leaves)])
    flows = Flows(jaxpr)
    found: dict[int, Match] = {}
    taken: set[int] = set()
    # The largest first: an optimizer's state contains subtrees with the parameters' structure.
    for number in sorted(range(len(arguments)), key=lambda n: -len(arguments[n].leaves)):
        argument = arguments[number]
        is_object = bool(argument.in_object) and all(argument.in_object)
        explicit = is_object or request.donates(argument)
        matches = []
        for tree, start in _subtrees(result.tree, 0):
            outputs = range(start, start + tree.num_leaves)
            if tree == argument.tree and taken.isdisjoint(outputs):
                match = _match(argument, result, outputs, offsets, flows, explicit)
                if match is not None:
                    matches.append(match)
        if matches:
            best = max(matches, key=lambda m: (m.flow, len(m.aliases), -m.outputs.start))
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
    result: Result,
    outputs: range,
    offsets: np.ndarray,
    flows: Flows,
    explicit: bool,
) -> Match | None:
    others = result.leaves[outputs.start : outputs.stop]
    if [leaf is None for leaf in argument.leaves] != [other is None for other in others]:
        return None
    first, total = int(offsets[outputs.start]), len(list(argument.arrays()))
    arrays = zip(argument.arrays(), (other for other in others if other is not None), strict=True)
    aliases = {
        index: first + offset
        for offset, ((index, _, leaf), other) in enumerate(arrays)
        if leaf.shape == other.shape and leaf.dtype == other.dtype
    }
    # A single leaf has the structure of any other.
    is_likely = 2 * len(aliases) > total or (explicit and total > 1)
    if not total or not is_likely:
        return None
    return Match(aliases, outputs, flows.strongest(aliases))


_WRITES = frozenset({"dynamic_update_slice"}) | SCATTERS.keys()
_FIRST_OPERAND = frozenset({"dynamic_slice"}) | _WRITES


class Flows:
    """Which inputs an output is an update of, walking backwards through its equations."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.known: dict[int, tuple[dict[Var, int], dict[Var, tuple[Any, int]]]] = {}

    def strongest(self, aliases: Mapping[int, int]) -> int:
        """The strongest way in which one of the inputs flows to its alias."""
        best = NONE
        for allowed, flow in ((UPDATES, UPDATED), (SCALES, SCALED)):
            for index, output in aliases.items():
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
            producers = {var: (e, i) for e in jaxpr.eqns for i, var in enumerate(e.outvars)}
            self.known[id(jaxpr)] = {var: i for i, var in enumerate(jaxpr.invars)}, producers
        numbers, producers = self.known[id(jaxpr)]
        pending = [jaxpr.outvars[i] for i in outputs]
        seen: set[Var] = set()
        found: set[int] = set()
        while pending:
            atom = pending.pop()
            if isinstance(atom, Literal) or atom in seen:
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
            branches = (self.origins(b.jaxpr, {output}, allowed) for b in params["branches"])
            return [operands[1 + i] for origins in branches for i in origins]
        if name == "scan":
            scan = ScanParts.of(eqn)
            if output >= scan.num_carry:
                return self._written(scan, output, operands)
            return self._carried(scan.body, output, scan.num_consts, operands, allowed)
        if name == "while":
            loop = WhileParts.of(eqn)
            _, consts, carries = loop.operands(operands)
            return self._carried(loop.body, output, len(consts), [*consts, *carries], allowed)
        if name not in allowed:
            return []
        if name == "select_n":
            return list(operands[1:])
        return list(operands[:1] if name in _FIRST_OPERAND else operands)

    def _written(self, scan: ScanParts, output: int, operands: Any) -> list[Any]:
        """The stack into whose slices a scan writes, as into caches, to hand them on."""
        _, slices = scan.operands(scan.body.invars)[1:]
        made = next((e for e in scan.body.eqns if scan.body.outvars[output] in e.outvars), None)
        if made is None or made.primitive.name not in _WRITES:
            return []
        stacks = zip(scan.operands(operands)[2], slices, strict=True)
        return [stack for stack, own in stacks if own is made.invars[0]]

    def _carried(
        self, body: Jaxpr, output: int, first: int, operands: Any, allowed: frozenset[str]
    ) -> list[Any]:
        """Operands that reach one carried value of a loop, over any number of iterations."""
        reached, carries = {first + output}, {output}
        while True:
            reached |= self.origins(body, carries, allowed)
            more = {i - first for i in reached if 0 <= i - first < len(body.outvars)}
            if more <= carries:
                return [operands[i] for i in sorted(reached)]
            carries |= more
