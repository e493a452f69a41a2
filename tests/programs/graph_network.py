# mypy: disallow-untyped-defs=False
"""A graph network by `segment_sum` on padded graphs, batched by `jax.vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import data
from .case import Case
from .optimizers import adam

NODES = 10
EDGES = 24
FEATURES = 6
WIDTH = 16


@jax.jit
def init(key):
    """Two rounds of messages and a readout."""
    keys = jax.random.split(key, 6)
    rounds = [
        {
            "message": jax.random.normal(keys[2 * i + 1], (2 * WIDTH, WIDTH)) / 6,
            "update": jax.random.normal(keys[2 * i + 2], (2 * WIDTH, WIDTH)) / 6,
            "bias": jnp.zeros(WIDTH),
        }
        for i in range(2)
    ]
    return {
        "embed": jax.random.normal(keys[0], (FEATURES, WIDTH)) / 3,
        "rounds": rounds,
        "readout": jax.random.normal(keys[5], (WIDTH,)) / 4,
    }


def predict(params, graph):
    """The property of one graph."""
    h = jnp.tanh(graph["nodes"] @ params["embed"])
    for layer in params["rounds"]:
        pair = jnp.concatenate([h[graph["senders"]], h[graph["receivers"]]], axis=-1)
        messages = jax.nn.relu(pair @ layer["message"]) * graph["edge_mask"][:, None]
        received = jax.ops.segment_sum(messages, graph["receivers"], num_segments=NODES)
        degree = jax.ops.segment_sum(graph["edge_mask"], graph["receivers"], num_segments=NODES)
        received = received / jnp.maximum(degree, 1)[:, None]
        h = h + jnp.tanh(jnp.concatenate([h, received], -1) @ layer["update"] + layer["bias"])
    return jnp.sum(h * graph["node_mask"][:, None], axis=0) @ params["readout"]


def _graphs(index):
    rng = np.random.default_rng([7, index])
    count = rng.integers(4, NODES + 1, (data.BATCH, 1))
    senders = rng.integers(0, NODES, (data.BATCH, EDGES)) % count
    receivers = rng.integers(0, NODES, (data.BATCH, EDGES)) % count
    nodes = rng.normal(size=(data.BATCH, NODES, FEATURES)).astype(np.float32)
    node_mask = (np.arange(NODES) < count).astype(np.float32)
    return {
        "nodes": nodes,
        "senders": senders.astype(np.int32),
        "receivers": receivers.astype(np.int32),
        "edge_mask": (rng.random((data.BATCH, EDGES)) < 0.9).astype(np.float32),
        "node_mask": node_mask,
        "target": np.sum(nodes[:, :, 0] * node_mask, axis=1),
    }


def build() -> Case:
    """Regression of a graph's property with a Huber loss."""
    optimizer = adam()

    def loss_fn(params, graphs):
        predictions = jax.vmap(predict, in_axes=(None, 0))(params, graphs)
        return optax.huber_loss(predictions, graphs["target"]).mean()

    def train_step(state, graphs):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, graphs)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    params = init(jax.random.key(0))
    batches = [(_graphs(i),) for i in range(data.STEPS)]
    return Case(train_step, (params, jax.jit(optimizer.init)(params)), batches)
