"""Weights that the backward pass reads after a barrier, so that they may be gathered a second time.

A weight of which each device has a slice is gathered for the products that read it, once: what was
gathered for the forward pass is there until the backward pass has read it. Where layers are not
iterations of a scan, all weights are there on every device when the loss is computed. Behind a
barrier a weight is another value, which may lie in slices in between and be gathered again, as in
PyTorch's FSDP by default (Zhao et al., VLDB 2023). The barrier waits for the gradient that is
multiplied with the weight, so that no compiler gathers it earlier. So does one for the forward
pass, for the activation: XLA:GPU gathered five weights at the beginning of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom, variables
from autopar.passes.graph.microbatched import LoopPhase, Microbatched, Task
from autopar.passes.graph.primitives import HEAVY
from autopar.passes.slicing.anatomy import bytes_of, dissect

LITTLE_SHARE = 0.01  # of all bytes, in the smallest weights: these are kept as they were gathered


def weights_read_twice(loop: LoopPhase, late: Collection[int]) -> tuple[Var, ...]:
    """The body's variables for matrices that products read before and in the backward pass.

    Args:
      loop: over the microbatches.
      late: the body's equations that belong to the backward pass.
    """
    reads: dict[bool, dict[Var, None]] = {False: {}, True: {}}
    for index, eqn in enumerate(loop.body.eqns):
        if eqn.primitive.name in HEAVY:
            reads[index in late].update(dict.fromkeys(variables(eqn.invars)))
    found = [v for v in reads[False] if v in reads[True] and v in loop.consts and _is_matrix(v)]
    enough = largest_little(map(bytes_of, found))
    return tuple(var for var in found if bytes_of(var) > enough)


def largest_little(sizes: Iterable[int]) -> int:
    """The largest size of which all weights, and smaller ones, are hardly anything together."""
    often, together, largest = Counter(sizes), 0, 0
    enough = LITTLE_SHARE * sum(size * times for size, times in often.items())
    for size, times in sorted(often.items()):
        together += size * times
        if together > enough:
            break
        largest = size
    return largest


def with_weights_read_again(step: Microbatched) -> tuple[Microbatched, tuple[Var, ...]]:
    """The step whose backward pass reads its weights after barriers, and these weights.

    Raises:
      OptionError: the step has no loop over microbatches.
    """
    parts = dissect(step)
    loop, late = parts.loop, parts.backward
    weights = weights_read_twice(loop, late)
    if not weights:
        return step, ()
    eqns, tasks = list[JaxprEqn](), list[Task]()
    passed: dict[bool, dict[Var, Var]] = {False: {}, True: {}}
    for index, eqn in enumerate(loop.body.eqns):
        made = [eqn]
        if not set(weights).isdisjoint(variables(eqn.invars)):
            made = _behind_barrier(eqn, weights, passed[index in late], loop.consts)
        eqns += made
        tasks += [loop.tasks[index]] * len(made) if loop.tasks else []
    body = jax_compat.replace_jaxpr(loop.body, eqns=eqns)
    closed = ClosedJaxpr(body, loop.scan.params["jaxpr"].consts)
    scan = loop.scan.replace(params={**loop.scan.params, "jaxpr": closed})
    return step.with_scan(scan, tuple(tasks)), weights


def _behind_barrier(
    eqn: JaxprEqn, weights: Collection[Var], again: dict[Var, Var], consts: Collection[Var]
) -> list[JaxprEqn]:
    """An equation that reads weights after a barrier, and the barrier of those that are new."""
    read = variables(eqn.invars)
    new = [var for var in dict.fromkeys(read) if var in weights and var not in again]
    beside = [var for var in dict.fromkeys(read) if var not in consts]
    made, renamed = list[JaxprEqn](), dict[Var, Var]()
    if new and beside:
        passing = [*new, *beside]
        results = [jax_compat.new_var(var.aval) for var in passing]
        barrier, effects = jax_compat.optimization_barrier_primitive(), jex_core.no_effects
        info = eqn.source_info
        made.append(jex_core.new_jaxpr_eqn(passing, results, barrier, {}, effects, info))
        renamed = dict(zip(passing, results, strict=True))
        again.update((var, renamed[var]) for var in new)
    renamed = {**again, **renamed}

    def other(atom: Atom) -> Atom:
        return renamed.get(atom, atom) if isinstance(atom, Var) else atom

    return [*made, eqn.replace(invars=[*map(other, eqn.invars)])]


def _is_matrix(var: Var) -> bool:
    return len(var.aval.shape) > 1 and bool(jnp.issubdtype(var.aval.dtype, jnp.floating))
