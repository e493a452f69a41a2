"""What crosses between stages, on small steps written for one question each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Jaxpr
from stages.stage_programs import (
    SplitProgram,
    assert_equal_to_whole,
    check_links,
    crossing,
    microbatched,
    microbatched_step,
    one_each_way,
)

from autopar.base.errors import OptionError
from autopar.passes.graph.alike import pairs_if_alike
from autopar.passes.microbatch import analyze, split
from autopar.passes.primitives.populate import populate
from autopar.passes.slicing.anatomy import dissect
from autopar.passes.slicing.layering import layers_of
from autopar.passes.slicing.slice_stages import slice_stages
from autopar.passes.slicing.stage_graphs import StageGraph, Stages
from autopar.passes.trace.trace import trace

WIDTH, DEPTH = 16, 4


def parameters(depth: int = DEPTH) -> list[jax.Array]:
    """Square matrices."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32) for _ in range(depth)
    ]


def batch(rows: int = 16) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, rows, WIDTH)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(y)


def train(loss_fn: Any, params: Any, clip: bool = False) -> SplitProgram:
    """One step of momentum on `loss_fn(params, x, y)`."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    if clip:
        optimizer = optax.chain(optax.clip_by_global_norm(0.1), optimizer)

    def step(state: Any, data: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *data)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return microbatched_step(step, ((params, optimizer.init(params)), batch()))


def cut(whole: SplitProgram, number: int, split_backward: bool = True) -> Stages:
    """The stages, compared with the whole."""
    stages = slice_stages(whole.step, whole.rules, number, split_backward=split_backward)
    check_links(stages)
    assert_equal_to_whole(whole, stages)
    return stages


def per_step(stages: Stages) -> list[tuple[int, int, str]]:
    """What crosses once a step, without scalars."""
    return [(k.source, k.target, k.label) for k in stages.links if not k.per_microbatch and k.shape]


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_a_multilayer_perceptron(number: int, split_backward: bool) -> None:
    """One activation up and one gradient down per boundary, and the same numbers."""
    whole = microbatched("mlp")
    stages = cut(whole, number, split_backward)
    assert crossing(stages) == one_each_way(number)
    assert not stages.forward_only
    for stage in stages.graphs:
        assert ("W" in stage.tasks) == split_backward


def test_a_tied_matrix_moves_once_a_step() -> None:
    """Its gradient is accumulated on both stages and added up at home."""

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = x @ params[0]
        for w in params[1:]:
            h = jnp.tanh(h) @ w
        return jnp.mean((jnp.tanh(h) @ params[0].T - y) ** 2)

    stages = cut(train(loss_fn, parameters()), 2)
    assert crossing(stages) == one_each_way(2)
    assert per_step(stages) == [(0, 1, "state[0][0]"), (1, 0, "partial sum")]


def test_shared_layers() -> None:
    """All stages use one matrix: it is sent to each, each sends its part of the gradient home."""

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.tanh(x @ params[0])
        return jnp.mean((x - y) ** 2)

    stages = cut(train(loss_fn, parameters(1)), 4)
    assert crossing(stages) == one_each_way(4)
    assert sorted((s, t) for s, t, _ in per_step(stages)) == [
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 0),
        (2, 0),
        (3, 0),
    ]


def test_a_bias_that_all_layers_add_with_a_mask() -> None:
    """It is made again on every stage; its gradient crosses once a step."""

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        bias = params["bias"] + jnp.where(y > 1, -1.0, 0.0)
        for w in params["layers"]:
            x = jnp.tanh(x @ w + bias)
        return jnp.mean((x - y) ** 2)

    params = {"layers": parameters(), "bias": jnp.ones((1, WIDTH))}
    stages = cut(train(loss_fn, params), 2)
    assert crossing(stages) == one_each_way(2)
    assert [(s, t) for s, t, _ in per_step(stages)] == [(0, 1), (1, 0)]


def test_an_encoder_output_goes_with_the_decoder() -> None:
    """Its gradient is added up on the way back, though all its readers are on one line of code."""

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        encoded = x
        for w in params["encoder"]:
            encoded = jnp.tanh(encoded @ w)
        for w, across in params["decoder"]:
            y = jnp.tanh(y @ w + encoded @ across)
        return jnp.mean(y**2)

    matrices = parameters(12)
    params = {
        "encoder": matrices[:4],
        "decoder": list(zip(matrices[4:8], matrices[8:], strict=True)),
    }
    stages = cut(train(loss_fn, params), 3)
    assert crossing(stages) == {
        (0, 1, "activation"): 1,  # the encoder's output
        (0, 2, "activation"): 1,  # the same
        (1, 2, "activation"): 1,
        (2, 1, "gradient"): 2,
        (1, 0, "gradient"): 1,
    }
    assert not per_step(stages)


def test_rematerialized_layers_stay_on_their_stage() -> None:
    """Recomputed products count to the backward pass of the stage that has the layer."""

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ w) @ w.T)

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for w in params:
            x = jax.checkpoint(layer)(w, x)
        return jnp.mean((x - y) ** 2)

    stages = cut(train(loss_fn, parameters()), 2)
    assert crossing(stages) == one_each_way(2)
    assert not per_step(stages)
    products = [
        sum(
            eqn.primitive.name == "dot_general" and task != "F"
            for eqn, task in zip(body(stage).eqns, stage.tasks, strict=True)
        )
        for stage in stages.graphs
    ]
    # Per layer: the first product again (the second's result is not needed), and two gradients
    # each. Before the boundary two fewer: the first layer's input needs no gradient, and what is
    # sent on is not computed again.
    assert products[0] == products[1] - 2


def body(stage: StageGraph) -> Jaxpr:
    """The jaxpr of a stage's loop."""
    assert stage.loop is not None
    return stage.loop.body


