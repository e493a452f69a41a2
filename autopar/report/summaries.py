"""What a reader needs of a plan's long lists: repeated layers folded, collectives added up.

Every view of a plan (text, Rich tables, pictures) shows these same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.base.plan_records import (
    PipelinePlan,
    PlanRecord,
    SolverSummary,
    StagePlan,
    StageTransfer,
    TensorPlan,
)
from autopar.base.units import format_bytes
from autopar.report.path_folding import fold_paths


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that differ only in their paths, such as the layers of a model.

    `path` folds them (`Block_{0..11}/{bias,scale}`), `tensor` is the first of them, `bytes` are
    those of all, `bytes_per_device` those on a device of the mesh that holds the most (or in its
    host's memory); `stages` has an entry for each of them.
    """

    path: str
    count: int
    tensor: TensorPlan
    bytes: int
    bytes_per_device: int
    stages: tuple[tuple[int, ...], ...] = ((0,),)

    @property
    def per_device(self) -> str:
        """The bytes per device in words; those of the hosts' memory are said to be there."""
        return format_bytes(self.bytes_per_device) + " host" * (self.tensor.memory == "host")


@dataclass(frozen=True)
class CollectiveGroup:
    """Collectives of one purpose, kind, dtype and axes: their number in a step, bytes and seconds.

    These are equal on each of the `stages`, and are those of one stage.
    """

    purpose: str
    kind: str
    axes: tuple[str, ...]
    dtype: str
    count: int
    bytes: int
    seconds: float
    stages: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class TransferGroup:
    """Values alike that cross between stages.

    `routes` says from where to where, `what` folds names of state (`state/{step,key}`), and `count`
    and `bytes` are those of a whole step, over all routes.
    """

    routes: str
    what: str
    dtype: str
    shape: tuple[int, ...]
    per_microbatch: bool
    count: int
    bytes: int

    @property
    def value(self) -> str:
        """`float32[8, 64]`."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def fold_tensors(
    tensors: Iterable[TensorPlan], meshes: Sequence[int] = ()
) -> tuple[TensorGroup, ...]:
    """Groups of tensors alike in all but stages, and names and numbers in their paths, in order.

    `meshes` are those of the stages; without them every stage has one of its own.
    """
    alike: dict[tuple[object, ...], dict[str, TensorPlan]] = {}
    order: dict[str, int] = {}
    for tensor in tensors:
        key = (tensor.role, tensor.shape, tensor.dtype, tensor.spec, tensor.donated, tensor.memory)
        alike.setdefault(key, {})[tensor.path] = tensor
        order[tensor.path] = len(order)
    groups: list[tuple[int, TensorGroup]] = []
    for by_path in alike.values():
        for name, paths in fold_paths(by_path).items():
            members = [by_path[path] for path in paths]
            group = TensorGroup(
                path=name,
                count=len(members),
                tensor=members[0],
                bytes=sum(tensor.bytes for tensor in members),
                bytes_per_device=most_bytes_per_device(members, meshes, members[0].memory),
                stages=tuple(tensor.stages for tensor in members),
            )
            groups.append((min(order[path] for path in paths), group))
    return tuple(group for _, group in sorted(groups, key=lambda item: item[0]))


def most_bytes_per_device(
    tensors: Iterable[TensorPlan], meshes: Sequence[int] = (), memory: str = "device"
) -> int:
    """What a device of the fullest mesh, or its "host", holds of these tensors, in bytes."""
    sizes: Counter[int] = Counter()
    for tensor in tensors:
        for stage in tensor.stages if tensor.memory == memory else ():
            sizes[meshes[stage] if meshes else stage] += tensor.bytes_per_device
    return max(sizes.values(), default=0)


def group_certificate(plan: PlanRecord) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    """For each way in which outputs are put together: their number, and folded paths.

    Outputs that are new state are only counted, because there are many and their names are known.
    """
    is_state = {tensor.path: tensor.role == "state" for tensor in plan.outputs}
    rows = []
    for how in dict.fromkeys(entry.how for entry in plan.certificate):
        paths = [entry.path for entry in plan.certificate if entry.how == how]
        results = [path for path in paths if not is_state.get(path, False)]
        names = list(fold_paths(results))
        if count := len(paths) - len(results):
            names.append(f"{count} {'leaf' if count == 1 else 'leaves'} of the new state")
        rows.append((how, len(paths), tuple(names)))
    return tuple(rows)


def results_of(plan: PlanRecord) -> tuple[TensorPlan, ...]:
    """The outputs worth a line of their own: all but new state laid out as the old one is."""

    def layouts(tensors: Iterable[TensorPlan]) -> Counter[object]:
        return Counter((t.dtype, t.shape, t.spec) for t in tensors if t.role == "state")

    if layouts(plan.inputs) == layouts(plan.outputs):
        return tuple(tensor for tensor in plan.outputs if tensor.role != "state")
    return plan.outputs


def group_collectives(stages: Sequence[StagePlan]) -> tuple[CollectiveGroup, ...]:
    """Collectives of each stage added up by purpose, kind, axes, dtype; stages alike share a row.

    What takes most seconds on a stage, then bytes, comes first.
    """
    Kind = tuple[str, str, tuple[str, ...], str]
    homes: dict[tuple[Kind, int, int, float], list[int]] = {}
    for number, stage in enumerate(stages):
        sums: dict[Kind, tuple[int, int, float]] = {}
        for item in stage.collectives:
            kind = (item.purpose, item.kind, item.axes, item.dtype)
            count, size, seconds = sums.get(kind, (0, 0, 0.0))
            seconds += item.seconds * item.times
            sums[kind] = (count + item.times, size + item.bytes * item.times, seconds)
        for kind, (count, size, seconds) in sums.items():
            homes.setdefault((kind, count, size, seconds), []).append(number)
    most: dict[Kind, tuple[float, int]] = {}
    for kind, _, size, seconds in homes:
        most[kind] = max(most.get(kind, (0.0, 0)), (seconds, size))

    def order(row: tuple[Kind, int, int, float]) -> tuple[float, int, Kind]:
        seconds, size = most[row[0]]
        return -seconds, -size, row[0]

    return tuple(
        CollectiveGroup(*row[0], *row[1:], stages=tuple(homes[row]))
        for row in sorted(homes, key=order)
    )


def group_transfers(
    transfers: Iterable[StageTransfer], num_stages: int
) -> tuple[TransferGroup, ...]:
    """Transfers added up by what they carry and the pattern of their routes, in order.

    With the number of the plan's stages, routes can be called "each to the next".
    """
    alike: dict[tuple[str, str, tuple[int, ...], int], list[StageTransfer]] = {}
    for item in transfers:
        alike.setdefault((item.what, item.dtype, item.shape, item.times), []).append(item)
    rows: dict[tuple[str, str, tuple[int, ...], int], dict[str, list[StageTransfer]]] = {}
    for (what, dtype, shape, times), items in alike.items():
        for routes, members in _by_pattern(items, num_stages):
            rows.setdefault((routes, dtype, shape, times), {})[what] = members
    groups = []
    for (routes, dtype, shape, times), by_name in rows.items():
        for name, whats in fold_paths(by_name).items():
            sizes = [item.bytes for what in whats for item in by_name[what]]
            count, size = times * len(sizes), times * sum(sizes)
            groups.append(TransferGroup(routes, name, dtype, shape, times > 1, count, size))
    return tuple(sorted(groups, key=lambda group: not group.per_microbatch))


def _by_pattern(
    items: Sequence[StageTransfer], num_stages: int
) -> list[tuple[str, list[StageTransfer]]]:
    """Transfers of one value under names for their routes: one for all, or one for each source."""
    routes = {(item.source, item.target) for item in items}
    if len(routes) == len(items) and (name := _pattern(routes, num_stages)):
        return [(name, list(items))]
    by_source: dict[int, list[StageTransfer]] = {}
    for item in items:
        by_source.setdefault(item.source, []).append(item)
    return [
        (f"{source} to {_join(item.target for item in members)}", members)
        for source, members in by_source.items()
    ]


def _pattern(routes: set[tuple[int, int]], num_stages: int) -> str:
    """A name for routes that many programs have, or an empty text."""
    stages = range(num_stages)
    if num_stages < 3:
        return ""
    if routes == {(s, s + 1) for s in stages[:-1]}:
        return "each to the next"
    if routes == {(s + 1, s) for s in stages[:-1]}:
        return "each to the one before"
    if routes == {(s, t) for s in stages for t in stages if s != t}:
        return "each to all others"
    sources, targets = {s for s, _ in routes}, {t for _, t in routes}
    if len(routes) == num_stages - 1 and len(sources) == 1:
        return f"{min(sources)} to all others"
    if len(targets) == 1 and len(routes) > 1:
        several = "all others" if len(routes) == num_stages - 1 else _join(sources)
        return f"{several} to {min(targets)}"
    return ""


def _join(stages: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(stages))))


def stage_method(plan: PlanRecord, number: int) -> str:
    """The method that was asked for one stage alone, or ""."""
    asked = plan.options.get("stages")
    said = asked[number] if isinstance(asked, (list, tuple)) and len(asked) > number else None
    return str(said.get("method", "")) if isinstance(said, Mapping) else ""


def format_stages(stages: Iterable[int]) -> str:
    """Numbers of stages as people write them.

    >>> [format_stages(stages) for stages in ([2], [0, 1, 2, 3], [3, 0], [1, 2])]
    ['2', '0 to 3', '0, 3', '1, 2']
    """
    found = sorted(set(stages))
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]} to {found[-1]}"
    return _join(found)


def format_homes(homes: Iterable[tuple[int, ...]]) -> str:
    """Where tensors of one kind are: spread over stages, or on several at once.

    >>> format_homes([(0,), (1,), (2,)]), format_homes([(0, 3)])
    ('0 to 2', '0 + 3')
    """
    different = dict.fromkeys(homes)
    alone = [home[0] for home in different if len(home) == 1]
    shared = [" + ".join(map(str, home)) for home in different if len(home) > 1]
    return ", ".join([*([format_stages(alone)] if alone else []), *shared])


def format_layers(layers: tuple[int, int]) -> str:
    """The first layer and the one after the last as people write them.

    >>> format_layers((4, 8)), format_layers((4, 5))
    ('4 to 7', '4')
    """
    first, stop = layers
    return str(first) if stop == first + 1 else f"{first} to {stop - 1}"


def describe_cluster(cluster: Mapping[str, object]) -> str:
    """One line for a plan's cluster, such as `2 nodes of 8 x H100-SXM`."""
    nodes, devices = cluster.get("num_nodes", 1), cluster.get("devices_per_node", "?")
    device = cluster.get("device", {})
    kind = device.get("name", "device") if isinstance(device, Mapping) else device
    return f"{nodes} node{'' if nodes == 1 else 's'} of {devices} x {kind}"


