"""The states between which a program may be cut, and which cut may follow which.

A state says what has run before the cut; a stage is what lies between two states. Consecutive
layers give a chain. A graph that branches gives its downsets: sets of nodes that hold, with every
node, all of its predecessors. PipeDream's antichains and Piper's ideals are such states.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Lattice:
    """Cut states in a topological order; the first is the program's start, the last its end.

    Args:
      successors: for each state, the states that may be the next cut, ascending and later than it.

    Raises:
      ValueError: a successor is not later than its state, or they are out of order.

    >>> print(Lattice.chain(3))
    4 cut states, 6 stages
    """

    successors: tuple[NDArray[np.intp], ...]

    def __post_init__(self) -> None:
        if not self.successors:
            raise ValueError("a lattice needs a state")
        for state, after in enumerate(self.successors):
            bounded = np.concatenate(([state], after, [self.num_states]))
            if not (np.diff(bounded) > 0).all():
                raise ValueError(
                    f"the successors of state {state} must be later, each once: {after}"
                )

    @classmethod
    def chain(cls, num_layers: int) -> Lattice:
        """Every cut of `num_layers` layers in a row: state i has layers 0..i-1 before it."""
        return cls(tuple(np.arange(i + 1, num_layers + 1) for i in range(num_layers + 1)))

    @classmethod
    def from_predecessors(cls, predecessors: Sequence[Collection[int]]) -> Lattice:
        """The lattice in which state s may follow the states `predecessors[s]`.

        >>> print(Lattice.from_predecessors([[], [0], [0], [0, 1, 2]]))
        4 cut states, 5 stages
        """
        successors: list[list[int]] = [[] for _ in predecessors]
        for state, before in enumerate(predecessors):
            for other in before:
                if not 0 <= other < state:
                    raise ValueError(f"state {other} cannot precede state {state}")
                successors[other].append(state)
        return cls(tuple(np.array(after, dtype=np.intp) for after in successors))

    @property
    def num_states(self) -> int:
        return len(self.successors)

    def longest_paths(self) -> NDArray[np.intp]:
        """For each state, the most stages that a path from it to the end has; -1: there is none."""
        longest = np.full(self.num_states, -1)
        longest[-1] = 0
        for state in reversed(range(self.num_states - 1)):
            best = longest[self.successors[state]].max(initial=-1)
            longest[state] = best + 1 if best >= 0 else -1
        return longest

    def __str__(self) -> str:
        return f"{self.num_states} cut states, {sum(map(len, self.successors))} stages"


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


def inclusion_lattice(sets: NDArray[np.bool_]) -> Lattice:
    """The lattice whose states are `sets` (`[sets, nodes]`, by size): a cut may follow its subsets.

    >>> print(inclusion_lattice(downsets([[], [], [0, 1]], limit=10)))
    5 cut states, 9 stages
    """
    counts = sets.astype(np.float32)
    sizes = sets.sum(axis=1)
    contained = counts @ counts.T == sizes[:, None]
    return Lattice(
        tuple(
            np.flatnonzero(row & (sizes > size)) for row, size in zip(contained, sizes, strict=True)
        )
    )