def perceptron_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def test_a_global_norm_sends_one_scalar_from_stage_to_stage() -> None:
    """Each stage adds up its own squares first."""

    stages = cut(train(perceptron_loss, parameters(6), clip=True), 3)
    assert crossing(stages) == one_each_way(3)
    assert not per_step(stages)
    scalars = [(k.source, k.target) for k in stages.links if not k.per_microbatch]
    assert sorted(scalars) == [(s, t) for s in range(3) for t in range(3) if s != t]


def test_of_many_stages_the_first_adds_up_a_global_norm() -> None:
    """So the inner ones do the same, and twice as many scalars are sent as there are others."""

    stages = cut(train(perceptron_loss, parameters(12), clip=True), 6)
    scalars = [(k.source, k.target) for k in stages.links if not k.per_microbatch]
    assert sorted(scalars) == [*((0, t) for t in range(1, 6)), *((s, 0) for s in range(1, 6))]
    inner = [stage.graph.jaxpr for stage in stages.graphs[1:-1]]
    assert all(pairs_if_alike(inner[0], other) for other in inner[1:])


def test_stages_of_a_scan_are_alike_wherever_they_begin() -> None:
    """What is made of a constant for all layers is made for each stage's, not cut out."""

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["in"]) * w["scale"], None), x, params)
        return jnp.mean((x - y) ** 2)

    layers = {"in": np.ones((12, 16, 16), np.float32), "scale": np.ones((12, 16), np.float32)}
    stages = cut(train(loss_fn, layers, clip=True), 6)
    inner = [stage.graph.jaxpr for stage in stages.graphs[1:-1]]
    assert all(pairs_if_alike(inner[0], other) for other in inner[1:])


def test_an_evaluation_is_forward_only() -> None:
    """Nothing flows back."""

    def step(params: Any, data: Any) -> jax.Array:
        x, y = data
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    whole = microbatched_step(step, (parameters(), batch()), batch_argnums=(1,))
    stages = cut(whole, 2)
    assert stages.forward_only
    assert crossing(stages) == {(0, 1, "activation"): 1}


def test_bad_input() -> None:
    """More stages than layers, boundaries that are none, and a program without a loop."""
    whole = microbatched("mlp")
    assert len(layers_of(dissect(whole.step), whole.rules)) == 3
    with pytest.raises(OptionError, match=r"it has \d+ layers, even if it is cut between any"):
        slice_stages(whole.step, whole.rules, 100)
    with pytest.raises(OptionError, match="not a number of stages"):
        slice_stages(whole.step, whole.rules, 0)
    for boundaries in ([2, 1], [0], [3], [1, 1]):
        with pytest.raises(OptionError, match="not boundaries between layers"):
            slice_stages(whole.step, whole.rules, boundaries)
    assert slice_stages(whole.step, whole.rules, [2]).boundaries == (2,)
    # With fewer heavy equations than stages, light ones are layers; the same for given boundaries.
    four = slice_stages(whole.step, whole.rules, 4)
    again = slice_stages(whole.step, whole.rules, four.boundaries)
    assert len(four.layers) == 4
    assert again.layers == four.layers

    plain = trace(lambda w, x: (w, jnp.sum(x @ w)), (parameters(1)[0], batch()[0]))
    whole_batch = split(plain.graph, analyze(plain.graph, populate(plain.graph.jaxpr), 1))
    with pytest.raises(OptionError, match="no loop over microbatches"):
        slice_stages(whole_batch, populate(plain.graph.jaxpr), 2)


def test_prints_well() -> None:
    """Layers and stages as a person reads them."""
    whole = microbatched("mlp")
    text = str(slice_stages(whole.step, whole.rules, 2))
    assert text.startswith("2 stages of 3 layers\n  stage 0: layers 0 to 0; equations: ")
    assert "  0 -> 1 per microbatch: activation float32[8,64] (2 KiB)" in text
    assert "3 layers, 3 of them different" in str(layers_of(dissect(whole.step), whole.rules))
