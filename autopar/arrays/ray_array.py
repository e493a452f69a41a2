"""`RayArray`: an array that lives on Ray actors; the driver holds its name and its type."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from autopar.arrays.operators import WholeArray
from autopar.arrays.typed_keys import is_key
from autopar.base.errors import StageError

T = TypeVar("T")


@dataclass(frozen=True)
class MeshSharding:
    """How an array, or some rows of one, lies on a mesh of one actor or several.

    The `actors` are the mesh's processes, `mesh` has the sizes of its axes; the array belongs to a
    pipeline `stage`, and `spec` has the axes that cut each dimension.
    """

    mesh_number: int
    actors: tuple[int, ...]
    stage: int
    mesh: tuple[int, ...]
    axis_names: tuple[str, ...]
    spec: PartitionSpec


@dataclass(frozen=True)
class RaySharding:
    """Where a `RayArray` is: one part, or several if its rows are on several meshes.

    They are split along `axis`; `ends` are after the last row of each part, () if there is one.
    """

    parts: tuple[MeshSharding, ...]
    axis: int = 0
    ends: tuple[int, ...] = ()

    def is_equivalent_to(self, other: Any, ndim: int) -> bool:
        """Whether an array of `ndim` dimensions is cut and placed alike."""
        del ndim
        return self == other

    def indices(self) -> list[tuple[slice, ...] | None]:
        """The rows of each part as an index; None: all."""
        if not self.ends:
            return [None]
        before = (slice(None),) * self.axis
        return [(*before, slice(*rows)) for rows in itertools.pairwise((0, *self.ends))]

    def pieces(self, array: Any) -> list[Any]:
        """The rows of an array that belong to each part."""
        return [array if rows is None else array[rows] for rows in self.indices()]


@functools.cache
def key_implementation(dtype: Any) -> Any:
    """The generator that keys of a dtype are for; no public name tells it of the dtype alone."""
    found = []

    def look(keys: jax.Array) -> jax.Array:
        found.append(jax.random.key_impl(keys))
        return keys

    jax.eval_shape(look, jax.ShapeDtypeStruct((), dtype))
    return found[0]


class Owner(Protocol):
    """What knows the actors of an array."""

    def fetch(self, resident: Resident) -> np.ndarray:
        """The numbers of an array, in host memory."""

    def start_fetch(self, resident: Resident) -> None:
        """Ask for them already."""

    def wait_ready(self, resident: Resident) -> None:
        """Wait until it is computed."""

    def forget(self, resident: Resident) -> None:
        """Nobody holds it any more; called at any time, also while another call runs."""

    def is_lost(self, resident: Resident) -> bool:
        """Whether a failure took it."""

    def check(self, resident: Resident) -> None:
        """Raise a `StageError` if a failure took it."""


class Resident:
    """An array in the stores of a mesh's actors, which forget it when nobody holds this any more.

    The `owner` knows the actors, which have the array under a `key`. `is_deleted` says whether it
    was consumed by a step or given up, `is_ready` whether it is known to be computed.
    """

    __slots__ = ("is_deleted", "is_ready", "key", "mesh", "owner")

    def __init__(self, owner: Owner, mesh: int, key: int):
        self.owner, self.mesh, self.key = owner, mesh, key
        self.is_deleted = self.is_ready = False

    def __del__(self) -> None:
        if not self.is_deleted:
            self.owner.forget(self)


class LeafPlace(NamedTuple):
    """The leaf of a step in whose place an array lies, which says more than a sharding can.

    It is one of the step's arguments or of its results, with a number among these.
    """

    kind: Literal["argument", "result"]
    leaf: int


class ArrayKind(NamedTuple):
    """What is known of an array before it is computed; `RayArray` says what the fields are."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: RaySharding
    place: LeafPlace
    weak_type: bool


class Keeper(Protocol):
    """What made an array, and may make it again when its actors are lost."""

    def attempt(self, do: Callable[[], T]) -> T:
        """What `do` returns; where actors are lost meanwhile, after a recovery that allows it."""

    def place(self, leaf: Any, place: LeafPlace, weak: bool | None = None) -> RayArray:
        """A leaf, copied to a place on the actors."""

    def save(self, arrays: Sequence[RayArray], folder: Path, label: str) -> Any:
        """Let the actors write arrays into a folder; returns a `runtime.ray.driver.save.Saving`."""

    def ping(self) -> None:
        """Notice a lost actor."""


