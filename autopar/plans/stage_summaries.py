"""What a reader needs of a pipelined plan: what crosses between stages, and what each holds.

As in `autopar.summaries`, long lists become rows that every view of a plan shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.plans.summaries import (
    CollectiveGroup,
    fold_paths,
    group_collectives,
    input_categories,
    short_path,
)

if TYPE_CHECKING:
    from autopar.base.plan_records import PlanRecord, StagePlan, StageTransfer

_Route = tuple[int, int]


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


def group_transfers(
    transfers: Iterable[StageTransfer], num_stages: int
) -> tuple[TransferGroup, ...]:
    """Transfers added up by what they carry and the pattern of their routes, in order.

    Args:
      transfers: those of a plan.
      num_stages: of the plan, so that routes can be called "each to the next".
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


def _pattern(routes: set[_Route], num_stages: int) -> str:
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
    """The first layer and the one behind the last as people write them.

    >>> format_layers((4, 8)), format_layers((4, 5))
    ('4 to 7', '4')
    """
    first, stop = layers
    return str(first) if stop == first + 1 else f"{first} to {stop - 1}"


def group_stage_collectives(
    stages: Sequence[StagePlan],
) -> tuple[tuple[CollectiveGroup, tuple[int, ...]], ...]:
    """The collectives of every stage added up, and which stages have just these, in order."""
    homes: dict[CollectiveGroup, list[int]] = {}
    for number, stage in enumerate(stages):
        for group in group_collectives(stage.collectives):
            homes.setdefault(group, []).append(number)
    slowest: dict[tuple[object, ...], float] = {}
    for group in homes:
        kind = (group.purpose, group.kind, group.axes)
        slowest[kind] = max(slowest.get(kind, 0.0), group.seconds)
    order = sorted(slowest, key=lambda kind: -slowest[kind])
    return tuple(
        (group, tuple(where))
        for kind in order
        for group, where in homes.items()
        if (group.purpose, group.kind, group.axes) == kind
    )


def stage_contents(plan: PlanRecord) -> tuple[tuple[str, ...], ...]:
    """For each stage, folded names of the parts of the model that are stored there.

    They are the names below the first large part of the state: `block_{0..5}` of
    `state/params/block_0/kernel`.
    """
    state = [tensor for tensor in plan.inputs if tensor.role == "state"]
    categories = input_categories(plan)
    sizes: dict[str, int] = {}
    for tensor in state:
        name = categories[tensor.path]
        sizes[name] = sizes.get(name, 0) + tensor.bytes
    large = next((name for name, size in sizes.items() if 10 * size >= sum(sizes.values())), None)
    model = [tensor for tensor in state if categories[tensor.path] == large]
    paths = [short_path(tensor.path).split("/") for tensor in model]
    common = 0
    while paths and all(len(p) > common + 1 and p[common] == paths[0][common] for p in paths):
        common += 1
    names: list[dict[str, None]] = [{} for _ in plan.stages]
    # A number alone says nothing: `layers/3`.
    first = max(common - any(path[common][0].isdigit() for path in paths), 0)
    for tensor, path in zip(model, paths, strict=True):
        for stage in tensor.stages:
            names[stage]["/".join(path[first : common + 1])] = None
    return tuple(tuple(fold_paths(here)) for here in names)
