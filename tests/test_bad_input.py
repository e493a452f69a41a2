"""Bad input: one clear error each, which says what is wrong, where, why, and what to try."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import P

import autopar
from autopar.base.errors import (
    AutoparError,
    AutoparWarning,
    BatchArgumentError,
    DeviceError,
    DonatedBufferError,
    DonationWarning,
    InexactMicrobatchError,
    MemoryLimitError,
    OptionError,
    PinError,
    PlanMismatchError,
    TraceError,
)

STATE = {"dense": {"kernel": np.ones((8, 16), np.float32), "bias": np.zeros(16, np.float32)}}
BATCH = {"x": np.ones((16, 8), np.float32), "y": np.ones((16, 16), np.float32)}


def loss_fn(state: Any, batch: Any) -> Any:
    dense = state["dense"]
    return jnp.mean((jnp.tanh(batch["x"] @ dense["kernel"] + dense["bias"]) - batch["y"]) ** 2)


def train_step(state: Any, batch: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_fn)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss


def rows(number: int) -> Any:
    return jax.tree.map(lambda x: x[:1].repeat(number, 0), BATCH)


def raises(
    error: type[AutoparError],
    call: Callable[[], Any],
    *,
    what: str,
    where: str | None = None,
    why: str | None = None,
    hint: str | None = None,
) -> AutoparError:
    """Check the error's class and that each part of its text says what it should."""
    with pytest.raises(error) as caught:
        call()
    found = caught.value
    assert what in found.what
    for name, part in (("where", where), ("why", why), ("hint", hint)):
        text = getattr(found, name)
        if part is not None:
            assert text is not None, f"{name} is missing"
            assert part in text, f"{name}: {text}"
            assert flat(part) in flat(str(found))
    return found


def flat(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


def every_entrance(*arguments: Any, **options: Any) -> list[Callable[[], Any]]:
    """A request through `plan`, `compile` and `parallelize`: all must refuse it."""
    step = arguments[0]
    return [
        lambda: autopar.plan(*arguments, **options),
        lambda: autopar.compile(*arguments, **options),
        lambda: autopar.parallelize(step, **options)(*arguments[1:]),
    ]


# The batch


def test_batch_that_microbatches_do_not_divide() -> None:
    for call in every_entrance(train_step, STATE, BATCH, microbatches=3):
        raises(
            BatchArgumentError,
            call,
            what="16 examples cannot be divided into 3 microbatches",
            where="batch['x']",
            why="the same number of examples",
            hint="1, 2, 4, 8, 16",
        )


@pytest.mark.parametrize("method", ["data", "zero1", "zero2", "zero3"])
def test_batch_that_the_mesh_does_not_divide(method: str) -> None:
    raises(
        BatchArgumentError,
        lambda: autopar.plan(train_step, STATE, rows(12), method=method, microbatches=1),
        what="12 examples cannot be divided among 8 devices",
        where="batch['x']",
        why=f"method={method!r}",
        hint="multiple of 8",
    )


def test_a_batch_along_another_dimension_than_time() -> None:
    def step(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            x, queries = batch["x"], batch["x"] @ w
            scores = jax.nn.softmax(jnp.einsum("tbd,sbd->bts", queries, x))
            return jnp.mean((jnp.einsum("bts,sbd->bd", scores, x) - batch["y"]) ** 2)

        return w - jax.grad(loss)(w)

    x, y = np.ones((12, 16, 4), np.float32), np.ones((16, 4), np.float32)
    line = "batch_axes=(None, {'x': 1, 'y': 0})"
    for options in ({"method": "data", "microbatches": 1}, {"microbatches": 5}):
        with pytest.raises(BatchArgumentError, match="of 12 examples") as caught:
            autopar.plan(step, np.eye(4, dtype=np.float32), {"x": x, "y": y}, **options)
        assert f"if the 16 along another dimension are the examples, say so:\n{line}" in str(
            caught.value.hint
        )

    def batch_major(w: Any, batch: Any) -> Any:
        return step(w, {**batch, "x": jnp.swapaxes(batch["x"], 0, 1)})

    with pytest.raises(BatchArgumentError) as caught:  # time meets itself in the scores
        autopar.plan(
            batch_major, np.eye(4, dtype=np.float32), {"x": x.swapaxes(0, 1), "y": y},
            microbatches=5,
        )  # fmt: skip
    assert "batch_axes" not in str(caught.value.hint)


def test_microbatches_that_the_mesh_does_not_divide() -> None:
    raises(
        BatchArgumentError,
        lambda: autopar.plan(train_step, STATE, BATCH, method="data", microbatches=4, stages=1),
        what="cannot be divided",
        where="batch",
        why="microbatch",
        hint="multiple of",
    )


def test_no_batch_argument() -> None:
    def step(state: Any) -> Any:
        return jax.tree.map(lambda p: p - 0.1 * p, state)

    for options in ({"microbatches": 4}, {"method": "data"}, {"method": "zero2"}):
        raises(
            BatchArgumentError,
            lambda options=options: autopar.plan(step, STATE, **options),  # type: ignore[misc]
            what="needs a batch, and no argument holds one",
            why="state['dense']['bias'] (state)",
            hint="batch_argnums",
        )


def test_ambiguous_batch_argument() -> None:
    def step(state: Any, query: Any, key: Any) -> Any:
        kernel = state["kernel"]
        loss = lambda kernel: jax.nn.logsumexp((query @ kernel) @ key.T)  # noqa: E731
        return {"kernel": kernel - 0.1 * jax.grad(loss)(kernel)}

    rows = [np.ones((n, 4), np.float32) for n in (4, 8, 5)]
    for call in every_entrance(step, {"kernel": rows[0]}, *rows[1:]):
        raises(
            BatchArgumentError,
            call,
            what="The batch is ambiguous",
            where="query",
            why="key: 5",
            hint="for 5 examples: batch_axes=(None, None, 0)",
        )


def test_batch_that_cannot_be_split_exactly() -> None:
    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> Any:
            hidden = batch["x"] @ state["dense"]["kernel"]
            hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-5)  # over the batch
            hidden = jnp.tanh(hidden) @ state["dense"]["kernel"].T @ state["dense"]["kernel"]
            hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-5)  # and once more
            return jnp.mean((hidden - batch["y"]) ** 2)

        gradients = jax.grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients)

    line = step.__code__.co_firstlineno + 3
    error = raises(
        InexactMicrobatchError,
        lambda: autopar.plan(step, STATE, BATCH, microbatches=2),
        what="",
        where="test_bad_input.py",
        hint="microbatches=1",
    )
    assert f"test_bad_input.py:{line}" in str(error.where)


