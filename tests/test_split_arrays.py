"""States whose leaves are stacked by layer, on stages that hold some of the layers each."""

import copy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.arrays.split_array import SplitArray, SplitSharding, put
from autopar.base.errors import DeviceError, DonatedBufferError

DEPTH, WIDTH, ROWS = 6, 8, 16
BATCH = np.random.default_rng(1).normal(size=(2, ROWS, WIDTH)).astype(np.float32)


def init(key: jax.Array) -> Any:
    w = jax.random.normal(key, (DEPTH, WIDTH, WIDTH)) / WIDTH**0.5
    params = {"w": w, "head": jnp.eye(WIDTH)}
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "step": 0}


def train_step(state: Any, x: Any, y: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params["w"])
        return jnp.mean((h @ params["head"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "step": state["step"] + 1}, loss


def compiled(**options: Any) -> autopar.Executable:
    options = {"stages": [2, 3, 5], "microbatches": 4, "logical_mesh": (2,), **options}
    return autopar.compile(train_step, init(jax.random.key(0)), *BATCH, **options)


def expected(steps: int = 3) -> Any:
    step, state = jax.jit(train_step), init(jax.random.key(0))
    for _ in range(steps):
        state, loss = step(state, *BATCH)
    return jax.device_get((state, loss))


def assert_close(left: Any, right: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), left, right)


@pytest.fixture(scope="module")
def step() -> autopar.Executable:
    return compiled()


def test_the_state_is_split_where_the_layers_are(step: autopar.Executable) -> None:
    """Plain arrays go in, and split ones come out and go in again."""
    state: Any = init(jax.random.key(0))
    for _ in range(3):
        state, loss = step(state, *BATCH)
    w = state["params"]["w"]
    assert isinstance(w, SplitArray)
    assert [part.shape[0] for part in w.parts] == [2, 1, 2, 1]
    assert [len(part.sharding.device_set) for part in w.parts] == [2, 2, 2, 2]
    assert len(w.sharding.device_set) == 8
    assert isinstance(state["momentum"]["w"], SplitArray)
    assert isinstance(state["params"]["head"], jax.Array)
    assert_close(jax.device_get((state, loss)), expected())
    paths = [tensor.path for tensor in step.plan.inputs]
    assert "state['params']['w'][3:5]" in paths
    assert step.in_shardings[0]["params"]["w"].ends == (2, 3, 5, 6)


def test_initialize_makes_every_part_on_its_mesh(step: autopar.Executable) -> None:
    state = step.initialize(init, jax.random.key(0))
    w = state["params"]["w"]
    assert isinstance(w, SplitArray)
    assert w.sharding.is_equivalent_to(step.in_shardings[0]["params"]["w"], 3)
    assert_close(jax.device_get(state), jax.device_get(init(jax.random.key(0))))
    for _ in range(3):
        state, loss = step(state, *BATCH)
    assert_close(jax.device_get((state, loss)), expected())


def test_donation(step: autopar.Executable) -> None:
    old = step.initialize(init, jax.random.key(0))
    step(old, *BATCH)
    assert old["params"]["w"].is_deleted()
    assert "deleted" in repr(old["params"]["w"])
    with pytest.raises(DonatedBufferError, match="donated by an earlier call"):
        step(old, *BATCH)
    # One array in two places of the state is memory that can be donated once.
    state = step.initialize(init, jax.random.key(0))
    state["momentum"] = {**state["params"]}
    step(state, *BATCH)
    kept = compiled(donate_argnums=())
    state = kept.initialize(init, jax.random.key(0))
    kept(state, *BATCH)
    assert not state["params"]["w"].is_deleted()


def test_gather_and_apply(step: autopar.Executable) -> None:
    state, _ = step(step.initialize(init, jax.random.key(0)), *BATCH)
    plain = expected(1)[0]
    whole = step.gather(state)
    assert isinstance(whole["params"]["w"], jax.Array)
    assert_close(jax.device_get(whole), plain)
    norm = step.apply(lambda tree: jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))),
                      state["params"])  # fmt: skip
    wanted = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(plain["params"])))
    np.testing.assert_allclose(norm, wanted, rtol=1e-5)
    halved = step.apply(lambda tree: jax.tree.map(lambda x: x / 2, tree), state["params"])
    assert isinstance(halved["w"], SplitArray)
    state, _ = step({**state, "params": halved}, *BATCH)


