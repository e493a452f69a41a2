"""What name stacks say of equations: to which pass of a step they belong."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jax.extend.core import JaxprEqn, Var

from autopar.passes.graph.graph import Atom

REMATERIALIZED = "rematted_computation"
"""What `jax.checkpoint` calls the forward pass that it computes again, in name stacks."""

RUN_AGAIN = f"autopar_{REMATERIALIZED}"
"""What autopar calls that which it computes again."""

_TRANSPOSED = re.compile(r"(^|[/(])transpose\(")
_DERIVED = re.compile(r"(^|[/(])jvp\(")


def pass_of(stack: str) -> str:
    """The pass of a step to which a name stack belongs, or "" outside of what is differentiated.

    What runs again does so as `jax.checkpoint` has it ("checkpoint") or as autopar has ("again").

    >>> [pass_of(x) for x in ("jvp(GPT)/h_0", "transpose(jvp(GPT))/h_0", "", "transpose(x)")]
    ['forward', 'backward', '', 'backward']
    >>> pass_of("transpose(jvp(jvp(rematted_computation)))")
    'checkpoint'
    """
    if REMATERIALIZED in stack:
        return "again" if RUN_AGAIN in stack else "checkpoint"
    if _TRANSPOSED.search(stack):
        return "backward"
    return "forward" if _DERIVED.search(stack) else ""


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether an equation is of a backward pass."""
    return bool(_TRANSPOSED.search(str(eqn.source_info.name_stack)))


def marked_again(eqn: JaxprEqn, invars: Sequence[Atom], outvars: Sequence[Var]) -> JaxprEqn:
    """An equation of the forward pass, of other values, with a name that says so."""
    info = eqn.source_info
    info = info.replace(name_stack=info.name_stack.extend(RUN_AGAIN))
    return eqn.replace(invars=[*invars], outvars=[*outvars], source_info=info)