class RayArray(WholeArray):
    """An array that lives on Ray actors.

    `numpy.asarray`, `jax.device_get`, `jax.numpy.asarray`, printing, `float`, indexing, arithmetic
    and comparisons fetch it; `jax.block_until_ready` waits for it without fetching. The step takes
    it back as it is. Other functions of JAX take what `jax.numpy.asarray` makes of it, or
    `step.gather` of a tree.

    Args:
      residents: of each of its parts.
      kind: its shape, dtype, sharding, place and weak type.
      keeper: what made it.

    Attributes:
      number: in the log of its keeper; None: it has none.
      error: why it will not come; None: it is there, or may come.
    """

    __slots__ = ("__weakref__", "_numbers", "error", "keeper", "kind", "number", "residents")

    # A call makes one for every leaf: what all steps have in common of it is one object.
    def __init__(self, residents: tuple[Resident, ...], kind: ArrayKind, keeper: Keeper):
        self.residents, self.kind, self.keeper = residents, kind, keeper
        self.number: int | None = None
        self.error: StageError | None = None
        self._numbers: np.ndarray | None = None

    def rebind(self, other: RayArray) -> None:
        """Become another array, which has the same numbers on other actors."""
        self.residents = other.residents
        self.kind = self.kind._replace(sharding=other.sharding)

    def lose(self, error: StageError) -> None:
        """The array will not come, and this is why."""
        self.error = error

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return self.kind.shape

    @property
    def dtype(self) -> Any:
        """Of its elements."""
        return self.kind.dtype

    @property
    def sharding(self) -> RaySharding:
        """Where its parts are."""
        return self.kind.sharding

    @property
    def place(self) -> LeafPlace:
        """The leaf of the step that it is, or is in the place of."""
        return self.kind.place

    @property
    def weak_type(self) -> bool:
        """Whether JAX promotes it as it does a Python number."""
        return self.kind.weak_type

    @property
    def is_lost(self) -> bool:
        """Whether a failure took it."""
        return self.error is not None or any(x.owner.is_lost(x) for x in self.residents)

    def is_deleted(self) -> bool:
        """Whether its memory was given away."""
        for resident in self.residents:  # noqa: SIM110 - of all leaves in every call: no generator
            if resident.is_deleted:
                return True
        return False

    def delete(self) -> None:
        """Give up its memory."""
        for resident in self.residents:
            if not resident.is_deleted:
                resident.owner.forget(resident)
                resident.is_deleted = True

    def block_until_ready(self) -> RayArray:
        """Wait until it is computed.

        Raises:
          StageError: the step that makes it failed.
        """
        self._of_all(lambda resident: resident.owner.wait_ready(resident))
        return self

    def copy_to_host_async(self) -> None:
        """Start to fetch it."""
        self._of_all(lambda resident: resident.owner.start_fetch(resident))

    def _of_all(self, do: Callable[[Resident], None]) -> None:
        """Do something with every part, unless its elements were fetched before."""
        self.check()

        def attempt() -> None:
            for resident in self.residents:
                do(resident)

        if self._numbers is None:
            self.keeper.attempt(attempt)

    def numbers(self) -> np.ndarray:
        """Its elements in host memory; of PRNG keys, the numbers that they wrap.

        Raises:
          StageError: the step that makes it failed.
          RuntimeError: it was deleted.
        """
        self.check()
        if self._numbers is None:
            self.copy_to_host_async()
            whole = self.keeper.attempt(self._fetched)
            whole.flags.writeable = False
            self._numbers = whole
        return self._numbers

    @property
    def fetched(self) -> np.ndarray | None:
        """Its elements, if they were fetched before."""
        return self._numbers

    def _fetched(self) -> np.ndarray:
        self.check()
        parts = [resident.owner.fetch(resident) for resident in self.residents]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, self.sharding.axis)

    def check(self) -> None:
        """See that it is there, or may come.

        Raises:
          StageError: the step that was to make it failed.
          RuntimeError: it was deleted.
        """
        if self.error is not None and self._numbers is None:
            raise self.error.with_traceback(None)
        if self.is_deleted():
            raise RuntimeError(
                f"Array has been deleted with shape={self.dtype.name}{list(self.shape)}: a step "
                "consumed it, or its delete() was called."
            )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if is_key(self.dtype):  # no NumPy array; NumPy says so, and jax.device_get takes it
            return self.__jax_array__()
        if copy is False and self._numbers is None:
            raise ValueError("a RayArray becomes a NumPy array only by fetching it")
        numbers = self.numbers()
        if dtype is not None and numbers.dtype != dtype:
            return numbers.astype(dtype)
        return numbers.copy() if copy else numbers

    def __jax_array__(self) -> jax.Array:
        if is_key(self.dtype):
            data = jnp.asarray(self.numbers())
            return jax.random.wrap_key_data(data, impl=key_implementation(self.dtype))
        return jnp.asarray(self.numbers())

    def item(self) -> Any:
        """The element of an array of one element, as a Python number."""
        return self.numbers().item()

    def __float__(self) -> float:
        return float(self.numbers())

    def __int__(self) -> int:
        return int(self.numbers())

    def __bool__(self) -> bool:
        return bool(self.numbers())

    def __index__(self) -> int:
        return self.numbers().__index__()

    def __format__(self, form: str) -> str:
        return format(self.numbers()[()] if not self.shape else self, form) if form else str(self)

    def __str__(self) -> str:
        return repr(self) if self.is_deleted() or is_key(self.dtype) else str(self.numbers())

    def __repr__(self) -> str:
        kind = f"{self.dtype.name}{list(self.shape)}"
        stages = sorted({part.stage for part in self.sharding.parts})
        place = f"stage{'' if len(stages) == 1 else 's'} {', '.join(map(str, stages))}"
        if self.is_deleted():
            return f"RayArray({kind}, deleted)"
        if is_key(self.dtype) or self.is_lost:
            return f"RayArray({kind} on {place})"
        return f"RayArray({np.asarray(self)!r}, on {place})"
