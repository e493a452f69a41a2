"""What a stage receives is kept: nothing from before a boundary is computed again after it.

`jax.checkpoint` around a block keeps the block's input, and its backward pass computes the rest
again from there. Where a boundary falls inside of the block, the later stage would wait for what
the earlier one computes again; and since backward values only flow to earlier stages, the rest of
the block's backward pass would move there, with its weights. But the later stage has received the
value once, in the forward pass. It reads that, as if the checkpoint had a boundary there too: the
two parts of the block are computed again each on its own stage.

The barrier that keeps XLA from merging both passes is one for all that the block reads and for the
gradient of its result. It becomes one for each stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.barriers import is_barrier, part_of_barrier
from autopar.passes.graph.graph import Atom, eliminate_dead_code, readers_of, variables
from autopar.passes.graph.jumps import is_jump, is_real
from autopar.passes.slicing.anatomy import Anatomy, dissect


def read_received(parts: Anatomy, stage_of: Mapping[int, int]) -> tuple[Anatomy, Mapping[int, int]]:
    """The program whose backward pass reads what crosses a boundary, instead of computing it again.

    Args:
      parts: the program.
      stage_of: the stages of the body's forward equations, by number.

    Returns:
      The program, the same one if nothing changes, and the stages of its forward equations.
    """
    numbers, eqns = parts.value_numbers, parts.body.eqns
    kept = {numbers[var]: var for var in _crossing(parts, stage_of)}
    instead: dict[Var, Var] = {
        var: kept[numbers[var]]
        for index in sorted(parts.backward)
        for var in eqns[index].outvars
        if numbers[var] in kept and not is_barrier(eqns[index])
    }
    if not instead:
        return parts, stage_of

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else instead.get(atom, atom)

    again, new = _StagesOfReaders(parts, stage_of, numbers), list[JaxprEqn]()
    stage_by_results: dict[object, int] = {}
    for index, eqn in enumerate(eqns):
        if index in stage_of:
            stage_by_results[_identity(eqn)] = stage_of[index]
        replaced = [var for var in variables(eqn.invars) if var in instead]
        # What was computed again is not compared with what was kept: it may be rounded otherwise.
        rest = [var for var in variables(eqn.invars) if var not in instead and again.is_again(var)]
        if replaced and not (is_jump(eqn) and any(map(is_real, rest))):
            eqn = eqn.replace(invars=[read(atom) for atom in eqn.invars])
        new += again.apart(eqn) if is_barrier(eqn) and index in parts.backward else [eqn]
    outvars = [read(atom) for atom in parts.body.outvars]
    body = eliminate_dead_code(jax_compat.replace_jaxpr(parts.body, eqns=new, outvars=outvars))
    scan = parts.loop.scan
    changed = scan.replace(params={**scan.params, "jaxpr": ClosedJaxpr(body, ())})
    found = dissect(parts.step.with_scan(changed))
    stages = {
        index: stage_by_results[_identity(eqn)]
        for index, eqn in enumerate(found.body.eqns)
        if _identity(eqn) in stage_by_results
    }
    return found, stages


def _identity(eqn: JaxprEqn) -> object:
    """What an equation is known by, also after dead code has gone."""
    return tuple(eqn.outvars) or id(eqn)


def _crossing(parts: Anatomy, stage_of: Mapping[int, int]) -> Iterator[Var]:
    """Values that a forward equation makes and one of a later stage reads."""
    eqns = parts.body.eqns
    readers = readers_of(eqns)
    for index, stage in stage_of.items():
        for var in eqns[index].outvars:
            if any(stage_of.get(reader, stage) != stage for reader in readers.get(var, ())):
                yield var


class _StagesOfReaders:
    """On which stages what passes a barrier is computed with again."""

    def __init__(
        self, parts: Anatomy, stage_of: Mapping[int, int], numbers: Mapping[Var, int]
    ) -> None:
        self.eqns, self.numbers = parts.body.eqns, numbers
        self.readers = readers_of(self.eqns)
        self.staged: dict[int, int] = {}
        for index, stage in stage_of.items():
            self.staged.update((numbers[var], stage) for var in self.eqns[index].outvars)
        self.forward = {
            numbers[var]
            for index, eqn in enumerate(self.eqns)
            if index not in parts.backward
            for var in eqn.outvars
        }

        self.made_late = {var for index in parts.backward for var in self.eqns[index].outvars}

    def is_again(self, var: Var) -> bool:
        """Whether the backward pass computes a value that the forward pass computed."""
        return var in self.made_late and self.numbers[var] in self.forward

    def _stages(self, var: Var) -> tuple[set[int], set[int]]:
        """Where a value is computed with again, and what is made of it; nowhere: a gradient."""
        direct, reached, seen = set[int](), set[int](), set[Var]()
        stack = [(var, True)]
        while stack:
            value, is_direct = stack.pop()
            for reader in self.readers.get(value, ()):
                for result in set(self.eqns[reader].outvars) - seen:
                    number = self.numbers[result]
                    if number not in self.forward:
                        continue
                    seen.add(result)
                    stage = self.staged.get(number)  # None: evaluated wherever it is read
                    if stage is not None:
                        reached.add(stage)
                        direct.update({stage} if is_direct else ())
                    stack.append((result, is_direct and stage is None))
        return direct, reached

    def apart(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """A barrier as one for each stage; gradients pass the one of the last."""
        stages = [self._stages(var) for var in eqn.outvars]
        last = max((stage for _, reached in stages for stage in reached), default=0)
        own = [max(direct, default=last) for direct, _ in stages]
        return [
            part_of_barrier(eqn, [place for place, s in enumerate(own) if s == stage])
            for stage in sorted(set(own))
        ]
