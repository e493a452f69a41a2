"""Tiny train steps on shapes alone, and the passes applied to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.base.cluster import Cluster, axis_names
from autopar.base.options import Options
from autopar.passes.graph.graph import Graph
from autopar.passes.graph.microbatched import in_phases
from autopar.passes.planner.compiler import Compiled, compile_graph
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding.batch_dims import BatchDims, batch_dims
from autopar.passes.sharding.build import build
from autopar.passes.sharding.lower import lower
from autopar.passes.sharding.pins import resolve_pins
from autopar.passes.sharding.pricing import Pricing
from autopar.passes.sharding.restrict import Restriction, restriction
from autopar.passes.sharding.spmd_program import SpmdProgram
from autopar.passes.sharding.strategy_graph import StrategyGraph
from autopar.passes.trace.trace import trace

CLUSTER = Cluster.preset("h100")
Shapes = Any  # a pytree of jax.ShapeDtypeStruct


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def momentum_step(state: Any, batch: Any) -> Any:
    """Least squares with one hidden layer, by gradient descent with momentum."""

    def loss_fn(weights: Any) -> Any:
        x, y = batch
        return jnp.sum((jnp.tanh(x @ weights["in"]) @ weights["out"] - y) ** 2)

    weights, velocity = state
    gradients = jax.grad(loss_fn)(weights)
    velocity = jax.tree.map(lambda v, g: 0.5 * v + g, velocity, gradients)
    return jax.tree.map(lambda w, v: w - v, weights, velocity), velocity


def momentum_shapes(batch: int = 16, features: int = 8, hidden: int = 32) -> tuple[Shapes, Shapes]:
    """Arguments of `momentum_step`; the weights and the velocity are equally large."""
    weights = {"in": shaped(features, hidden), "out": shaped(hidden, features)}
    return (weights, weights), (shaped(batch, features), shaped(batch, features))


def linear_step(state: Any, batch: Any) -> Any:
    """Least squares by gradient descent with a sum of gradients: one matrix of each kind."""
    weights, total = state
    x, y = batch
    total = total + jax.grad(lambda w: jnp.sum(jnp.square(x @ w - y)))(weights)
    return weights - total, total


def linear_shapes() -> tuple[Shapes, Shapes]:
    """Arguments of `linear_step`."""
    return (shaped(8, 8), shaped(8, 8)), (shaped(16, 8), shaped(16, 8))


def recurrent_step(state: Any, batch: Any) -> Any:
    """A recurrence over time, a branch on a norm, a scale in the state, and a metric."""

    def loss_fn(weights: Any) -> Any:
        x, y = batch

        def body(hidden: Any, now: Any) -> Any:
            hidden = jnp.tanh(hidden @ weights + now)
            return hidden, hidden.max(axis=1)

        last, largest = jax.lax.scan(body, jnp.zeros_like(y), jnp.moveaxis(x, 1, 0))
        return jnp.mean((last - y) ** 2) + 0.1 * jnp.mean(largest)

    weights, scale = state
    loss, gradient = jax.value_and_grad(loss_fn)(weights)
    norm = jnp.sqrt(jnp.sum(gradient**2))
    gradient = jax.lax.cond(norm > 0.1, lambda g: g * (0.1 / norm), lambda g: g, gradient)
    return (weights - scale * gradient, scale * 0.99), loss


def recurrent_shapes() -> tuple[Shapes, Shapes]:
    """Arguments of `recurrent_step`: eight examples of four points in time."""
    return (shaped(8, 8), shaped()), (shaped(8, 4, 8), shaped(8, 8))


def arrays(shapes: Shapes, seed: int = 0) -> Any:
    """Normal numbers of these shapes."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype), shapes)


def graph_of(step: Callable[..., Any], *args: Any, **options: Any) -> Graph:
    return trace(step, args, **options).graph


def compiled(graph: Graph, cluster: Cluster = CLUSTER, **options: Any) -> Compiled:
    return compile_graph(graph, Options(**options), cluster)


def sharded(made: Compiled) -> SpmdProgram:
    """What one mesh runs."""
    (program,) = made.runnable.pieces.programs
    return program


class Passes:
    """The sharding passes on one mesh, step by step."""

    def __init__(
        self,
        graph: Graph,
        mesh: tuple[int, ...],
        method: str = "shard",
        pins: Any = (),
    ):
        self.graph, self.mesh, self.names = graph, mesh, axis_names(mesh)
        self.rules: Any = populate(graph.jaxpr)
        self.dims: BatchDims = batch_dims(graph, self.rules)
        found = resolve_pins(graph, pins, mesh, self.names)
        self.restriction: Restriction = restriction(graph, method, self.dims, mesh, found)
        self.pricing = Pricing(CLUSTER, mesh, self.restriction.reduce_scatter)

    def build(self) -> StrategyGraph:
        return build(in_phases(self.graph), self.rules, self.mesh, self.pricing, self.restriction)

    def lower(self, built: StrategyGraph, assignment: Any) -> SpmdProgram:
        return lower(in_phases(self.graph), built, assignment, self.pricing, self.names, self.dims)
