"""A program in the making: equations taken over from another one, and others traced into it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.passes.graph import graph as graphs
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom
from autopar.passes.microbatch.batch_states import WHOLE
from autopar.passes.microbatch.liveness import ABSENT, PhaseStep
from autopar.passes.microbatch.run_steps import Env, local_struct, run


class NewProgram:
    """The equations of the new program, on the old one's variables."""

    def __init__(self, same: Mapping[Var, Var] | None = None) -> None:
        self.same = same or {}
        self.eqns: list[JaxprEqn] = []
        self.renamed: dict[Var, Atom] = {}

    def read(self, atom: Atom) -> Atom:
        return graphs.read_atom(self.renamed, graphs.read_atom(self.same, atom))

    def add(self, step: PhaseStep) -> None:
        """One step outside of the loop."""
        eqn = step.eqn
        if step.bodies or ABSENT in step.operand_forms:
            operands = list(dict.fromkeys(var for var, _ in step.reads))
            kept = [var for var, _ in step.makes]

            def evaluate(*values: Any) -> list[Any]:
                env = wholes(operands, values)
                run([step], env)
                return [env.read(var, WHOLE) for var in kept]

            self.trace(evaluate, operands, kept)
            return
        if ABSENT in step.result_forms:  # another phase gives these results
            kept = [var for var, _ in step.makes]
            outvars = [v if v in kept else jax_compat.new_var(v.aval) for v in eqn.outvars]
            eqn = eqn.replace(outvars=outvars)
        self.take(eqn)

    def take(self, eqn: JaxprEqn) -> None:
        """An equation as it is, on what its operands have become."""
        if any(self.read(atom) is not atom for atom in eqn.invars):
            eqn = eqn.replace(invars=[self.read(atom) for atom in eqn.invars])
        self.eqns.append(eqn)

    def trace(
        self, function: Callable[..., list[Any]], operands: Sequence[Var], results: Sequence[Var]
    ) -> list[JaxprEqn]:
        """Append the equations of a function that computes `results` from `operands`."""
        closed = graphs.flatten(jax.make_jaxpr(function)(*(local_struct(v.aval) for v in operands)))
        flat = closed.jaxpr
        # Slicing an equation may bring a few numbers with it; the program has no new inputs.
        for var, value in zip(flat.constvars, closed.consts, strict=True):
            self.trace(functools.partial(_spelled_out, value), [], [var])
        names: dict[Var, Atom] = {
            inner: self.read(outer) for inner, outer in zip(flat.invars, operands, strict=True)
        }
        made = {var for eqn in flat.eqns for var in eqn.outvars}
        for inner, outer in zip(flat.outvars, results, strict=True):
            if not isinstance(inner, Literal) and inner in made and inner not in names:
                names[inner] = outer
            else:
                self.renamed[outer] = graphs.read_atom(names, inner)

        def named(atoms: Sequence[Atom]) -> list[Atom]:
            return [graphs.read_atom(names, atom) for atom in atoms]

        new = [e.replace(invars=named(e.invars), outvars=named(e.outvars)) for e in flat.eqns]
        self.eqns += new
        return new


def _spelled_out(value: Any) -> list[Any]:
    """A small array from literals."""
    assert value.size <= 64, f"the split program holds an array of shape {value.shape}"
    items = [lax.full((1,), item, value.dtype) for item in np.asarray(value).ravel()]
    return [lax.reshape(lax.concatenate(items, 0), value.shape)]


def wholes(
    variables: Sequence[Var], values: Sequence[Any], same: Mapping[Var, Var] | None = None
) -> Env:
    """An environment outside of the loop that holds these values."""
    known = {(var, WHOLE): value for var, value in zip(variables, values, strict=True)}
    return Env(known, same=same or {})
