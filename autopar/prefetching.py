"""`Prefetch`: the batches of a loop, read and placed ahead of time on a thread."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from autopar.arrays.foreign import on_host
from autopar.base.errors import BatchArgumentError, OptionError, did_you_mean
from autopar.host_batches import Axes, padded, rows_of, with_axes
from autopar.passes.graph.logical import no_mesh
from autopar.passes.trace.trace import Traced
from autopar.plans.plan import Plan

RAGGED = ("follow", "drop", "pad")


class CompiledStep(Protocol):
    """A step that is compiled for one signature, as far as it matters here."""

    @property
    def traced(self) -> Traced:
        """Its trace, which knows the batch."""

    @property
    def plan(self) -> Plan:
        """What was decided."""

    def place_leaf(self, index: int, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
        """An array leaf where the step wants it, from what reads its parts."""

    @property
    def leaf_shardings(self) -> tuple[Any, ...]:
        """Where each array leaf of its arguments lies."""


class _Item(NamedTuple):
    value: Any
    position: Any


class _Buffer:
    """What the thread has read and the loop has not taken; all that both of them hold."""

    def __init__(self, size: int):
        self._size = size
        self._items: deque[_Item] = deque()
        self._error: BaseException | None = None
        self._ended = self.closed = False
        self._changed = threading.Condition()

    def put(self, item: _Item) -> bool:
        """Wait for room and put an item there; false if nobody wants it any more."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._items) < self._size)
            if not self.closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self.closed

    def end(self, error: BaseException | None) -> None:
        """The source has no more, or failed."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def take(self) -> _Item | None:
        """The next item; None after the last one.

        Raises:
          BaseException: what the source raised, once.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._ended or bool(self._items))
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None and not self.closed:
            raise error
        return None

    def close(self) -> None:
        """Let go of everything; whoever waits goes on."""
        with self._changed:
            self.closed = True
            self._items.clear()
            self._changed.notify_all()


class Prefetch(Iterator[Any]):
    """The batches of a source, placed where a step's plan wants them; `step.prefetch` makes it.

    It is an iterator, and ends its thread when it is exhausted, closed, left as a `with` block, or
    forgotten. A thread that waits for the source itself is not waited for.

    Attributes:
      position: where in the source the next batch is read: the number of its batches so far, or
        what the source's own iterator says (`get_state`, as Grain's do). What was read ahead does
        not count, so a checkpoint that keeps it (`extra=`) goes on with the very next batch.
    """

    def __init__(self, source: Any, prepare: Callable[[Any], Any], size: int, position: Any):
        self._buffer = _Buffer(size)
        self.position = 0 if position is None else position
        arguments = (self._buffer, source, prepare, position)
        self._thread = threading.Thread(
            target=_read, args=arguments, name="autopar prefetch", daemon=True
        )
        self._close = weakref.finalize(self, self._buffer.close)
        self._thread.start()

    def __next__(self) -> Any:
        item = self._buffer.take()
        if item is None:
            self.close()
            raise StopIteration
        self.position = item.position
        return item.value

    def __iter__(self) -> Prefetch:
        return self

    def close(self) -> None:
        """End the thread and let go of what was read ahead; it can be called again."""
        self._close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)  # it may be waiting for the source, without end

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._buffer.closed else "open"
        return f"<Prefetch at {self.position!r}, {state}>"


def _read(buffer: _Buffer, source: Any, prepare: Callable[[Any], Any], position: Any) -> None:
    """What the thread does. Nothing here refers to the `Prefetch`, so that it can be forgotten."""
    error: BaseException | None = None
    items = _positioned(source, position)
    try:
        for value, after in items:
            prepared = prepare(value)
            del value
            if prepared is not None and not buffer.put(_Item(prepared, after)):
                break
            del prepared
            if buffer.closed:
                break
    except BaseException as raised:  # also a SystemExit of the source: the loop shall see it
        error = raised
    finally:
        items.close()
        buffer.end(error)


