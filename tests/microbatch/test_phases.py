"""Small programs for each state of a value and for each phase, compared with plain `jax.jit`."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from microbatch.helpers import analyzed, check_split, run, trace

from autopar.passes.graph.graph import user_source
from autopar.passes.microbatch import analyze, split
from autopar.passes.primitives.populate import populate


@pytest.fixture(params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test's floating-point type, with 64-bit types enabled where it needs them."""
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def normal(seed: int, *shape: int, dtype: Any = "float32") -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def how(analysis: Any) -> dict[str, str]:
    """How each output is put together, by path."""
    return {item.path: item.how for item in analysis.certificate}


def sgd(params: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def test_one_microbatch_is_the_same_graph() -> None:
    graph, analysis = analyzed(lambda w, x: w * x.sum(), (2.0, normal(0, 8, 3)), 1)
    assert split(graph, analysis).graph is graph


def test_mean_loss_and_gradients(dtype: str) -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
            return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        return sgd(params, gradients), loss

    params = {
        "w": normal(0, 5, 7, dtype=dtype),
        "b": np.zeros(7, dtype),
        "v": normal(1, 7, 2, dtype=dtype),
    }
    batch = {"x": normal(2, 24, 5, dtype=dtype), "y": normal(3, 24, 2, dtype=dtype)}
    for count in (2, 3, 24):
        analysis = check_split(step, (params, batch), count)
        assert analysis.costs.loop_share > 0.9
        assert how(analysis)["out[1]"] == "sum"
        assert how(analysis)["out[0]['w']"] == "epilogue"
        assert all(monoid == "sum" for _, monoid in analysis.phases.accumulated)


def test_token_weights_are_counted_before_the_loop(dtype: str) -> None:
    def step(w: Any, batch: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            errors = (batch["x"] @ w) ** 2
            mask = (batch["labels"] >= 0).astype(w.dtype)
            return jnp.sum(errors * mask) / jnp.sum(mask)

        loss, gradient = jax.value_and_grad(loss_fn)(w)
        return w - 0.1 * gradient, loss

    labels = np.random.default_rng(1).integers(-2, 3, (16, 6)).astype(np.int32)
    batch = {"x": normal(0, 16, 6, 4, dtype=dtype), "labels": labels}
    analysis = check_split(step, (normal(2, 4, dtype=dtype), batch), 4)
    assert "reduce_sum" in [step.eqn.primitive.name for step in analysis.phases.prologue]
    assert len(analysis.phases.accumulated) == 2


def test_class_weights_from_parameters_may_still_be_counted_first() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            weights = params["class_weights"][batch["labels"]]
            hidden = batch["x"] @ w
            return jnp.sum((hidden**2).sum(-1) * weights) / jnp.sum(weights)

        loss, gradient = jax.value_and_grad(loss_fn)(params["w"])
        return {**params, "w": params["w"] - gradient}, loss

    labels = np.random.default_rng(1).integers(0, 3, 16).astype(np.int32)
    params = {"w": normal(0, 32, 64), "class_weights": np.array([1, 2, 3], np.float32)}
    analysis = check_split(step, (params, {"x": normal(1, 16, 32), "labels": labels}), 4)
    assert analysis.costs.loop_share > 0.9


def test_per_example_results_are_collected_in_order(dtype: str) -> None:
    def evaluate(w: Any, x: Any) -> Any:
        logits = x @ w
        return {"logits": logits, "best": jnp.argmax(logits, -1), "by_class": logits.T, "x": x}

    analysis = check_split(
        evaluate, (normal(0, 4, 3, dtype=dtype), normal(1, 12, 4, dtype=dtype)), 3
    )
    assert how(analysis) == {
        "out['best']": "collected",
        "out['by_class']": "collected",
        "out['logits']": "collected",
        "out['x']": "prologue",
    }


def test_other_monoids() -> None:
    def evaluate(w: Any, x: Any) -> Any:
        y = x * w
        return {
            "max": y.max(),
            "min": y.min(0),
            "prod": y.prod(),
            "all": (y > -9).all(),
            "any": (y > 0).any(1).any(),
            "step": w + 1,
            "clipped": y.max() * 2 + w,
        }

    analysis = check_split(evaluate, (np.float32(1.5), normal(1, 8, 3)), 4)
    assert how(analysis) == {
        "out['all']": "and",
        "out['any']": "or",
        "out['clipped']": "epilogue",
        "out['max']": "max",
        "out['min']": "min",
        "out['prod']": "prod",
        "out['step']": "invariant",
    }


def test_merged_and_repeated_batch_dimensions(dtype: str) -> None:
    """Rows stay rows through [B, T] -> [B * T], [2 * B] and [B / M, M] views."""

    def step(w: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            tokens = x.reshape(-1, x.shape[-1]) @ w  # [B * T, F]
            views = jnp.concatenate([tokens, jnp.sin(tokens)])
            one, other = jnp.split(views, 2)
            heads = jnp.moveaxis(one.reshape(*x.shape[:2], 2, -1), 2, 0)  # [2, B, T, F / 2]
            merged = heads.reshape(-1, heads.shape[-1])
            return merged.sum() + (other * one).mean() + jnp.repeat(tokens, 2, axis=0).sum()

        return jax.value_and_grad(loss_fn)(w)

    args = (normal(0, 3, 4, dtype=dtype), normal(1, 8, 5, 3, dtype=dtype))
    for count in (2, 4, 8):
        analysis = check_split(step, args, count)
        assert analysis.costs.loop_share > 0.9


def test_batch_axis_need_not_be_the_first() -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(w @ x)))(w)

    args = (normal(0, 3, 4), normal(1, 4, 12))
    graph = trace(step, args)
    graph = replace(graph, inputs=(graph.inputs[0], replace(graph.inputs[1], batch_axis=1)))
    analysis = analyze(graph, populate(graph.jaxpr), 3)
    for one, other in zip(run(graph, args), run(split(graph, analysis).graph, args), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert analysis.costs.loop_share > 0.8


def test_state_with_a_row_for_each_example() -> None:
    """A leaf of the state that is used row by row is sliced, and its gradient is collected."""

    def step(state: Any, x: Any) -> Any:
        def loss_fn(state: Any) -> Any:
            return jnp.sum((x @ state["w"] + state["memory"]) ** 2)

        return sgd(state, jax.grad(loss_fn)(state))

    state = {"w": normal(0, 4, 5), "memory": normal(1, 8, 5)}
    analysis = check_split(step, (state, normal(2, 8, 4)), 4)
    assert len(analysis.phases.collected) == 1


def test_tied_contributions_share_one_accumulator() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            for _ in range(3):
                x_ = jnp.tanh(x @ w) @ w.T
            return jnp.sum(jnp.tanh(x_ @ w) @ w.T)

        return jax.grad(loss_fn)(w)

    analysis = check_split(step, (normal(0, 4, 4), normal(1, 8, 4)), 4)
    assert len(analysis.phases.accumulated) == 1


def test_bfloat16_sums_are_accumulated_in_float32() -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w).astype(jnp.float32)))(w)

    args = (normal(0, 4, 4, dtype=jnp.bfloat16), normal(1, 64, 4, dtype=jnp.bfloat16))
    graph, analysis = analyzed(step, args, 8)
    new = split(graph, analysis).graph
    (loop,) = [eqn for eqn in new.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert [str(v.aval.dtype) for v in loop.outvars] == ["float32"]
    check_split(step, args, 8, tolerance=2e-2)


def test_narrowing_casts_complete_a_sum() -> None:
    def step(w: Any, x: Any) -> Any:
        total = jnp.sum(x * w, axis=0).astype(jnp.bfloat16)
        return total.astype(jnp.float32) + 1

    analysis = check_split(step, (np.float32(2.0), normal(1, 64, 4)), 8)
    late = [step.eqn.primitive.name for step in analysis.phases.epilogue]
    assert late.count("convert_element_type") == 2


def test_clipping_and_dynamic_loss_scaling() -> None:
    def step(state: Any, x: Any) -> Any:
        w, scale = state
        loss, gradient = jax.value_and_grad(lambda w: scale * jnp.mean((x @ w) ** 2))(w)
        gradient = gradient / scale
        norm = jnp.sqrt(jnp.sum(gradient**2))
        finite = jnp.isfinite(norm)
        clipped = gradient * jnp.minimum(1.0, 0.5 / norm)
        new_w = lax.cond(finite, lambda: w - clipped, lambda: w)
        return (new_w, jnp.where(finite, scale * 2, scale / 2)), loss / scale

    state, x = (normal(0, 4, 3), np.float32(8.0)), normal(1, 16, 4)
    analysis = check_split(step, (state, x), 4)
    assert how(analysis) == {"out[0][0]": "epilogue", "out[0][1]": "epilogue", "out[1]": "sum"}
    x[3, 2] = np.inf
    graph, analysis = analyzed(step, (state, x), 4)
    w, scale, loss = run(split(graph, analysis).graph, (state, x))
    np.testing.assert_array_equal(w, state[0])
    assert scale == 4
    assert loss == np.inf


def test_two_losses_and_statistics_of_the_batch() -> None:
    """A sum of one loss may scale another metric: that is the epilogue's business."""

    def step(w: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            y = x @ w
            return jnp.mean(y**2) + 0.1 * jnp.mean(jnp.abs(y)), y

        (loss, y), gradient = jax.value_and_grad(loss_fn, has_aux=True)(w)
        rows = jnp.sum(y**2, axis=1)
        return w - gradient, loss, rows.mean() / loss, rows.max()

    analysis = check_split(step, (normal(0, 8, 16), normal(1, 16, 8)), 4)
    assert how(analysis)["out[3]"] == "max"


def test_cheap_work_on_the_whole_batch_is_allowed() -> None:
    """The deviation of per-example losses needs their mean: it runs behind the loop, exactly."""

    def step(w: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            losses = jnp.sum(jnp.tanh(x @ w) ** 2, axis=1)
            return losses.mean(), losses

        (loss, losses), gradient = jax.value_and_grad(loss_fn, has_aux=True)(w)
        return w - gradient, loss, losses.std()

    analysis = check_split(step, (normal(0, 32, 32), normal(1, 16, 32)), 4)
    assert analysis.costs.causes
    assert analysis.costs.flops_share < 0.01
    assert how(analysis)["out[2]"] == "epilogue"


def test_batch_statistics_of_the_inputs_are_known_before_the_loop() -> None:
    def step(w: Any, x: Any) -> Any:
        normalised = (x - x.mean(0)) / x.std(0)
        return jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(normalised @ w) ** 2))(w)

    analysis = check_split(step, (normal(0, 8, 16), normal(1, 16, 8)), 4)
    assert analysis.costs.loop_share > 0.5


def test_examples_that_are_reordered_or_mixed_up_front() -> None:
    """A permutation of the batch happens before the loop, and the loop slices its result."""

    def step(state: Any, x: Any) -> Any:
        w, key = state
        order = jax.random.permutation(key, x.shape[0])
        mixed = 0.7 * x + 0.3 * x[order]
        ranked = jnp.sort(x, axis=0)
        return jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(mixed @ w) * ranked @ w))(w)

    args = ((normal(0, 8, 8), jax.random.key(1)), normal(1, 16, 8))
    analysis = check_split(step, args, 4)
    assert analysis.costs.loop_share > 0.8


