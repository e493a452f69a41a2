"""`analyze` and `split`: find an exact split of the batch into microbatches, and apply it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jax.extend.core import Var

from autopar.base.errors import InexactMicrobatchError
from autopar.base.plan_records import OutputCertificate
from autopar.base.row_sorts import told
from autopar.passes.graph.graph import Graph, batch_sizes
from autopar.passes.graph.microbatched import Microbatched, in_phases
from autopar.passes.graph.primitives import FOREIGN, KERNELS
from autopar.passes.microbatch import batch_states as lattice
from autopar.passes.microbatch.batch_scales import without_batch_scales
from autopar.passes.microbatch.batch_states import BatchState
from autopar.passes.microbatch.certificates import certificate_of
from autopar.passes.microbatch.compared_rows import rows_to_compare
from autopar.passes.microbatch.equations import MIXES, Context
from autopar.passes.microbatch.nothing_divided import nothing_divided
from autopar.passes.microbatch.phases import Phases, find_phases
from autopar.passes.microbatch.propagate import Forward, forward, input_states
from autopar.passes.microbatch.rewrite import rewrite
from autopar.passes.microbatch.row_chunks import chunk_hint
from autopar.passes.microbatch.scan_tails import with_tails_apart
from autopar.passes.microbatch.several_loops import (
    CutStep,
    cut_step,
    gives_with_effect,
    num_late,
    one_after_the_other,
    rows_for_the_middle,
    rows_to_keep,
    rows_to_reuse,
)
from autopar.passes.microbatch.whole_batch import (
    Costs,
    Culprit,
    costs_of_parts,
    immovable_effects,
    measure,
)
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.populate import populate

MAX_LOOPS = 4
"""Soft actor-critic has three passes. Every loop computes again what it needs of those before."""

MIDDLE_SHARE = 0.5
"""Of FLOPs and of bytes, what may run on the whole batch between two loops, in the part it begins.