def _positioned(source: Any, position: Any) -> Any:
    """The batches of a source from a position on, each with the position after it."""
    if _is_indexable(source):
        start = _as_number(position)
        for number in range(start, len(source)):
            yield source[number], number + 1
        return
    iterator = iter(source)
    own_state = all(callable(getattr(iterator, x, None)) for x in ("get_state", "set_state"))
    if own_state and position is not None:
        iterator.set_state(position)
    elif position is not None:
        skipped = _as_number(position)
        next(itertools.islice(iterator, skipped, skipped), None)
    start = 0 if own_state or position is None else position
    try:
        for number, value in enumerate(iterator, start + 1):
            yield value, iterator.get_state() if own_state else number
    finally:
        close = getattr(iterator, "close", None)
        if callable(close):
            close()


def _is_indexable(source: Any) -> bool:
    methods = ("__getitem__", "__len__")
    return all(hasattr(source, x) for x in methods) and not isinstance(source, Mapping)


def _as_number(position: Any) -> int:
    if position is None:
        return 0
    if isinstance(position, bool) or not isinstance(position, int) or position < 0:
        raise OptionError(
            f"position={position!r} is not possible.",
            where="prefetch",
            why="for a source without a state of its own it is the number of batches that were "
            "read before.",
        )
    return position


# Where the batches go


@dataclass(frozen=True)
class _Target:
    """One batch argument of a compiled step: its structure, and of its leaves what is wanted."""

    tree: Any
    shapes: tuple[jax.ShapeDtypeStruct | None, ...]
    axes: tuple[int | None, ...]
    shardings: tuple[Any, ...]

    def placed(self, value: Any) -> Any | None:
        """The argument on the devices; None: it is not as the step was compiled for."""
        leaves: list[Any] | None
        leaves, tree = jax.tree.flatten(value)
        if tree != self.tree:
            leaves = _like(value, self.tree)
        if leaves is None or not all(map(_fits, leaves, self.shapes)):
            return None
        wanted = zip(leaves, self.shapes, self.shardings, strict=True)
        return self.tree.unflatten([_put(*each) for each in wanted])


def _like(value: Any, tree: Any) -> list[Any] | None:
    """The leaves of a value whose lists are a structure's tuples (loaders make lists)."""

    def tuples(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(tuples, value))
        if isinstance(value, dict):
            return {key: tuples(each) for key, each in value.items()}
        return value

    leaves, found = jax.tree.flatten(tuples(value))
    return leaves if found == tree else None


def _fits(leaf: Any, shape: jax.ShapeDtypeStruct | None) -> bool:
    return shape is None or (hasattr(leaf, "dtype") and np.shape(leaf) == shape.shape)


def _put(leaf: Any, shape: jax.ShapeDtypeStruct | None, sharding: Any) -> Any:
    if shape is None or sharding is None:
        return leaf
    if isinstance(leaf, np.ndarray):
        leaf = leaf.astype(shape.dtype, copy=False) if _same_kind(leaf, shape) else leaf
        if not sharding.is_fully_addressable:
            # Of several processes, each copies what its devices hold; device_put would compare.
            return jax.make_array_from_callback(leaf.shape, sharding, lambda rows: leaf[rows])
    return jax.device_put(leaf, sharding)


def _same_kind(leaf: np.ndarray, shape: jax.ShapeDtypeStruct) -> bool:
    """Whether NumPy's dtype is the plan's but for its width, which JAX would cut as well."""
    kinds = (leaf.dtype.kind, np.dtype(shape.dtype).kind)
    return kinds[0] == kinds[1] and leaf.dtype.itemsize > np.dtype(shape.dtype).itemsize


def batch_targets(executable: CompiledStep) -> tuple[_Target, ...]:
    """The arguments of a step that hold the batch."""
    traced, shardings = executable.traced, executable.leaf_shardings
    inputs, found = traced.graph.inputs, list[_Target]()
    for argument in traced.arguments:
        arrays = {path: i for i, path, _ in argument.arrays()}
        indices = [arrays.get(path) for path in argument.paths]
        if not any(i is not None and inputs[i].role == "batch" for i in indices):
            continue
        found.append(
            _Target(
                argument.tree,
                tuple(argument.leaves),
                tuple(None if i is None else inputs[i].batch_axis for i in indices),
                tuple(None if i is None else _sharding(shardings[i]) for i in indices),
            )
        )
    return tuple(found)


