"""What a node of the integer program could have chosen instead, as a plan keeps it."""

from __future__ import annotations

import dataclasses

from autopar.base.records import Record


@dataclasses.dataclass(frozen=True)
class RunnerUp(Record):
    """The best that was found with another choice for a node, for nodes that are alike.

    The layouts around the node (within two edges of the integer program) were chosen again,
    all others are as in the plan, and memory was left out: with the whole program chosen again it
    may cost less, never more.

    Args:
      nodes: numbers of the nodes, in the order of the stage's strategies.
      neighbours: for each of them the node that accounts for most of the difference, or -1.
      choice: the other choice's layout.
      more_seconds: by how much a step of the stage would be longer; negative where only memory
        stood against it.
      own_seconds: the part of it that is the node's own computation.
      neighbour_seconds: the part that is the neighbour's, with what is moved between the two.
      more_bytes: the most that it would take more of a device's memory at any time, where it
        would be quicker; else 0.
    """

    nodes: tuple[int, ...]
    neighbours: tuple[int, ...]
    choice: str
    more_seconds: float
    own_seconds: float
    neighbour_seconds: float
    more_bytes: int
