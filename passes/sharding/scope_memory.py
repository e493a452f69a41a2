"""The live ranges of a scope's values, where the compiler fuses at any distance.

What is no buffer has no row in the integer program, and what it is made of is there until it is
read: the same account as that of the lowered program (`fused_peak`), before layouts are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jax.extend.core import DropVar, Jaxpr, Literal, Var

from autopar.passes.sharding.compiler_rules import CompilerRules
from autopar.passes.sharding.epilogues import InstructionValues
from autopar.passes.sharding.held_values import held_values
from autopar.passes.sharding.scopes import Assigned, ScopeValue, aval_shape, value_bytes


def settle(
    compiler: CompilerRules, jaxpr: Jaxpr, env: Mapping[Var, ScopeValue], ends: Sequence[int]
) -> None:
    """Say of a scope's values whether they are buffers, and until when.

    Args:
      compiler: nothing is said where its rules are those of near readers.
      jaxpr: the scope's.
      env: what its variables are.
      ends: when each of its equations is done.
    """
    if not compiler.fuses_anywhere:
        return
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
    for made, end in zip(program, ends, strict=True):
        for var in made.results:
            value = env.get(var)
            if isinstance(value, Assigned) and held.made_of.get(var) not in (None, {var}):
                value.live.made_again = True
        if any(map(held.is_held, made.results)):
            for var in held.read_by(made.operands):
                value = env.get(var)
                if isinstance(value, Assigned):
                    value.live.last = max(value.live.last, end)
