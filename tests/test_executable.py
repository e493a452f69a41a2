"""Calling an executable: any input, donation, born-sharded states, static leaves, what it tells."""

import dataclasses
import sys
import traceback
import types
import weakref
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import autopar
from autopar import call_checks
from autopar.base import user_code
from autopar.base.errors import AutoparWarning, DonatedBufferError, TraceError

OPTIMIZER = optax.adam(1e-2)


def loss_fn(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.mean((hidden - batch["y"]) ** 2)


def train_step(state: Any, batch: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, {"loss": loss}


def make_state(seed: int = 0) -> Any:
    w = jax.random.normal(jax.random.key(seed), (8, 16))
    params = {"w": w, "b": jnp.zeros(16)}
    return {"params": params, "opt_state": OPTIMIZER.init(params), "step": 0}


def make_batch(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(16, 8)).astype(np.float32),
        "y": rng.normal(size=(16, 16)).astype(np.float32),
    }


def copy(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + 0 if isinstance(x, jax.Array) else x, tree)


def assert_equal(found: Any, expected: Any, rtol: float = 2e-5) -> None:
    structure: Any = jax.tree.structure(found)
    assert structure == jax.tree.structure(expected)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=1e-6), found, expected)


@pytest.fixture(scope="module")
def sharded() -> autopar.Executable:
    """A step whose parameters are stored in slices: every placement matters."""
    return autopar.compile(train_step, make_state(), make_batch(), method="zero3", microbatches=1)


def plain(steps: int = 1) -> tuple[Any, Any]:
    state: Any = make_state()
    result: Any = None
    for i in range(steps):
        state, result = jax.jit(train_step)(state, make_batch(i))
    return state, result


# Inputs


def test_three_steps_equal_the_plain_step(sharded: autopar.Executable) -> None:
    state = make_state()
    for i in range(3):
        state, metrics = sharded(state, make_batch(i))
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((state, metrics)))
    assert_equal((state, metrics), plain(3))
    assert state["params"]["w"].sharding.spec != P()


def test_inputs_lie_wherever_they_are(sharded: autopar.Executable) -> None:
    explicit = jax.make_mesh((4, 2), ("a", "b"))
    assert explicit.axis_types == (AxisType.Explicit,) * 2
    auto = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    expected = plain()
    for place in (
        lambda x: np.asarray(x),
        lambda x: jax.device_put(x, jax.devices()[5]),
        lambda x: jax.device_put(x, NamedSharding(auto, P())),
        lambda x: jax.device_put(x, NamedSharding(explicit, P("a") if x.ndim > 1 else P())),
    ):
        state = make_state()
        state["step"] = jnp.int32(0)
        state, batch = jax.tree.map(place, (state, make_batch()))
        assert_equal(sharded(state, batch), expected)


def test_what_was_copied_to_its_place_is_not_consumed(sharded: autopar.Executable) -> None:
    state = jax.device_put(make_state(), jax.devices()[2])
    results = [sharded(state, make_batch()) for _ in range(2)]
    assert_equal(results[0], results[1], rtol=0)
    assert_equal(state, make_state(), rtol=0)


def test_numpy_memory_is_never_written(sharded: autopar.Executable) -> None:
    state = jax.tree.map(np.array, make_state())
    before = jax.tree.map(np.copy, state)
    aliases = jax.tree.map(jnp.asarray, state)  # may use NumPy's memory as it is
    sharded(aliases, make_batch())
    sharded(state, make_batch())
    assert_equal(state, before, rtol=0)


def test_64_bit_numpy_arrays_and_other_integers(sharded: autopar.Executable) -> None:
    state, batch = jax.tree.map(lambda x: np.asarray(x, np.float64), (make_state(), make_batch()))
    state["step"], state["opt_state"] = np.int64(0), make_state()["opt_state"]
    assert_equal(sharded(state, batch), plain())


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_under_a_mesh_of_the_user(sharded: autopar.Executable, axis_type: AxisType) -> None:
    with jax.set_mesh(jax.make_mesh((8,), ("mine",), axis_types=(axis_type,))):
        found = sharded(copy(make_state()), make_batch())
    assert_equal(found, plain())


def test_inside_a_transformation_it_is_the_plain_function(sharded: autopar.Executable) -> None:
    state, batch = make_state(), make_batch()
    assert jax.eval_shape(sharded, state, batch) == jax.eval_shape(train_step, state, batch)
    assert_equal(jax.jit(sharded)(state, batch), plain())
    with pytest.warns(AutoparWarning, match="called inside another transformation"):
        gradient = jax.grad(lambda b: sharded(state, b)[1]["loss"])(batch)
    assert_equal(gradient, jax.grad(lambda b: train_step(state, b)[1]["loss"])(batch))