# Leaves and results


class NotHashable:
    __hash__ = None  # type: ignore[assignment]


def test_leaf_that_is_neither_an_array_nor_hashable() -> None:
    for call in every_entrance(train_step, STATE, {**BATCH, "meta": NotHashable()}):
        raises(
            TraceError,
            call,
            what="neither an array nor a constant",
            where="batch['meta']",
            why="hashable",
            hint="numpy.asarray",
        )


def test_function_that_returns_no_arrays() -> None:
    def step(state: Any, batch: Any) -> Any:
        train_step(state, batch)

    for call in every_entrance(step, STATE, BATCH):
        raises(
            TraceError,
            call,
            what="step returns no arrays",
            where="test_bad_input.py",
            why="its result is",
            hint="return the new state",
        )


# Memory


def test_memory_limit_that_nothing_satisfies() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        autopar.plan(train_step, STATE, BATCH, memory_limit=64, microbatches=1)
    error = caught.value
    assert error.least_bytes is not None
    assert error.least_bytes > 64
    assert len(error.largest_tensors) == 5
    sizes = [size for _, size in error.largest_tensors]
    assert sizes == sorted(sizes, reverse=True)
    text = str(error)
    assert f"{error.least_bytes:,} bytes" in text
    for path, _ in error.largest_tensors:
        assert path in text
    assert error.hint is not None
    assert "memory_limit" in error.hint


def test_the_least_memory_that_would_do_does() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        autopar.plan(train_step, STATE, BATCH, memory_limit=64, microbatches=1)
    least = caught.value.least_bytes
    assert least is not None
    plan = autopar.plan(train_step, STATE, BATCH, memory_limit=least, microbatches=1)
    assert plan.estimates.peak_bytes_per_device <= least


# Pins


def test_pin_that_matches_no_parameter() -> None:
    for call in every_entrance(train_step, STATE, BATCH, pins={"conv/kernel": P("x")}):
        raises(
            PinError,
            call,
            what="'conv/kernel' matches no input",
            why="state['dense']['kernel']",
            hint="'*kernel*'",
        )


