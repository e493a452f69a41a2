"""What is asked for and what may be tried: stages, submeshes, logical meshes, microbatches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.base.cluster import Cluster, axis_names
from autopar.base.errors import OptionError
from autopar.base.methods import BATCH_METHODS, LOOP_METHODS
from autopar.base.options import Options
from autopar.base.transfer_costs import is_compact, places_of
from autopar.passes.graph.graph import Graph, batch_sizes
from autopar.passes.sharding.constraint_axes import most_kept
from autopar.passes.sharding.pins import are_possible
from autopar.passes.slicing.stage_graphs import StageParts

# Meshes of three axes have ten times as many strategies: they are planned when it is asked for.
MAX_AXES = 2


ExpectedSeconds = Mapping[tuple[int, ...], float]
"""Of a step, by logical mesh."""


@dataclass(frozen=True)
class StageLayout:
    """Where stages begin and what they run on.

    Args:
      boundaries: the layers at which the second and later stages begin, or how many stages there
        are (of about the same FLOPs), or what part of the step each has.
      devices: of every mesh.
      remat: for every stage, whether its backward pass computes the forward pass again; empty if
        that is not decided here.
      schedule: what these were chosen for; empty if for none of several.
      expected: for every stage, the seconds of a step that it is expected to take on logical
        shapes of its mesh; empty if that is not known.
      casts: for every stage, whether it is expected to fit only if it casts parameters in every
        microbatch; empty if that is not known.
      may_divide: whether stages may fit by schedules in which the gradients of weights come last.
    """

    boundaries: int | tuple[int, ...] | StageParts
    devices: tuple[int, ...]
    remat: tuple[bool, ...] = ()
    schedule: str = ""
    expected: tuple[ExpectedSeconds, ...] = ()
    casts: tuple[bool, ...] = ()
    may_divide: bool = True

    @property
    def is_pipeline(self) -> bool:
        """Whether there are several stages."""
        return self.boundaries not in (1, ())


def asked_layout(options: Options, cluster: Cluster) -> StageLayout:
    """What the options say; all meshes are of one size, unless stages say their own.

    Raises:
      OptionError: the devices do not divide by the stages, or chunks do not divide the stages, or
        the cluster cannot be shared out as the stages say.
    """
    if options.stages_by_hand:
        devices = _devices_by_hand(options, cluster)
        layers = [stage.layers for stage in options.stages_by_hand]
        shares = tuple(size / cluster.num_devices for size in devices)
        said = tuple(part for part in layers if isinstance(part, (int, float)))
        return StageLayout(StageParts(said or shares), devices)
    stages, chunks = options.stages, chunks_of(options)
    if stages in ("auto", 1):
        return StageLayout(1, (cluster.num_devices,))
    boundaries: int | tuple[int, ...]
    if isinstance(stages, int):
        meshes, boundaries = stages, stages * chunks
    else:
        assert isinstance(stages, tuple)
        boundaries = tuple(stage for stage in stages if isinstance(stage, int))
        total = len(stages) + 1
        if total % chunks:
            raise OptionError(
                f"stages={list(stages)} cannot have num_chunks={chunks}.",
                why=f"that makes {total} stages, which do not divide by {chunks} per mesh.",
            )
        meshes = total // chunks
    if meshes > cluster.num_devices:
        raise OptionError(
            f"{meshes} pipeline stages are more than the cluster has devices.",
            where=f"stages={stages!r}",
            why=f"{cluster.name} has {cluster.num_devices} "
            f"device{'' if cluster.num_devices == 1 else 's'}, and every stage needs one.",
            hint=f"use at most stages={cluster.num_devices}, or num_chunks for several stages on "
            f"one mesh. On a CPU, jax.config.update('jax_num_cpu_devices', {meshes}) before JAX is "
            "used makes virtual devices.",
        )
    if cluster.num_devices % meshes:
        divisors = [n for n in range(1, cluster.num_devices + 1) if cluster.num_devices % n == 0]
        raise OptionError(
            f"{cluster.num_devices} devices cannot be split into {meshes} equal meshes.",
            where=f"stages={stages!r}",
            why="every stage has a mesh of its own, and all are of one size.",
            hint=f"use a number of stages of {', '.join(map(str, divisors))}; or stages='auto', "
            "which may give stages different meshes.",
        )
    return StageLayout(boundaries, (cluster.num_devices // meshes,) * meshes)


def _devices_by_hand(options: Options, cluster: Cluster) -> tuple[int, ...]:
    """The devices of every stage; those that say none share what is left."""
    stages, total = options.stages_by_hand, cluster.num_devices
    said = sum(stage.devices or 0 for stage in stages)
    silent = sum(stage.devices is None for stage in stages)
    left = total - said
    if left < silent or (left % silent if silent else left):
        shown = ", ".join("..." if s.devices is None else str(s.devices) for s in stages)
        raise OptionError(
            f"The stages' devices do not add up to the {total} of the cluster.",
            where=f"devices={shown}",
            why=f"{said} are given away to {len(stages) - silent} of {len(stages)} stages, and "
            + (f"{max(left, 0)} are left for {silent}." if silent else f"there are {total}."),
            hint="every device of the cluster belongs to one stage; a stage without devices= has "
            "an equal part of the rest.",
        )
    devices = tuple(s.devices or left // silent for s in stages)
    each = cluster.devices_per_node
    for number, place in enumerate(places_of(devices, each)):
        if not is_compact(place, each):
            raise OptionError(
                f"Stage {number} would lie on parts of several nodes.",
                where=f"devices={', '.join(map(str, devices))}",
                why=f"a node has {each} devices, and neither in the order of the stages nor with "
                f"the largest first is each inside a node or has whole nodes; in their order these "
                f"are devices {place.start} to {place.stop - 1}.",
                hint="size the stages so that they fill nodes: by powers of two and whole nodes.",
            )
    return devices


def chunks_of(options: Options) -> int:
    """Stages per mesh."""
    return options.num_chunks if isinstance(options.num_chunks, int) else 1


def submesh(cluster: Cluster, num_devices: int) -> Cluster:
    """A part of the cluster: devices of one node where they fit there, else whole nodes."""
    share = cluster.host_share
    if num_devices <= cluster.devices_per_node:
        host = share * num_devices
        return dataclasses.replace(
            cluster, num_nodes=1, devices_per_node=num_devices, host_memory_bytes=host
        )
    if num_devices % cluster.devices_per_node:
        return dataclasses.replace(
            cluster, num_nodes=num_devices, devices_per_node=1, host_memory_bytes=share
        )
    return dataclasses.replace(cluster, num_nodes=num_devices // cluster.devices_per_node)


def logical_meshes(
    options: Options, part: Cluster, graph: Graph, *, of_stage: bool
) -> tuple[tuple[int, ...], ...]:
    """Logical shapes to consider for a stage's mesh, or for that of the whole step.

    Where the program holds sharding constraints: those that can keep the most of them. Where leaves
    are pinned: those that divide them so, if any do.

    Raises:
      OptionError: the asked one does not have the devices or the method's number of axes.
    """
    asked = options.logical_mesh
    if options.method == "hsdp" and asked is None:
        return ((part.num_nodes, part.devices_per_node),)
    if options.method in LOOP_METHODS and asked is None and part.num_nodes > 1:
        return ((part.num_nodes, part.devices_per_node),)
    if options.method in (*BATCH_METHODS, *LOOP_METHODS) and asked is None:
        return ((part.num_devices,),)
    if asked is None:
        pinned = {axis for _, spec in options.pins for axes in spec for axis in axes}
        if not pinned:
            return most_kept(graph.jaxpr, part.logical_meshes(), part.logical_meshes(MAX_AXES))
        meshes = part.logical_meshes(*(() if "z" in pinned else (MAX_AXES,)))
        meshes = tuple(m for m in meshes if pinned <= set(axis_names(m))) or meshes
        meshes = tuple(m for m in meshes if are_possible(graph, options.pins, m)) or meshes
        return most_kept(graph.jaxpr, meshes, meshes)
    if options.method == "hsdp" and len(asked) != 2:
        raise OptionError(
            f"logical_mesh={asked} is not possible with method='hsdp'.",
            why="the state is cut along the second of two axes, and replicated along the first.",
            hint=f"use logical_mesh={(part.num_nodes, part.devices_per_node)}, or method='zero3'.",
        )
    if of_stage and math.prod(asked) != part.num_devices:
        raise OptionError(
            f"logical_mesh={asked} does not fit a stage.",
            why=f"every stage has {part.num_devices} devices.",
        )
    if math.prod(asked) > part.num_devices:
        raise OptionError(
            f"logical_mesh={asked} is larger than the cluster.",
            why=f"the cluster has {part.num_devices} devices.",
        )
    return (asked,)


def microbatch_counts(graph: Graph, options: Options, layout: StageLayout) -> Iterator[int]:
    """What the user wants; else as few as may fit: more and more, as far as the batch divides.

    One mesh begins with one microbatch, a pipeline with four for each mesh.
    """
    sizes = batch_sizes(graph)
    asked = options.microbatches
    if asked != "auto":
        yield int(asked)
        return
    count = 1
    if layout.is_pipeline:
        count = largest_count(sizes, 4 * len(layout.devices))
    yield count
    while sizes and count < min(sizes) and all(size % (2 * count) == 0 for size in sizes):
        count *= 2
        yield count


def largest_count(sizes: set[int], enough: int) -> int:
    """The smallest power of two that is enough, or the largest that divides the batch."""
    count = 1
    while count < enough and sizes and all(size and size % (2 * count) == 0 for size in sizes):
        count *= 2
    return count