def test_pairs_of_what_comes_from_the_batch_alone() -> None:
    def step(w: Any, batch: Any) -> Any:
        same = batch["labels"][:, None] == batch["labels"][None, :]  # [B, B]
        weights = 1.0 / same.sum(1)
        return jax.grad(lambda w: jnp.sum(weights[:, None] * jnp.tanh(batch["x"] @ w)))(w)

    labels = np.random.default_rng(1).integers(0, 3, 16).astype(np.int32)
    check_split(step, (normal(0, 32, 32), {"x": normal(1, 16, 32), "labels": labels}), 4)


def test_embeddings_looked_up_twice() -> None:
    def step(table: Any, tokens: Any) -> Any:
        def loss_fn(table: Any) -> Any:
            return jnp.sum(jnp.tanh(table[tokens]) * table[tokens[::1] % 5])

        return jax.value_and_grad(loss_fn)(table)

    tokens = np.random.default_rng(0).integers(0, 11, (12, 5)).astype(np.int32)
    analysis = check_split(step, (normal(0, 11, 4), tokens), 4)
    assert {monoid for _, monoid in analysis.phases.accumulated} == {"sum"}


def test_scatter_into_values_that_are_not_zero() -> None:
    def step(table: Any, batch: Any) -> Any:
        return table.at[batch["at"]].add(batch["x"]), table.at[batch["at"]].max(batch["x"])

    at = np.random.default_rng(0).integers(0, 5, 12).astype(np.int32)
    check_split(
        step,
        (normal(0, 5, 3), {"at": at, "x": normal(1, 12, 3)}),
        4,
        max_flops_share=1,
        max_bytes_share=1,
    )