def test_other_arguments_than_it_was_compiled_for(sharded: autopar.Executable) -> None:
    state, batch = make_state(), make_batch()
    half = jax.tree.map(lambda x: x[:8], batch)
    with pytest.raises(TraceError, match="compiled for other arguments") as caught:
        sharded(state, half)
    text = str(caught.value)
    assert "batch['x']: float32[16,8], float32[8,8]" in text
    assert "autopar.parallelize" in text
    with pytest.raises(TraceError, match=r"state\['params'\]\['b'\]: float32\[16\], nothing"):
        sharded({**state, "params": {"w": state["params"]["w"]}}, batch)
    with pytest.raises(TraceError, match=r"batch\['y'\]: float32\[16,16\], int32\[16,16\]"):
        sharded(state, {**batch, "y": batch["y"].astype(np.int32)})
    with pytest.raises(TraceError, match=r"state\['step'\]: int32\[\], a constant"):
        sharded({**state, "step": "text"}, batch)
    # Nothing was consumed by the attempts.
    assert_equal(sharded(state, batch), plain())


# Donation


def test_a_donated_state_is_gone(sharded: autopar.Executable) -> None:
    state, _ = sharded(make_state(), make_batch())
    kept = jax.tree.map(jnp.copy, state)
    newer, _ = sharded(state, make_batch(1))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    with pytest.raises(DonatedBufferError) as caught:
        sharded(state, make_batch(1))
    error = caught.value
    assert error.where == "state['opt_state'][0].count"
    for part in ("leaves", "donated", "donate_argnums=()", "train_step writes the new state"):
        assert part in str(error)
    for use in (jnp.sum, np.asarray, str):
        with pytest.raises(RuntimeError, match="has been deleted") as outside:
            use(state["params"]["w"])
        assert "donate_argnums=()" in outside.value.__notes__[0]
        files = [frame.filename for frame in traceback.extract_tb(outside.value.__traceback__)]
        assert not any(user_code.is_own(file) for file in files), files
    again, _ = sharded(kept, make_batch(1))
    assert_equal(again, newer, rtol=0)


def test_a_returned_state_is_not_held(sharded: autopar.Executable) -> None:
    state, _ = sharded(make_state(), make_batch())
    state, _ = sharded(state, make_batch())
    references = [weakref.ref(leaf) for leaf in jax.tree.leaves(state)]
    del state
    assert [reference() for reference in references] == [None] * len(references)


def test_a_deleted_batch_is_named_too(sharded: autopar.Executable) -> None:
    batch = jax.tree.map(jnp.asarray, make_batch())
    batch["y"].delete()
    with pytest.raises(DonatedBufferError, match="another computation") as caught:
        sharded(make_state(), batch)
    assert caught.value.where == "batch['y']"


def test_a_kept_state_can_be_used_again() -> None:
    step = autopar.compile(
        train_step, make_state(), make_batch(), method="data", microbatches=1, donate_argnums=()
    )
    state, _ = step(make_state(), make_batch())
    first, second = step(state, make_batch(1)), step(state, make_batch(1))
    assert_equal(first, second, rtol=0)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("method", ["data", "zero3"])
def test_what_is_gathered_outlives_the_next_step(method: str, num_devices: int) -> None:
    def noisy_step(state: Any, batch: Any) -> Any:
        new, metrics = train_step({k: v for k, v in state.items() if k in made}, batch)
        return {**new, "key": jax.random.split(state["key"])[0], "none": state["none"]}, metrics

    made, batch = make_state(), make_batch()
    state: Any = {**made, "key": jax.random.key(0), "none": jnp.zeros((0, 4))}
    devices = jax.devices()[:num_devices]
    step = autopar.compile(noisy_step, state, batch, method=method, microbatches=1, devices=devices)
    state, _ = step(state, batch)
    gathered = step.gather(state)
    step(state, batch)
    assert state["params"]["w"].is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(gathered))
    assert_equal(gathered["params"], plain()[0]["params"])
    assert gathered["params"]["w"].sharding.spec == P()


def average_step(state: Any, x: Any) -> Any:
    gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    w = state["w"] - 0.1 * gradient
    return {"w": w, "average": 0.9 * state["average"] + 0.1 * w, "target": state["target"]}


