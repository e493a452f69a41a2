"""Problems of the size of one stage of a model, whose memory limit binds hard, for `solver.py`.

Four families of train steps: a chain with skips, a transformer, a U-Net, parallel branches. Each
operation exists in the forward and in the backward pass, what the forward one makes lives until
the backward one, parameters live always and are tied to their moments. A strategy is a layout per
operation; more sharding costs communication and saves memory, with noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.passes.solver import FORBIDDEN, Problem

LAYOUTS = 8


@dataclass
class _Graph:
    """A problem in the making; `layout[u][s]` is the layout in which strategy `s` leaves `u`."""

    random: np.random.Generator
    length: int
    move: np.ndarray = field(init=False)
    layout: list[np.ndarray] = field(default_factory=list)
    costs: list[np.ndarray] = field(default_factory=list)
    usages: list[np.ndarray] = field(default_factory=list)
    intervals: list[tuple[int, int]] = field(default_factory=list)
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    time: int = 0

    def __post_init__(self) -> None:
        self.move = self.random.integers(200, 2000, (LAYOUTS, LAYOUTS))
        np.fill_diagonal(self.move, 0)
        self.shards = 2 ** self.random.integers(0, 4, LAYOUTS)
        self.shards[0] = 1

    def node(self, layout: np.ndarray, size: int, start: int, end: int, work: int) -> int:
        """A node whose strategies cost and use according to their layouts."""
        shards = self.shards[layout]
        noise = self.random.uniform(0.8, 1.2, (2, len(layout)))
        self.layout.append(layout)
        cost = work / shards * noise[0] + self.random.integers(0, work, len(layout)) * (shards > 1)
        self.costs.append(cost.astype(np.int64))
        self.usages.append((size / shards * noise[1]).astype(np.int64))
        self.intervals.append((start, end))
        return len(self.costs) - 1

    def join(self, u: int, v: int, size: int) -> None:
        matrix = self.move[np.ix_(self.layout[u], self.layout[v])] * size // 1000
        self.edges[u, v] = matrix.astype(np.int64)

    def operation(self, inputs: list[int], strategies: int, weight: bool) -> int:
        """A forward operation, its backward one, perhaps a parameter; returns the forward one."""
        size = int(2 ** self.random.uniform(7, 12))
        layout = self.random.integers(0, LAYOUTS, strategies)
        now, then = self.time, self.length - self.time
        self.time += 1
        forward = self.node(layout, size, now, then, 1000)
        back = self.node(layout, size, then - 1, then + 1, 2000)
        self.join(forward, back, size)
        for u in inputs:
            self.join(u, forward, size)
            self.join(back, self.back[u], size)
        self.back[forward] = back
        if weight:
            size = int(2 ** self.random.uniform(7, 12))
            everywhere = np.arange(LAYOUTS)
            parameter = self.node(everywhere, size, 0, self.length + 1, 10)
            moment = self.node(everywhere, 2 * size, 0, self.length + 1, 10)
            tie = np.full((LAYOUTS, LAYOUTS), FORBIDDEN, np.int64)
            np.fill_diagonal(tie, 0)
            self.edges[parameter, moment] = tie
            self.join(parameter, forward, size)
            self.join(back, parameter, size)
        return forward

    back: dict[int, int] = field(default_factory=dict)

    def problem(self, name: str) -> Problem:
        return Problem(
            tuple(self.intervals),
            tuple(self.costs),
            tuple(self.usages),
            tuple(self.edges),
            tuple(self.edges.values()),
            None,
            name,
        )


def chain(nodes: int, strategies: int, seed: int) -> Problem:
    """Operations in a row, one in five with a skip from up to twelve operations before."""
    count = int(nodes / 2.6)
    graph = _Graph(np.random.default_rng(seed), 2 * count)
    made: list[int] = []
    for k in range(count):
        inputs = made[-1:]
        if len(made) > 2 and graph.random.random() < 0.2:
            inputs = [made[-1], made[-1 - int(graph.random.integers(1, min(12, len(made))))]]
        made.append(graph.operation(inputs, strategies, k % 3 == 0))
    return graph.problem(f"chain-{nodes}-{strategies}-{seed}")


def transformer(nodes: int, strategies: int, seed: int) -> Problem:
    """Blocks of query, key, value, scores, mix, projection, two of an MLP, on a residual stream."""
    layers = max(1, round(nodes / 32))
    graph = _Graph(np.random.default_rng(seed), 2 * layers * 10 + 2)
    stream = graph.operation([], strategies, True)
    for _ in range(layers):
        q, k, v = (graph.operation([stream], strategies, True) for _ in range(3))
        scores = graph.operation([q, k], strategies, False)
        mixed = graph.operation([scores, v], strategies, False)
        projected = graph.operation([mixed], strategies, True)
        stream = graph.operation([stream, projected], strategies, False)
        up = graph.operation([stream], strategies, True)
        down = graph.operation([up], strategies, True)
        stream = graph.operation([stream, down], strategies, False)
    return graph.problem(f"transformer-{nodes}-{strategies}-{seed}")


def unet(nodes: int, strategies: int, seed: int) -> Problem:
    """A way down and a way up of equal length, joined at every third operation."""
    half = max(2, int(nodes / 2 / 2.6))
    graph = _Graph(np.random.default_rng(seed), 4 * half + 2)
    skips: list[int] = []
    last: list[int] = []
    for k in range(half):
        last = [graph.operation(last, strategies, k % 3 == 0)]
        if k % 3 == 2:
            skips.append(last[0])
    for k in range(half):
        inputs = last + ([skips.pop()] if k % 3 == 0 and skips else [])
        last = [graph.operation(inputs, strategies, k % 3 == 0)]
    return graph.problem(f"unet-{nodes}-{strategies}-{seed}")


def branches(nodes: int, strategies: int, seed: int) -> Problem:
    """Six branches side by side, which mix with a neighbour now and then."""
    width = 6
    steps = max(1, int(nodes / width / 2.6))
    graph = _Graph(np.random.default_rng(seed), 2 * width * steps + 4)
    row = [graph.operation([], strategies, True) for _ in range(1)] * width
    for k in range(steps):
        new = []
        for b in range(width):
            inputs = [row[b]]
            if graph.random.random() < 0.15 and row[b] != row[b - 1]:
                inputs.append(row[b - 1])
            new.append(graph.operation(inputs, strategies, k % 3 == 0))
        row = new
    return graph.problem(f"branches-{nodes}-{strategies}-{seed}")


FAMILIES: dict[str, Callable[[int, int, int], Problem]] = {
    "chain": chain,
    "transformer": transformer,
    "unet": unet,
    "branches": branches,
}


def with_limit(problem: Problem, least: int, peak: int, part: float) -> Problem:
    """The problem with a limit at a part of the way from the least peak to `peak`."""
    return replace(
        problem,
        usage_limit=int(least + part * (peak - least)),
        name=f"{problem.name}-{part}",
    )
