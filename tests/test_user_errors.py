"""What goes wrong in a step's own code is said for who wrote it: what, where, why, what to try."""

import gc
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_releases
import numpy as np
import pytest
from flax import nnx

import autopar
from autopar.errors import AutoparError, AutoparWarning, OptionError, TraceError

W = np.ones((8, 8), np.float32)
BATCH = {"x": np.ones((16, 8), np.float32), "train": True, "rows": 3}


def loss_fn(w: Any, batch: Any) -> Any:
    return jnp.mean((batch["x"] @ w) ** 2)


def step_with(extra: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def train_step(w: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_fn)(w, batch)
        extra(w, batch)
        return w - 0.1 * gradient, loss

    return train_step


def decides(w: Any, batch: Any) -> Any:
    return w if batch["train"] else -w


def decides_by_loss(w: Any, batch: Any) -> Any:
    while w.sum() > 0:
        w = w - 1


def uses_numpy(w: Any, batch: Any) -> Any:
    return np.sin(w)


def masks(w: Any, batch: Any) -> Any:
    return w[w > 0]


def finds(w: Any, batch: Any) -> Any:
    return jnp.nonzero(w)


def asks(w: Any, batch: Any) -> Any:
    return float(w.sum())


def counts(w: Any, batch: Any) -> Any:
    return list(range(batch["rows"]))


def shapes(w: Any, batch: Any) -> Any:
    return jnp.zeros(batch["rows"])


def formats(w: Any, batch: Any) -> Any:
    return f"{w.sum():.3f}"


def slices(w: Any, batch: Any) -> Any:
    return w[: batch["rows"]]


def hashes(w: Any, batch: Any) -> Any:
    return {1: w}[batch["rows"]]


@pytest.mark.parametrize(
    ("extra", "what", "hint"),
    [
        (decides, "decides in Python", "make batch['train'], a Python bool, an argument"),
        (decides_by_loss, "decides in Python", "jax.lax.while_loop"),
        (uses_numpy, "calls NumPy", "jnp.sin"),
        (masks, "size depends on the step's values", "jnp.where(mask, x, 0)"),
        (finds, "size depends on the step's values", "size=n"),
        (asks, "asks for the number", "read it after the call"),
        (counts, "needs a Python integer", "static_argnums"),
        (shapes, "needs a Python integer", "static_argnums"),
        (formats, "formats a value", "jax.debug.print"),
        (
            slices,
            "cuts a slice",
            "dynamic_slice_in_dim" if jax_releases.IS_OURS else "static_argnums",
        ),
        (hashes, "hashes a value", "static_argnums"),
    ],
)
def test_what_needs_numbers_while_it_is_traced(extra: Any, what: str, hint: str) -> None:
    step = step_with(extra)
    for call in (
        lambda: autopar.parallelize(step)(W, BATCH),
        lambda: autopar.compile(step, W, BATCH),
        lambda: autopar.plan(step, W, BATCH),
    ):
        with pytest.raises(TraceError) as caught:
            call()
        error = caught.value
        assert what in error.what
        assert error.what.startswith("train_step ")
        line = extra.__code__.co_firstlineno + 1
        assert error.where == f"{__file__}:{line} ({extra.__name__})"
        assert error.hint is not None
        assert hint in error.hint
        assert error.why is not None
        # JAX's own error is the cause, and no frame of ours stands before the user's.
        cause = error.__cause__
        assert cause is not None
        assert not isinstance(cause, AutoparError)
        assert [f.filename for f in traceback.extract_tb(error.__traceback__)] == [__file__] * 2
        assert traceback.extract_tb(cause.__traceback__)[0].filename == __file__


def test_an_argument_that_is_a_flag_names_its_own_option() -> None:
    def step(w: Any, x: Any, train: Any) -> Any:
        return w - (jnp.tanh(x) if train else x).mean(0)

    x = np.ones((16, 8), np.float32)
    with pytest.raises(TraceError, match=r"static_argnums=\(2,\)"):
        autopar.plan(step, W[0], x, True)
    autopar.plan(step, W[0], x, True, static_argnums=(2,))


def test_errors_of_the_users_own_code_begin_there() -> None:
    def fails(w: Any, batch: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        autopar.parallelize(fails)(W, BATCH)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames] == [
        "test_errors_of_the_users_own_code_begin_there",
        "fails",
    ]
    with pytest.raises(OptionError) as refused:
        autopar.parallelize(fails, methd="data")
    assert len(traceback.extract_tb(refused.value.__traceback__)) == 1


def test_values_of_the_trace_that_are_printed_or_kept(capsys: Any) -> None:
    def prints(w: Any, batch: Any) -> Any:
        print("norm", w.sum())

    with pytest.warns(AutoparWarning, match=r"prints a value(.|\n)*jax\.debug\.print") as told:
        autopar.plan(step_with(prints), W, BATCH)
    assert f"{__file__}:{prints.__code__.co_firstlineno + 1} (prints)" in str(told[0].message)
    assert "Tracer" in capsys.readouterr().out

    kept: list[Any] = []  # a new one: searches leave out what was there before this file's tests

    def keeps(w: Any, batch: Any) -> Any:
        kept.append(w * 2)

    with pytest.warns(AutoparWarning, match=r"keeps a value(.|\n)*a list of 1") as told:
        autopar.plan(step_with(keeps), W, BATCH)
    assert len(told) == 1
    assert f"{__file__}:{keeps.__code__.co_firstlineno + 1}" in str(told[0].message)
    assert told[0].filename == __file__

    def uses(w: Any, batch: Any) -> Any:
        return w - kept[0]

    with pytest.raises(TraceError, match="kept from an earlier trace"):
        autopar.plan(uses, W, BATCH)


def test_a_program_that_keeps_its_trace_is_no_reason_to_search_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The derivative of `relu` is a function of the trace; to collect takes seconds in a large heap.
    monkeypatch.setattr(gc, "collect", lambda *_: pytest.fail("searched all memory for cycles"))
    autopar.plan(step_with(lambda w, batch: jax.nn.relu(w)), W, BATCH)


def test_state_that_is_not_returned() -> None:
    def step(params: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p, b: loss_fn(p["w"], b))(params, batch)
        params["w"] = params["w"] - 0.1 * gradients["w"]
        return loss

    line = step.__code__.co_firstlineno + 2
    for fn in (step, jax.jit(step)):
        with pytest.warns(AutoparWarning, match="computes new values of params and does") as told:
            plan = autopar.plan(fn, {"w": W}, {"x": BATCH["x"]})
        assert f"{__file__}:{line}" in str(told[0].message)
        assert plan.program_hash

    def evaluate(params: Any, batch: Any) -> Any:
        return loss_fn(params["w"], batch)

    autopar.plan(evaluate, {"w": W[:, :4]}, {"x": BATCH["x"]}, batch_argnums=(1,))


def test_a_transformation_around_a_parallelized_step_is_told_once() -> None:
    plain = step_with(lambda w, batch: None)
    step = autopar.parallelize(plain, method="data")
    batch = {"x": BATCH["x"]}
    jax.eval_shape(step, W, batch)
    jax.jit(lambda w: step(w, batch)).eval_shape(W)
    jax.make_jaxpr(step)(W, batch)

    def loop(w: Any) -> Any:
        for _ in range(2):
            w, _ = step(w, batch)
        return w

    twice = jax.jit(loop)
    with pytest.warns(AutoparWarning, match=r"called inside another transformation") as told:
        twice(W)
    assert len(told) == 1
    assert f"{__file__}:{loop.__code__.co_firstlineno + 2}" in str(told[0].message)
    compiled = autopar.compile(plain, W, batch, method="data")
    for transformed in (
        lambda: nnx.jit(lambda w: compiled(w, batch))(W),
        lambda: jax.grad(lambda w: autopar.parallelize(plain)(w, batch)[1])(jnp.asarray(W)),
    ):
        with pytest.warns(AutoparWarning, match="inside another transformation"):
            transformed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twice(W)
        step(W, batch)


def test_an_object_that_is_no_argument() -> None:
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def step(batch: Any) -> Any:
        model.bias[...] = model.bias[...] + batch["x"].mean(0)
        return model(batch["x"]).mean()

    with pytest.raises(TraceError, match="changes an object that is not among its arguments"):
        autopar.plan(step, {"x": BATCH["x"]})

    def by_gradient(batch: Any) -> Any:
        return nnx.value_and_grad(lambda model: model(batch["x"]).mean())(model)[0]

    with pytest.raises(TraceError, match="changes an object that is not among its arguments"):
        autopar.plan(by_gradient, {"x": BATCH["x"]})


def test_an_error_of_the_users_own_stays_that() -> None:
    def step(w: Any, batch: Any) -> Any:
        raise ValueError("the size argument of my_pool is odd")

    with pytest.raises(ValueError, match="my_pool") as own:
        autopar.plan(step, W, BATCH)
    assert not isinstance(own.value, AutoparError)


def test_hints_do_not_lead_to_the_next_refusal() -> None:
    batch = {"x": BATCH["x"]}

    def standardized(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            hidden = batch["x"] @ w
            for _ in range(2):
                hidden = jnp.tanh((hidden - hidden.mean(0)) / (hidden.std(0) + 1e-5)) @ w.T @ w
            return jnp.mean(hidden**4)

        return w - 0.1 * jax.grad(loss)(w)

    with pytest.raises(AutoparError) as caught:
        autopar.plan(standardized, W, batch, stages=1, microbatches=2)
    assert "use microbatches=1" in str(caught.value)
    autopar.plan(standardized, W, batch, stages=1, microbatches=1)
    with pytest.raises(AutoparError) as caught:
        autopar.plan(lambda w, x: w + x.sum(0), W[0], batch["x"], stages=2)
    assert "use stages=1" in str(caught.value)
    for stages in (9, 3):
        with pytest.raises(OptionError) as refused:
            autopar.plan(step_with(lambda w, batch: None), W, batch, stages=stages)
        assert refused.value.why is not None
        assert str(9 if stages == 9 else 4) in str(refused.value.hint)


def test_a_call_that_the_step_does_not_take() -> None:
    step = step_with(lambda w, batch: None)
    for arguments in ((W,), (W, BATCH, BATCH)):
        with pytest.raises(TraceError, match=r"cannot be called in this way(.|\n)*argument") as no:
            autopar.plan(step, *arguments)
        assert f"{__file__}:{step.__code__.co_firstlineno}" in str(no.value.where)

    def inner_type_error(w: Any, batch: Any) -> Any:
        return len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len") as own:
        autopar.plan(inner_type_error, W, BATCH)
    assert not isinstance(own.value, AutoparError)
    with pytest.raises(TraceError, match="leave it out"):
        autopar.plan(step, W, {**BATCH, "names": np.array(["a"] * 16)})
