"""Arrays between actors by `jax.experimental.transfer`: numbers, failures, losses."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from on_actors.small_step import BATCH, check_one_step, init, on_actors
from on_actors.training import assert_same, train

import autopar
from autopar.base.errors import OptionError, StageError
from autopar.ray_executable import RayExecutable
from autopar.runtime.ray.transport.offers import Transfers, copy

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray itself


@pytest.fixture(scope="module")
def ends() -> tuple[Transfers, Transfers]:
    return Transfers("127.0.0.1"), Transfers("127.0.0.1")


def test_arrays_of_all_kinds_arrive_and_outlive_what_they_were(
    ends: tuple[Transfers, Transfers],
) -> None:
    dtypes = ("float32", "bfloat16", "int8", "bool", "uint32", "complex64", "int4")
    place = SingleDeviceSharding(jax.devices()[1])
    arrays = [
        jax.device_put(np.arange(6).astype(jnp.dtype(dtype)).reshape(2, 3)) for dtype in dtypes
    ] + [jnp.float32(3)]
    wanted = [np.array(x) for x in arrays]
    offer = ends[0].offer([copy(x) for x in arrays])
    for array in arrays:
        array.delete()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in wanted]
    for got, value in zip(ends[1].pull(offer, shapes), wanted, strict=True):
        assert got.devices() == {jax.devices()[1]}
        np.testing.assert_array_equal(np.asarray(got), value)


def test_what_was_offered_is_forgotten_with_the_step(ends: tuple[Transfers, Transfers]) -> None:
    array = jnp.arange(4.0)
    ends[0].offer([array])
    ends[0].renew()
    shape = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    (again,) = ends[1].pull(ends[0].offer([array]), [shape])
    np.testing.assert_array_equal(again, array)


def test_a_transport_that_does_not_exist() -> None:
    with pytest.raises(OptionError, match='must be "sockets" or "transfer"'):
        autopar.Ray(transport="pigeons")


@pytest.fixture(scope="module")
def step(ray_cluster: None) -> Iterator[RayExecutable]:
    options: dict[str, Any] = {"deadline": 60, "max_restarts": 2, "snapshot_every": 3}
    with jax.debug_nans(True), on_actors(autopar.Ray(transport="transfer", **options)) as x:
        yield x


def test_an_error_in_a_stage_is_told_and_the_next_step_is_right(step: RayExecutable) -> None:
    check_one_step(step)
    bad = init()
    bad[-1]["scale"] = -100 * bad[-1]["scale"]  # the last stage's logarithm is no number
    with pytest.raises(StageError, match="nan"):
        jax.block_until_ready(step(bad, BATCH))
    check_one_step(step)


def test_a_lost_actor_is_replaced(step: RayExecutable) -> None:
    wanted = train(step, 8)

    def kill(number: int, _: Any) -> None:
        if number == 4:
            os.kill(step.actor_pids[1], signal.SIGKILL)

    assert_same(train(step, 8, after=kill), wanted)
    assert len(step.recoveries) == 1
