"""The same plan in Ray actors: numbers, arrays that live there, and what a step may be asked."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_actors.equality import check_program
from on_actors.profiles import check_profile
from on_actors.small_step import layers_step
from on_actors.told import noted_messages
from programs import ONE_LAYER, PROGRAMS, Program

import autopar
from autopar.arrays.ray_array import RayArray
from autopar.base.errors import (
    AutoparWarning,
    DeviceError,
    DonatedBufferError,
    OptionError,
    StageError,
    TraceError,
)
from autopar.ray_executable import RayExecutable
from autopar.runtime.ray.driver.step_queue import StepQueue

RAY = autopar.Ray(deadline=60)
FOUR = autopar.Cluster.preset("cpu", devices_per_node=4)

CHOSEN = ("key_typed", "loss_scale_cond")
"""In the default run; the others are marked `full`."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray itself
    pytest.mark.usefixtures("ray_cluster"),
]


def programs() -> Iterator[Any]:
    for program in PROGRAMS.values():
        if program.splits and program.name not in ONE_LAYER and not program.prints:
            marks = [] if program.name in CHOSEN else [pytest.mark.full]
            yield pytest.param(program, id=program.name, marks=marks)


@pytest.mark.parametrize("program", list(programs()))
def test_a_step_on_two_actors_equals_the_plain_step(program: Program) -> None:
    check_program(program, FOUR, stages=2, schedule="1f1b", microbatches=4)


def test_batches_of_two_sizes_take_turns() -> None:
    parallel = autopar.parallelize(train_step, runtime=RAY, cluster=FOUR, stages=2, microbatches=2)
    states = [init(jax.random.key(0)) for _ in range(2)]
    with pytest.warns(AutoparWarning, match="follows its plan for 16 examples with 8"):
        for rows in (16, 8, 16):
            x = jax.random.normal(jax.random.key(rows), (rows, 8))
            results = [
                cast(Any, f)(s, {"x": x, "y": x})
                for f, s in zip((jax.jit(train_step), parallel), states, strict=True)
            ]
            states = [state for state, _ in results]
    plain, found = (jax.device_get(s["params"]) for s in states)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, found)
    for executable in cast(Any, parallel)._executables.values():
        executable.shutdown()


# A small step for everything else.


def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    key, _ = jax.random.split(state["key"])
    new = {"params": params, "step": state["step"] + 1, "key": key, "kept": state["kept"]}
    return new, {"loss": loss, "step": state["step"]}


def init(key: Any, layers: int = 4, width: int = 8) -> Any:
    keys = jax.random.split(key, layers)
    params = [{"w": jax.random.normal(k, (width, width)) / 4, "b": jnp.zeros(width)} for k in keys]
    return {"params": params, "step": jnp.int32(0), "key": key, "kept": jnp.arange(3)}


BATCH = {
    "x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32),
}


@pytest.fixture(scope="module")
def step(ray_cluster: None) -> Iterator[RayExecutable]:
    made = autopar.compile(
        train_step, init(jax.random.key(0)), BATCH, stages=2, microbatches=4, cluster=FOUR,
        runtime=RAY,
    )  # fmt: skip
    assert isinstance(made, RayExecutable)
    with made:
        yield made


def plain(steps: int) -> Any:
    state, metrics = init(jax.random.key(0)), None
    for _ in range(steps):
        state, metrics = jax.jit(train_step)(state, BATCH)
    return state, metrics


def assert_close(left: Any, right: Any) -> None:
    def check(a: Any, b: Any) -> None:
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(jax.device_get(a)), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)

    jax.tree.map(check, left, right)


def test_steps_that_nobody_waits_for(step: RayExecutable) -> None:
    state, metrics = init(jax.random.key(0)), None
    for _ in range(20):
        state, metrics = step(state, BATCH)
    assert_close((state, metrics), plain(20))


