"""What is evaluated on the whole batch, what that costs, and who caused it.

A completed value that meets rows of the batch is no error: what follows runs batch-wide on
collected values, exactly. It is refused when it costs more than a stated share of the step.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Graph, inner_jaxprs, user_source, variables, walk
from autopar.passes.microbatch.equations import MEETS, Decision, is_control_flow
from autopar.passes.microbatch.liveness import PhaseStep
from autopar.passes.microbatch.phases import Phases
from autopar.passes.microbatch.propagate import Bodies, Forward
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.flops import equation_flops, sum_of_bodies


@dataclass(frozen=True)
class Culprit:
    """An equation that needs the whole batch: the user's line, why, and what follows from it.

    The shares are those of the step's FLOPs and of the bytes of its batch-sized values that would
    be evaluated batch-wide because of it.
    """

    source: str
    primitive: str
    reason: str
    flops_share: float
    bytes_share: float

    def __str__(self) -> str:
        return (
            f"{self.primitive} at {self.source}: {self.reason} "
            f"({self.flops_share:.1%} of FLOPs, {self.bytes_share:.1%} of bytes batch-wide)"
        )


@dataclass(frozen=True)
class Costs:
    """FLOPs of each phase, and the shares that are evaluated on the whole batch."""

    prologue_flops: float
    loop_flops: float
    epilogue_flops: float
    flops_share: float
    bytes_share: float
    causes: tuple[Culprit, ...]  # the most expensive first

    @property
    def loop_share(self) -> float:
        total = self.prologue_flops + self.loop_flops + self.epilogue_flops
        return self.loop_flops / total if total else 1.0


def step_flops(step: PhaseStep, rules: Rules) -> int:
    """FLOPs of a step over all microbatches: of control flow, only what its bodies compute."""
    if not step.bodies:
        return equation_flops(step.eqn, rules)
    bodies = [sum(step_flops(inner, rules) for inner in body.steps) for body in step.bodies]
    return sum_of_bodies(step.eqn, bodies)


def _bytes(var: Var) -> float:
    return float(var.aval.size * var.aval.dtype.itemsize)


def _inner_bytes(eqn: JaxprEqn) -> float:
    """Bytes of all values inside control flow, a scan's body times its length."""
    total = sum(_bytes(var) for body in inner_jaxprs(eqn) for e in walk(body) for var in e.outvars)
    return total * float(eqn.params.get("length", 1))


def _wide_bytes(eqn: JaxprEqn, results: Iterable[Var], forward: Forward) -> float:
    """Bytes of some results of an equation that grow with the batch; a barrier makes none."""
    if is_barrier(eqn):
        return 0.0
    wide = [var for var in results if forward.states[var].wide]
    inner = _inner_bytes(eqn) if wide and is_control_flow(eqn) else 0.0
    return inner + sum(map(_bytes, wide))


def _step_bytes(step: PhaseStep, forward: Forward) -> float:
    return _wide_bytes(step.eqn, (var for var, _ in step.makes), forward)


def measure(
    graph: Graph, forward: Forward, phases: Phases, rules: Rules, held: Iterable[Var] = ()
) -> Costs:
    """What the phases cost, and what of it is batch-wide; so are the `held` inputs."""
    jaxpr = graph.jaxpr
    flops_of = {id(eqn): equation_flops(eqn, rules) for eqn in jaxpr.eqns}
    all_flops = sum(flops_of.values()) or 1.0
    all_bytes = sum(_wide_bytes(eqn, eqn.outvars, forward) for eqn in jaxpr.eqns) or 1.0
    held_bytes = sum(map(_bytes, held))
    charged: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    origins = _origins(jaxpr, forward)
    index_of = {id(eqn): index for index, eqn in enumerate(jaxpr.eqns)}
    paid: set[Var] = set()
    for step in phases.epilogue:
        eqn = step.eqn
        if not _is_wide(step, forward):
            continue
        index = index_of[id(eqn)]
        charge = charged[origins.get(index, index)]
        charge[0] += flops_of[id(eqn)]
        charge[1] += _step_bytes(step, forward)
        for var, _ in step.reads:
            if forward.states[var].kind == "split" and var not in paid:
                paid.add(var)
                charge[1] += _bytes(var)
    for index, found in _prologue_charges(graph, forward, phases, flops_of, index_of).items():
        charged[index][0] += found[0]
        charged[index][1] += found[1]
    causes = [
        Culprit(
            source=user_source(jaxpr.eqns[index]),
            primitive=jaxpr.eqns[index].primitive.name,
            reason=_reason(index, forward),
            flops_share=found[0] / all_flops,
            bytes_share=found[1] / all_bytes,
        )
        for index, found in sorted(charged.items())
        if any(found)
    ]
    causes.sort(key=lambda cause: -max(cause.flops_share, cause.bytes_share))
    return Costs(
        prologue_flops=sum(step_flops(step, rules) for step in phases.prologue),
        loop_flops=sum(step_flops(step, rules) for step in phases.loop),
        epilogue_flops=sum(step_flops(step, rules) for step in phases.epilogue),
        flops_share=sum(found[0] for found in charged.values()) / all_flops,
        bytes_share=(sum(found[1] for found in charged.values()) + held_bytes) / all_bytes,
        causes=tuple(causes),
    )