def test_convolutions_and_pooling() -> None:
    def step(kernel: Any, images: Any) -> Any:
        def loss_fn(kernel: Any) -> Any:
            y = lax.conv_general_dilated(
                images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            return jnp.mean(jax.nn.gelu(y))

        return jax.value_and_grad(loss_fn)(kernel)

    analysis = check_split(step, (normal(0, 3, 3, 2, 4), normal(1, 8, 6, 6, 2)), 4)
    assert analysis.costs.loop_share > 0.9


def test_convolutions_of_examples() -> None:
    """What `jax.vmap` brings into the features of a convolution, as its groups, are rows."""

    def step(kernel: Any, images: Any) -> Any:
        def adapted(kernel: Any, x: Any) -> Any:
            def loss(kernel: Any) -> Any:
                numbers = ("NHWC", "HWIO", "NHWC")
                y = lax.conv_general_dilated(
                    x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=2
                )
                return jnp.mean(jnp.tanh(y) ** 2)

            return loss(kernel - 0.1 * jax.grad(loss)(kernel))

        def outer(kernel: Any) -> Any:
            return jnp.mean(jax.vmap(adapted, (None, 0))(kernel, images))

        return jax.value_and_grad(outer)(kernel)

    analysis = check_split(step, (normal(0, 3, 3, 1, 4), normal(1, 8, 3, 6, 6, 2)), 4)
    phases = analysis.phases
    outside = [step.eqn.primitive.name for step in (*phases.prologue, *phases.epilogue)]
    assert "conv_general_dilated" not in outside
    assert 16 in {step.eqn.params.get("feature_group_count") for step in phases.loop}


def test_checkpointed_layers() -> None:
    def step(w: Any, x: Any) -> Any:
        layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
        return jax.value_and_grad(lambda w: jnp.mean(layer(w, layer(w, x))))(w)

    analysis = check_split(step, (normal(0, 4, 4), normal(1, 8, 4)), 4)
    names = [step.eqn.primitive.name for step in analysis.phases.loop]
    assert "optimization_barrier" in names


def test_checkpointed_layers_cast_weights_once() -> None:
    """What does not depend on the batch is there for all microbatches, before the loop."""

    def step(w: Any, x: Any) -> Any:
        layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w.astype(jnp.bfloat16).T))
        return jax.value_and_grad(lambda w: jnp.mean(layer(w, layer(w, x))))(w)

    _, analysis = analyzed(step, (normal(0, 4, 4), normal(1, 8, 4).astype(jnp.bfloat16)), 4)
    before = [step.eqn.primitive.name for step in analysis.phases.prologue]
    assert before == ["convert_element_type"]