def test_who_waits_for_a_step_asks_no_actor_for_its_arrays(
    step: RayExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: Any) -> Any:
        raise AssertionError("an actor is asked")

    state = step.initialize(init, jax.random.key(0))
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(StepQueue, "result", ask)
            assert jax.block_until_ready(state) is not None
            state, metrics = step(state, BATCH)
            jax.block_until_ready((state, metrics))
        assert step.gather(metrics["step"]).is_ready()
    assert_close((state, metrics), plain(3))
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="is asked"):
        patch.setattr(StepQueue, "result", ask)
        jax.device_get(step(state, BATCH)[1])


def test_state_is_made_on_the_actors(step: RayExecutable) -> None:
    state = step.initialize(init, jax.random.key(0))
    assert all(isinstance(leaf, RayArray) for leaf in jax.tree.leaves(state))
    assert_close(state, init(jax.random.key(0)))
    first, last = state["params"][0]["w"], state["params"][-1]["w"]
    assert [part.actors for x in (first, last) for part in x.sharding.parts] == [(0,), (1,)]
    assert_close(step(state, BATCH), plain(1))
    with pytest.raises(TraceError, match="none of the step's arguments"):
        step.initialize(lambda: jnp.zeros(3))


def test_what_a_handle_knows_and_does(step: RayExecutable) -> None:
    state, metrics = step(init(jax.random.key(0)), BATCH)
    weights, loss = state["params"][0]["w"], metrics["loss"]
    expected_state, expected = plain(1)
    assert (weights.shape, weights.dtype, weights.ndim) == ((8, 8), np.float32, 2)
    assert (weights.size, weights.nbytes, len(weights)) == (64, 256, 8)
    assert jax.block_until_ready(weights) is weights
    np.testing.assert_allclose(float(loss), expected["loss"], rtol=1e-5)
    assert f"{loss:.3f}" == f"{float(loss):.3f}"
    assert loss.item() < loss + 1
    assert str(loss) == str(np.asarray(loss))
    assert "on stage 0" in repr(weights)
    assert repr(state["key"]) == "RayArray(key<fry>[] on stage 0)"
    assert int(state["step"]) == 1
    assert isinstance(jnp.asarray(weights), jax.Array)
    assert isinstance(2 * weights @ weights, jax.Array)
    np.testing.assert_array_equal(weights[2], np.asarray(weights)[2])
    np.testing.assert_array_equal(jax.device_get(state)["kept"], np.arange(3))
    with pytest.raises(ValueError, match="not producing an array"):
        np.asarray(state["key"])
    assert_close(state, expected_state)


def test_a_consumed_state_is_gone(step: RayExecutable) -> None:
    first = init(jax.random.key(0))
    state, _ = step(first, BATCH)
    assert first["params"][0]["w"].is_deleted()
    step(state, BATCH)
    leaf = state["params"][0]["w"]
    assert leaf.is_deleted()
    assert "deleted" in repr(leaf)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(leaf)
    with pytest.raises(DonatedBufferError, match="donated by an earlier call"):
        step(state, BATCH)


