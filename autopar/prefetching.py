"""`Prefetch`: the batches of a loop, read and placed ahead of time on a thread."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from autopar.arrays.foreign import on_host
from autopar.arrays.sourced_leaf import SourcedLeaf
from autopar.base.errors import BatchArgumentError, OptionError, did_you_mean
from autopar.batch_targets import BatchTarget, CompiledStep, batch_targets, placed_batch
from autopar.host_batches import Axes, padded, rows_of, with_axes
from autopar.passes.graph.logical import no_mesh

RAGGED = ("follow", "drop", "pad")


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

    def __init__(self, source: Any, prepare: _Preparer, size: int, position: Any):
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


def _read(buffer: _Buffer, source: Any, prepare: _Preparer, position: Any) -> None:
    """What the thread does. Nothing here refers to the `Prefetch`, so that it can be forgotten."""
    error: BaseException | None = None
    items = _positioned(source, position, prepare)
    try:
        for value, after in items:
            prepared = value if _is_promised(value) else prepare(value)
            del value
            if prepared is not None and not buffer.put(_Item(prepared, after)):
                break
            del prepared
            if buffer.closed:
                break
    except BaseException as raised:  # also a SystemExit of the source: the loop shall see it
        error = raised
    finally:
        try:
            items.close()
        except BaseException as raised:  # the source's own `close` failed
            error = error or raised
        buffer.end(error)


def _positioned(source: Any, position: Any, prepare: _Preparer) -> Any:
    """The batches of a source from a position on, each with the position after it."""
    if _is_indexable(source):
        start = _as_number(position)
        for number in range(start, len(source)):
            promised = prepare.promised(source, number)
            yield source[number] if promised is None else promised, number + 1
        return
    iterator = iter(source)
    own_state = all(callable(getattr(iterator, x, None)) for x in ("get_state", "set_state"))
    if isinstance(position, int) and position == 0:
        position = None  # where every `Prefetch` begins; no state of a source
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


def _is_promised(value: Any) -> bool:
    return any(isinstance(leaf, SourcedLeaf) for leaf in jax.tree.leaves(value))


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


@dataclass
class _Preparer:
    """What the thread does with a batch before the loop gets it."""

    executables: Callable[[], Sequence[CompiledStep]]
    ragged: str
    mask: str | None
    rows: int | None = None  # of a full batch
    targets: dict[CompiledStep, tuple[BatchTarget, ...]] = field(default_factory=dict)
    fits: CompiledStep | None = None  # the step for which a batch of the source was read last
    data: bytes | None = None  # the source, where others read it

    def __call__(self, value: Any) -> Any:
        """The batch to hand out; None: it is left out."""
        value = jax.tree.map(on_host, value)
        steps = self.executables()
        known = [self._targets(each) for each in steps]
        axes = self._axes(value, known[0] if known else ())
        if self.ragged != "follow":
            rows = rows_of(value, axes)
            self.rows = self.rows or _planned_rows(self.executables()) or rows
            if self.rows is not None and rows is not None and rows < self.rows:
                if self.ragged == "drop":
                    return None
                value = padded(value, axes, self.rows)
            if self.ragged == "pad":
                mask = np.arange(max(self.rows or 0, rows or 0)) < (rows or 0)
                value = self._masked(value, mask)
        self.fits = None
        with no_mesh():
            for step, targets in zip(steps, known, strict=True):
                placed = placed_batch(value, targets)
                if placed is not None:
                    self.fits = step
                    return placed
        return value

    def promised(self, source: Any, number: int) -> Any:
        """A batch that its readers will read; None: it is read here.

        So are the first one, which shows that they are what the step takes, and the last, which may
        have fewer examples.
        """
        if self.fits is None or self.ragged == "pad" or number + 1 >= len(source):
            return None
        if self.data is None:
            self.data = self.fits.source_bytes(source) or b""
        if not self.data:
            return None
        numbers = itertools.count()
        arguments = [
            target.tree.unflatten(
                [
                    SourcedLeaf(source, data, number, next(numbers), shape.shape, shape.dtype)
                    for shape in target.shapes
                    if shape is not None
                ]
            )
            for data in (self.data,)
            for target in self._targets(self.fits)
            if None not in target.shapes
        ]
        if len(arguments) < len(self._targets(self.fits)):
            return None
        return arguments[0] if len(arguments) == 1 else tuple(arguments)

    def _targets(self, executable: CompiledStep) -> tuple[BatchTarget, ...]:
        if executable not in self.targets:
            self.targets[executable] = batch_targets(executable)
        return self.targets[executable]

    def _axes(self, value: Any, targets: tuple[BatchTarget, ...]) -> Axes:
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
    if isinstance(source, Mapping):
        raise BatchArgumentError(
            "prefetch takes batches to iterate over, and got one dict.",
            where="prefetch",
            why=f"going through it gives its keys: {', '.join(map(repr, list(source)[:3]))}.",
            hint="[batch] is a source of one batch; a generator or a list of dicts one of several.",
        )
    if not (_is_indexable(source) or hasattr(source, "__iter__")):
        raise BatchArgumentError(
            f"prefetch takes batches to iterate over, and got {type(source).__name__}.",
            where="prefetch",
            hint="give it a generator, a list, or a loader.",
        )
    return Prefetch(source, _Preparer(executables, ragged, mask), size, position)