def _sharding(sharding: Any) -> jax.sharding.Sharding | None:
    """Where JAX can put an array; not on Ray actors, which are sent it with the call."""
    return sharding if isinstance(sharding, jax.sharding.Sharding) else None


@dataclass
class _Preparer:
    """What the thread does with a batch before the loop gets it."""

    executables: Callable[[], Sequence[CompiledStep]]
    ragged: str
    mask: str | None
    rows: int | None = None  # of a full batch
    targets: dict[CompiledStep, tuple[_Target, ...]] = field(default_factory=dict)

    def __call__(self, value: Any) -> Any:
        """The batch to hand out; None: it is left out."""
        value = jax.tree.map(on_host, value)
        known = [self._targets(each) for each in self.executables()]
        axes = self._axes(value, known[0] if known else ())
        if self.ragged != "follow":
            rows = rows_of(value, axes)
            self.rows = self.rows or _planned_rows(self.executables()) or rows
            if self.rows is not None and rows is not None and rows < self.rows:
                if self.ragged == "drop":
                    return None
                value = padded(value, axes, self.rows)
            if self.ragged == "pad":
                mask = np.arange(self.rows or 0) < (rows or 0)
                value = self._masked(value, mask)
        with no_mesh():
            return self._placed(value, known)

    def _targets(self, executable: CompiledStep) -> tuple[_Target, ...]:
        if executable not in self.targets:
            self.targets[executable] = batch_targets(executable)
        return self.targets[executable]

    def _axes(self, value: Any, targets: tuple[_Target, ...]) -> Axes:
        """For each leaf the dimension that the batch has there, as the plan says."""
        if self.ragged == "pad" and self.mask is None:
            targets = targets[:-1]
        axes = [axis for target in targets for axis in target.axes]
        if self.ragged == "pad" and self.mask is not None:
            axes = []  # the mask is one of the plan's leaves, and not yet one of the value's
        return with_axes(value, axes)

    def _masked(self, value: Any, mask: np.ndarray) -> Any:
        if self.mask is None:
            return value, mask
        if not isinstance(value, Mapping):
            raise OptionError(
                f"mask={self.mask!r} is not possible.",
                where="prefetch",
                why=f"it names an entry of the batch, which is a {type(value).__name__}.",
                hint="without mask= each item is a pair of the batch and its mask.",
            )
        return {**value, self.mask: mask}

    def _placed(self, value: Any, known: Sequence[tuple[_Target, ...]]) -> Any:
        for targets in known:
            if len(targets) == 1:
                placed = targets[0].placed(value)
                if placed is not None:
                    return placed
            elif isinstance(value, (tuple, list)) and len(value) == len(targets):
                each = [t.placed(x) for t, x in zip(targets, value, strict=True)]
                if not any(x is None for x in each):
                    return tuple(each)
        return value


def _planned_rows(executables: Sequence[CompiledStep]) -> int | None:
    return max((x.traced.batch_size or 0 for x in executables), default=0) or None


def prefetch(
    executables: Callable[[], Sequence[CompiledStep]],
    source: Any,
    *,
    size: int,
    ragged: str,
    mask: str | None,
    position: Any,
) -> Prefetch:
    """See `Executable.prefetch`; `executables` are those that the step has by now."""
    if ragged not in RAGGED:
        raise OptionError(
            f"ragged={ragged!r} is not possible.",
            where="prefetch",
            why="it is one of " + ", ".join(map(repr, RAGGED)) + ".",
            hint=did_you_mean(str(ragged), RAGGED),
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise OptionError(
            f"size={size!r} is not possible.", where="prefetch", why="it must be 1 at least."
        )
    if mask is not None and ragged != "pad":
        raise OptionError(
            f"mask={mask!r} has no meaning with ragged={ragged!r}.", hint="ragged='pad' makes one."
        )
    if not (_is_indexable(source) or hasattr(source, "__iter__")):
        raise BatchArgumentError(
            f"prefetch takes batches to iterate over, and got {type(source).__name__}.",
            where="prefetch",
            hint="give it a generator, a list, or a loader.",
        )
    return Prefetch(source, _Preparer(executables, ragged, mask), size, position)