No loop can take less of it: a contrastive loss is about all pairs of a batch. It takes no time that
the step would not take anyway; where it has most of the bytes, microbatches would save little.
"""


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
    parts: tuple[Analysis, ...] = ()
    cuts: tuple[CutStep, ...] = ()
    max_loops: int = 1

    def __str__(self) -> str:
        if self.parts:
            return "\n".join(
                f"loop {n} of {len(self.parts)}: {x}" for n, x in enumerate(self.parts, 1)
            )
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
    rules: Rules,
    num_microbatches: int,
    *,
    max_flops_share: float = 0.01,
    max_bytes_share: float = 0.05,
    max_loops: int = MAX_LOOPS,
    later_loops: str = "recompute",
) -> Analysis:
    """Find out how every value depends on the batch, and so what runs before, in and after a loop.

    Args:
      graph: the traced step, batch leaves labelled with their batch axis.
      rules: the factor rules of its equations (`autopar.passes.primitives.populate.populate`).
      num_microbatches: M, a divisor of the batch size.
      max_flops_share: the largest share of FLOPs that may be evaluated on the whole batch.
      max_bytes_share: the same for the bytes of values that grow with the batch.
      max_loops: how many loops a step may become that one does not do for.
      later_loops: what these do with what earlier ones computed of a row: "recompute" or "keep" it,
        or "reuse" what those needed themselves.

    Returns:
      The analysis. It raises nothing: `culprits` says what forbids the split.
    """
    sizes = tuple(sorted(batch_sizes(graph), reverse=True))
    assert not any(size % num_microbatches for size in sizes), (sizes, num_microbatches)
    limits = _Limits(num_microbatches, sizes, max_flops_share, max_bytes_share, later_loops)
    usual, found = _attempt(graph, rules, limits, input_states(graph, num_microbatches))
    if not usual.culprits:
        return usual
    # Mostly it is of no use to compute before the loop, on the whole batch, what depends on the
    # parameters; where that alone saves the split, it may still be cheap enough.
    other, _ = _attempt(graph, rules, limits, input_states(graph, num_microbatches, params=()))
    if not other.culprits:
        return other
    states = input_states(graph, num_microbatches)
    apart = with_tails_apart(graph, states, limits.context(rules))
    if apart is not None:
        rules_apart = populate(apart.jaxpr)
        other = analyze(
            apart,
            rules_apart,
            num_microbatches,
            max_flops_share=max_flops_share,
            max_bytes_share=max_bytes_share,
            max_loops=1,
        )
        if not other.culprits:
            return other
    scaled_last = without_batch_scales(graph, found)
    if scaled_last is not None:
        states = input_states(scaled_last, num_microbatches)
        other, _ = _attempt(scaled_last, populate(scaled_last.jaxpr), limits, states)
        if not other.culprits:
            return other
    several = None
    if max_loops > 1 and not immovable_effects(graph):
        whole, known = (graph, rules) if apart is None else (apart, rules_apart)
        states = input_states(whole, num_microbatches, params=("state", "constant"))
        given = dict(zip(whole.jaxpr.invars, states, strict=True))
        several = _in_several_loops(whole, known, limits, given, (), max_loops)
    return several or replace(usual, max_loops=max_loops)


@dataclass(frozen=True)
class _Limits:
    """What all parts of an analysis refer to."""

    num_microbatches: int
    sizes: tuple[int, ...]
    max_flops_share: float
    max_bytes_share: float
    later_loops: str

    def context(self, rules: Rules) -> Context:
        """What the analysis of equations with these rules refers to."""
        return Context(rules, self.num_microbatches, self.sizes)

    @property
    def between_loops(self) -> _Limits:
        """With what may run on the whole batch between two loops."""
        flops = max(self.max_flops_share, MIDDLE_SHARE)
        size = max(self.max_bytes_share, MIDDLE_SHARE)
        return replace(self, max_flops_share=flops, max_bytes_share=size)


def _attempt(
    graph: Graph,
    rules: Rules,
    limits: _Limits,
    states: Sequence[BatchState],
    held: Sequence[Var] = (),
) -> tuple[Analysis, Forward]:
    """The analysis with one loop, from these states of the inputs; `held` are whole batches."""
    context = limits.context(rules)
    found = forward(graph.jaxpr, states, context)
    phases = find_phases(found, context)
    costs = measure(graph, found, phases, rules, held)
    culprits = immovable_effects(graph)
    too_many = costs.flops_share > limits.max_flops_share
    if too_many or costs.bytes_share > limits.max_bytes_share:
        culprits += costs.causes
    analysis = Analysis(
        graph=graph,
        num_microbatches=limits.num_microbatches,
        batch_sizes=limits.sizes,
        states=found.states,
        phases=phases,
        costs=costs,
        certificate=certificate_of(graph, found, phases),
        culprits=culprits if limits.num_microbatches > 1 else (),
        max_flops_share=limits.max_flops_share,
        max_bytes_share=limits.max_bytes_share,
    )
    return analysis, found


def _in_several_loops(
    graph: Graph,
    rules: Rules,
    limits: _Limits,
    given: Mapping[Var, BatchState],
    held: Sequence[Var],
    loops_left: int,
) -> Analysis | None:
    """The analysis of a step that is cut where its first loop ends; None if that does not help.

    Args:
      graph: the step, or the rest of one.
      rules: those of its equations.
      limits: of what may run on the whole batch.
      given: the states of its inputs.
      held: those of its inputs that are rows of which an earlier loop has given all.
      loops_left: how many loops there may be.
    """
    states = [given[var] for var in graph.jaxpr.invars]
    usual, found = _attempt(graph, rules, limits, states, held)
    if not usual.culprits:
        return usual
    if loops_left < 2 or any(map(gives_with_effect, graph.jaxpr.eqns)):
        return None
    # What the loop has summed up is there when it ends.
    kept = {var: lattice.whole(batch=True) for var, _ in usual.phases.accumulated}
    own = rows_to_keep(found, (var for var, _ in usual.phases.collected))
    if limits.later_loops == "keep":
        kept |= {var: found.states[var] for var in own}
    middle: dict[Var, BatchState] = {}
    while True:
        cut = cut_step(graph, rules, tuple(kept | middle))
        known = {**given, **dict(zip(cut.held, (kept | middle).values(), strict=True))}
        context = limits.context(cut.rules)
        states_of_rest = [known[var] for var in cut.rest.jaxpr.invars]
        rest_found = forward(cut.rest.jaxpr, states_of_rest, context)
        rows = rows_for_the_middle(found, rest_found, cut)
        rows += rows_to_compare(found, rest_found, cut)
        rows = [var for var in rows if var not in middle]
        middle |= {var: replace(found.states[var], params=False) for var in rows}
        if not rows and limits.later_loops == "reuse" and own:
            rows, own = rows_to_reuse(found, own, cut), []
            kept |= {var: found.states[var] for var in rows}
        if not rows:
            break
    if not cut.kept or num_late(rest_found) >= num_late(found):
        return None
    first, _ = _attempt(cut.first, cut.rules, limits, states, held)
    if first.culprits:
        return None
    whole_rows = [var for var, outer in zip(cut.held, cut.kept, strict=True) if outer in middle]
    rest = _in_several_loops(
        cut.rest, cut.rules, limits.between_loops, known, whole_rows, loops_left - 1
    )
    if rest is None:
        return None
    parts, cuts = (first, *(rest.parts or (rest,))), (cut, *rest.cuts)
    return replace(
        first,
        graph=graph,
        costs=costs_of_parts([part.costs for part in parts]),
        certificate=_certificate_of_parts(graph, parts, cuts),
        parts=parts,
        cuts=cuts,
    )


def split(graph: Graph, analysis: Analysis) -> Microbatched:
    """The graph with its batch split in time: prologue, one scan over the microbatches, epilogue.

    Where one loop does not do, several, with what needs the whole batch between them. Its graph is
    again a plain flat one with the same inputs and outputs, and computes the same numbers up to the
    order in which sums are added up. With one microbatch it is `graph` itself.

    Raises:
      InexactMicrobatchError: too large a part of it needs the whole batch, or none has rows.
    """
    if analysis.num_microbatches == 1:
        return in_phases(graph)
    if analysis.culprits:
        raise refusal(analysis)
    count = analysis.num_microbatches
    if not analysis.parts:
        made = rewrite(analysis.graph, analysis.phases, count)
        if not made.loops and analysis.costs.prologue_flops + analysis.costs.epilogue_flops:
            raise nothing_divided(graph, count)
        return made
    parts = [rewrite(part.graph, part.phases, count) for part in analysis.parts]
    return one_after_the_other(analysis.graph, parts, analysis.cuts)


def refusal(analysis: Analysis) -> InexactMicrobatchError:
    """The error for an analysis that has culprits."""
    culprit = analysis.culprits[0]
    costs = analysis.costs
    is_kernel = culprit.primitive in KERNELS or culprit.primitive in FOREIGN
    reason = culprit.reason
    if is_kernel and reason == MIXES:
        reason = "nothing says that rows of the batch do not meet in it"
    why = f"{reason[0].upper()}{reason[1:]}."
    if not culprit.flops_share and not culprit.bytes_share:
        hint = (
            "call the host after the step, on what the step returns; or, where the call returns "
            "nothing, make it unordered or use microbatches=1."
        )
    else:
        why += (
            f" Evaluating what depends on it on the whole batch takes {costs.flops_share:.1%} of"
            f" the step's FLOPs and {min(costs.bytes_share, 1.0):.1%} of its batch-sized bytes;"
            f" allowed are {analysis.max_flops_share:.1%} and {analysis.max_bytes_share:.1%}."
        )
        kernel = ""
        if is_kernel:
            kernel = "; or say by autopar.local along which dimensions it computes independently"
        one_mesh = "; or one mesh (stages=1), where a step may have several loops"
        if analysis.max_loops > 1:
            one_mesh = ""
            why += f" {analysis.max_loops} loops, with that work between them, do not do either."
        hint = (
            f"use microbatches=1{one_mesh}{kernel}; or make examples independent of each other here"
            " (for instance normalise over features instead of the batch, or take the mean of what"
            " each example gives); or allow more batch-wide work by max_flops_share and"
            " max_bytes_share."
        )
    chunks = chunk_hint(analysis.graph, analysis.batch_sizes, analysis.num_microbatches)
    hint = f"{chunks}; or {hint}" if chunks else hint
    whole = [sort for sort in analysis.graph.row_sorts if not sort.by_example]
    why += "".join(f" Rows are {line}." for line in told(whole))
    return InexactMicrobatchError(
        f"the step cannot be split into {analysis.num_microbatches} microbatches without changing"
        f" what it computes: `{culprit.primitive}` needs the whole batch.",
        where=culprit.source,
        why=why,
        hint=hint,
    )


def _certificate_of_parts(
    graph: Graph, parts: Sequence[Analysis], cuts: Sequence[CutStep]
) -> tuple[OutputCertificate, ...]:
    """How outputs are put together in a step of several loops: each is made in one of them."""
    items = []
    for index, label in enumerate(graph.outputs):
        number, atom = len(parts) - 1, parts[-1].graph.jaxpr.outvars[index]
        while number and atom in (held := cuts[number - 1].held):
            index, number = held.index(atom), number - 1
            atom = parts[number].graph.jaxpr.outvars[index]
        how = parts[number].certificate[index].how
        if how == "epilogue":
            how = f"epilogue of {len(parts)} loops"
        elif how == "prologue":
            how = f"between loops {number} and {number + 1}" if number else how
        elif how != "invariant":
            how = f"{how} in loop {number + 1} of {len(parts)}"
        items.append(OutputCertificate(label.path, how))
    return tuple(items)