def test_of_a_state_that_goes_on_actors_are_told_its_step_alone(
    step: RayExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = noted_messages(monkeypatch)
    state = step.initialize(init, jax.random.key(0))
    for _ in range(3):
        state, metrics = step(state, BATCH)
    assert_close((state, metrics), plain(3))
    told, others = messages[:2], messages[2:]
    assert all(message.carried is None for message in told)
    assert [x.carried for x in others] == [x.step - 1 for x in others]
    assert not any(isinstance(x, int) for message in others for x in message.given)
    assert not any(message.consumed for message in others)


def test_states_that_take_turns(step: RayExecutable, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = noted_messages(monkeypatch)
    states = [init(jax.random.key(0)), step.initialize(init, jax.random.key(0))]
    for _ in range(3):
        states = [step(state, BATCH)[0] for state in states]
    assert [x.carried for x in messages] == 4 * [None] + [x.step - 2 for x in messages[4:]]
    mixed = {**states[0], "params": states[1]["params"]}
    state, metrics = step(mixed, BATCH)
    assert messages[-1].carried is None
    assert_close((state, metrics), plain(4))
    with pytest.raises(DonatedBufferError):
        step(states[1], BATCH)


def test_a_state_of_which_a_leaf_was_given_up_or_put_elsewhere(step: RayExecutable) -> None:
    state, _ = step(init(jax.random.key(0)), BATCH)
    state["kept"].delete()
    with pytest.raises(DonatedBufferError, match="kept"):
        step(state, BATCH)
    state, metrics = step({**state, "kept": jnp.arange(3)}, BATCH)
    assert_close((state, metrics), plain(2))
    layers = state["params"]
    turned = {**state, "params": layers[::-1]}
    expected = jax.jit(train_step)(jax.device_get(turned), BATCH)
    assert_close(step(turned, BATCH), expected)


def test_a_state_that_is_dropped_is_forgotten(step: RayExecutable) -> None:
    """Its first leaf is not its largest, and nothing waits for the garbage collector."""
    state = step.initialize(init, jax.random.key(0))
    for _ in range(2):
        state, metrics = step(state, BATCH)
    step.finish()
    arrays = list(map(weakref.ref, jax.tree.leaves((state, metrics))))
    before = len(step._compiled.running.arrays._forgotten)
    del state, metrics
    assert not any(array() is not None for array in arrays)
    assert len(step._compiled.running.arrays._forgotten) == before + len(arrays)


def test_one_array_in_two_places_of_the_state(step: RayExecutable) -> None:
    state, _ = step(init(jax.random.key(0)), BATCH)
    layers = state["params"]
    tied = {**state, "params": [layers[0], layers[0], *layers[2:]]}
    expected = jax.jit(train_step)(jax.device_get(tied), BATCH)
    assert_close(step(tied, BATCH), expected)


def test_leaves_with_rows_on_both_actors() -> None:
    def stacked(key: Any) -> Any:
        return {"w": jax.random.normal(key, (4, 8, 8)) / 4, "b": jnp.zeros((4, 8))}

    key, x = jax.random.key(1), BATCH["x"]
    shapes = jax.eval_shape(stacked, key)
    with autopar.compile(
        layers_step, shapes, x, stages=2, microbatches=4, cluster=FOUR, runtime=RAY
    ) as made:  # type: ignore[attr-defined]
        state = made.initialize(stacked, key)
        assert state["w"].sharding.ends == (2, 4)
        assert [part.actors for part in state["w"].sharding.parts] == [(0,), (1,)]
        assert_close(state, stacked(key))
        assert_close(made.apply(lambda tree: jax.tree.map(jnp.cos, tree), state)["w"],
                     jnp.cos(stacked(key)["w"]))  # fmt: skip
        wanted = stacked(key)
        for _ in range(2):
            state, loss = made(state, x)
            wanted, wanted_loss = jax.jit(layers_step)(wanted, x)
        assert_close((state, loss), (wanted, wanted_loss))


def test_gather_and_apply(step: RayExecutable) -> None:
    state, _ = step(init(jax.random.key(0)), BATCH)

    def halve(tree: Any) -> Any:
        return {**tree, "params": jax.tree.map(lambda x: x / 2, tree["params"])}

    gathered = step.gather(state)
    assert isinstance(gathered["params"][0]["w"], jax.Array)
    halved = step.apply(halve, state)
    assert isinstance(halved["params"][0]["w"], RayArray)
    assert halved["params"][0]["w"].sharding == state["params"][0]["w"].sharding
    assert_close(step(halved, BATCH), jax.jit(train_step)(halve(gathered), BATCH))
    assert step.apply(lambda tree: tree["step"] + 1, state) == 2


def test_what_is_gathered_outlives_the_next_step(step: RayExecutable) -> None:
    """Also of a state that is on the driver still, whose arrays the first step deletes."""
    state: Any = init(jax.random.key(0))
    for _ in range(2):
        gathered, before = step.gather(state), jax.device_get(state["params"])
        consumed, (state, _) = state, step(state, BATCH)
        assert consumed["params"][0]["w"].is_deleted()
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(gathered))
        jax.tree.map(np.testing.assert_array_equal, gathered["params"], before)


def test_what_a_loop_does_around_a_step(step: RayExecutable) -> None:
    """Weights from a file, batches read ahead, metrics; what only JAX's own arrays can have."""
    plain, told = init(jax.random.key(0)), list[int]()
    names = jax.tree_util.tree_leaves_with_path(plain["params"])
    weights = {".".join(str(k).strip("[]'") for k in path): np.asarray(x) for path, x in names}
    params = step.load_weights(plain["params"], weights)
    assert all(isinstance(x, RayArray) for x in jax.tree.leaves(params))
    state = {**init(jax.random.key(0)), "params": params}
    end = step.on_step(lambda found: told.append(found.window), every=2)
    for batch in step.prefetch([BATCH] * 4):
        state, _ = step(state, batch)
        plain, _ = jax.jit(train_step)(plain, BATCH)
    end()
    assert_close(state["params"], plain["params"])
    assert len(told) == 2 and step.metrics.step_seconds
    functions: list[Any] = [jnp.mean, jnp.sin, jax.lax.neg, jax.jit(jnp.sum)]
    for fn in functions:
        with pytest.raises(DeviceError, match=r"step\.apply"):
            fn(state["params"][0]["w"])


def test_a_function_that_follows_a_step_on_actors(step: RayExecutable) -> None:
    """Evaluation, and a loop over tokens that needs both stages; no parameter is brought here."""

    def evaluate(params: Any, x: Any) -> Any:
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return x

    def generate(params: Any, x: Any, key: Any) -> Any:
        def token(carry: Any, _: Any) -> Any:
            x, key = carry
            key, own = jax.random.split(key)
            x = evaluate(params, x) + jax.random.normal(own, x.shape)
            return (x, key), x.sum()

        return jax.lax.scan(token, (x, key), None, length=3)

    state, _ = step(step.initialize(init, jax.random.key(0)), BATCH)
    params, key = state["params"], jax.random.key(1)
    for fn, rest in ((evaluate, (BATCH["x"],)), (generate, (BATCH["x"][:4], key))):
        followed = autopar.follow(step, fn)
        for _ in range(2):
            found = followed(params, *rest)
        assert all(array.fetched is None for array in jax.tree.leaves(params))
        assert_close(found, jax.jit(fn)(step.gather(params), *rest))
        state, _ = step(state, BATCH)
        params = state["params"]
    assert_close(autopar.follow(step, evaluate)(jax.device_get(params), BATCH["x"]),
                 evaluate(step.gather(params), BATCH["x"]))  # fmt: skip


def scanned(stack: Any, x: Any) -> Any:
    narrow = stack.astype(jnp.bfloat16).astype(jnp.float32)
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, narrow)


