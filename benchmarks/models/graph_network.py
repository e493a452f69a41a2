"""Messages along the edges of graphs (Battaglia et al., 2018), one `jax.vmap` for a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.blocks import maybe_remat


@dataclass(frozen=True)
class GraphSize:
    """Width, rounds of messages, nodes and edges of a graph."""

    hidden: int
    layers: int
    nodes: int
    edges: int
    features: int = 64


SIZES = {"small": GraphSize(256, 4, 512, 4096), "large": GraphSize(512, 8, 1024, 8192)}


class MessageRound(nn.Module):
    """Every edge tells its receiver what a network makes of both ends."""

    hidden: int
    dtype: Any

    @nn.compact
    def __call__(self, nodes: jax.Array, edges: jax.Array, ends: jax.Array) -> Any:
        def network(x: jax.Array) -> jax.Array:
            y = nn.relu(nn.Dense(2 * self.hidden, dtype=self.dtype)(x))
            return nn.LayerNorm(dtype=self.dtype)(nn.Dense(self.hidden, dtype=self.dtype)(y))

        senders, receivers = ends
        said = network(jnp.concatenate([edges, nodes[senders], nodes[receivers]], axis=-1))
        heard = jax.ops.segment_sum(said, receivers, num_segments=nodes.shape[0])
        return nodes + network(jnp.concatenate([nodes, heard], axis=-1)), edges + said


class GraphNetwork(nn.Module):
    """Features of nodes and edges, and the edges' ends, to a value for every node."""

    size: GraphSize
    dtype: Any
    remat: bool | str = False

    @nn.compact
    def __call__(self, nodes: jax.Array, edges: jax.Array, ends: jax.Array) -> jax.Array:
        size, dtype = self.size, self.dtype
        nodes = nn.Dense(size.hidden, dtype=dtype)(nodes)
        edges = nn.Dense(size.hidden, dtype=dtype)(edges)
        block = maybe_remat(MessageRound, self.remat)
        for _ in range(size.layers):
            nodes, edges = block(size.hidden, dtype)(nodes, edges, ends)
        return nn.Dense(3, dtype=dtype)(nodes)
