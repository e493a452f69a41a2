"""`analyze` and `split`: find an exact split of the batch into microbatches, and apply it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Literal, Var

from autopar.base.errors import InexactMicrobatchError
from autopar.base.plan_records import OutputCertificate
from autopar.passes.graph.graph import Graph, batch_sizes, user_source, walk
from autopar.passes.graph.microbatched import Microbatched, in_phases
from autopar.passes.microbatch.batch_scales import without_batch_scales
from autopar.passes.microbatch.batch_states import BatchState
from autopar.passes.microbatch.equations import Context, is_control_flow
from autopar.passes.microbatch.phases import Phases, find_phases
from autopar.passes.microbatch.propagate import Forward, forward, input_states
from autopar.passes.microbatch.rewrite import rewrite
from autopar.passes.microbatch.whole_batch import Costs, Culprit, measure
from autopar.passes.primitives.factor_rule import FactorRule
from autopar.passes.primitives.populate import populate


@dataclass(frozen=True)
class Analysis:
    """How a program is split into microbatches, and the proof that this is exact.

    `graph` is the program that is split: the step, or one that computes the same in another order.
    With M = `num_microbatches`, microbatch i has the rows b with b % M == i. `states` say for every
    value how it depends on the batch, `certificate` for every output how it is put together;
    `culprits` are what forbids the split, worst first: none if it is exact and cheap enough.
    """

    graph: Graph
    num_microbatches: int
    batch_sizes: tuple[int, ...]
    states: Mapping[Var, BatchState]
    phases: Phases
    costs: Costs
    certificate: tuple[OutputCertificate, ...]
    culprits: tuple[Culprit, ...]
    max_flops_share: float
    max_bytes_share: float

    def __str__(self) -> str:
        parts, phases, costs = self.num_microbatches, self.phases, self.costs
        total = costs.prologue_flops + costs.loop_flops + costs.epilogue_flops or 1.0
        rows = " and ".join(str(size // parts) for size in self.batch_sizes)
        lines = [f"{parts} microbatches of {rows} rows"]
        for name, steps, amount in (
            ("prologue", phases.prologue, costs.prologue_flops),
            ("loop", phases.loop, costs.loop_flops),
            ("epilogue", phases.epilogue, costs.epilogue_flops),
        ):
            lines.append(f"  {name:9}{len(steps):6} equations {amount / total:7.1%} of FLOPs")
        monoids = Counter(monoid for _, monoid in phases.accumulated)
        leaving = [f"{count} x {monoid}" for monoid, count in sorted(monoids.items())]
        leaving += [f"{len(phases.collected)} collected"] if phases.collected else []
        lines.append(f"  into the loop, row by row: {len(phases.sliced)}")
        lines.append(f"  out of the loop: {', '.join(leaving) or 'nothing'}")
        by_kind: dict[str, list[str]] = {}
        for item in self.certificate:
            by_kind.setdefault(item.how, []).append(item.path)
        for how, paths in by_kind.items():
            more = "" if len(paths) <= 4 else f" and {len(paths) - 4} more"
            lines.append(f"  {how}: {', '.join(paths[:4])}{more}")
        lines += [f"  batch-wide: {cause}" for cause in costs.causes]
        lines += [f"  refused: {culprit}" for culprit in self.culprits[:1]]
        return "\n".join(lines)


def analyze(
    graph: Graph,
    rules: Mapping[JaxprEqn, FactorRule],
    num_microbatches: int,
    *,
    max_flops_share: float = 0.01,
    max_bytes_share: float = 0.05,
) -> Analysis:
    """Find out how every value depends on the batch, and so what runs before, in and after a loop.

    Args:
      graph: the traced step, batch leaves labelled with their batch axis.
      rules: the factor rules of its equations (`autopar.passes.primitives.populate.populate`).
      num_microbatches: M, a divisor of the batch size.
      max_flops_share: the largest share of FLOPs that may be evaluated on the whole batch.
      max_bytes_share: the same for the bytes of values that grow with the batch.

    Returns:
      The analysis. It raises nothing: `culprits` says what forbids the split.
    """
    sizes = tuple(sorted(batch_sizes(graph), reverse=True))
    assert not any(size % num_microbatches for size in sizes), (sizes, num_microbatches)

    def attempt(
        graph: Graph, rules: Mapping[JaxprEqn, FactorRule], before_loop: bool
    ) -> tuple[Analysis, Forward]:
        context = Context(rules, num_microbatches, sizes)
        states = input_states(graph, num_microbatches, params=not before_loop)
        found = forward(graph.jaxpr, states, context)
        phases = find_phases(found, context)
        costs = measure(graph, found, phases, rules)
        culprits = _immovable_effects(graph)
        if costs.flops_share > max_flops_share or costs.bytes_share > max_bytes_share:
            culprits += costs.causes
        analysis = Analysis(
            graph=graph,
            num_microbatches=num_microbatches,
            batch_sizes=sizes,
            states=found.states,
            phases=phases,
            costs=costs,
            certificate=_certificate(graph, found, phases),
            culprits=culprits if num_microbatches > 1 else (),
            max_flops_share=max_flops_share,
            max_bytes_share=max_bytes_share,
        )
        return analysis, found

    usual, found = attempt(graph, rules, before_loop=False)
    if not usual.culprits:
        return usual
    # Mostly it is of no use to compute before the loop, on the whole batch, what depends on the
    # parameters; where that alone saves the split, it may still be cheap enough.
    other, _ = attempt(graph, rules, before_loop=True)
    if not other.culprits:
        return other
    scaled_last = without_batch_scales(graph, found)
    if scaled_last is not None:
        other, _ = attempt(scaled_last, populate(scaled_last.jaxpr), before_loop=False)
    return usual if other.culprits else other


def split(graph: Graph, analysis: Analysis) -> Microbatched:
    """The graph with its batch split in time: prologue, one scan over the microbatches, epilogue.

    Its graph is again a plain flat one with the same inputs and outputs, and computes the same
    numbers up to the order in which sums are added up. With one microbatch it is `graph` itself.

    Raises:
      InexactMicrobatchError: part of the step needs the whole batch, and that part is too large.
    """
    if analysis.num_microbatches == 1:
        return in_phases(graph)
    if analysis.culprits:
        raise refusal(analysis)
    return rewrite(analysis.graph, analysis.phases, analysis.num_microbatches)


def refusal(analysis: Analysis) -> InexactMicrobatchError:
    """The error for an analysis that has culprits."""
    culprit = analysis.culprits[0]
    costs = analysis.costs
    why = f"{culprit.reason[0].upper()}{culprit.reason[1:]}."
    if not culprit.flops_share and not culprit.bytes_share:
        hint = "use microbatches=1, or an unordered callback."
    else:
        why += (
            f" Evaluating what depends on it on the whole batch takes {costs.flops_share:.1%} of"
            f" the step's FLOPs and {costs.bytes_share:.1%} of its batch-sized bytes; allowed are"
            f" {analysis.max_flops_share:.1%} and {analysis.max_bytes_share:.1%}."
        )
        hint = (
            "use microbatches=1; or make examples independent of each other here (for instance"
            " normalise over features instead of the batch); or allow more batch-wide work by"
            " max_flops_share and max_bytes_share."
        )
    return InexactMicrobatchError(
        f"the step cannot be split into {analysis.num_microbatches} microbatches without changing"
        f" what it computes: `{culprit.primitive}` needs the whole batch.",
        where=culprit.source,
        why=why,
        hint=hint,
    )


def _immovable_effects(graph: Graph) -> tuple[Culprit, ...]:
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


def _certificate(graph: Graph, found: Forward, phases: Phases) -> tuple[OutputCertificate, ...]:
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
