"""Stages chosen automatically: layers, submeshes and logical meshes by an exact dynamic program.

Every layer is sliced and planned alone on every size of submesh, identical layers once; a stage
costs what its layers cost, and what crosses its end. It may keep what its forward pass made, or
compute it again. No candidate split is planned or compiled itself; the chosen one is planned
afterwards as a whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.base.cluster import Cluster
from autopar.base.errors import OptionError
from autopar.base.options import Options
from autopar.base.transfer_costs import seconds_to_next
from autopar.passes.pieces.stage_account import StageAccount
from autopar.passes.planner.candidates import label_batch, plan_stage
from autopar.passes.planner.layouts import StageLayout, submesh
from autopar.passes.planner.stage_choice import StageOption, best_stages
from autopar.passes.planner.stage_shardings import PlaceInPipeline, SplitStep
from autopar.passes.schedules.flight import ONE_IN_FLIGHT
from autopar.passes.sharding.memory_rows import StageMemory
from autopar.passes.sharding.peak_memory import local_bytes
from autopar.passes.sharding.spmd_program import Block, Loop
from autopar.passes.slicing.slice_stages import slice_stages
from autopar.passes.slicing.stage_graphs import Layer, StageGraph, Stages

MAX_UNITS = 24  # more layers than this are put together in equal runs before the search


class _LayerCost(NamedTuple):
    """One run of layers on one submesh: per microbatch, once a step, and memory per device.

    `forward_seconds` are the part of `seconds` that computing the forward pass again would add;
    `bytes_fixed` are there all the time, `bytes_working` at the worst moment beside them.
    """

    seconds: float
    forward_seconds: float
    once_seconds: float
    bytes_fixed: int
    bytes_per_microbatch: int
    bytes_working: int


def stage_layouts(
    split: SplitStep, options: Options, cluster: Cluster, report: Callable[[str], None]
) -> Callable[[int], StageLayout | None]:
    """A function that gives, for a memory limit, the stages with the least step time that fit.

    It gives None where one stage is best, or nothing fits.

    Args:
      split: the program with its batch split.
      options: method, pins, memory limit and so on; `stages` is "auto".
      cluster: all devices.
      report: takes a line of progress.
    """
    try:
        whole = slice_stages(split.step, split.rules, 1)
    except OptionError:
        return lambda limit: None
    step = math.ceil(len(whole.layers) / MAX_UNITS)
    starts = list(range(0, len(whole.layers), step))
    if len(starts) < 2 or cluster.num_devices < 2:
        return lambda limit: None
    report(f"slicing into {len(starts)} layers")
    units = slice_stages(split.step, split.rules, starts[1:])
    sizes = [size for size in _sizes(cluster) if size < cluster.num_devices]
    costs = _costs(units, sizes, options, cluster, report)
    ends = [*starts[1:], len(whole.layers)]
    crossing = [whole.layers.layers[end - 1].cut_bytes for end in ends]

    def oracle(start: int, stop: int, size: int) -> Sequence[StageOption]:
        total = _LayerCost(*map(sum, zip(*costs[size][start:stop], strict=True)))
        moved = crossing[stop - 1] if stop < len(starts) else 0
        transfers = 2 * seconds_to_next(cluster, size, moved) if moved else 0.0
        working = max(cost.bytes_working for cost in costs[size][start:stop])
        needs = total.bytes_fixed + working, total.bytes_per_microbatch
        kept = StageOption(total.seconds + transfers, *needs, once_seconds=total.once_seconds)
        # Computed again: the input stays, and the rest is there for one microbatch at a time.
        again = dataclasses.replace(
            kept,
            seconds=kept.seconds + total.forward_seconds,
            bytes_fixed=kept.bytes_fixed + kept.bytes_per_microbatch,
            bytes_per_microbatch=math.ceil(crossing[start - 1] / size) if start else 0,
            remat=True,
        )
        if options.remat == "auto":
            return (kept, again)
        return (again,) if options.remat == "full" else (kept,)

    def within(limit: int) -> StageLayout | None:
        choice = best_stages(
            len(starts),
            sizes,
            cluster.num_devices,
            oracle,
            num_microbatches=split.num_microbatches,
            memory_limit=limit,
        )
        if choice is None or len(choice.stages) < 2:
            return None
        return StageLayout(
            tuple(starts[stage.start] for stage in choice.stages[1:]),
            tuple(stage.num_devices for stage in choice.stages),
            tuple(stage.option.remat for stage in choice.stages),
        )

    return within


def _sizes(cluster: Cluster) -> list[int]:
    """Powers of two within a node, and whole nodes."""
    inside = {2**i for i in range(cluster.devices_per_node.bit_length())}
    nodes = (2**i for i in range(1, cluster.num_nodes.bit_length()))
    whole = {n * cluster.devices_per_node for n in nodes}
    return sorted(inside | whole | {cluster.num_devices})


def _costs(
    units: Stages,
    sizes: Sequence[int],
    options: Options,
    cluster: Cluster,
    report: Callable[[str], None],
) -> dict[int, list[_LayerCost]]:
    """For every size of submesh, what each unit costs."""
    labelled = label_batch(units)
    ends = (0, *units.boundaries, len(units.layers))
    runs = [units.layers.layers[start:stop] for start, stop in itertools.pairwise(ends)]
    kinds = [tuple(layer.digest for layer in run) for run in runs]
    firsts = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    found: dict[int, list[_LayerCost]] = {}
    for size in sizes:
        report(f"costs of {len(firsts)} kinds of layers on {size} devices")
        part = submesh(cluster, size)
        known = {i: _cost(labelled[i], runs[i], options, part) for i in firsts.values()}
        found[size] = [known[firsts[kind]] for kind in kinds]
    return found


def _cost(
    stage: StageGraph, layers: Sequence[Layer], options: Options, part: Cluster
) -> _LayerCost:
    """What a run of layers costs."""
    total = sum(layer.flops for layer in layers)
    forward = sum(layer.forward_flops for layer in layers) / total if total else 0.0
    place = PlaceInPipeline(stage, ONE_IN_FLIGHT)
    planned = plan_stage(place, dataclasses.replace(options, remat="none"), part)
    program, prices = planned.program, planned.costs(part)
    block, scan = program.block, None if stage.loop is None else stage.loop.scan
    loops = [x for x in block.instructions if isinstance(x, Loop) and x.eqn is scan]
    outside = tuple(x for x in block.instructions if not any(x is loop for loop in loops))
    inside = sum(prices.seconds(loop.body) for loop in loops)
    held = [
        version
        for version, label in zip(block.inputs, stage.graph.inputs, strict=True)
        if label.role in ("state", "constant")
    ]
    passed = frozenset() if stage.loop is None else stage.loop.passed
    held += (v for loop in loops for v in loop.results if v.atom not in passed)
    account = StageAccount.of(stage, program, StageMemory(ONE_IN_FLIGHT))
    fixed = sum(local_bytes(version, program.mesh) for version in held)
    kept = sum(account.between_tasks.values())
    return _LayerCost(
        seconds=inside,
        forward_seconds=inside * forward,
        once_seconds=prices.seconds(Block(block.inputs, outside, block.outputs)),
        bytes_fixed=fixed,
        bytes_per_microbatch=kept,
        bytes_working=max(planned.peak.bytes - fixed - kept, 0),
    )