def describe_solver(solver: SolverSummary) -> str:
    """One line: the problem's size, and how far the choice may be from the best."""
    size = f"{solver.nodes} nodes, {solver.edges} edges"
    if solver.gap is None:
        return f"{size}; no bound was proved"
    if solver.gap == 0:
        return f"{size}; proved optimal for the cost model"
    return f"{size}; at most {solver.gap:.2%} of the cost above the best"


def describe_pipeline(pipeline: PipelinePlan, num_stages: int) -> str:
    """One line: the stages, their meshes, the schedule, and how long the meshes wait."""
    chunks = f", {pipeline.num_chunks} to a mesh" if pipeline.num_chunks > 1 else ""
    return (
        f"{num_stages} stages on {pipeline.num_meshes} meshes{chunks}, "
        f"schedule {pipeline.schedule}, {pipeline.bubble_fraction:.0%} bubble"
    )


def memory_limit(plan: PlanRecord) -> int | None:
    """Bytes that the plan may use on each device, or None where neither user nor cluster say."""
    limit = plan.options.get("memory_limit")
    if limit is None and isinstance(plan.cluster.get("device"), Mapping):
        device = plan.cluster["device"]
        known, share = device.get("memory_bytes"), device.get("memory_fraction", 1.0)
        limit = int(known * share) if isinstance(known, int) else None
    return limit if isinstance(limit, int) else None


def task_seconds(pipeline: PipelinePlan) -> dict[str, dict[int, float]]:
    """By the kind of task and the stage, the seconds that are expected of a task."""
    seconds: dict[str, dict[int, float]] = {}
    for piece in pipeline.model.pieces if pipeline.model else ():
        of_stage = seconds.setdefault(piece.when, {})
        total = piece.compute_seconds + piece.latency_seconds + piece.host_seconds
        total += piece.activation_seconds + piece.other_seconds
        of_stage[piece.stage] = of_stage.get(piece.stage, 0.0) + total
    return seconds
