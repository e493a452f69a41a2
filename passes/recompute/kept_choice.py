"""A choice of what a step keeps for its backward pass, and what it computes again."""

from __future__ import annotations

from dataclasses import dataclass

from jax.extend.core import Var

from autopar.passes.recompute.scan_stacks import StackCut


@dataclass(frozen=True)
class KeptChoice:
    """A choice: what is computed again, at which price.

    Args:
      price: seconds for each byte of a microbatch that is kept.
      again: the layer for whose backward pass an equation (a number in the loop's body) runs again.
      values: that are kept inside of layers.
      saved_bytes: of a microbatch, against keeping all that the backward pass reads.
      seconds: of computing again on one device, for one microbatch.
      hosted: values that are kept in the hosts' memory.
      hosted_bytes: of a microbatch.
      host_share: the share of the layers, the first ones, whose kept values these are.
      every_layer: the last one too, or all that its backward pass reads is kept.
      scans: what backward scans compute again in each iteration, by the number of the forward scan.
      joined: so many blocks run again with the one before them (`joined_blocks`).
    """

    price: float
    again: frozenset[tuple[int, int]]
    values: frozenset[Var]
    saved_bytes: int
    seconds: float
    hosted: frozenset[Var] = frozenset()
    hosted_bytes: int = 0
    host_share: float = 0.0
    every_layer: bool = True
    scans: tuple[tuple[int, StackCut], ...] = ()
    joined: int = 0
