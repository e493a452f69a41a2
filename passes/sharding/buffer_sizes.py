"""How large buffers of one device are, as its compiler lays and writes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, partial

from autopar.passes.sharding.compiler_rules import CompilerRules
from autopar.passes.sharding.layout import local_shape
from autopar.passes.sharding.narrow_parts import narrow_parts
from autopar.passes.sharding.scopes import aval_shape, itemsize
from autopar.passes.sharding.spmd_program import Block, ShardedValue, local_bytes
from autopar.passes.sharding.tiles import convolved_shapes, parts_of_vectors, tiled_elements

LARGE_BYTES = 1 << 20
"""What is smaller lies in tiles that are not counted."""


class BufferSizes:
    """Of a block's values."""

    def __init__(self, block: Block, mesh: Sequence[int], rules: CompilerRules):
        self.mesh = mesh
        self.plain: Callable[[ShardedValue], int] = cache(partial(local_bytes, mesh=mesh))
        self._known: dict[ShardedValue, int] = {}
        self._has_tiles = rules.has_tiles
        instructions = block.instructions if rules.has_tiles else ()
        self._convolved = convolved_shapes(instructions, mesh)
        self._narrow = narrow_parts(block) if rules.has_tiles else {}
        self._parts = set(parts_of_vectors(instructions))

    def rename(self, root: Callable[[ShardedValue], ShardedValue]) -> None:
        """Say whose buffer a value is."""
        self._parts = set(map(root, self._parts))

    def leave_out(self, values: Collection[ShardedValue]) -> None:
        """Count these as nothing."""
        self._known.update(dict.fromkeys(values, 0))

    def __call__(self, value: ShardedValue) -> int:
        """Bytes of a buffer; 0 if it is left out."""
        if value not in self._known:
            self._known[value] = self.laid(value)
        return self._known[value]

    def shape(self, value: ShardedValue) -> tuple[int, ...]:
        """Of a device's part."""
        return local_shape(aval_shape(value.atom), value.layout, self.mesh)

    def first_size(self, value: ShardedValue) -> int:
        """Of a device's part, along the first dimension."""
        return next(iter(self.shape(value)), 1)

    def elements(self, value: ShardedValue) -> int:
        """Of a device's part, without what tiles fill."""
        return self.plain(value) // itemsize(value.atom.aval)

    def laid(self, value: ShardedValue) -> int:
        """Bytes of a buffer, left out or not."""
        plain = self.plain(value)
        if not self._has_tiles or plain < LARGE_BYTES:
            return plain
        shape = self.shape(value)
        elements = tiled_elements(shape, self._convolved.get(shape), value in self._parts)
        return elements * self._narrow.get(value, itemsize(value.atom.aval))