def _is_wide(step: PhaseStep, forward: Forward) -> bool:
    """Whether a step outside of the loop works on the whole batch.

    Of control flow with rewritten bodies, only what all examples share is evaluated there.
    """
    touched = itertools.chain(step.reads, step.makes)
    return not step.bodies and any(forward.states[var].wide for var, _ in touched)


def _touches_rows(eqn: JaxprEqn, forward: Forward) -> bool:
    return any(forward.states[var].wide for var in (*variables(eqn.invars), *eqn.outvars))


def _origins(jaxpr: Jaxpr, forward: Forward) -> dict[int, int]:
    """For each batch-wide equation after the loop, the first one that made it so."""
    origin_of: dict[Var, int] = {}
    origins: dict[int, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        if forward.decisions[index].mode not in ("late", "inner"):
            continue
        known = [origin_of[var] for var in variables(eqn.invars) if var in origin_of]
        origin = min(known, default=None)
        if _touches_rows(eqn, forward):
            origin = origins[index] = index if origin is None else origin
        if origin is not None:
            late = (var for var in eqn.outvars if forward.states[var].kind == "late")
            origin_of.update(dict.fromkeys(late, origin))
    return origins


def _prologue_charges(
    graph: Graph,
    forward: Forward,
    phases: Phases,
    flops_of: Mapping[int, float],
    index_of: Mapping[int, int],
) -> dict[int, list[float]]:
    """Batch-wide work before the loop, charged to the equation that asks for it.

    Equations of the size of the batch leaves themselves are free: these are there as a whole.
    """
    labelled = zip(graph.jaxpr.invars, graph.inputs, strict=True)
    leaves = [var for var, label in labelled if label.role == "batch"]
    free_flops = 4.0 * sum(var.aval.size for var in leaves)
    free_bytes = 4.0 * sum(map(_bytes, leaves))
    asked_by: dict[Var, int] = {}
    charges: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for step in reversed(phases.prologue):
        eqn = step.eqn
        if not _is_wide(step, forward):
            continue
        index = max((asked_by[var] for var in eqn.outvars if var in asked_by), default=None)
        if index is None:
            index = index_of[id(eqn)]
        for var, _ in step.reads:
            asked_by.setdefault(var, index)
        work, size = flops_of[id(eqn)], _step_bytes(step, forward)
        if work > free_flops:
            charges[index][0] += work
        if size > free_bytes:
            charges[index][1] += size
    return charges


def _first_inside(decision: Decision) -> str:
    """What in the bodies of control flow waits for all rows first, and why.

    Not what reads something that already waits, such as a carry.
    """
    tried = decision.failed or decision.inner
    for last in tried.forwards if isinstance(tried, Bodies) else ():
        body = last.cause or last
        for index, (eqn, found) in enumerate(zip(body.jaxpr.eqns, body.decisions, strict=True)):
            waits = any(body.state(var).kind == "late" for var in variables(eqn.invars))
            if found.mode == "late" and not waits:
                reason = found.reason + _awaited(index, body)
                return f"`{eqn.primitive.name}` at {user_source(eqn)}: {reason}"
            if inside := _first_inside(found):
                return inside
    return ""


def _reason(index: int, forward: Forward) -> str:
    """Why an equation is evaluated on the whole batch, naming what it waits for."""
    decision = forward.decisions[index]
    reason = decision.reason or "its result is needed before all rows have been seen"
    if inside := _first_inside(decision):
        reason += f". In its body, {inside}"
    return reason + _awaited(index, forward)


def _awaited(index: int, forward: Forward) -> str:
    """Where that is computed which meets rows of the batch in an equation."""
    eqn, decision = forward.jaxpr.eqns[index], forward.decisions[index]
    if decision.reason != MEETS:
        return ""
    states = {var: forward.states[var] for var in variables(eqn.invars)}
    awaited = {v for v, s in states.items() if s.kind in ("late", "partial") and not s.wide}
    waits_for = [e for e in forward.jaxpr.eqns[:index] if not awaited.isdisjoint(e.outvars)]
    return f", computed at {user_source(waits_for[-1])}" if waits_for else ""


def costs_of_parts(costs: Sequence[Costs]) -> Costs:
    """What all parts of a step cost; what is batch-wide is that of the worst."""
    worst = max(costs, key=lambda cost: max(cost.flops_share, cost.bytes_share))
    return replace(
        worst,
        prologue_flops=costs[0].prologue_flops,
        loop_flops=sum(cost.loop_flops for cost in costs),
        epilogue_flops=sum(cost.epilogue_flops for cost in costs)
        + sum(cost.prologue_flops for cost in costs[1:]),
    )


def immovable_effects(graph: Graph) -> tuple[Culprit, ...]:
    """Effects that have to stay where they are among the others.

    Unordered callbacks may happen before or after the loop; an order, or a mutable array, is a
    promise about what happens when.
    """
    reason = "its effect is ordered, and microbatches would change the order"
    return tuple(
        Culprit(user_source(eqn), eqn.primitive.name, reason, flops_share=0.0, bytes_share=0.0)
        for eqn in walk(graph.jaxpr)
        if not is_control_flow(eqn)
        and any(type(effect).__name__ not in _UNORDERED for effect in eqn.effects)
    )


_UNORDERED = frozenset({"DebugEffect", "IOEffect"})
