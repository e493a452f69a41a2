"""Arrays between meshes: every layout into every other, and each part of an array crosses once."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.runtime.ray.transport import chunks
from autopar.runtime.ray.transport.chunks import Arrival
from autopar.runtime.ray.transport.host_tiles import (
    assembled,
    copied,
    cut,
    numbers,
    plain,
    taken,
    to_host,
)
from autopar.runtime.ray.transport.pinned import PinnedMemory
from autopar.runtime.ray.transport.routes import Move, Route, Spread, route, slices
from autopar.runtime.ray.transport.staged import Landing, copied_out, cut_out

MESHES = ((1,), (2,), (4,), (2, 2), (1, 3), (2, 1, 2), (3,), (6,), (3, 2))
AXES = ("x", "y", "z")


@st.composite
def spreads(draw: Any, shape: tuple[int, ...]) -> Spread:
    """Any layout of a shape whose cuts divide; axes that cut nothing make replicas."""
    mesh = draw(st.sampled_from(MESHES))
    dims: list[list[int]] = [[] for _ in shape]
    for axis in draw(st.permutations(range(len(mesh)))):
        choices: list[int | None] = [None]
        for dim, size in enumerate(shape):
            if size % (math.prod(mesh[a] for a in dims[dim]) * mesh[axis]) == 0:
                choices.append(dim)
        dim = draw(st.sampled_from(choices))
        if dim is not None:
            dims[dim].append(axis)
    return Spread(shape, tuple(map(tuple, dims)), mesh)


def num_elements(found: Route) -> int:
    """How many cross."""
    return sum(math.prod(move.shape) for move in found.moves)


@st.composite
def pairs(draw: Any) -> tuple[Spread, Spread]:
    sizes = st.sampled_from((0, 1, 2, 3, 5, 6, 12))
    shape = tuple(draw(st.lists(sizes, min_size=0, max_size=3)))
    return draw(spreads(shape)), draw(spreads(shape))


def tiles_of(whole: np.ndarray, spread: Spread) -> list[np.ndarray]:
    return [whole[slices(box)] for box in spread.boxes()]


def devices_of(count: int, processes: int) -> list[range]:
    size = count // processes
    return [range(n * size, (n + 1) * size) for n in range(processes)]


def moved(
    found: Route, held: list[np.ndarray], devices: int, senders: int = 1, receivers: int = 1
) -> list[Any]:
    """What the receiving devices hold, by NumPy alone: a message for every pair of processes."""
    sources, targets = devices_of(len(held), senders), devices_of(devices, receivers)

    def part(move: Move) -> np.ndarray:
        return held[move.device][slices(move.take)]

    messages = {
        (sender, receiver): [part(move) for move in moves]
        for sender, own in enumerate(sources)
        for receiver, moves in enumerate(found.departure(own, receivers).moves)
    }
    arrivals = [found.arrival(n, targets[n], receivers, sources) for n in range(receivers)]
    got: list[list[tuple[Move, np.ndarray]]] = []
    for receiver, way in enumerate(arrivals):
        got.append([])
        for sender, moves in enumerate(way.moves):
            got[-1] += zip(moves, messages[sender, receiver], strict=True)
    result: list[Any] = [None] * devices
    for receiver, way in enumerate(arrivals):
        parts = list(got[receiver])
        for other, moves in enumerate(way.passed_on):
            again = [value for move, value in got[other] if receiver in move.processes]
            parts += zip(moves, again, strict=True) if other != receiver else ()
        for number, tile in way.tiles.items():
            value = np.full(tile.shape, -1)
            for move, piece in parts:
                if move.tile == number:
                    value[slices(move.put)] = piece
            for device in tile.devices:
                result[device] = value
    return result


@settings(max_examples=150, deadline=None)
@given(pairs(), st.data())
def test_any_layout_becomes_any_other(pair: tuple[Spread, Spread], data: Any) -> None:
    source, target = pair
    counts = []
    for end in pair:
        size = math.prod(end.mesh)
        counts.append(data.draw(st.sampled_from([n for n in range(1, 7) if size % n == 0])))
    whole = np.arange(math.prod(source.shape)).reshape(source.shape)
    sent = data.draw(st.lists(st.integers(0, 9), min_size=6, max_size=6))
    found = route(source, target, sent, counts[1])
    received = moved(found, tiles_of(whole, source), math.prod(target.mesh), *counts)
    for got, wanted in zip(received, tiles_of(whole, target), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert num_elements(found) == whole.size, "every element crosses once"


def test_what_several_processes_want_comes_to_each_in_part() -> None:
    found = route(Spread((8, 4), ((), ()), (2,)), Spread((8, 4), ((), ()), (4,)), None, 4)
    assert [move.processes[0] for move in found.moves] == [0, 1, 2, 3]
    assert {move.shape for move in found.moves} == {(2, 4)}
    assert sorted(move.device for move in found.moves) == [0, 0, 1, 1]


def test_pieces_are_passed_on_in_the_order_in_which_they_came() -> None:
    source, target = Spread((8,), ((),), (2, 2)), Spread((8,), ((1,),), (2, 2))
    found = route(source, target, [1, 0, 0, 0], 2)
    whole = np.arange(8)
    received = moved(found, tiles_of(whole, source), 4, 2, 2)
    assert [list(tile) for tile in received] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_senders_are_balanced() -> None:
    replicated = Spread((8, 4), ((), ()), (4,))
    cut = Spread((8, 4), ((0,), ()), (4,))
    sent = [0] * 4
    found = route(replicated, cut, sent)
    assert sorted(move.device for move in found.moves) == [0, 1, 2, 3]
    assert sent == [8, 8, 8, 8]
    route(Spread((3,), ((),), (4,)), Spread((3,), ((),), (1,)), sent)
    route(Spread((3,), ((),), (4,)), Spread((3,), ((),), (1,)), sent)
    assert sorted(sent) == [8, 8, 11, 11]


@settings(max_examples=40, deadline=None)
@given(pairs())
def test_devices_are_numbered_as_jax_numbers_them(pair: tuple[Spread, Spread]) -> None:
    for spread in pair:
        sharding = sharded(spread, 0)
        indices = sharding.devices_indices_map(spread.shape)
        for device, box in zip(sharding.mesh.devices.flat, spread.boxes(), strict=True):
            ranges = zip(indices[device], spread.shape, strict=True)
            assert tuple(index.indices(size)[:2] for index, size in ranges) == box


def sharded(spread: Spread, first: int) -> NamedSharding:
    count = math.prod(spread.mesh)
    devices = (jax.devices() * 2)[first : first + count]
    mesh = Mesh(
        np.asarray(devices).reshape(spread.mesh),
        AXES[: len(spread.mesh)],
        axis_types=(AxisType.Auto,) * len(spread.mesh),
    )
    return NamedSharding(mesh, PartitionSpec(*(tuple(AXES[a] for a in d) for d in spread.dims)))


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int8", "bool", "float16", "uint32", "int4", "complex64"]
)
@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        ((8, 6), (((0,), (1,)), (2, 2)), (((), (0,)), (3,))),
        ((12,), (((0, 1),), (2, 3)), (((0,),), (4,))),
        ((12,), (((1, 0),), (2, 3)), (((),), (2,))),
        ((5, 3), (((), ()), (2,)), (((), ()), (4,))),
        ((), ((), (2,)), ((), (3,))),
        ((0, 4), (((), (0,)), (2,)), (((), ()), (2,))),
    ],
)
def test_arrays_arrive_as_they_are(
    dtype: str, shape: tuple[int, ...], source: Any, target: Any
) -> None:
    ends = Spread(shape, *source), Spread(shape, *target)
    whole = np.random.default_rng(0).integers(0, 2, shape).astype(jnp.dtype(dtype))
    array = jax.device_put(whole, sharded(ends[0], 0))
    check_crossing(array, ends)
    if dtype in ("float32", "int4"):
        check_crossing(array, ends, piece_bytes=3 * array.dtype.itemsize)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "int4", "complex64"])
@pytest.mark.parametrize("piece_bytes", [5, 8, 64])
def test_what_comes_into_pinned_memory_is_the_same(
    monkeypatch: pytest.MonkeyPatch, dtype: str, piece_bytes: int
) -> None:
    monkeypatch.setattr(chunks, "_LARGE", 0)
    pinned = PinnedMemory(jax.devices()[0], piece_bytes)
    ends = Spread((12, 6), ((0,), (1,)), (2, 2)), Spread((12, 6), ((), (0,)), (3,))
    for number in range(2):  # the second time in memory that is used again
        whole = np.random.default_rng(number).integers(0, 2, (12, 6)).astype(jnp.dtype(dtype))
        array = jax.device_put(whole, sharded(ends[0], 0))
        check_crossing(array, ends, piece_bytes, pinned)


def test_pinned_memory_is_used_again_when_nobody_holds_it() -> None:
    pinned = PinnedMemory(jax.devices()[0], 8)
    first, second, last = pinned.pieces(20)
    assert [x.data.size for x in (first, second, last)] == [8, 8, 4]
    places = [x.data.ctypes.data for x in (first, second)]
    part, copy = first.data[2:], second.on(jax.devices()[1]).block_until_ready()
    second.data[:] = 7
    assert second.on(jax.devices()[1]) is copy and not np.asarray(copy).any()
    del first, second, last
    (again,) = pinned.pieces(8)
    assert again.data.ctypes.data == places[1], "the first is still held"
    part[:] = 1
    assert not np.array_equal(again.data[2:], part)


def test_keys_arrive_as_keys() -> None:
    keys = jax.random.split(jax.random.key(7), 6)
    ends = Spread((6,), ((0,),), (3,)), Spread((6,), ((),), (2,))
    check_crossing(jax.device_put(keys, sharded(ends[0], 0)), ends)
    check_crossing(jax.device_put(keys, sharded(ends[0], 0)), ends, piece_bytes=4)


def arrived_as(data: np.ndarray, pinned: PinnedMemory | None) -> Arrival:
    """A message of which all is there."""
    arrival = Arrival(data.size, pinned)
    start = 0
    for view in arrival.views(0, data.size):
        view[:] = data[start : start + view.size]
        start += view.size
    assert start == data.size and np.array_equal(arrival.data, data)
    arrival.note(0, data.size)
    return arrival


def check_crossing(
    array: Any,
    ends: tuple[Spread, Spread],
    piece_bytes: int | None = None,
    pinned: PinnedMemory | None = None,
) -> None:
    """In the host's memory, or copied out of devices and into them in pieces."""
    shape, dtype = plain(array.shape, array.dtype)
    more = ((),) * (len(shape) - array.ndim)
    spreads = [Spread(shape, (*end.dims, *more), end.mesh) for end in ends]
    found = route(spreads[0], spreads[1])
    counts = [math.prod(end.mesh) for end in ends]
    (moves,) = found.departure(range(counts[0]), 1).moves
    way = found.arrival(0, range(counts[1]), 1, [range(counts[0])])
    devices = {device: n for n, device in enumerate(array.sharding.mesh.devices.flat)}
    if piece_bytes is None:
        parts = list(taken(array, moves, devices))
    else:
        parts = list(copied_out(cut_out(array, moves, devices, piece_bytes)))
    data = np.concatenate([np.zeros(0, np.uint8), *parts])
    assert data.size == num_elements(found) * dtype.itemsize
    landing = Landing(
        way.tiles,
        array.shape,
        array.dtype,
        where := sharded(ends[1], 2),
        is_staged=piece_bytes is not None,
        piece_bytes=piece_bytes or 1,
    )
    arrival, start = arrived_as(data, pinned), 0
    until: list[int] = []
    for move in moves:
        landing.take_of(move, arrival, start, until.append)
        start += math.prod(move.shape) * dtype.itemsize
    assert max(until, default=0) <= data.size
    arrived = landing.array()
    assert arrived.sharding.is_equivalent_to(where, arrived.ndim)
    assert (arrived.shape, arrived.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(np.asarray(numbers(arrived)), np.asarray(numbers(array)))


def held(spread: Spread, own: range) -> dict[Any, list[int]]:
    boxes: dict[Any, list[int]] = {}
    for device in own:
        boxes.setdefault(spread.boxes()[device], []).append(device)
    return boxes


def test_numbers_from_the_driver_are_placed() -> None:
    spread = Spread((4, 2), ((0,), ()), (2, 2))
    where, boxes = sharded(spread, 0), held(spread, range(4))
    value = np.arange(8, dtype=np.float32).reshape(4, 2)
    tiles = cut(value, boxes)
    assert [tile.shape for tile in tiles] == [(2, 2), (2, 2)]
    array = assembled(zip(tiles, boxes.values(), strict=True), (4, 2), np.dtype("float32"), where)
    np.testing.assert_array_equal(array, value)
    for box, tile in zip(boxes, tiles, strict=True):
        np.testing.assert_array_equal(to_host(array, box), tile)
    scalar = cut(np.asarray(np.float32(3)), {(): [0]})
    assert [tile.shape for tile in scalar] == [()]


def test_keys_from_the_driver_are_placed() -> None:
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 4)
    data, where = np.asarray(jax.random.key_data(keys)), sharded(Spread((4,), ((0,),), (2,)), 0)
    boxes = held(Spread(data.shape, ((0,), ()), (2,)), range(2))
    tiles = zip(cut(data, boxes), boxes.values(), strict=True)
    placed_keys = assembled(tiles, (4,), keys.dtype, where)
    assert placed_keys.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(placed_keys), data)
    np.testing.assert_array_equal(jax.random.key_data(copied(placed_keys)), data)


def test_a_copy_is_in_other_memory() -> None:
    array = jax.device_put(np.arange(64.0), sharded(Spread((64,), ((0,),), (2,)), 0))
    copy = copied(array)
    assert copy.sharding == array.sharding
    array.delete()
    np.testing.assert_array_equal(copy, np.arange(64.0))
