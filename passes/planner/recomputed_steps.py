"""A split step, or a stage, that computes values of the forward pass again: ways to keep less."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from jax.extend.core import JaxprEqn

from autopar.base.cluster import Cluster
from autopar.base.errors import PlanMismatchError
from autopar.base.plan_records import Recomputation
from autopar.passes.graph.primitives import keeps_order
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.primitives.populate import populate
from autopar.passes.recompute.choice import KeptValues
from autopar.passes.recompute.joined_blocks import JoinedBlocks
from autopar.passes.recompute.kept_choice import KeptChoice
from autopar.passes.recompute.read_again import with_weights_read_again
from autopar.passes.recompute.run_again import recomputed
from autopar.passes.recompute.without_loop import without_loop
from autopar.passes.sharding.compiler_rules import SAME_BUFFER, rules_of
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.traffic import stack_passes
from autopar.passes.slicing.anatomy import bytes_of


def recomputed_step(
    split: SplitStep, cluster: Cluster, again: Recomputation | None = None, *, weights: bool = True
) -> SplitStep:
    """A step with a loop that computes again what a plan says; None: all of every layer.

    Then it reads its `weights` again as well, as with `jax.checkpoint` around every layer.
    """
    if again is not None:
        if again.weights and not again.operations:
            return _gathering_as_recorded(split, again)
        steps = RecomputedSteps.of(split, cluster, again.host_share > 0)
        found = replace(steps, weights=again.weights > 0).as_recorded(again)
        _check_is_the_same(found.recomputation, again)
        return found
    steps = replace(RecomputedSteps.of(split, cluster), weights=weights)
    return steps[len(steps) - 1] if len(steps) else split


def _check_is_the_same(found: Recomputation | None, recorded: Recomputation) -> None:
    """See that a step computes again what a plan says; from its price alone follows the rest.

    Raises:
      PlanMismatchError: it does not.
    """
    is_same = found is not None and found.saved_bytes == recorded.saved_bytes
    if found is None or not is_same or found.operations != recorded.operations:
        raise PlanMismatchError(
            "The plan computes other values again than this version would at its price.",
            why=f"it says {recorded}; here it would be {found}.",
            hint="plan again.",
        )


def _gathering_as_recorded(split: SplitStep, again: Recomputation) -> SplitStep:
    found = gathering_again(split)
    if found.recomputation is None or found.recomputation.weights != again.weights:
        raise PlanMismatchError(
            f"The plan gathers {again.weights} weights again, and this version other ones.",
            why="which weights are too small for that changed with the version of autopar.",
            hint="plan again.",
        )
    return found


def gathering_again(split: SplitStep) -> SplitStep:
    """A step with a loop that keeps all values, and reads its weights again, if any twice."""
    found = split.reading_again
    loop = found.step.loop
    if found is split or loop is None or loop.num_microbatches > 1 or loop.tasks:
        return found
    step = without_loop(found.step)
    return replace(found, step=step, rules=populate(step.graph.jaxpr))


FUSED = 1 / 16
"""The part of its time alone that an operation takes in a kernel with its reader.

