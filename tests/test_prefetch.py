"""`step.prefetch`: batches read and placed ahead of time, from sources of many kinds."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.errors import BatchArgumentError, OptionError

ROWS = 16


def train(w: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def batch(number: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    shapes = {"x": (rows, 4), "y": (rows,)}
    return {k: random.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


START = np.ones(4, np.float32)


@pytest.fixture(scope="module")
def step() -> Any:
    made = autopar.parallelize(train, method="data", microbatches=1, donate_argnums=())
    made(START, batch(0))
    return made


def trained(step: Any, batches: Any) -> Any:
    w = START
    for each in batches:
        w, _ = step(w, each)
    return np.asarray(w)


def wait_until(done: Any) -> None:
    for _ in range(500):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come")


def threads() -> int:
    return sum(x.name == "autopar prefetch" for x in threading.enumerate())


def test_batches_are_placed_and_in_order(step: Any) -> None:
    source = [batch(i) for i in range(5)]
    with step.prefetch(iter(source)) as batches:
        placed = list(batches)
    wanted = jax.tree.leaves(step.executable.in_shardings[1])
    assert [x.sharding for x in jax.tree.leaves(placed[3])] == wanted
    np.testing.assert_allclose(trained(step, placed), trained(jax.jit(train), source), rtol=1e-5)
    assert batches.position == 5 and threads() == 0


def test_no_more_is_read_than_was_asked_for(step: Any) -> None:
    read: list[int] = []

    def source() -> Iterator[Any]:
        for i in range(100):
            read.append(i)
            yield batch(i)

    batches = step.prefetch(source(), size=2)
    next(batches)
    wait_until(lambda: len(read) == 4)  # one taken, two there, one in hand
    batches.close()
    batches.close()
    assert len(read) == 4 and batches.position == 1 and not list(batches)


def test_a_source_may_use_its_memory_again(step: Any) -> None:
    memory = batch(0)

    def source() -> Iterator[Any]:
        for i in range(4):
            for name, value in batch(i).items():
                memory[name][...] = value
            yield memory

    found = trained(step, step.prefetch(source(), size=4))
    np.testing.assert_array_equal(found, trained(step, [batch(i) for i in range(4)]))


def test_a_run_goes_on_where_it_was(step: Any) -> None:
    class Counted:
        """A sequence that says what was read of it."""

        def __init__(self) -> None:
            self.read: list[int] = []

        def __len__(self) -> int:
            return 6

        def __getitem__(self, number: int) -> Any:
            self.read.append(number)
            return batch(number)

    class Stateful(Iterator[Any]):
        """An iterator with a state of its own, as Grain's."""

        def __init__(self) -> None:
            self.at = 0

        def __next__(self) -> Any:
            if self.at == 6:
                raise StopIteration
            self.at += 1
            return batch(self.at - 1)

        def get_state(self) -> dict[str, int]:
            return {"at": self.at}

        def set_state(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    whole = trained(step, map(batch, range(6)))
    for make in (Counted, Stateful, lambda: map(batch, range(6))):
        first = step.prefetch(make())
        w = START
        for _ in range(2):
            w, _ = step(w, next(first))
        first.close()
        again = make()
        for each in step.prefetch(again, position=first.position):
            w, _ = step(w, each)
        np.testing.assert_array_equal(w, whole)
        if isinstance(again, Counted):
            assert again.read == [2, 3, 4, 5]
    assert first.position == 2


def test_ragged_ends(step: Any) -> None:
    source = [batch(0), batch(1), batch(2, 5)]
    assert len(list(step.prefetch(source, ragged="drop"))) == 2
    *_, last = step.prefetch(source, ragged="follow")
    assert last["x"].shape == (5, 4)

    def masked(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            errors = (batch["x"] @ w - batch["y"]) ** 2
            return jnp.sum(errors * batch["real"]) / jnp.sum(batch["real"])

        return w - 0.1 * jax.grad(loss)(w), batch["real"].sum()

    padded = autopar.parallelize(masked, method="data", microbatches=1)
    w: Any = START
    for each in padded.prefetch(source, ragged="pad", mask="real"):
        w, count = padded(w, each)
    assert int(count) == 5
    np.testing.assert_allclose(w, trained(jax.jit(train), source), rtol=1e-5)
    *_, (last, mask) = step.prefetch(source, ragged="pad")
    assert last["x"].shape == (ROWS, 4) and mask.tolist() == [True] * 5 + [False] * 11


def test_several_batch_arguments_and_foreign_arrays() -> None:
    class Tensor:
        """As PyTorch's: it says its numbers only when it is asked on the CPU."""

        def __init__(self, array: np.ndarray):
            self.array, self.dtype = array, "torch.float64"

        def detach(self) -> Any:
            return self

        cpu = detach

        def numpy(self) -> np.ndarray:
            return self.array

    def loss(w: Any, x: Any, y: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 0.1 * gradient, value

    step = autopar.parallelize(loss, method="data", microbatches=1)
    w, plain = START, START
    source = [[Tensor(x.astype(np.float64)) for x in batch(i).values()] for i in range(3)]
    for x, y in step.prefetch(source):
        w, _ = step(w, x, y)
    for i in range(3):
        plain, _ = jax.jit(loss)(plain, *batch(i).values())
    np.testing.assert_allclose(w, plain, rtol=1e-5)
    assert len(step._executables) == 1


def test_an_error_of_the_source_is_the_loops(step: Any) -> None:
    def source() -> Iterator[Any]:
        yield batch(0)
        raise OSError("the disk is gone")

    batches = step.prefetch(source())
    next(batches)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(batches)
    assert [x.name for x in caught.traceback][-1] == "source"
    assert list(batches) == [] and threads() == 0


def test_nothing_hangs_and_nothing_stays(step: Any) -> None:
    asked = threading.Event()

    def silent() -> Iterator[Any]:
        yield batch(0)
        asked.wait(20)

    stuck = step.prefetch(silent())
    next(stuck)
    began = time.monotonic()
    stuck.close()
    assert time.monotonic() - began < 10
    asked.set()
    forgotten = step.prefetch(batch(i) for i in range(50))
    next(forgotten)
    del forgotten
    gc.collect()
    wait_until(lambda: threads() == 0)


def test_bad_requests(step: Any) -> None:
    with pytest.raises(OptionError, match="ragged='padd'"):
        step.prefetch([], ragged="padd")
    with pytest.raises(OptionError, match="size=0"):
        step.prefetch([], size=0)
    with pytest.raises(OptionError, match="no meaning"):
        step.prefetch([], mask="m")
    with pytest.raises(BatchArgumentError, match="got int"):
        step.prefetch(3)
    with pytest.raises(OptionError, match="position=-1"):
        next(step.prefetch([batch(0)], position=-1))


def test_a_source_whose_close_fails_does_not_hang(step: Any) -> None:
    class Closing(Iterator[Any]):
        def __next__(self) -> Any:
            return np.ones(3)

        def close(self) -> None:
            raise OSError("it was gone")

    batches = step.prefetch(Closing(), ragged="pad", mask="real")
    with pytest.raises(OptionError, match="names an entry of the batch"):
        next(batches)
    assert list(batches) == [] and threads() == 0


def test_a_position_before_the_first_batch(step: Any) -> None:
    class Stateful(Iterator[Any]):
        at = 0

        def __next__(self) -> Any:
            if self.at == 2:
                raise StopIteration
            self.at += 1
            return batch(self.at)

        def get_state(self) -> dict[str, int]:
            return {"at": self.at}

        def set_state(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    with step.prefetch(Stateful()) as batches:
        position = batches.position
    assert len(list(step.prefetch(Stateful(), position=position))) == 2


def test_masks_are_as_long_as_their_batches(step: Any) -> None:
    source = [batch(0, ROWS), batch(1, 2 * ROWS), batch(2, 3), batch(3, 0)]
    padded = list(step.prefetch(source, ragged="pad"))
    assert [len(each["y"]) for each, _ in padded] == [ROWS, 2 * ROWS, ROWS, ROWS]
    assert [len(mask) for _, mask in padded] == [ROWS, 2 * ROWS, ROWS, ROWS]
    assert [int(mask.sum()) for _, mask in padded] == [ROWS, 2 * ROWS, 3, 0]
    assert all(np.isfinite(each["x"]).all() for each, _ in padded)


def test_keys_are_filled_up_too(step: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    ((filled, mask),) = step.prefetch([keys], ragged="pad")
    assert (filled == keys[np.minimum(np.arange(ROWS), 2)]).all() and mask.sum() == 3


def test_one_dict_is_no_source_of_batches() -> None:
    step = autopar.parallelize(lambda w, batch: w + batch["x"].sum())
    with pytest.raises(BatchArgumentError, match=r"(?s)got one dict.*keys: 'x'.*\[batch\]"):
        step.prefetch({"x": np.ones((8, 4))})
