"""An independent simulator: the longest paths of the graph of waits, in a few lines."""

from __future__ import annotations

import graphlib
from collections.abc import Mapping, Sequence
from typing import Any

TaskTuple = tuple[str, int, int]


def waits(lists: Sequence[Sequence[TaskTuple]], num_stages: int) -> dict[TaskTuple, set[TaskTuple]]:
    """What each task waits for: the one before it on its mesh, and what it computes with."""
    graph: dict[TaskTuple, set[TaskTuple]] = {}
    for tasks in lists:
        for before, task in zip([None, *tasks], tasks, strict=False):
            kind, stage, i = task
            needed: set[TaskTuple] = {
                "F": {("F", stage - 1, i)} if stage else set(),
                "B": {("F", stage, i)}
                | ({("B", stage + 1, i)} if stage + 1 < num_stages else set()),
                "W": {("B", stage, i)},
            }[kind]
            graph[kind, stage, i] = needed | ({before} if before else set())
    return graph


def has_cycle(lists: Sequence[Sequence[TaskTuple]], num_stages: int) -> bool:
    try:
        graphlib.TopologicalSorter(waits(lists, num_stages)).prepare()
    except graphlib.CycleError:
        return True
    return False


def times(
    lists: Sequence[Sequence[TaskTuple]],
    num_stages: int,
    seconds: Mapping[str, Sequence[Any]],
    latency: Any = 0,
    begins: Sequence[Any] = (),
) -> dict[TaskTuple, tuple[Any, Any]]:
    """(start, end) of every task; a stage starts none before it `begins`."""
    home = {task[1]: mesh for mesh, tasks in enumerate(lists) for task in tasks}
    graph = waits(lists, num_stages)
    result: dict[TaskTuple, tuple[Any, Any]] = {}
    for task in graphlib.TopologicalSorter(graph).static_order():
        after = (result[w][1] + latency * (home[w[1]] != home[task[1]]) for w in graph[task])
        start = max(after, default=0)
        start = max(start, begins[task[1]]) if begins else start
        result[task] = (start, start + seconds[task[0]][task[1]])
    return result
