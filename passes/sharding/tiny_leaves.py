"""Which leaves of the state are so small that every device keeps them whole."""

from __future__ import annotations

import math
from collections import Counter

from autopar.passes.graph.graph import Graph
from autopar.passes.sharding.scopes import value_bytes

TINY_SHARE = 1000  # a state leaf smaller than the whole state over this stays replicated,
TINY_TOGETHER = 200  # if all that do so are no more than the whole state over this;
MATRIX_BYTES = 2**16  # larger ones if they are, on each device, no more than its
TINY_ON_DEVICE = 100  # even part of the state over this


def tiny_bytes(graph: Graph, devices: int) -> int:
    """State leaves of fewer bytes stay replicated.

    In a model of many layers, matrices are a small share of the state each and most of it together:
    so all that are as large are tiny, or none. Beside experts, those of attention may be a small
    share of the state and a large one of what a device has of it.
    """
    leaves = zip(graph.jaxpr.invars, graph.inputs, strict=True)
    sizes = Counter(value_bytes(var) for var, label in leaves if label.role == "state")
    state = sum(size * count for size, count in sizes.items())
    together = 0
    for size, count in sorted(sizes.items()):
        together += size * count
        whole = TINY_TOGETHER
        if size > MATRIX_BYTES:
            whole = max(whole, TINY_ON_DEVICE * devices)
        if size * TINY_SHARE < state < together * whole:
            return size
    return math.ceil(state / TINY_SHARE)