def test_pin_that_does_not_divide() -> None:
    state = {"dense": {"kernel": np.ones((8, 15), np.float32), "bias": np.zeros(15, np.float32)}}
    batch = {**BATCH, "y": np.ones((16, 15), np.float32)}
    pins = {"dense/kernel": P(None, "x")}
    raises(
        PinError,
        lambda: autopar.plan(train_step, state, batch, pins=pins, logical_mesh=(8,)),
        what="'dense/kernel'",
        where="state['dense']['kernel']",
        why="15",
    )


def test_pins_that_conflict() -> None:
    pins = {"*kernel": P("x"), "dense/*": P(None)}
    raises(
        PinError,
        lambda: autopar.plan(train_step, STATE, BATCH, pins=pins, logical_mesh=(8,)),
        what="give one tensor two shardings",
        where="state['dense']['kernel']",
        hint="narrower",
    )


def test_pin_with_an_unknown_axis_or_too_many_dimensions() -> None:
    for spec in (P("model"), P(None, None, "x")):
        raises(
            PinError,
            lambda spec=spec: autopar.plan(  # type: ignore[misc]
                train_step, STATE, BATCH, pins={"dense/kernel": spec}, logical_mesh=(8,)
            ),
            what="dense/kernel",
        )


# Options


def test_unknown_method() -> None:
    for call in every_entrance(train_step, STATE, BATCH, method="zero4"):
        raises(
            OptionError,
            call,
            what="There is no method 'zero4'",
            why="auto, data, zero1, zero2, zero3, hsdp, megatron, megatron_sp, expert, shard",
            hint="did you mean",
        )


def test_unknown_option() -> None:
    raises(
        OptionError,
        lambda: autopar.parallelize(train_step, micro_batches=4),
        what="There is no option 'micro_batches'",
        why="microbatches",
        hint="'microbatches'",
    )
    raises(
        OptionError,
        lambda: autopar.compile(train_step, STATE, BATCH, micro_batches=4),
        what="There is no option 'micro_batches'",
        where="autopar.compile",
        why="microbatches",
        hint="'microbatches'",
    )


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 0},
        {"cluster": 3},
        {"plan": 3},
        {"stages": 0},
        {"schedule": "1f1b", "stages": 1},
        {"memory_limit": "much"},
        {"logical_mesh": (2, 2, 2, 1)},
        {"runtime": "spark"},
    ],
    ids=str,
)
def test_impossible_value_of_an_option(options: Any) -> None:
    name = next(iter(options))
    error = raises(OptionError, lambda: autopar.parallelize(train_step, **options), what=f"{name}=")
    assert error.why is not None


def test_what_is_not_a_function() -> None:
    compile_: Any = autopar.compile
    raises(
        OptionError,
        lambda: compile_(STATE, BATCH),
        what="takes a function",
        hint="train_step",
    )
    decorator: Any = autopar.parallelize
    raises(OptionError, lambda: decorator("data"), what="takes a function", hint="method=")


# Plans


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    autopar.plan(train_step, STATE, BATCH, method="data", microbatches=1).save(path)
    return path


def follow(path: Any, step: Any = train_step, batch: Any = BATCH, **options: Any) -> Any:
    return autopar.compile(
        step, STATE, batch, plan=path, **{"method": "data", "microbatches": 1, **options}
    )


def test_plan_file_that_is_truncated(saved: Path, tmp_path: Path) -> None:
    text = saved.read_text()
    path = tmp_path / "plan.json"
    for share in (0.1, 0.5, 0.99):
        path.write_text(text[: int(share * len(text))])
        raises(
            PlanMismatchError,
            lambda: follow(path),
            what="truncated",
            where=str(path),
            why="ends after",
            hint="plan again",
        )


def test_plan_file_of_another_version(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(saved.read_text()), "format_version": 999}))
    raises(
        PlanMismatchError,
        lambda: follow(path),
        what="format version 999",
        where=str(path),
        why="reads format version",
        hint="plan again",
    )


def test_plan_file_that_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for content in (b"", b"[1, 2]", b"\xff\xfe", b'{"format_version": 1}'):
        path.write_bytes(content)
        raises(PlanMismatchError, lambda: follow(path), what="", where=str(path))
    with pytest.raises(FileNotFoundError):
        follow(tmp_path / "missing.json")


