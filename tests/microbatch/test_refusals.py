"""What has no exact split at an acceptable price is refused, with the user's own line."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from microbatch.helpers import analyzed, check_split

import autopar
from autopar.base.errors import InexactMicrobatchError
from autopar.passes.microbatch import split


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def batch_norm(w: Any, x: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        y = x @ w
        y = (y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-5)  # here
        return jnp.mean(jnp.tanh(y) ** 2)

    return jax.value_and_grad(loss_fn)(w)


def contrastive(w: Any, x: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        z = jnp.tanh(x @ w)
        logits = z @ z.T  # here
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jnp.eye(16), axis=1))

    return jax.value_and_grad(loss_fn)(w)


def hardest_examples(w: Any, x: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        losses = jnp.sum((x @ w) ** 2, axis=1)
        return jnp.mean(jnp.sort(losses)[-4:])  # here

    return jax.value_and_grad(loss_fn)(w)


def softmax_over_the_batch(w: Any, x: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        return jnp.sum(jax.nn.softmax(x @ w, axis=0) ** 2)  # here

    return jax.value_and_grad(loss_fn)(w)


def capacity(w: Any, x: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        gates = jax.nn.softmax(x @ w)
        expert = jax.nn.one_hot(jnp.argmax(gates, -1), 4)
        position = jnp.cumsum(expert, axis=0) * expert  # here
        return jnp.sum(gates * jnp.where(position <= 3, expert, 0))

    return jax.value_and_grad(loss_fn)(w)


def neighbours(w: Any, x: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        y = jnp.tanh(x @ w)
        return jnp.mean(jnp.roll(y, 1, axis=0) * y)  # here

    return jax.value_and_grad(loss_fn)(w)


def mixes_often(w: Any, x: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        y = jnp.repeat(x @ w, 16, axis=1)
        y = jnp.cumsum(y, axis=0)  # here
        for _ in range(6):
            y = jnp.tanh(jnp.sort(y, axis=0))
        return jnp.mean(y**2)

    return jax.value_and_grad(loss_fn)(w)


IN_ONE_LOOP = (batch_norm, contrastive, hardest_examples, softmax_over_the_batch, capacity)


@pytest.mark.parametrize(
    ("step", "max_loops"),
    [*((step, 1) for step in IN_ONE_LOOP), (neighbours, 1), (mixes_often, 4)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_is_refused_at_the_right_line(step: Callable[..., Any], max_loops: int) -> None:
    """In one loop, from which stages could be cut, or where several loops do not help."""
    args = (normal(0, 8, 4), normal(1, 16, 8))
    graph, analysis = analyzed(step, args, 4, max_loops=max_loops)
    with pytest.raises(InexactMicrobatchError) as error:
        split(graph, analysis)
    lines, start = inspect.getsourcelines(step)
    (line,) = [start + i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]
    assert f"{__file__}:{line} " in str(error.value.where)
    assert error.value.hint is not None
    assert "microbatches=1" in error.value.hint
    assert ("stages=1" in error.value.hint) == (max_loops == 1)
    assert ("4 loops" in str(error.value.why)) == (max_loops == 4)
    assert analysis.culprits == analysis.costs.causes


@pytest.mark.parametrize(("step", "helps"), [(mixes_often, False), (contrastive, True)])
def test_a_pipeline_names_one_mesh_only_where_it_helps(
    step: Callable[..., Any], helps: bool
) -> None:
    args = (normal(0, 8, 4), normal(1, 16, 8))
    with pytest.raises(InexactMicrobatchError) as error:
        autopar.plan(step, *args, stages=2, microbatches=4)
    assert ("stages=1" in str(error.value.hint)) == helps
    if helps:
        assert autopar.plan(step, *args, microbatches=4).num_microbatches == 4


@pytest.mark.parametrize(
    "step",
    [*IN_ONE_LOOP, neighbours, mixes_often],
    ids=lambda step: step.__name__,
)
def test_is_exact_where_its_price_is_accepted(step: Callable[..., Any]) -> None:
    """What is batch-wide runs behind the loop, on collected values."""
    args = (normal(0, 8, 4), normal(1, 16, 8))
    analysis = check_split(step, args, 4, max_flops_share=1.0, max_bytes_share=10.0)
    assert analysis.costs.causes


def test_one_microbatch_refuses_nothing() -> None:
    graph, analysis = analyzed(contrastive, (normal(0, 8, 4), normal(1, 16, 8)), 1)
    assert split(graph, analysis).graph is graph


@pytest.mark.filterwarnings("ignore::autopar.errors.UnknownPrimitiveWarning")
def test_ordered_callbacks_are_refused() -> None:
    def step(w: Any, x: Any) -> Any:
        y = jnp.sum(x * w)
        shape = jax.ShapeDtypeStruct((), np.float32)
        return y + io_callback(lambda v: v, shape, y, ordered=True)

    graph, analysis = analyzed(step, (np.float32(2), normal(1, 16, 8)), 4)
    with pytest.raises(InexactMicrobatchError, match="ordered") as error:
        split(graph, analysis)
    assert __file__ in str(error.value.where)
    assert "after the step" in str(error.value)  # whatever is said first, this does


def balanced(w: Any, x: Any) -> Any:
    """A router's loss for the balance of experts, in layers of a scan."""

    def loss_fn(w: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            y, balance = carry
            gates = jax.nn.softmax(y @ w[:, :4])  # meets
            load = jnp.mean(jax.nn.one_hot(jnp.argmax(gates, -1), 4), 0)
            balance = balance + jnp.sum(load * jnp.mean(gates, 0))  # computed
            return (jnp.tanh(y @ w), balance), None

        (y, balance), _ = jax.lax.scan(jax.checkpoint(layer), (x, 0.0), w)
        return jnp.mean(y**2) + balance

    return jax.value_and_grad(loss_fn)(w)


def balanced_in_stacks(w: Any, x: Any) -> Any:
    """The same with a loss for each layer: what its gradient makes of rows is carried on."""

    def loss_fn(w: Any) -> Any:
        def layer(y: Any, w: Any) -> Any:
            gates = jax.nn.softmax(y @ w[:, :4])  # meets
            load = jnp.mean(jax.nn.one_hot(jnp.argmax(gates, -1), 4), 0)
            balance = jnp.sum(load * jnp.mean(gates, 0))  # computed
            return y + jnp.tanh(y @ w), balance

        y, balance = jax.lax.scan(jax.checkpoint(layer), x, w)
        return jnp.mean(y**2) + jnp.mean(balance)

    return jax.value_and_grad(loss_fn)(w)


@pytest.mark.parametrize("step", [balanced, balanced_in_stacks])
def test_of_a_scan_the_line_in_its_body_is_told(step: Any) -> None:
    with pytest.raises(InexactMicrobatchError) as error:
        autopar.plan(
            step,
            normal(0, 3, 8, 8),
            normal(1, 16, 8),
            cluster="1x4 h100",
            microbatches=4,
            stages=1,
            batch_argnums=(1,),
        )
    lines, start = inspect.getsourcelines(step)
    meets, computed = (
        next(start + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}"))
        for mark in ("meets", "computed")
    )
    why = " ".join(str(error.value).split())
    assert f"at {__file__}:{meets} " in why.split("In its body, ")[1]
    assert f"only the whole batch determines, computed at {__file__}:{computed} " in why
