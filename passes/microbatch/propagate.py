"""The forward sweep: the state of every value, and how every equation is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import Jaxpr, Literal, Var

from autopar.passes.graph.graph import Atom, Graph
from autopar.passes.microbatch import batch_states as lattice
from autopar.passes.microbatch import control_flow, equations
from autopar.passes.microbatch.batch_states import State
from autopar.passes.microbatch.equations import Context, Decision


@dataclass(frozen=True)
class Forward:
    """The states of a jaxpr's values, and a decision for each of its equations."""

    jaxpr: Jaxpr
    states: dict[Var, State]
    decisions: tuple[Decision, ...]

    def state(self, atom: Atom) -> State:
        if isinstance(atom, Literal):
            return lattice.whole(zero=not np.any(np.asarray(atom.val)))
        return self.states[atom]

    @property
    def results(self) -> list[State]:
        return [self.state(atom) for atom in self.jaxpr.outvars]


def forward(jaxpr: Jaxpr, in_states: Sequence[State], context: Context) -> Forward:
    """Propagate the states of a jaxpr's inputs through its equations."""
    states = dict(zip(jaxpr.invars, in_states, strict=True))
    states.update((var, lattice.whole()) for var in jaxpr.constvars)
    decisions: list[Decision] = []
    result = Forward(jaxpr, states, ())
    for eqn in jaxpr.eqns:
        operands = [result.state(atom) for atom in eqn.invars]
        if equations.is_control_flow(eqn):
            decision, found = control_flow.transfer(eqn, operands, context)
        else:
            decision, found = equations.transfer(eqn, operands, context)
        decisions.append(decision)
        states.update(zip(eqn.outvars, found, strict=True))
    return Forward(jaxpr, states, tuple(decisions))


def input_states(graph: Graph, num_microbatches: int, params: bool = True) -> list[State]:
    """What the input leaves are: batch leaves are split, everything else is whole.

    With `params`, what depends on parameters (arrays of floats in the state) is never computed
    before the loop on the whole batch; what depends on the batch alone may be.
    """
    states = []
    for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True):
        aval = var.aval
        if label.role == "batch":
            axis = label.batch_axis
            if axis is None:
                states.append(lattice.whole(batch=True))
            else:
                place = (axis, aval.shape[axis] // num_microbatches)
                states.append(lattice.split(place, params=False))
        else:
            is_parameter = params and label.role == "state" and _is_parameter(aval)
            states.append(lattice.whole(params=is_parameter))
    return states


def _is_parameter(aval: object) -> bool:
    kind = getattr(getattr(aval, "dtype", None), "kind", "")
    return bool(getattr(aval, "shape", ())) and kind not in "iub?"