def tokens(stack: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, x: scanned(stack, x)[0], x)


def reads_its_start(stack: Any, x: Any) -> Any:
    """The first carry begins with what the body reads, the second with the same, one with 0."""

    def body(carry: Any, w: Any) -> Any:
        h, other, total = carry
        h = jnp.tanh(h @ w) + x
        return (h, other * 0.5, total + h.sum()), h.mean()

    (h, other, total), means = jax.lax.scan(body, (x, x, 0.0), stack * 0.5)
    return h, other, total, means


def test_layers_under_a_scan_are_followed_on_their_actors() -> None:
    def train_scan(stack: Any, x: Any) -> Any:
        gradient = jax.grad(lambda stack: jnp.mean((scanned(stack, x)[0] - x) ** 2))(stack)
        return stack - 0.1 * gradient

    stack = jax.random.normal(jax.random.key(0), (4, 8, 8)) / 3
    options: dict[str, Any] = {"stages": 2, "microbatches": 2, "schedule": "gpipe"}
    made = autopar.compile(train_scan, stack, BATCH["x"], cluster=FOUR, runtime=RAY, **options)
    assert isinstance(made, RayExecutable)
    with made:
        trained = made(stack, BATCH["x"])
        assert len(trained.sharding.parts) == 2
        for fn in (scanned, tokens, reads_its_start):
            found = autopar.follow(made, fn)(trained, BATCH["x"])
            assert trained.fetched is None or fn is not scanned
            assert_close(found, jax.jit(fn)(np.asarray(trained), BATCH["x"]))
        with pytest.raises(DeviceError, match="`reduce_sum`"):
            autopar.follow(made, lambda stack: jnp.sum(stack**2))(trained)
        with pytest.raises(DeviceError, match=r"`mul`.*returns"):
            autopar.follow(made, lambda stack: stack * 0.5)(trained)