def test_what_is_gathered_outlives_the_next_step(step: autopar.Executable) -> None:
    state, _ = step(step.initialize(init, jax.random.key(0)), *BATCH)
    whole = step.gather(state)
    step(state, *BATCH)
    assert_close(jax.device_get(whole), expected(1)[0])


def test_functions_of_jax_say_what_brings_arrays_together(step: autopar.Executable) -> None:
    state, _ = step(step.initialize(init, jax.random.key(0)), *BATCH)
    split = next(x for x in jax.tree.leaves(state) if isinstance(x, SplitArray))
    functions: list[Any] = [jnp.mean, jax.lax.neg, jax.jit(jnp.sum), jax.vmap(jnp.sum)]
    for fn in functions:
        with pytest.raises(DeviceError, match=r"step\.apply"):
            fn(split)
    with pytest.raises(ValueError, match=r"step\.apply"):  # of JAX's own arrays, on two meshes
        jnp.add(split.parts[0].sum(), split.parts[1].sum())
    devices = jax.devices()
    meshes = [
        Mesh(np.array(pair), "x") for pair in ([devices[0], devices[5]], [devices[1], devices[6]])
    ]
    elsewhere = [jax.device_put(1.0, NamedSharding(mesh, PartitionSpec())) for mesh in meshes]
    with pytest.raises(ValueError, match="incompatible devices") as found:
        jnp.add(*elsewhere)
    assert "autopar" not in str(found.value), "no business of ours"


def test_a_checkpoint_goes_on_with_other_stages(step: autopar.Executable, tmp_path: Path) -> None:
    """Written from one plan, read into another number of stages and into one mesh."""
    state = step.initialize(init, jax.random.key(0))
    for _ in range(2):
        state, _ = step(state, *BATCH)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", jax.device_get(state))
    for options in ({"stages": 2, "logical_mesh": (4,)}, {"stages": 1, "logical_mesh": None}):
        other = compiled(**options)
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "state", init(jax.random.key(1)))
        restored, loss = other(restored, *BATCH)
        assert_close(jax.device_get((restored, loss)), expected())


def test_a_state_of_other_stages_is_taken(step: autopar.Executable) -> None:
    state = step.initialize(init, jax.random.key(0))
    for _ in range(2):
        state, _ = step(state, *BATCH)
    state, loss = compiled(stages=[3], logical_mesh=(4,))(state, *BATCH)
    assert state["params"]["w"].ends == (3, 6)
    assert_close(jax.device_get((state, loss)), expected())


@pytest.mark.parametrize("method", ["auto", "zero3"])
def test_a_state_in_stages_is_taken_by_one_mesh(step: autopar.Executable, method: str) -> None:
    state = step.initialize(init, jax.random.key(0))
    for _ in range(2):
        state, _ = step(state, *BATCH)
    one = autopar.compile(train_step, init(jax.random.key(0)), *BATCH, stages=1, method=method)
    state, loss = one(state, *BATCH)
    assert isinstance(state["params"]["w"], jax.Array)
    assert_close(jax.device_get((state, loss)), expected())


def test_plans_are_saved_and_followed(step: autopar.Executable, tmp_path: Path) -> None:
    step.plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == step.plan
    again = compiled(plan=loaded)
    state: Any = init(jax.random.key(0))
    for _ in range(3):
        state, loss = again(state, *BATCH)
    assert_close(jax.device_get((state, loss)), expected())


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2, "num_chunks": 2, "schedule": "interleaved_1f1b", "logical_mesh": (4,)},
        {
            "stages": 4,
            "schedule": "zb_h1",
            "logical_mesh": (2,),
            "pins": {"*params*w": (None, "x")},
        },
    ],
    ids=["interleaved", "zero bubble, pinned"],
)
def test_other_schedules(options: dict[str, Any]) -> None:
    step = compiled(**options)
    state: Any = init(jax.random.key(0))
    for _ in range(3):
        state, loss = step(state, *BATCH)
    assert_close(jax.device_get((state, loss)), expected())


