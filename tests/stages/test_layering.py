"""Layers: cheap cuts, balanced work, equal layers recognised."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stages.stage_programs import microbatched_step

from autopar.passes.slicing.anatomy import dissect
from autopar.passes.slicing.layering import boundaries_of, layers_of
from autopar.passes.slicing.stage_graphs import Layer, Layers

WIDTH = 16


def residual_network(depth: int) -> Layers:
    """The layers of pre-norm residual blocks that are wide inside."""
    rng = np.random.default_rng(0)
    params = [
        (
            jnp.asarray(rng.normal(size=(WIDTH, 4 * WIDTH)), jnp.float32),
            jnp.asarray(rng.normal(size=(4 * WIDTH, WIDTH)), jnp.float32),
        )
        for _ in range(depth)
    ]

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for up, down in params:
            normed = x / (1 + jnp.mean(x**2, axis=-1, keepdims=True))
            x = x + jax.nn.relu(normed @ up) @ down
        return jnp.mean(x**2)

    def step(params: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    whole = microbatched_step(step, (params, jnp.ones((8, WIDTH))), microbatches=4)
    return layers_of(dissect(whole.step), whole.rules)


def test_blocks_are_layers_and_inner_ones_are_equal() -> None:
    """Cuts lie where only the residual stream is alive, never in the wide middle of a block."""
    found = residual_network(6)
    assert len(found) == 6
    stream = 2 * WIDTH * 4
    assert [layer.cut_bytes for layer in found.layers] == [stream] * 5 + [0]
    # The first block's input has no gradient, the last one ends in the loss.
    assert len({layer.digest for layer in found.layers[1:-1]}) == 1
    flops = [layer.flops for layer in found.layers]
    assert max(flops) < 1.5 * min(flops)
    assert all(layer.backward_flops > layer.forward_flops for layer in found.layers[1:-1])


@pytest.mark.parametrize("seed", range(10))
def test_stages_are_balanced(seed: int) -> None:
    """The slowest stage is within the allowed slack of the best of all partitions."""
    rng = np.random.default_rng(seed)
    flops = [int(f) for f in rng.integers(1, 1000, 9)]
    found = Layers(tuple(Layer((), f, 0, int(rng.integers(1, 9)), "", "") for f in flops))
    for number in (1, 2, 4, 9):
        cuts = boundaries_of(found, number)

        def slowest(cuts: Any) -> int:
            return max(sum(flops[a:b]) for a, b in itertools.pairwise((0, *cuts, len(flops))))

        best = min(map(slowest, itertools.combinations(range(1, len(flops)), number - 1)))
        assert slowest(cuts) <= 1.05 * best


def test_scans_are_cut_between_any_iterations() -> None:
    """What all layers are given crosses each cut, and so a cut in front of all sends less."""
    rng = np.random.default_rng(0)
    depth, rows = 24, 8
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "given": (WIDTH, WIDTH)}
    params = {
        name: jnp.asarray(rng.normal(size=(depth, *shape)), jnp.float32)
        for name, shape in shapes.items()
    }

    def loss_fn(params: Any, x: jax.Array, c: jax.Array) -> jax.Array:
        c = jnp.tanh(c @ params["given"][0])

        def block(h: Any, w: Any) -> Any:
            h = h + (jax.nn.silu(c) @ w["given"])[:, None]
            return h + jax.nn.relu(h @ w["up"]) @ w["down"], None

        h, _ = jax.lax.scan(jax.checkpoint(block), x, params)
        return jnp.mean(h**2)

    def step(params: Any, x: jax.Array, c: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, c)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    arguments = params, jnp.ones((rows, 2, WIDTH)), jnp.ones((rows, WIDTH))
    whole = microbatched_step(step, arguments, microbatches=4)
    found = layers_of(dissect(whole.step), whole.rules)
    assert len(found) == depth
    flops = [layer.flops for layer in found.layers]
    assert max(flops) < 2 * min(flops)
