"""The cuts of graphs that branch, for the stage search: which cut may follow which.

A state says what has run before the cut; a stage is what lies between two states. A graph that
branches gives its downsets: sets of nodes that hold, with every node, all of its predecessors.
PipeDream's antichains and Piper's ideals are such states. A lattice is, for each state in a
topological order, the states that may be the next cut, as `StageProblem` takes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.passes.planner.stage_problem import Successors


def from_predecessors(predecessors: Sequence[Collection[int]]) -> Successors:
    """The lattice in which state s may follow the states `predecessors[s]`.

    >>> [after.tolist() for after in from_predecessors([[], [0], [0], [0, 1, 2]])]
    [[1, 2, 3], [3], [3], []]
    """
    successors: list[list[int]] = [[] for _ in predecessors]
    for state, before in enumerate(predecessors):
        for other in before:
            if not 0 <= other < state:
                raise ValueError(f"state {other} cannot precede state {state}")
            successors[other].append(state)
    return tuple(np.array(after, dtype=np.intp) for after in successors)


def downsets(predecessors: Sequence[Collection[int]], *, limit: int) -> NDArray[np.bool_] | None:
    """All sets of nodes that contain every predecessor of their members.

    Args:
      predecessors: for each node, the nodes that must come before it.
      limit: the most sets to enumerate; a graph with w independent branches of length n has about
        n**w of them.

    Returns:
      A boolean array `[sets, nodes]`, ordered by size and then by members, so that the empty set
      is first and that of all nodes last; None where there are more than `limit`.

    Raises:
      ValueError: the graph has a cycle.

    >>> downsets([[], [], [0, 1]], limit=10).astype(int).tolist()
    [[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    num_nodes = len(predecessors)
    needed = [sum(1 << node for node in set(before)) for before in predecessors]
    found = level = {0}
    for _ in range(num_nodes):
        level = {
            members | 1 << node
            for members in level
            for node in range(num_nodes)
            if not members >> node & 1 and needed[node] & ~members == 0
        }
        found = found | level
        if len(found) > limit:
            return None
    if (1 << num_nodes) - 1 not in found:
        raise ValueError("the graph has a cycle")
    rows = np.array([[members >> node & 1 for node in range(num_nodes)] for members in found])
    rows = rows.reshape(len(found), num_nodes).astype(np.bool_)
    keys = [*rows.T[::-1], rows.sum(axis=1)]
    return rows[np.lexsort(keys)]


def inclusion_lattice(sets: NDArray[np.bool_]) -> Successors:
    """The lattice whose states are `sets` (`[sets, nodes]`, by size): a cut may follow its subsets.

    >>> sets = downsets([[], [], [0, 1]], limit=10)
    >>> [after.tolist() for after in inclusion_lattice(sets)]
    [[1, 2, 3, 4], [3, 4], [3, 4], [4], []]
    """
    counts = sets.astype(np.float32)
    sizes = sets.sum(axis=1)
    contained = counts @ counts.T == sizes[:, None]
    return tuple(
        np.flatnonzero(row & (sizes > size)) for row, size in zip(contained, sizes, strict=True)
    )
