"""Which arguments hold the batch, in which dimension: as the user says, or as the program tells."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from traced_steps import PARAMS, X, Y, check, loss_fn, roles, sgd, train

import autopar
from autopar.base.errors import BatchArgumentError, OptionError
from autopar.passes.graph import graph
from autopar.passes.trace.trace import trace

# The batch, as the user names it


def masked(params: Any, batch: Any) -> Any:
    return train(params, batch["mask"] @ batch["x"], batch["y"])


MASKED = {
    "x": jax.ShapeDtypeStruct((16, 8, 8), jnp.float32),
    "y": jax.ShapeDtypeStruct((16, 8, 4), jnp.float32),
    "mask": jax.ShapeDtypeStruct((8, 8), jnp.float32),
}


def test_rows_against_rows_are_ambiguous() -> None:
    def step(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            return jax.nn.logsumexp((batch["query"] @ w) @ batch["key"].T)

        return w - 0.1 * jax.grad(loss)(w)

    w, key = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((12, 8), jnp.float32)
    with pytest.raises(BatchArgumentError) as caught:
        trace(step, (w, {"query": X, "key": key}))
    text = str(caught.value)
    assert caught.value.where == "batch['key']"
    for part in ("batch_argnums", "batch['query']: 16", "batch['key']: 12"):
        assert part in text
    assert "for 16 examples: batch_axes=(None, {'key': None, 'query': 0})" in text
    assert "for 8 examples" not in text, "the state has them too"


def test_a_batch_with_features_first_is_named() -> None:
    def step(w: Any, x: Any, y: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((w @ x - y) ** 2))(w)

    w, x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 8), (8, 32), (4, 32)))
    with pytest.raises(BatchArgumentError, match="ambiguous") as caught:
        trace(step, (w, x, y))
    assert "for 32 examples: batch_axes=(None, 1, 1)" in str(caught.value)
    assert trace(step, (w, x, y), batch_axes=(None, 1, 1)).batch_size == 32


def test_batch_axes_name_what_holds_no_batch() -> None:
    axes = {"x": 0, "y": 0, "mask": None}
    for prefix in ((None, axes), [None, axes]):
        labels = check(traced := trace(masked, (PARAMS, MASKED), batch_axes=prefix))
        assert labels["batch['mask']"].role == "other"
        assert labels["batch['x']"] == graph.Input("batch['x']", "batch", 0)
        assert labels["params['w']"].donated
        assert traced.batch_size == 16


def test_batch_axes_may_be_negative_and_apply_to_a_subtree() -> None:
    def step(params: Any, batch: Any, *, extra: Any) -> Any:
        return train(params, batch[0].T + extra[:, :1], batch[1].T)

    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    y = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    labels = check(trace(step, (PARAMS, (x, y)), {"extra": X}, batch_axes=(None, -1)))
    assert [labels[f"batch[{i}]"].batch_axis for i in (0, 1)] == [1, 1]
    assert labels["extra"].batch_axis == 0


@pytest.mark.parametrize(
    ("axes", "error", "text"),
    [
        ((None,), OptionError, "has 1 entry, and the call has 2 positional"),
        ((None, {"x": 0}), OptionError, "does not fit argument batch"),
        ((None, "x"), OptionError, "'x' for batch"),
        ((None, 3), BatchArgumentError, "dimension 3"),
        ({"batch": 0}, OptionError, "must be an integer, or a tuple"),
    ],
)
def test_batch_axes_that_do_not_fit(axes: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        trace(masked, (PARAMS, MASKED), batch_axes=axes)


def test_batch_argnums() -> None:
    def step(table: Any, params: Any, x: Any, y: Any) -> Any:
        return train(params, x + table.sum(), y)

    table = jax.ShapeDtypeStruct((5, 8), jnp.float32)
    with pytest.raises(BatchArgumentError, match="ambiguous"):
        trace(step, (table, PARAMS, X, Y))
    for argnums in ((2, 3), (-2, -1)):
        found = roles(trace(step, (table, PARAMS, X, Y), batch_argnums=argnums))
        assert found["x"] == found["y"] == "batch"
        assert found["table"] == "state"
    by_name = trace(step, (table, PARAMS), {"x": X, "y": Y}, batch_argnums=(2, 3))
    assert roles(by_name)["x"] == "batch"
    with pytest.raises(OptionError, match="names argument 7"):
        trace(step, (table, PARAMS, X, Y), batch_argnums=(7,))
    with pytest.raises(BatchArgumentError, match="Argument rate holds no batch"):
        trace(lambda params, rate: sgd(params, params), (PARAMS, 0.1), batch_argnums=(1,))


def test_a_batch_without_rows() -> None:
    x, y = (jax.ShapeDtypeStruct((0, *shape.shape[1:]), shape.dtype) for shape in (X, Y))
    assert trace(train, (PARAMS, x, y)).batch_size == 0
    with pytest.raises(BatchArgumentError, match="without rows cannot be divided into 2") as error:
        trace(train, (PARAMS, x, y), microbatches=2)
    assert error.value.where == "x"


def test_no_batch_argument() -> None:
    def step(params: Any) -> Any:
        return sgd(params, params)

    assert trace(step, (PARAMS,)).batch_size is None
    assert trace(step, (PARAMS,), microbatches=1).batch_size is None
    for request in ({"microbatches": 4}, {"method": "data"}, {"method": "zero3"}):
        with pytest.raises(BatchArgumentError, match="needs a batch, and no argument holds one"):
            trace(step, (PARAMS,), **request)


def test_no_leaf_is_named() -> None:
    with pytest.raises(BatchArgumentError, match="needs a batch") as caught:
        trace(train, (PARAMS, X, Y), microbatches=4, batch_axes=(None, None, None))
    assert caught.value.where == "batch_axes"
    assert "names no dimension" in str(caught.value.why)


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(BatchArgumentError, match="16 examples cannot be divided into 3") as caught:
        trace(train, (PARAMS, X, Y), microbatches=3)
    assert caught.value.where == "x"
    assert "1, 2, 4, 8, 16" in str(caught.value.hint)


# The batch, where the leading sizes do not tell

IDS = jax.ShapeDtypeStruct((16,), jnp.int32)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, batch: sgd(params, jax.grad(loss)(params, batch))


def unlabelled(params: Any, batch: Any) -> Any:
    more = jnp.mean(jnp.tanh(batch["u"] @ params["w"]) ** 2)
    return loss_fn(params, batch["x"], batch["y"]) + more


def graph_net(params: Any, batch: Any) -> Any:
    sent = batch["nodes"][batch["senders"]]
    received = jax.ops.segment_sum(sent, batch["receivers"], num_segments=16)
    return loss_fn(params, batch["nodes"] + received, batch["labels"])


def pooled(params: Any, batch: Any) -> Any:
    sent = (batch["nodes"] @ params["w"])[batch["senders"]]
    received = jax.ops.segment_sum(sent, batch["receivers"], num_segments=16)
    totals = jax.ops.segment_sum(received, batch["graph"], num_segments=3)
    return jnp.mean((totals - batch["target"]) ** 2)


def time_first(params: Any, batch: Any) -> Any:
    values = (batch["obs"] @ params["w"]).mean(-1)

    def back(later: Any, reward: Any) -> Any:
        later = reward + 0.9 * later
        return later, later

    _, returns = jax.lax.scan(back, batch["last"], batch["reward"], reverse=True)
    return jnp.mean((values - returns) ** 2)


def recurrent(params: Any, batch: Any) -> Any:
    def forward(state: Any, x: Any) -> Any:
        state = jnp.tanh(state + x @ params["w"])
        return state, state

    start = jnp.zeros(batch["x"].shape[1:2] + params["b"].shape)  # of the shape of params["w"]
    return jnp.mean((jax.lax.scan(forward, start, batch["x"])[1] - batch["y"]) ** 2)


def counted(params: Any, batch: Any) -> Any:
    """A metric of the rows in their order, beside the loss of tokens that are shifted."""
    ids, start = batch["ids"], jnp.float32(0)
    average, _ = jax.lax.scan(lambda a, row: (0.9 * a + jnp.mean(row == 0), None), start, ids)

    def loss(params: Any) -> Any:
        logits = jax.nn.one_hot(ids[:, :-1], 8) @ params["w"]
        return jnp.mean(cross_entropy(logits, ids[:, 1:] % 4))

    return sgd(params, jax.grad(loss)(params)), average


def attended(params: Any, batch: Any) -> Any:
    """The same metric, where positions are compared with positions."""
    x = batch["x"]
    start = jnp.float32(0)
    average, _ = jax.lax.scan(lambda a, row: (0.9 * a + jnp.mean(row), None), start, x)

    def loss(params: Any) -> Any:
        return loss_fn(params, jax.nn.softmax(x @ x.mT) @ x, batch["y"])

    return sgd(params, jax.grad(loss)(params)), average


def states_of(params: Any, x: jax.Array) -> Any:
    """What a recurrence over time makes of its rows."""

    def forward(state: Any, row: Any) -> Any:
        state = jnp.tanh(state + row @ params["w"])
        return state, state

    return jax.lax.scan(forward, jnp.zeros((x.shape[1], 4)), x)[1]


def weighted_in_time(params: Any, batch: Any) -> Any:
    losses = ((states_of(params, batch["x"]) - batch["y"]) ** 2).mean((1, 2))
    return jnp.mean(losses * batch["weight"])


def contrasted(params: Any, batch: Any) -> Any:
    """The last states of a recurrence, each against those of the other rows."""
    last = states_of(params, batch["x"])[-1]
    return jnp.mean(jax.nn.logsumexp(last @ last.T, -1)) + jnp.mean(last[:8] - last[8:])


def remembered(params: Any, batch: Any) -> Any:
    """Batches of two sizes, and a loss that is written to its place in a history."""
    loss, gradients = jax.value_and_grad(unlabelled)(params, batch)
    return sgd(params, gradients), jnp.zeros(10).at[jnp.argmax(params["b"])].set(loss)


def weighted(params: Any, batch: Any) -> Any:
    losses = cross_entropy(batch["x"] @ params["w"], batch["ids"]) * batch["class"][batch["ids"]]
    return jnp.mean(losses) + jnp.sum(batch["task"] * jnp.stack([losses.max(), losses.min()]))


def evaluated(params: Any, batch: Any) -> Any:
    return loss_fn(params, batch["x"], batch["y"])


def positions(params: Any, batch: Any) -> Any:
    attention = jnp.where(batch["mask"], batch["x"] @ batch["x"].mT, 0.0)
    return loss_fn(params, attention @ batch["x"] + batch["table"], batch["y"])


def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("step", "batch", "axes"),
    [
        (trained(unlabelled), {"x": X, "y": Y, "u": floats(48, 8)}, {"x": 0, "y": 0, "u": 0}),
        (
            trained(graph_net),
            {
                "nodes": X,
                "labels": Y,
                "senders": jax.ShapeDtypeStruct((40,), jnp.int32),
                "receivers": jax.ShapeDtypeStruct((40,), jnp.int32),
            },
            {"nodes": 0, "labels": 0, "senders": 0, "receivers": 0},
        ),
        (
            lambda params, batch: (trained(pooled)(params, batch), pooled(params, batch)),
            {
                "nodes": X,
                "graph": IDS,
                "senders": jax.ShapeDtypeStruct((40,), jnp.int32),
                "receivers": jax.ShapeDtypeStruct((40,), jnp.int32),
                "target": floats(3, 4),
            },
            {"nodes": 0, "graph": 0, "senders": 0, "receivers": 0},
        ),
        (
            trained(time_first),
            {"obs": floats(5, 16, 8), "reward": floats(5, 16), "last": floats(16)},
            {"obs": 1, "reward": 1, "last": 0},
        ),
        (
            trained(recurrent),
            {"x": floats(5, 8, 8), "y": floats(5, 8, 4)},
            {"x": 1, "y": 1},
        ),
        (counted, {"ids": jax.ShapeDtypeStruct((8, 13), jnp.int32)}, {"ids": 0}),
        (attended, {"x": floats(16, 6, 8), "y": floats(16, 6, 4)}, {"x": 0, "y": 0}),
        (
            trained(weighted_in_time),
            {"x": floats(5, 16, 8), "y": floats(5, 16, 4), "weight": floats(5)},
            {"x": 1, "y": 1},
        ),
        (trained(contrasted), {"x": floats(5, 16, 8)}, {"x": 1}),
        (remembered, {"x": X, "y": Y, "u": floats(48, 8)}, {"x": 0, "y": 0, "u": 0}),
        (
            trained(weighted),
            {"x": X, "ids": IDS, "class": floats(4), "task": floats(2)},
            {"x": 0, "ids": 0},
        ),
        (evaluated, {"x": X, "y": Y}, {"x": 0, "y": 0}),
        (evaluated, {"x": floats(8, 8), "y": floats(8, 4)}, {"x": 0, "y": 0}),
        (
            trained(positions),
            {
                "x": floats(16, 6, 8),
                "y": floats(16, 6, 4),
                "mask": jax.ShapeDtypeStruct((6, 6), jnp.bool_),
                "table": floats(6, 8),
            },
            {"x": 0, "y": 0},
        ),
    ],
    ids=[
        "unlabelled",
        "graph",
        "graphs",
        "time-first",
        "recurrent",
        "metric-shifted",
        "metric-attention",
        "time-weights",
        "contrasted",
        "history",
        "weights",
        "eval",
        "eval-square",
        "masks",
    ],
)
def test_the_program_tells_its_batch(
    step: Callable[..., Any], batch: dict[str, Any], axes: dict[str, int]
) -> None:
    labels = check(trace(step, (PARAMS, batch)))
    found = {p: x.batch_axis for p, x in labels.items() if x.batch_axis is not None}
    assert found == {f"batch[{name!r}]": axis for name, axis in axes.items()}


def test_parameters_that_come_back_as_they_were_are_no_batch() -> None:
    """As of an inference that returns them: also those that nothing reads."""

    def scores(params: Any, tokens: Any) -> Any:
        return params, jax.nn.log_softmax(jnp.tanh(params["emb"][tokens]) @ params["emb"].T)

    params = {"emb": jnp.ones((32, 16)), "unused": jnp.ones((10, 16))}
    plan = autopar.plan(scores, params, np.arange(8, dtype=np.int32))
    roles = {leaf.path: leaf.role for leaf in plan.inputs}
    assert roles == {"params['emb']": "state", "params['unused']": "state", "tokens": "batch"}


def test_a_size_that_all_leaves_have_is_named_wherever_it_is() -> None:
    """Steps of environments, and what these are left in."""

    def step(params: Any, steps: Any, last: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean(jnp.cumsum(steps["reward"], 0)[-1] * (last @ params))

        return params - 0.1 * jax.grad(loss)(params)

    steps = {name: jax.ShapeDtypeStruct((8, 16), jnp.float32) for name in ("reward", "value")}
    last = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    with pytest.raises(BatchArgumentError, match="ambiguous") as refused:
        trace(step, (jax.ShapeDtypeStruct((4,), jnp.float32), steps, last), microbatches=2)
    hint = str(refused.value.hint)
    assert "for 16 examples: batch_axes=(None, 1, 0)" in hint
    assert "for 8 examples: batch_axes=(None, 0, None)" in hint


def test_an_ambiguous_batch_has_a_line_for_every_argument() -> None:
    def scores(params: Any, tokens: Any) -> Any:
        hidden = params["emb"][tokens] + params["a"].sum() + params["b"].sum() + params["c"].sum()
        return hidden @ params["emb"].T

    shapes = {"emb": (32, 16), "a": (10, 4), "b": (12, 4), "c": (14, 4)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    with pytest.raises(BatchArgumentError, match="ambiguous") as refused:
        autopar.plan(scores, params, np.arange(8, dtype=np.int32))
    assert "for 8 examples: batch_axes=(None, 0)" in " ".join(str(refused.value).split())


def test_what_nobody_reads_tells_nothing_of_its_argument() -> None:
    """One step of a mixture's expectation maximization, whose components lead all of its state."""

    def step(state: Any, batch: Any) -> Any:
        means, weights = state
        scores = jnp.log(weights) - ((batch["x"][:, None] - means) ** 2).sum(-1)
        shares = jax.nn.softmax(scores)
        each = shares.sum(0)
        return (shares.T @ batch["x"] / each[:, None], each / len(scores)), scores.max(1).mean()

    state = jnp.ones((4, 8)), jnp.ones(4) / 4
    batch = {"x": np.ones((32, 8), np.float32), "label": np.arange(32), "weight": np.ones(32)}
    labels = trace(step, (state, batch), microbatches=8).graph.inputs
    assert [x.path for x in labels if x.batch_axis == 0] == ["batch['x']"]