def test_plan_of_another_program(saved: Path) -> None:
    def other_step(state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.2 * g, state, gradients), loss

    for step, batch, why in (
        (other_step, BATCH, "content hash"),
        (other_step, BATCH, "Python number"),
        (train_step, rows(8), "[8, "),
    ):
        raises(
            PlanMismatchError,
            lambda step=step, batch=batch: follow(saved, step, batch),  # type: ignore[misc]
            what="made for another program",
            why=why,
            hint="plan again",
        )


def test_plan_with_other_options(saved: Path) -> None:
    raises(
        PlanMismatchError,
        lambda: follow(saved, method="zero1"),
        what="made with other options",
        why="method",
        hint="plan again",
    )


# Donation


def test_donated_state_whose_output_has_another_shape_or_dtype() -> None:
    def shrink(state: Any, batch: Any) -> Any:
        new, loss = train_step(state, batch)
        kernel = new["dense"]["kernel"].astype(jnp.bfloat16)
        return {"dense": {"kernel": kernel, "bias": new["dense"]["bias"][:4]}}, loss

    def widen(state: Any, batch: Any) -> Any:
        new, loss = train_step(state, batch)
        new["dense"]["kernel"] = new["dense"]["kernel"].astype(jnp.bfloat16)
        return new, loss

    for step, kept in ((shrink, ("kernel", "bias")), (widen, ("kernel",))):
        state = jax.tree.map(jnp.asarray, STATE)
        with pytest.warns(DonationWarning, match=r"state\['dense'\]\['\w+'\]") as caught:
            compiled = autopar.compile(
                step, state, BATCH, donate_argnums=0, method="data", microbatches=1
            )
        for name in kept:
            assert f"state['dense']['{name}']" in str(caught[0].message)
        assert "no output of the same shape and dtype" in str(caught[0].message)
        new, loss = compiled(state, BATCH)
        for name in kept:
            assert not state["dense"][name].is_deleted()
        expected, expected_loss = jax.jit(step)(STATE, BATCH)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        np.testing.assert_allclose(new["dense"]["bias"], expected["dense"]["bias"], rtol=1e-5)


def test_donated_buffer_that_is_used_again() -> None:
    step = autopar.parallelize(train_step, method="data", microbatches=1)
    state, _ = step(STATE, BATCH)
    step(state, BATCH)
    raises(
        DonatedBufferError,
        lambda: step(state, BATCH),
        what="donated by an earlier call",
        where="state['dense']['bias']",
        why="train_step writes the new state into the memory of the old one",
        hint="donate_argnums=()",
    )


# Devices


def test_fewer_devices_than_the_plan_needs(tmp_path: Path) -> None:
    cluster = autopar.Cluster.preset("dgx-h100", nodes=2)
    raises(
        DeviceError,
        lambda: autopar.compile(train_step, STATE, BATCH, cluster=cluster),
        what="has 16 devices, and JAX sees 8",
        where="jax.devices()",
        why="needs the devices",
        hint="autopar.plan needs no devices",
    )
    plan = autopar.plan(
        train_step, STATE, BATCH, cluster=cluster, method="data", microbatches=1, stages=1
    )
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json"):
        raises(
            DeviceError,
            lambda given=given: follow(given),  # type: ignore[misc]
            what="needs 16 devices, and JAX sees 8",
            where="jax.devices()",
            hint="jax_num_cpu_devices",
        )


def test_another_optimizer_object_is_named() -> None:
    def state() -> TrainState:
        params = {"w": jnp.ones((4, 2))}
        return TrainState.create(apply_fn=apply, params=params, tx=optax.sgd(0.1))

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return x @ params["w"]

    def step(state: TrainState, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads), jnp.mean(x)

    rows = jnp.ones((8, 4))
    compiled = autopar.compile(step, state(), rows, method="data", microbatches=1)
    with pytest.raises(TraceError, match="build the state once") as caught:
        compiled(state(), rows)
    assert "state.tx: GradientTransformationExtraArgs, another" in str(caught.value)


def test_a_plan_for_other_devices_warns_where_it_is_compiled() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return w + x.sum(0), x.mean()

    shapes = jnp.ones(4), jnp.ones((8, 4))
    options: dict[str, Any] = {"method": "data", "microbatches": 1}
    plan = autopar.plan(step, *shapes, cluster="h100", **options)
    with pytest.warns(AutoparWarning, match="The plan is for H100 SXM5 80GB, and 'cpu' devices"):
        autopar.compile(step, *shapes, plan=plan, **options)
