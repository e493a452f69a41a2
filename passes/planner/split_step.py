"""A step with its batch split in time, and what is known of it on every mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.base.plan_records import OutputCertificate, Recomputation
from autopar.passes.graph.graph import Graph
from autopar.passes.graph.microbatched import Microbatched
from autopar.passes.planner.rewritings import AS_WRITTEN, Rewriting
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.populate import populate
from autopar.passes.recompute.read_again import with_weights_read_again
from autopar.passes.sharding.batch_dims import BatchDims, batch_dims, repeated_dims
from autopar.passes.sharding.compiler_rules import rules_of
from autopar.passes.sharding.scope_memory import ScopeBuffers
from autopar.passes.sharding.traffic import MemoryTraffic
from autopar.passes.slicing.anatomy import bytes_of
from autopar.passes.slicing.slice_stages import LayersOfStep, find_layers, slice_stages
from autopar.passes.slicing.stage_graphs import Boundaries, StageGraph, Stages


@dataclass(frozen=True)
class SplitStep:
    """A step with its batch split in time, its rules, and how each output is put together.

    `rewriting` says what is written otherwise in its program than in the user's; of a step with
    several loops over the microbatches, `later_loops` says what the later ones do with what earlier
    ones computed of a row: "keep", "reuse" or "recompute". `recomputation` says what is computed
    again, and `casts` of a stage's whether parameters are cast "once" or in every "microbatch".
    """

    step: Microbatched
    rules: Rules
    certificate: tuple[OutputCertificate, ...] = ()
    num_microbatches: int = 1
    rewriting: Rewriting = AS_WRITTEN
    later_loops: str = ""
    recomputation: Recomputation | None = None
    casts: str = "once"

    @property
    def is_rewritten(self) -> bool:
        """Whether it casts in every microbatch or computes values again, a stage for itself."""
        return self.casts != "once" or self.recomputation is not None

    @property
    def graph(self) -> Graph:
        """All of the program."""
        return self.step.graph

    def stage(self, stage: StageGraph) -> StageGraph:
        """A stage with this program, where that is the stage's written otherwise; else itself.

        The labels are those of the stage.
        """
        if not self.is_rewritten:
            return stage
        own = stage.graph
        graph = Graph(self.graph.jaxpr, own.inputs, own.outputs, own.constants)
        return replace(stage, step=replace(self.step, graph=graph))

    def traffic(self, device: str) -> MemoryTraffic:
        """What its equations move in the memory of a kind of device."""
        reads_buffers = rules_of(device).gathers_read_buffers
        if reads_buffers not in self._traffic:
            self._traffic[reads_buffers] = MemoryTraffic(self.graph.jaxpr, reads_buffers)
        return self._traffic[reads_buffers]

    @cached_property
    def _traffic(self) -> dict[bool, MemoryTraffic]:
        return {}

    @cached_property
    def dims(self) -> BatchDims:
        """Where the batch is."""
        return batch_dims(self.graph, self.rules)

    @cached_property
    def repeated_dims(self) -> BatchDims:
        """Where as many rows are as the batch has."""
        return repeated_dims(self.graph, self.rules)

    @cached_property
    def layers(self) -> LayersOfStep:
        """The layers of its loop over microbatches.

        Raises:
          OptionError: it has none.
        """
        return find_layers(self.step, self.rules)

    @cached_property
    def reading_again(self) -> SplitStep:
        """The same whose backward pass reads its weights again, and may gather them a second time.

        Itself where it reads none twice.

        Raises:
          OptionError: it has no loop over microbatches.
        """
        step, weights = with_weights_read_again(self.step)
        if not weights:
            return self
        size = sum(map(bytes_of, weights))
        again = Recomputation(0.0, (), 0, 0, 0.0, weights=len(weights), weight_bytes=size)
        return replace(self, step=step, rules=populate(step.graph.jaxpr), recomputation=again)

    def cut_at(self, boundaries: Boundaries) -> Stages:
        """Its stages with the backward pass as it is.

        The first are kept: those are units of layers, which are often the stages of a deep model.
        """
        known = self._cut.get(boundaries) if isinstance(boundaries, tuple) else None
        if known is None:
            known = slice_stages(self.step, self.rules, boundaries, known=self.layers)
            if isinstance(boundaries, tuple) and not self._cut:
                self._cut[boundaries] = known
        return known

    @cached_property
    def _cut(self) -> dict[tuple[int, ...], Stages]:
        return {}

    def buffers(self, device: str, num_devices: int) -> ScopeBuffers:
        """Which of its values are buffers on devices of a kind, whole, that divide the rows."""
        rules = rules_of(device)
        rules = replace(rules, split_rows=rules.split_rows * num_devices)
        return self._buffers.setdefault((device, rules.split_rows), ScopeBuffers(rules))

    @cached_property
    def _buffers(self) -> dict[tuple[str, int], ScopeBuffers]:
        return {}
