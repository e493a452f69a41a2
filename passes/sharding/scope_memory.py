"""The live ranges of a scope's values, where the compiler fuses at any distance.

What is no buffer has no row in the integer program, and what it is made of is there until it is
read: the same account as that of the lowered program (`fused_peak`), before layouts are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import DropVar, Jaxpr, Literal, Var

from autopar.passes.sharding.compiler_rules import CompilerRules
from autopar.passes.sharding.epilogues import InstructionValues
from autopar.passes.sharding.held_values import held_values
from autopar.passes.sharding.scopes import Assigned, ScopeValue, aval_shape, value_bytes


class ScopeBuffers:
    """Which values of a program's scopes are buffers; found once for all meshes.

    Nothing is said where the compiler's rules are those of near readers.
    """

    def __init__(self, compiler: CompilerRules):
        self.compiler = compiler
        self._found: dict[int, tuple[Jaxpr, _ScopeFacts]] = {}  # by identity of what lives

    def settle(self, jaxpr: Jaxpr, env: Mapping[Var, ScopeValue], ends: Sequence[int]) -> None:
        """Say of a scope's values whether they are buffers, and until when.

        Args:
          jaxpr: the scope's.
          env: what its variables are.
          ends: when each of its equations is done.
        """
        if not self.compiler.fuses_anywhere:
            return
        if id(jaxpr) not in self._found:
            self._found[id(jaxpr)] = jaxpr, _facts(jaxpr, self.compiler)
        facts = self._found[id(jaxpr)][1]
        for var in facts.made_again:
            value = env.get(var)
            if isinstance(value, Assigned):
                value.live.made_again = True
        for var, reader in facts.last_read.items():
            value = env.get(var)
            if isinstance(value, Assigned):
                value.live.last = max(value.live.last, ends[reader])


class _ScopeFacts(NamedTuple):
    """The values that are no buffers, and the last equation of those that read each buffer."""

    made_again: Sequence[Var]
    last_read: Mapping[Var, int]


def _facts(jaxpr: Jaxpr, compiler: CompilerRules) -> _ScopeFacts:
    program = [
        InstructionValues(
            eqn,
            tuple(None if isinstance(atom, Literal) else atom for atom in eqn.invars),
            tuple(var for var in eqn.outvars if not isinstance(var, DropVar)),
        )
        for eqn in jaxpr.eqns
    ]
    outputs = [atom for atom in jaxpr.outvars if not isinstance(atom, Literal)]
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    held = held_values(
        program, inputs, outputs, value_bytes, lambda v: math.prod(aval_shape(v)), compiler
    )
    results = (var for made in program for var in made.results)
    made_again = [var for var in results if held.is_made_again(var)]
    last_read: dict[Var, int] = {}
    times = held.run_times(program)
    for number in sorted(range(len(program)), key=times.__getitem__):
        made = program[number]
        if any(map(held.is_held, made.results)):
            last_read.update(dict.fromkeys(held.read_by(made.operands), times[number]))
    return _ScopeFacts(made_again, last_read)