def test_one_buffer_in_several_leaves_of_a_donated_state() -> None:
    x = make_batch()["x"]
    w = jnp.ones((8, 4))
    state = {"w": w, "average": w, "target": w}
    step = autopar.compile(average_step, state, x, method="zero3", microbatches=1)
    expected = jax.jit(average_step)(state, x)
    assert_equal(state := step(state, x), expected)
    for alias in (
        lambda w: w,  # one of our own arrays twice
        lambda w: jax.device_put(w, NamedSharding(w.sharding.mesh, P(("x",), None))),
    ):
        w = state["w"]
        state = {"w": w, "average": alias(w), "target": alias(w)}
        expected = jax.jit(average_step)(jax.tree.map(np.array, state), x)
        assert_equal(state := step(state, x), expected)


def test_a_buffer_that_is_donated_and_read() -> None:
    def step(params: Any, target: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean((x @ w - x @ target["w"]) ** 2))(params["w"])
        return {"w": params["w"] - 0.1 * gradient, "n": params["n"] + 1}

    x = make_batch()["x"]
    params = {"w": jnp.ones((8, 4)), "n": jnp.int32(0)}
    target = {"w": jnp.zeros((8, 4)), "n": jnp.int32(0)}
    compiled = autopar.compile(
        step, params, target, x, method="data", microbatches=1, batch_argnums=2
    )
    params = compiled(params, target, x)
    expected = step(jax.tree.map(np.asarray, params), params, x)
    assert_equal(compiled(params, params, x), expected)


def test_typed_keys_are_donated_and_their_aliases_copied() -> None:
    def step(state: Any, x: Any) -> Any:
        key, use = jax.random.split(state["key"])
        w = state["w"] + jax.random.normal(use, (8,)) + x.mean(0)
        return {"key": key, "other": jax.random.fold_in(state["other"], 1), "w": w}

    x, key = make_batch()["x"], jax.random.key(7)
    state = {"key": key, "other": key, "w": jnp.ones(8)}
    compiled = autopar.compile(step, state, x, method="data", microbatches=1)
    expected: Any = jax.tree.map(lambda x: x, state)
    for _ in range(2):
        expected = jax.jit(step)(expected, x)
        state = compiled(state, x)
        np.testing.assert_allclose(state["w"], expected["w"], rtol=1e-5)
        for name in ("key", "other"):
            found, wanted = (jax.random.key_data(tree[name]) for tree in (state, expected))
            np.testing.assert_array_equal(found, wanted)


def test_a_batch_on_another_device_is_placed_every_time(sharded: autopar.Executable) -> None:
    state = make_state()
    for i in range(3):
        batch = jax.device_put(make_batch(i), jax.devices()[i])
        state, metrics = sharded(state, batch)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(batch))
    assert_equal((state, metrics), plain(3))


# Static leaves


def test_equinox_model_and_static_arguments() -> None:
    model = eqx.nn.MLP(8, 16, 16, 1, key=jax.random.key(0))

    def step(model: Any, batch: Any, power: int, *, name: str) -> Any:
        def loss(model: Any) -> Any:
            return jnp.mean(jnp.abs(jax.vmap(model)(batch["x"]) - batch["y"]) ** power)

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates = jax.tree.map(lambda g: -0.1 * g, gradients)
        return eqx.apply_updates(model, updates), {"loss": value, "name": name}

    compiled = autopar.compile(
        step, model, make_batch(), 2, name="a", method="zero3", microbatches=1, static_argnums=2
    )
    expected = eqx.filter_jit(step)(model, make_batch(), 2, name="a")
    new, metrics = compiled(copy(model), make_batch(), 2, name="a")
    assert new.activation is model.activation
    assert metrics["name"] == "a"
    assert_equal(
        (eqx.filter(new, eqx.is_array), metrics["loss"]),
        (eqx.filter(expected[0], eqx.is_array), expected[1]["loss"]),
    )
    shardings = compiled.in_shardings
    assert shardings[0].activation is None
    assert shardings[0].layers[0].weight == new.layers[0].weight.sharding
    assert shardings[2] is None
    assert compiled.out_shardings[1]["name"] is None
    with pytest.raises(TraceError, match="static argument power: 2, 4"):
        compiled(new, make_batch(), 4, name="a")
    with pytest.raises(TraceError, match="a static leaf"):
        compiled(new, make_batch(), 2, name="b")
    with pytest.raises(TraceError):
        compiled(new, make_batch(), True, name="a")
    compiled(new, make_batch(), 2, name="a")


# Born sharded


def test_initialize(sharded: autopar.Executable) -> None:
    state = sharded.initialize(make_state, 3)
    assert_equal(state, make_state(3))
    placed = jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, (sharded.in_shardings[0])
    )
    assert all(jax.tree.leaves(placed))
    sharded(state, make_batch())


