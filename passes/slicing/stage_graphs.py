"""What slicing gives: one graph per stage, and the links between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from autopar.base.units import format_bytes
from autopar.passes.graph.graph import Graph
from autopar.passes.graph.microbatched import LoopPhase, Microbatched, Task
from autopar.passes.primitives.factor_rule import Rules


@dataclass(frozen=True)
class Layer:
    """Forward equations that stay together. FLOPs and bytes are of one microbatch.

    Args:
      equations: their numbers in the loop's body, ascending.
      iterations: of these, the scans over layers of which this has only some iterations: (equation,
        first, last + 1).
      backward_flops: of the heavy backward equations that belong to them.
      cut_bytes: what crosses after this layer to later ones.
      inside: whether the backward pass computes some of it again, if the layer is not cut off.
      weight_bytes: of what it reads of parameters.
      digest: equal for layers that compute the same on inputs of the same shapes.
      source: the user's line of its heaviest equation.
    """

    equations: tuple[int, ...]
    forward_flops: int
    backward_flops: int
    cut_bytes: int
    digest: str
    source: str
    iterations: tuple[tuple[int, int, int], ...] = ()
    inside: bool = False
    weight_bytes: int = 0

    @property
    def flops(self) -> int:
        """Forward and backward."""
        return self.forward_flops + self.backward_flops


@dataclass(frozen=True)
class StageParts:
    """What each stage has of the step: numbers of layers, or shares of the FLOPs."""

    parts: tuple[int, ...] | tuple[float, ...]

    @property
    def are_counts(self) -> bool:
        """Whether these are numbers of layers."""
        return all(isinstance(part, int) for part in self.parts)


Boundaries = int | Sequence[int] | StageParts
"""How many stages, of about the same FLOPs; or where they begin, in layers; or their parts."""


@dataclass(frozen=True)
class Layers:
    """The layers of the loop's body, in order."""

    layers: tuple[Layer, ...]

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        total = sum(layer.flops for layer in self.layers) or 1
        kinds = {digest: i for i, digest in enumerate(dict.fromkeys(x.digest for x in self.layers))}
        lines = [f"{len(self.layers)} layers, {len(kinds)} of them different"]
        for number, x in enumerate(self.layers):
            size = f"{len(x.equations):5} equations {x.flops / total:6.1%} of FLOPs"
            after = f"{format_bytes(x.cut_bytes)} after it, {x.source}"
            lines.append(f"  {number:3}: kind {kinds[x.digest]:2} {size}, {after}")
        return "\n".join(lines)


@dataclass(frozen=True)
class LeafRows:
    """Where rows of a leaf are, if a scan over layers was cut: in leaf `number` of the cut program.

    The layers are in dimension `axis`; a `stop` of None says that these are all of them.
    """

    number: int
    axis: int = 0
    start: int = 0
    stop: int | None = None


# For every leaf of a program before scans over layers were cut, the leaves that hold its rows.
Rows: TypeAlias = tuple[tuple[LeafRows, ...], ...]


@dataclass(frozen=True)
class StageLink:
    """One value that a stage sends to another, per microbatch or once a step.

    `label` says what it is, for people: "activation", "gradient", "residual", or a path. It is an
    output of the source's graph and an input of the target's; sizes are of one transfer.
    """

    source: int
    target: int
    per_microbatch: bool
    label: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    source_output: int
    target_input: int

    def __str__(self) -> str:
        rate = "per microbatch" if self.per_microbatch else "per step"
        value = f"{self.label} {self.dtype}[{','.join(map(str, self.shape))}]"
        return f"{self.source} -> {self.target} {rate}: {value} ({format_bytes(self.bytes)})"


@dataclass(frozen=True)
class StageGraph:
    """One stage's program: again prologue, one scan over the microbatches, epilogue.

    A value received once per microbatch is an input stacked [M, ...] that enters the scan as a
    slice; a value sent per microbatch is an output stacked [M, ...].

    Args:
      step: the program. An input that is received has a path "recv[i] <label>" and the role
        "received", or "other" where it is a stack of what comes once per microbatch.
        An epilogue may need values of other stages that themselves need this stage's sums, so the
        program is not always one that can run at one go. The loop has tasks; there is none if the
        stage has no part of it.
      inputs: for every input the number of the whole graph's input, or None if it is received.
      outputs: for every output the number of the whole graph's output, or None if it is sent.
    """

    step: Microbatched
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    @property
    def graph(self) -> Graph:
        return self.step.graph

    @property
    def loop(self) -> LoopPhase | None:
        return self.step.loop

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the equations of the loop's body."""
        return () if self.loop is None else self.loop.tasks


@dataclass(frozen=True)
class Stages:
    """A program cut into pipeline stages: a graph per stage, and what passes between them.

    Args:
      forward_only: no stage has backward equations.
      layers: the layers that the stages are made of.
      boundaries: stage s has the layers from boundaries[s - 1] to boundaries[s] (ends left out).
      whole: the program that the stages together compute: scans over layers that more than one
        stage has a part of are cut in it, and leaves stacked by layer are several leaves.
      rules: the factor rules of its equations.
      leaves: for every input of the program before, where it is in `whole`.
      results: for every output of the program before, where it is in `whole`.
    """

    graphs: tuple[StageGraph, ...]
    links: tuple[StageLink, ...]
    forward_only: bool
    layers: Layers
    boundaries: tuple[int, ...]
    whole: Microbatched
    rules: Rules
    leaves: Rows
    results: Rows

    def __str__(self) -> str:
        ends = (0, *self.boundaries, len(self.layers))
        lines = [f"{len(self.graphs)} stages of {len(self.layers)} layers"]
        for number, stage in enumerate(self.graphs):
            counts: Counter[str] = Counter(stage.tasks)
            tasks = ", ".join(f"{counts[task]} {task}" for task in "FBW" if counts[task])
            outside = len(stage.graph.jaxpr.eqns) - (stage.loop is not None)
            layers = f"layers {ends[number]} to {ends[number + 1] - 1}"
            equations = f"equations: {tasks or 'none'} in the loop, {outside} outside"
            lines.append(f"  stage {number}: {layers}; {equations}")
        lines += [f"  {link}" for link in self.links]
        return "\n".join(lines)