And its result is written only if it is kept. So that of a product is kept, rather than what is
computed of it element by element and is as large. On H100s, XLA holds both where a sum in bfloat16
is kept: what else reads it computes it again in float32, of what the product wrote (four layers of
a GPT-125M with 80% of their memory: 3.85 GiB planned and 4.18 compiled).
"""

VIEWS = SAME_BUFFER - {"transpose"}
"""What names a buffer anew: it is written where what it names is."""


@dataclass(frozen=True)
class RecomputedSteps:
    """A split step, and the ways to keep less of it.

    Args:
      split: the step, with one loop over its microbatches.
      values: what its backward pass reads.
      num_devices: among which its work is divided.
      weights: whether the backward pass reads weights again too, which are gathered anew.
    """

    split: SplitStep
    values: KeptValues
    num_devices: int
    weights: bool = False

    @classmethod
    def of(
        cls, split: SplitStep, cluster: Cluster, hosting: bool = False, at_once: bool = True
    ) -> RecomputedSteps:
        """Those of a step with one loop; if `hosting`, the hosts' memory may have what is kept.

        Of a stage, `at_once`: a microbatch runs forward and backward without a break.
        """
        compiler, number = rules_of(cluster.device.name), cluster.num_devices

        @cache
        def prices() -> Pricing:
            return Pricing(cluster, (number,), traffic=split.traffic(cluster.device.name))

        def seconds(eqn: JaxprEqn) -> float:
            alone = prices().compute(eqn, split.rules[eqn], number, stacking=False)
            return FUSED * alone if compiler.may_be_fused(eqn) else alone

        def writing(eqn: JaxprEqn) -> float:
            while eqn.primitive.name in VIEWS or keeps_order(eqn):
                number = values.maker_of(eqn.invars[0])
                if number is None:
                    break
                eqn = values.parts.body.eqns[number]
            return 1 / cluster.device.memory_bandwidth if compiler.may_be_fused(eqn) else 0.0

        def stacking(eqn: JaxprEqn) -> float:
            passes = stack_passes(eqn) if compiler.fills_stacks else 0
            return passes / cluster.device.memory_bandwidth

        price = 2 / cluster.host_bandwidth if hosting and cluster.host_bandwidth else 0.0
        asked = seconds, price, at_once, writing, stacking
        values = KeptValues.of(split.step, split.rules, *asked, known=split.layers)
        return cls(split, values, number)

    def smallest_fits(
        self, fits: Callable[[SplitStep], bool], report: Callable[[str], None]
    ) -> bool:
        """Whether the step that keeps least fits."""
        return len(self) > 0 and self._fits(len(self) - 1, fits, report)

    def least_that_fits(
        self, fits: Callable[[SplitStep], bool], report: Callable[[str], None]
    ) -> None:
        """Where the step that keeps least fits, asks for those around the first that does."""
        low, high = -1, len(self) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle, fits, report) else (middle, high)

    def _fits(
        self, place: int, fits: Callable[[SplitStep], bool], report: Callable[[str], None]
    ) -> bool:
        report(f"computing values again: choice {place + 1} of {len(self)}")
        return fits(self[place])

    @property
    def most_saved_bytes(self) -> int:
        """Of a microbatch on all devices, with the step that keeps least."""
        return self.values.family[-1].saved_bytes if self.values.family else 0

    @property
    def wanted_bytes(self) -> int:
        """Of a microbatch on all devices, what the backward pass reads inside of layers."""
        return sum(bytes_of(var) for wanted in self.values.wanted.values() for var in wanted)

    @property
    def crossing_bytes(self) -> int:
        """Of a microbatch on all devices, what passes from layer to layer, and is always kept."""
        return sum(map(bytes_of, self.values.crossing))

    def __len__(self) -> int:
        return len(self.values.family)

    def __getitem__(self, place: int) -> SplitStep:
        """The steps, from the one that keeps most."""
        return self.made(self.values.family[place])

    def as_recorded(self, again: Recomputation) -> SplitStep:
        """The step that keeps what a plan says."""
        if again.host_share:
            return self.made(self.values.hosting(again.price, again.host_share))
        values = self._joining(again.joined, again.every_layer)
        return self.made(values.at(again.price, every_layer=again.every_layer))

    @cached_property
    def joined(self) -> JoinedBlocks:
        """The ways to keep less than the least of what passes from layer to layer."""
        return JoinedBlocks(self.values)

    def _joining(self, count: int, every_layer: bool) -> KeptValues:
        """The values with so many joined blocks, of every layer or of all but the last."""
        if not count:
            return self.values
        blocks = self.joined
        if every_layer == self.values.at_once:
            blocks = JoinedBlocks(replace(self.values, at_once=not every_layer))
        if count > len(blocks):
            raise PlanMismatchError(
                f"The plan joins {count} blocks of layers, and at most {len(blocks)} can be.",
                why="what is a layer changed with the version of autopar.",
                hint="plan again.",
            )
        return blocks.of(count)

    def made(self, kept: KeptChoice) -> SplitStep:
        """The step of a choice."""
        values = self._joining(kept.joined, kept.every_layer)
        step, loop = recomputed(values, kept), values.parts.loop
        read_again = ()
        if self.weights:
            step, read_again = with_weights_read_again(step)
        if loop.num_microbatches == 1 and not loop.tasks:
            step = without_loop(step)
        eqns = values.parts.body.eqns
        counts, seconds = Counter[str](), defaultdict[str, float](float)
        runs = [(eqns[number], 1) for _, number in sorted(kept.again)]
        pairs = [(values.pairs[number][1], cut) for number, cut in kept.scans]
        runs += [(eqn, pair.length) for pair, cut in pairs for eqn in pair.equations(cut)]
        for eqn, times in runs:
            name = eqn.primitive.name
            counts[name] += times
            seconds[name] += times * values.seconds_of(eqn)
        layers = len({layer for layer, _ in kept.again})
        layers += sum(pair.length for pair, cut in pairs if cut.again)
        again = Recomputation(
            price=kept.price,
            operations=tuple(sorted(counts.items(), key=lambda item: (-seconds[item[0]], *item))),
            layers=layers,
            saved_bytes=kept.saved_bytes,
            seconds=kept.seconds * loop.num_microbatches / self.num_devices,
            hosted=len(kept.hosted),
            hosted_bytes=kept.hosted_bytes,
            host_share=kept.host_share,
            every_layer=kept.every_layer,
            weights=len(read_again),
            weight_bytes=sum(map(bytes_of, read_again)),
            joined=kept.joined,
        )
        return replace(self.split, step=step, rules=populate(step.graph.jaxpr), recomputation=again)