def test_a_tied_tables_transpose_and_its_zeros_are_made_inside_the_loop() -> None:
    """Before it, they would be held through all microbatches beside the table."""

    def step(table: Any, tokens: Any) -> Any:
        return jax.value_and_grad(lambda w: jnp.mean((jnp.sin(w[tokens]) @ w.T) ** 2))(table)

    analysis = check_split(step, (normal(0, 16, 4), jnp.arange(8) % 5), 4)
    phases = analysis.phases
    inside = [x.eqn for x in phases.loop if x.eqn.outvars[0].aval.shape in ((16, 4), (4, 16))]
    assert {"transpose", "broadcast_in_dim", "scatter-add"} <= {e.primitive.name for e in inside}
    assert not phases.prologue


def test_a_checkpointed_loss_takes_rows() -> None:
    """Its barrier passes integers, which may be had before the loop, and activations."""

    def step(w: Any, batch: Any) -> Any:
        x, targets = batch

        def loss_fn(w: Any) -> Any:
            @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
            def head(w: Any, x: Any) -> Any:
                logits = jax.nn.log_softmax(x @ w)
                return -jnp.mean(jnp.take_along_axis(logits, targets[..., None], -1))

            return head(w, jnp.tanh(x))

        return jax.value_and_grad(loss_fn)(w)

    check_split(step, (normal(0, 4, 64), (normal(1, 8, 2, 4), jnp.arange(16).reshape(8, 2))), 4)


