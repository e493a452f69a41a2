"""Which leaves of the state may lie in the memory of the hosts between steps, and which must."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.arrays.typed_keys import is_key
from autopar.base.cluster import Cluster
from autopar.base.errors import OptionError
from autopar.base.option_values import OFFLOADED
from autopar.base.units import without_rows
from autopar.passes.graph.graph import Graph
from autopar.passes.sharding.batch_dims import BatchDims, parameters
from autopar.passes.sharding.pins import matches_path
from autopar.passes.sharding.scopes import aval_shape, value_bytes
from autopar.passes.sharding.spmd_program import SpmdProgram, host_bytes

SMALL_SHARE = 1000
"""What is smaller than the whole state over this stays on the devices, unless it is named."""


def host_leaves(graph: Graph, offload: str | tuple[str, ...], dims: BatchDims) -> Mapping[int, str]:
    """The numbers of input leaves that "may" or "must" lie in the hosts' memory.

    Args:
      graph: a step, or a stage of it.
      offload: the option.
      dims: where the batch is.
    """
    if offload == "none":
        return {}
    if isinstance(offload, tuple):
        return {i: "must" for i in _leaves(graph) if _is_named(graph.inputs[i].path, offload)}
    large = _large(graph)
    if offload == "auto":
        return dict.fromkeys(large, "may")
    used = parameters(graph, dims)
    return {i: "must" for i in large if i not in used}


def check_offload(graph: Graph, offload: str | tuple[str, ...], cluster: Cluster) -> None:
    """See that every pattern names leaves of the state, and that there is a way to the hosts.

    Raises:
      OptionError: a pattern names none, or the cluster has no `host_bandwidth`.
    """
    if offload not in ("none", "auto") and not cluster.host_bandwidth:
        raise OptionError(
            f"offload={offload!r} is not possible on {cluster.name}.",
            why="the cluster's host_bandwidth is 0: nothing is moved to the hosts' memory.",
            hint="set host_bandwidth, in bytes per second, in a cluster of your own.",
        )
    for pattern in offload if isinstance(offload, tuple) else ():
        if not any(_is_named(graph.inputs[i].path, (pattern,)) for i in _leaves(graph)):
            some = [graph.inputs[i].path for i in _leaves(graph)][:6]
            raise OptionError(
                f"offload={pattern!r} names no array of the state.",
                why=f"its paths look like {', '.join(some) or 'nothing: it has no arrays'}.",
                hint=f"use a shell pattern such as '*mu*', the name of a part of the state, or one "
                f"of {', '.join(map(repr, OFFLOADED))}.",
            )


def may_leave(graph: Graph, offload: str | tuple[str, ...], cluster: Cluster) -> frozenset[int]:
    """The leaves that need not be on the devices between steps, for bounds from below."""
    if offload == "none" or not cluster.host_bandwidth:
        return frozenset()
    if isinstance(offload, str):
        return frozenset(_large(graph))
    return frozenset(i for i in _leaves(graph) if _is_named(graph.inputs[i].path, offload))


def _leaves(graph: Graph) -> list[int]:
    """The state's arrays."""
    return [
        index
        for index, (var, label) in enumerate(zip(graph.jaxpr.invars, graph.inputs, strict=True))
        if label.role == "state" and math.prod(aval_shape(var)) > 1 and not is_key(var.aval.dtype)
    ]


def _large(graph: Graph) -> list[int]:
    leaves, invars = _leaves(graph), graph.jaxpr.invars
    whole = sum(value_bytes(invars[i]) for i in leaves)
    return [i for i in leaves if value_bytes(invars[i]) * SMALL_SHARE >= whole]


def _is_named(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern is for a leaf, or for a part of the state that has it."""
    plain = without_rows(path)
    return any(
        matches_path(plain, form) for pattern in patterns for form in (pattern, f"{pattern}/*")
    )


def hosts_fit(program: SpmdProgram, cluster: Cluster) -> bool:
    """Whether the hosts have the memory for what a program has there."""
    return not cluster.host_share or host_bytes(program) <= cluster.host_share
