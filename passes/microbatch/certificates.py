"""How every output of a step in microbatches is put together."""

from __future__ import annotations

from jax.extend.core import Literal

from autopar.base.plan_records import OutputCertificate
from autopar.passes.graph.graph import Graph
from autopar.passes.microbatch.phases import Phases
from autopar.passes.microbatch.propagate import Forward


def certificate_of(graph: Graph, found: Forward, phases: Phases) -> tuple[OutputCertificate, ...]:
    """Of each output, in order: in which phase it is made, or by what it is added up."""
    accumulated = dict(phases.accumulated)
    collected = dict(phases.collected)
    before = {*graph.jaxpr.invars, *(v for step in phases.prologue for v, _ in step.makes)}
    items = []
    for atom, label in zip(graph.jaxpr.outvars, graph.outputs, strict=True):
        state = found.state(atom)
        if isinstance(atom, Literal) or (state.kind == "whole" and not state.batch):
            how = "invariant"
        elif atom in collected:
            how = "collected"
        elif atom in accumulated:
            how = accumulated[atom]
        elif state.kind == "partial":
            how = str(state.monoid)
        else:
            how = "prologue" if atom in before else "epilogue"
        items.append(OutputCertificate(label.path, how))
    return tuple(items)
