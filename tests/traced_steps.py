"""A train step on shapes alone, and what tracing says of its inputs."""

from typing import Any

import jax
import jax.numpy as jnp

from autopar.passes.graph import graph
from autopar.passes.trace.trace import Traced

W = jax.ShapeDtypeStruct((8, 4), jnp.float32)
B = jax.ShapeDtypeStruct((4,), jnp.float32)
X = jax.ShapeDtypeStruct((16, 8), jnp.float32)
Y = jax.ShapeDtypeStruct((16, 4), jnp.float32)
PARAMS = {"w": W, "b": B}


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def sgd(params: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def train(params: Any, x: Any, y: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_fn)(params, x, y)
    return sgd(params, gradients), loss


def check(traced: Traced) -> dict[str, graph.Input]:
    """The labels by path, of a graph that is sound."""
    graph.check(traced.graph)
    return {label.path: label for label in traced.graph.inputs}


def roles(traced: Traced) -> dict[str, str]:
    return {path: label.role for path, label in check(traced).items()}
