"""A boundary inside of a block that `jax.checkpoint` computes again."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_jit import equals_plain_jit

from autopar import Stage
from autopar.passes.microbatch import analyze, split
from autopar.passes.primitives.populate import populate
from autopar.passes.slicing.slice_stages import find_layers
from autopar.passes.trace.trace import trace

WIDTH, ROWS, DEPTH = 64, 32, 3
BATCH = np.random.default_rng(2).normal(size=(2, ROWS, WIDTH)).astype(np.float32)


@jax.checkpoint
def block(x: jax.Array, w: jax.Array) -> jax.Array:
    """Two residual parts, as attention and a feed-forward network are."""
    x = x + jnp.tanh(jnp.tanh(x / 2) @ w[0]) @ w[1]
    return x + jnp.tanh(jnp.tanh(x / 2) @ w[2]) @ w[3]


def train_step(params: Any, x: Any, y: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        h = x
        for w in params:
            h = block(h, w)
        return jnp.mean((h - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.mark.parametrize("boundaries", [(2,), (4,), (2, 4)])
def test_each_stage_computes_its_part_of_the_block_again(boundaries: tuple[int, ...]) -> None:
    """One activation crosses each boundary, one gradient comes back, and no weight moves."""
    keys = jax.random.split(jax.random.key(0), DEPTH)
    params = [list(jax.random.normal(key, (4, WIDTH, WIDTH)) / 8) for key in keys]
    ends = (0, *boundaries, 7)  # two layers a block, three of the first
    devices = (2, 2, 4) if len(boundaries) == 2 else (4, 4)
    stages = [
        Stage(layers=stop - start, devices=size)
        for (start, stop), size in zip(itertools.pairwise(ends), devices, strict=True)
    ]
    options: dict[str, Any] = {"stages": stages, "microbatches": 4, "method": "data"}
    plan = equals_plain_jit(train_step, params, *BATCH, **options).plan
    sent = sorted(
        (transfer.source, transfer.target, transfer.what, transfer.times)
        for transfer in plan.pipeline.transfers
        if transfer.bytes > 4
    )
    expected = []
    for stage in range(len(plan.stages) - 1):
        expected.append((stage, stage + 1, "activation", 4))
        expected.append((stage + 1, stage, "gradient", 4))
    assert sent == sorted(expected)


def narrow(x: jax.Array, w: jax.Array) -> jax.Array:
    """Less crosses inside of it than after it, and its derivative reads its own result."""
    return jnp.tanh(jnp.tanh(x @ w[0, :, : 3 * WIDTH // 4]) @ w[1, : 3 * WIDTH // 4])


def _layers(step: Any, depth: int) -> list[tuple[int, bool]]:
    """Of each layer the products, and whether the cut after it is inside of a block."""
    params = [list(jnp.ones((4, WIDTH, WIDTH))) for _ in range(depth)]
    x = jnp.ones((ROWS, WIDTH))
    graph = trace(step, (params, x, x)).graph
    phases = split(graph, analyze(graph, populate(graph.jaxpr), 4))
    assert phases.loop is not None
    names = [eqn.primitive.name for eqn in phases.loop.body.eqns]
    layers = find_layers(phases, populate(phases.graph.jaxpr)).found.layers
    return [([names[i] for i in x.equations].count("dot_general"), x.inside) for x in layers]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_a_deep_program_is_cut_between_blocks(wrap: Any) -> None:
    """Inside of a block that is computed again, what crosses would be kept as well."""
    again = wrap is jax.checkpoint
    again_block = wrap(narrow)

    def step(params: Any, x: Any, y: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            h = x
            for w in params:
                h = again_block(h, jnp.stack(w))
            return jnp.mean((h - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    products, inside = zip(*_layers(step, 60), strict=True)
    ends = list(itertools.accumulate(products))
    assert ends[-1] == 120 and not any(inside)
    assert all(end % 2 == 0 for end in ends) == again


def test_a_layer_says_whether_it_ends_inside_of_a_block() -> None:
    products, inside = zip(*_layers(train_step, DEPTH), strict=True)
    assert len(products) > DEPTH
    ends = itertools.accumulate(products)
    assert [end % 4 > 0 for end in ends] == list(inside)


def test_a_layer_of_a_scan_reads_its_part_of_the_parameters() -> None:
    depth = 4

    def step(params: Any, x: Any, y: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)
            return jnp.mean((h - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return params - 0.1 * grads, loss

    params, x = jnp.ones((depth, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))
    graph = trace(step, (params, x, x)).graph
    phases = split(graph, analyze(graph, populate(graph.jaxpr), 4))
    layers = find_layers(phases, populate(phases.graph.jaxpr)).found.layers
    assert len(layers) == depth
    assert {layer.weight_bytes for layer in layers} == {WIDTH * WIDTH * 4}