def test_initialize_from_shapes_and_an_optimizer_of_its_own() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        params: Any
        opt_state: Any
        optimizer: Any = dataclasses.field(metadata={"static": True})

    def init(key: Any) -> State:
        optimizer = optax.adam(1e-2)  # another object on every call
        params = {"w": jax.random.normal(key, (8, 16)), "b": jnp.zeros(16)}
        return State(params, optimizer.init(params), optimizer)

    def step(state: State, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = state.optimizer.update(gradients, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return dataclasses.replace(state, params=params, opt_state=opt_state), loss

    key = jax.random.key(0)
    shapes = jax.eval_shape(init, key)
    batch = jax.eval_shape(make_batch)
    compiled = autopar.compile(step, shapes, batch, method="zero3", microbatches=1)
    state, loss = compiled(compiled.initialize(init, key), make_batch())
    expected_state, expected_loss = jax.jit(step)(init(key), make_batch())
    assert_equal((state.params, loss), (expected_state.params, expected_loss))


def test_initialize_several_arguments_and_static_leaves() -> None:
    def init(key: Any, width: int, activation: Any) -> Any:
        model = eqx.nn.MLP(8, 16, width, 1, activation=activation, key=key)
        return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))

    def step(model: Any, opt_state: Any, batch: Any) -> Any:
        def loss(model: Any) -> Any:
            return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state)
        return eqx.apply_updates(model, updates), opt_state, value

    arguments = (jax.random.key(0), 16, jax.nn.gelu)
    states = init(*arguments)
    compiled = autopar.compile(step, *states, make_batch(), method="data", microbatches=1)
    make = partial(init, width=16, activation=jax.nn.gelu)
    model, opt_state = compiled.initialize(make, jax.random.key(0))
    assert model.activation is jax.nn.gelu
    found, expected = (
        compiled(model, opt_state, make_batch()),
        eqx.filter_jit(step)(*states, make_batch()),
    )
    assert_equal(*(eqx.filter(x, eqx.is_array) for x in (found, expected)))


def test_initialize_something_else(sharded: autopar.Executable) -> None:
    with pytest.raises(TraceError, match="none of the step's arguments") as caught:
        sharded.initialize(lambda: {**make_state(), "step": jnp.zeros(3)})
    assert "state['step']: int32[], float32[3]" in str(caught.value)
    with pytest.raises(ZeroDivisionError):
        sharded.initialize(lambda: 1 / 0)


# What it tells


def test_shardings_text_and_analyses(sharded: autopar.Executable) -> None:
    state, metrics = sharded(make_state(), make_batch())
    out_state, out_metrics = sharded.out_shardings
    assert out_state["params"]["w"] == state["params"]["w"].sharding
    assert out_metrics["loss"] == metrics["loss"].sharding
    assert len(sharded.in_shardings) == 2
    assert sharded.kwargs_shardings == {}
    batch = jax.device_put(make_batch(), sharded.in_shardings[1])
    sharded(state, batch)
    assert "train_step" in sharded.as_text().splitlines()[0]
    assert sharded.memory_analysis().argument_size_in_bytes > 0
    assert sharded.cost_analysis()["flops"] > 0
    assert repr(sharded).startswith("<Executable train_step: <Plan zero3 on x=8")


def test_closed_over_arrays_are_placed_once() -> None:
    table = jnp.arange(8.0)

    def step(w: Any, x: Any) -> Any:
        return w + (x * table).mean(0)

    w, x = jnp.ones(8), make_batch()["x"]
    compiled = autopar.compile(step, w, x, method="data", microbatches=1)
    expected = jax.jit(step)(w, x)
    assert_equal(w := compiled(w, x), expected)
    assert_equal(compiled(w, x), jax.jit(step)(expected, x))


def test_an_error_after_donation_says_that_the_state_is_gone(
    sharded: autopar.Executable,
) -> None:
    state, _ = sharded(make_state(), make_batch())
    batch = make_batch()
    batch["x"][0] = np.nan
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan in the results") as e:
        sharded(state, batch)
    assert any("the state that was passed in is gone" in note for note in e.value.__notes__)
    with pytest.raises(DonatedBufferError):
        sharded(state, make_batch())


def test_notebooks_are_told_once_that_a_state_is_consumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = types.SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setattr(call_checks, "_notebook_was_told", False)

    def step(w: Any, x: Any) -> Any:
        return w + x.mean(0)

    x = make_batch()["x"]
    for _ in range(2):
        compiled = autopar.compile(step, jnp.ones(8), x, method="data", microbatches=1)
        compiled(compiled(jnp.ones(8), x), x)
    told = capsys.readouterr().out
    assert told.count("step reuses the memory of w") == 1
    assert "donate_argnums=()" in told