def test_source_lines_and_name_stacks_survive() -> None:
    def step(w: Any, x: Any) -> Any:
        with jax.named_scope("head"):
            return jnp.sum(jnp.tanh(x @ w))

    graph, analysis = analyzed(step, (normal(0, 4, 4), normal(1, 8, 4)), 4)
    new = split(graph, analysis).graph
    (loop,) = [eqn for eqn in new.jaxpr.eqns if eqn.primitive.name == "scan"]
    (tanh,) = [eqn for eqn in loop.params["jaxpr"].jaxpr.eqns if eqn.primitive.name == "tanh"]
    assert "head" in str(tanh.source_info.name_stack)
    assert __file__ in user_source(tanh)


def test_rows_that_are_written_at_fixed_places() -> None:
    """Writing single rows slices with a few numbers, which do not become inputs."""

    def step(w: Any, x: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            y = jnp.tanh(x @ w).at[jnp.array([1, 6])].set(0.0)
            return jnp.sum(y.at[3].add(1.0) ** 2)

        return jax.value_and_grad(loss_fn)(w)

    args = (normal(0, 4, 4), normal(1, 8, 4))
    check_split(step, args, 4, max_flops_share=1, max_bytes_share=1)


def test_a_transpose_from_which_rows_are_gathered_is_made_once() -> None:
    """A gather takes no order but its own: every microbatch would transpose the table."""

    def step(table: Any, tokens: Any) -> Any:
        return jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(w).T[tokens] ** 2))(table)

    analysis = check_split(step, (normal(0, 4, 16), jnp.arange(8) % 5), 4)
    assert "transpose" in [x.eqn.primitive.name for x in analysis.phases.prologue]


def test_a_causal_mask_is_made_inside_the_loop_unless_something_reads_it_whole() -> None:
    """Before it, XLA:GPU has an array that it writes for all heads of every layer."""

    def step(w: Any, x: Any, written: bool) -> Any:
        def loss_fn(w: Any) -> Any:
            queries = x @ w
            mask = jnp.tril(jnp.ones((6, 6), bool))
            scores = jnp.where(mask, queries @ jnp.swapaxes(x, 1, 2), -1e9)
            seen = (mask.astype(x.dtype) @ x) if written else x
            return jnp.mean((jax.nn.softmax(scores) @ seen) ** 2)

        return jax.value_and_grad(loss_fn)(w)

    args = (normal(0, 4, 4), normal(1, 8, 6, 4))
    for written in (False, True):
        analysis = check_split(functools.partial(step, written=written), args, 4)
        phases = analysis.phases
        made = {x.eqn.primitive.name for x in phases.loop if x.eqn.outvars[0].aval.shape == (6, 6)}
        assert ("ge" in made) is not written
        assert ("ge" in {x.eqn.primitive.name for x in phases.prologue}) is written
