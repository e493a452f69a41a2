"""The arrays that one process has between steps, and what the driver does with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.arrays.typed_keys import is_key
from autopar.passes.graph.logical import no_mesh
from autopar.runtime.on_meshes import Cut, spec_on
from autopar.runtime.ray.actor.actor_plan import ActorPlan
from autopar.runtime.ray.transport.host_tiles import assembled, copied, numbers, to_host
from autopar.runtime.ray.transport.pickling import loads
from autopar.runtime.ray.transport.routes import Box
from autopar.runtime.ray.transport.sourced import SourcedTiles
from autopar.runtime.stage_programs import StagePrograms

KEYS = 1 << 32
"""Keys of a step: its number times this, and what is below is the number of a value."""
FIRST_OTHER = 1 << 48
"""In place of a step's number for what comes from elsewhere, such as `initialize`."""


class Missing(Exception):
    """A key that the store does not have."""


class Store:
    """Arrays that outlive a step, by key; readers may come before the array does."""

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._lost: list[tuple[int, int]] = []
        self._complete: dict[bool, int] = {}

    def __getitem__(self, key: int) -> Any:
        with self._changed:
            if key not in self._arrays:
                raise Missing(f"key {key}")
            return self._arrays[key]

    def wait(self, key: int) -> Any:
        """The array, when it is there: the driver watches that its step goes on.

        Raises:
          Missing: it was lost, or dropped.
        """
        serial = key // KEYS
        with self._changed:
            while key not in self._arrays:
                is_past = serial <= self._complete.get(serial >= FIRST_OTHER, 0)
                if is_past or any(first <= key < last for first, last in self._lost):
                    raise Missing(f"key {key}")
                self._changed.wait()
            return self._arrays[key]

    def put(self, key: int, array: Any) -> None:
        with self._changed:
            self._arrays[key] = array
            self._changed.notify_all()

    def complete(self, serial: int) -> None:
        """Say that all arrays with these numbers, and lower ones of their kind, were put."""
        with self._changed:
            self._complete[serial >= FIRST_OTHER] = serial
            self._changed.notify_all()

    def drop(self, keys: Sequence[int]) -> None:
        with self._changed:
            for key in keys:
                self._arrays.pop(key, None)

    def lose(self, first: int, last: int) -> None:
        """Say that keys from `first` to `last` (left out) will not come, and drop those there."""
        with self._changed:
            self._arrays = {k: x for k, x in self._arrays.items() if not first <= k < last}
            self._lost.append((first, last))
            self._changed.notify_all()


class ActorArrays:
    """Arrays of one process, in its `store` by key; `programs` are those of its devices."""

    def __init__(self, plan: ActorPlan, programs: StagePrograms) -> None:
        self._plan, self._programs = plan, programs
        self.store = Store()
        self._functions: dict[int, Callable[..., Any]] = {}

    def placed(self, value: int, tiles: Sequence[np.ndarray] | SourcedTiles) -> jax.Array:
        """An array where a value lives, of what this process holds of it, or reads here."""
        if isinstance(tiles, SourcedTiles):
            tiles = tiles.read()
        aval, held = self._plan.pieces.versions[value].atom.aval, self._plan.held(value)
        sharding = self._programs.places[value].sharding
        pairs = zip(tiles, held.values(), strict=True)
        return assembled(pairs, tuple(aval.shape), aval.dtype, sharding)

    def keep(self, key: int, value: int, tiles: Sequence[np.ndarray] | SourcedTiles) -> None:
        """Put an array from the driver into the store, where `value` lives."""
        self.store.complete(key // KEYS - 1)
        self.store.put(key, self.placed(value, tiles))

    def duplicate(self, key: int, copy: int) -> None:
        """Put a copy of an array into the store, unless the array is lost."""
        try:
            array = self.store[key]
        except Missing:
            self.store.lose(copy, copy + 1)
            return
        self.store.put(copy, copied(array))

    def copies(self, wanted: Sequence[tuple[int, Box | None]]) -> list[np.ndarray] | None:
        """The numbers of arrays, or boxes, in memory that no later step overwrites.

        Returns:
          None: one is lost.
        """
        try:
            return [np.array(to_host(self.store[key], box)) for key, box in wanted]
        except Missing:
            return None

    def make(
        self,
        function: Callable[..., Sequence[Any]],
        arguments: Sequence[Any],
        wanted: Sequence[tuple[int, int, int, tuple[slice, ...] | None]],
    ) -> None:
        """Run a function of arrays, compiled for the mesh of each stage, whose results stay here.

        What is wanted is (key, value, number of the result, rows) of what stays.
        """
        implementations = [
            jax.random.key_impl(x) if is_key(getattr(x, "dtype", None)) else None for x in arguments
        ]
        # NumPy's arrays are taken for the same in every process.
        plain_arguments = [np.asarray(numbers(jax.numpy.asarray(x))) for x in arguments]
        by_stage: dict[int, list[tuple[int, int, int, tuple[slice, ...] | None]]] = {}
        for item in wanted:
            by_stage.setdefault(self._plan.program.value_of[item[1]].stage, []).append(item)
        for items in by_stage.values():

            def part(*plain: Any, _items: Any = tuple(items)) -> list[Any]:
                args = [
                    x if kind is None else jax.random.wrap_key_data(x, impl=kind)
                    for x, kind in zip(plain, implementations, strict=True)
                ]
                made = function(*args)
                return [made[n] if rows is None else made[n][rows] for _, _, n, rows in _items]

            shardings = [self._programs.places[value].sharding for _, value, _, _ in items]
            with no_mesh():
                results = jax.jit(part, out_shardings=shardings)(*plain_arguments)
            jax.block_until_ready(results)
            for (key, *_), result in zip(items, results, strict=True):
                self.store.put(key, result)

    def evaluate(
        self,
        number: int,
        function: bytes | None,
        stage: int,
        given: Sequence[int | tuple[np.ndarray, Cut | None]],
    ) -> list[np.ndarray] | None:
        """The results of a function that runs on a stage's mesh, after the steps so far.

        Args:
          number: of the function, which is sent with its first call as a pickled closed jaxpr.
          function: that, or None.
          stage: whose mesh.
          given: of each argument its key in the store, or its numbers and how they are cut.

        Returns:
          None: an argument is lost.
        """
        mesh = self._programs.stage_meshes[stage]
        if function is not None:
            # Results are whole in every process of a mesh that has several.
            whole = NamedSharding(mesh, PartitionSpec()) if mesh.is_multi_process else None
            call = jaxpr_as_fun(loads(function))
            self._functions[number] = jax.jit(call, out_shardings=whole)
        try:
            arrays = [self.store[x] if isinstance(x, int) else _sent(*x, mesh=mesh) for x in given]
        except Missing:
            return None
        # In a thread of its own, for the reason that `StageActor.make` gives.
        with ThreadPoolExecutor(1) as thread:
            results = thread.submit(_called, self._functions[number], arrays).result()
        return [to_host(x) for x in results]

    def fetch(self, wanted: Sequence[tuple[int, Box | None]]) -> list[np.ndarray]:
        """The numbers of arrays, or boxes; waits until they are there and computed."""
        return [to_host(self.store.wait(key), box) for key, box in wanted]

    def ready(self, key: int) -> None:
        """Wait until an array of the store is there and computed."""
        self.store.wait(key).block_until_ready()


def _called(function: Callable[..., Any], arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    with no_mesh():
        return function(*arrays)


def _sent(numbers: np.ndarray, cut: Cut | None, mesh: Mesh) -> jax.Array:
    sharding = NamedSharding(mesh, spec_on(numbers, cut, mesh))
    return jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])
