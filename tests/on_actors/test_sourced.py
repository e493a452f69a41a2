"""What a process reads of a source of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from autopar.runtime.ray.transport import pickling, sourced
from autopar.runtime.ray.transport.sourced import SourcedTiles


class Batches:
    """Ten batches of eight rows; it notes what is read, also of copies that went as bytes."""

    read: list[object] = []  # noqa: RUF012  # one for all copies

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> Any:
        self.read.append(number)
        return self.whole(number)

    def whole(self, number: int) -> Any:
        rows = np.arange(8 * self.columns, dtype=np.float32).reshape(8, self.columns)
        return {"x": rows + 100 * number, "y": 2 * rows}


class BatchesInRows(Batches):
    """The same, whose rows can be read."""

    def rows(self, number: int, first: int, last: int) -> Any:
        self.read.append((number, first, last))
        return {name: leaf[first:last] for name, leaf in self.whole(number).items()}


@pytest.fixture(autouse=True)
def closed_readers() -> Iterator[None]:
    yield
    while sourced._readers:
        sourced._readers.popitem()[1].close()


def tiles(source: Batches, number: int, leaf: int, *rows: tuple[int, int]) -> SourcedTiles:
    boxes = tuple((each, (0, source.columns)) for each in rows)
    shape, dtype = (8, source.columns), np.dtype(np.float32)
    return SourcedTiles(pickling.dumps(source, "a source"), number, leaf, boxes, shape, dtype)


@pytest.mark.parametrize("kind", [Batches, BatchesInRows])
def test_tiles_are_read_once_for_all_leaves(kind: type[Batches]) -> None:
    source = kind(columns=3)
    Batches.read.clear()
    for leaf, name in enumerate("xy"):
        found = tiles(source, 8, leaf, (4, 6), (6, 8)).read()
        for tile, (first, last) in zip(found, ((4, 6), (6, 8)), strict=True):
            np.testing.assert_array_equal(tile, source.whole(8)[name][first:last])
    tiles(source, 9, 0, (4, 6), (6, 8)).read()  # was read ahead; there is none after it
    wanted = [8, 9] if kind is Batches else [(8, 4, 8), (9, 4, 8)]
    assert Batches.read == wanted


def test_rows_that_are_not_as_promised_are_refused() -> None:
    class Short(BatchesInRows):
        def rows(self, number: int, first: int, last: int) -> Any:
            return super().rows(number, first, last - 1)

    with pytest.raises(ValueError, match=r"leaf 0 of batch 2 .* shall be float32\[4, 3\]"):
        tiles(Short(columns=3), 2, 0, (4, 8)).read()