@pytest.mark.parametrize("method", ["data", "zero2"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_two_stacked_leaves(method: str, schedule: str) -> None:
    """Gradients that are summed over devices once a step, in W tasks of their own or in B."""

    def step(params: Any, x: Any, y: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            def layer(h: jax.Array, params: Any) -> Any:
                return h + jnp.tanh(h @ params["w"]) * params["gain"], None

            h, _ = jax.lax.scan(layer, x, params)
            return jnp.mean((h - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def make() -> Any:
        return {"w": init(jax.random.key(0))["params"]["w"], "gain": jnp.ones((DEPTH, WIDTH))}

    options: dict[str, Any] = {"stages": 2, "microbatches": 4, "schedule": schedule}
    parallel = autopar.compile(step, make(), *BATCH, method=method, **options)
    state, plain = make(), make()
    for _ in range(3):
        state, loss = parallel(state, *BATCH)
        plain, plain_loss = jax.jit(step)(plain, *BATCH)
    assert_close(jax.device_get((state, loss)), jax.device_get((plain, plain_loss)))


# The array itself.


@pytest.fixture
def meshes() -> list[NamedSharding]:
    devices = np.asarray(jax.devices())
    return [
        NamedSharding(Mesh(devices[start:stop], ("x",)), PartitionSpec(None, "x"))
        for start, stop in ((0, 2), (2, 4))
    ]


@pytest.mark.parametrize("axis", [0, 2])
def test_an_array_in_parts_is_an_array(meshes: list[NamedSharding], axis: int) -> None:
    whole = np.random.default_rng(0).normal(size=(5, 4, 5)).astype(np.float32)
    sharding = SplitSharding(axis, (3, 5), tuple(meshes))
    array = put(whole, sharding)
    assert isinstance(array, SplitArray)
    assert (array.shape, array.dtype, array.ndim) == (whole.shape, whole.dtype, 3)
    assert (array.size, array.nbytes, len(array)) == (whole.size, whole.nbytes, 5)
    np.testing.assert_array_equal(np.asarray(array), whole)
    np.testing.assert_array_equal(jax.device_get({"a": array})["a"], whole)
    np.testing.assert_array_equal(array[1:3, 2], whole[1:3, 2])
    np.testing.assert_array_equal(np.stack(list(array)), whole)
    np.testing.assert_allclose(jnp.sum(jnp.asarray(array)), whole.sum(), rtol=1e-5)
    assert np.asarray(array, np.float64).dtype == np.float64
    assert jax.block_until_ready(array) is array
    assert str(whole.dtype) in repr(array)
    assert (array == whole).all() and not (array != whole).any()
    np.testing.assert_array_equal(1 - array * array, 1 - whole * whole)
    np.testing.assert_array_equal(array.astype(np.float16).T, whole.astype(np.float16).T)
    assert jnp.zeros_like(array).shape == whole.shape
    np.testing.assert_array_equal(copy.deepcopy(array), whole)
    assert not hasattr(array, "no_such_method")
    one = put(array, jax.sharding.SingleDeviceSharding(jax.devices()[7]))
    np.testing.assert_array_equal(one, whole)
    assert array.sharding == sharding
    assert put(array, sharding).sharding.is_equivalent_to(sharding, 3)
    other = SplitSharding(axis, (1, 5), tuple(meshes))
    np.testing.assert_array_equal(put(array, other), whole)
    assert not other.is_equivalent_to(sharding, 3)
    assert not sharding.is_equivalent_to(meshes[0], 3)
    array.delete()
    assert array.is_deleted()


def test_functions_of_jax_say_what_takes_a_split_state(step: autopar.Executable) -> None:
    state, _ = step(init(jax.random.key(0)), *BATCH)
    leaf = state["params"]["w"]
    assert isinstance(leaf, SplitArray)
    functions: list[Any] = [jnp.mean, jax.jit(jnp.sin), jax.typeof]
    for fn in functions:
        with pytest.raises(DeviceError, match=r"step\.apply\(fn, state\)"):
            fn(leaf)
    assert jnp.asarray(leaf).shape == leaf.shape
