"""Which of a loop's operands and results are what, and what its bodies are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.passes.graph import jax_compat

T = TypeVar("T")


@dataclass(frozen=True)
class ScanParts:
    """A scan's body, and how many constants and carries the scan has.

    Its operands, and its body's inputs, are constants, carries and slices of stacks; its results,
    and its body's outputs, are carries and stacks.
    """

    body: Jaxpr
    num_consts: int
    num_carry: int

    @classmethod
    def of(cls, eqn: JaxprEqn) -> ScanParts:
        """Those of a scan equation."""
        return cls(eqn.params["jaxpr"].jaxpr, *jax_compat.scan_counts(eqn.params))

    def operands(self, values: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """(constants, carries, slices) of what is aligned with operands or the body's inputs."""
        last = self.num_consts + self.num_carry
        return values[: self.num_consts], values[self.num_consts : last], values[last:]

    def results(self, values: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        """(carries, stacks) of what is aligned with results or the body's outputs."""
        return values[: self.num_carry], values[self.num_carry :]


@dataclass(frozen=True)
class WhileParts:
    """A while loop's bodies, and how many constants each has.

    Its operands are the condition's constants, the body's constants, and carries.
    """

    condition: Jaxpr
    body: Jaxpr
    num_condition_consts: int
    num_body_consts: int

    @classmethod
    def of(cls, eqn: JaxprEqn) -> WhileParts:
        """Those of a while equation."""
        params = eqn.params
        condition, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        return cls(condition, body, params["cond_nconsts"], params["body_nconsts"])

    def operands(self, values: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """(condition's constants, body's constants, carries) of what is aligned with operands."""
        first = self.num_condition_consts
        last = first + self.num_body_consts
        return values[:first], values[first:last], values[last:]


def bodies_with_constants(eqn: JaxprEqn) -> list[tuple[Jaxpr, list[tuple[Var, Any]]]]:
    """Each body of a control-flow equation, and what its first inputs are throughout.

    These are pairs of the body's variable and the atom outside.
    """
    if eqn.primitive.name == "scan":
        scan = ScanParts.of(eqn)
        given = [(scan.body, scan.operands(eqn.invars)[0])]
    elif eqn.primitive.name == "cond":
        given = [(branch.jaxpr, eqn.invars[1:]) for branch in eqn.params["branches"]]
    else:
        loop = WhileParts.of(eqn)
        tested, consts, _ = loop.operands(eqn.invars)
        given = [(loop.condition, tested), (loop.body, consts)]
    return [(body, list(zip(body.invars, atoms, strict=False))) for body, atoms in given]