def test_actors_read_their_rows_of_a_source(step: RayExecutable) -> None:
    class Source:  # in here, so that its code goes with it
        def __init__(self, bad: int = -1):
            self.read, self.bad = list[int](), bad

        def __len__(self) -> int:
            return 6

        def __getitem__(self, number: int) -> Any:
            self.read.append(number)
            if number == self.bad:
                raise OSError("the disk is gone")
            random = np.random.default_rng(number)
            rows = 16 if number < 5 else 8
            return {k: random.normal(size=(rows, 8)).astype(np.float32) for k in ("y", "x")}

    source, plain = Source(), init(jax.random.key(0))
    state: Any = init(jax.random.key(0))
    batches = step.prefetch(source)
    for number in range(5):
        batch = next(batches)
        state, loss = step(state, batch)
        plain, wanted = jax.jit(train_step)(plain, Source()[number])
        assert_close(loss, wanted)
        assert type(batch["x"]).__name__ == ("SourcedLeaf" if number else "ndarray")
    assert_close(state["params"], plain["params"])
    assert next(batches)["x"].shape == (8, 8) and batches.position == 6
    assert source.read == [0, 5], "the actors have read the others"
    np.testing.assert_array_equal(batch["x"], Source()[4]["x"])
    state = init(jax.random.key(0))
    with pytest.raises(StageError, match="the disk is gone"):
        for batch in itertools.islice(step.prefetch(Source(bad=2)), 4):
            state, loss = step(state, batch)
        float(loss["loss"])
    state, _ = step(init(jax.random.key(0)), BATCH)


def test_wrong_arguments_are_named(step: RayExecutable) -> None:
    with pytest.raises(TraceError, match="compiled for other arguments"):
        step(init(jax.random.key(0), width=4), BATCH)


def test_every_piece_is_compiled_and_readable(step: RayExecutable) -> None:
    assert "// piece F0" in step.as_text()
    found = set(step.memory_analysis())
    assert found >= {"F0", "B0", "B1"} and "F1" not in found  # the last stage does both at once
    assert set(step.cost_analysis()) >= {"F0", "B0", "B1"}


def test_a_profile(step: RayExecutable) -> None:
    state = step.initialize(init, jax.random.key(0))
    check_profile(step.profile(state, BATCH))
    assert_close(step(state, BATCH), plain(1))  # nothing was consumed


def test_one_stage_on_one_actor_by_decorator() -> None:
    scale = jnp.arange(8.0)

    @autopar.parallelize(runtime=RAY, cluster=autopar.Cluster.preset("cpu", devices_per_node=2))
    def one(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x * scale @ w) ** 2))(w)

    w, wanted = jnp.ones((8, 4)), jnp.ones((8, 4))
    for _ in range(2):
        w = one(w, BATCH["x"])
        wanted = jax.jit(one.__wrapped__)(wanted, BATCH["x"])
    np.testing.assert_allclose(w, wanted, rtol=1e-5)
    assert isinstance(one.executable, RayExecutable)
    one.executable.shutdown()


@pytest.mark.parametrize(
    "options",
    [
        {"address": ""},
        {"address": "ray://here:10001"},
        {"address": 5},
        {"devices": "tpu"},
        {"deadline": 0},
        {"deadline": "1m"},
        {"max_restarts": -1},
        {"max_restarts": True},
        {"snapshot_every": 0},
        {"on_loss": "replan"},
        {"on_loss": "retry"},
    ],
    ids=str,
)
def test_impossible_options(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=re.escape(f"Ray({name}=")):
        autopar.Ray(**options)
