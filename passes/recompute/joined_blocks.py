"""Blocks that run again together, so that what passes from one to the next is not kept.

Where what is kept between layers is too much, segments of several of them keep only what enters the
first, as many segments as each has layers at the least (Chen et al., "Training deep nets with
sublinear memory cost", 2016). Here a block ends where the backward pass reads what is passed on:
with `jax.checkpoint` around it, or a part of a layer without. As many of them are joined as it
takes. What runs again by itself already does so once more if it is joined with the next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from autopar.passes.graph.graph import readers_of
from autopar.passes.recompute.choice import HARDLY, KeptValues
from autopar.passes.recompute.kept_choice import KeptChoice

_HALVINGS = 8  # of the prices between which lies that at which joined blocks keep least


class JoinedBlocks:
    """The choices of a step that keep less than the least of what passes from layer to layer.

    One after the other they join one block more with the one before it.
    """

    def __init__(self, values: KeptValues) -> None:
        self.values = values
        self._known = {values.joined: values}
        self._choices: dict[int, KeptChoice] = {}

    def __len__(self) -> int:
        """As many as leave a segment for each block of the largest."""
        count = len(self._blocks)
        return count - math.isqrt(count - 1) - 1 if count else 0

    def __getitem__(self, place: int) -> KeptChoice:
        if place not in self._choices:
            self._choices[place] = self._at(place + 1, self._price)
        return self._choices[place]

    def of(self, joined: int) -> KeptValues:
        """The values of the step with so many joined blocks: segments of them are layers."""
        if joined not in self._known:
            blocks = self._blocks
            size, left = divmod(len(blocks), len(blocks) - joined)
            first_of = dict[int, int]()
            for number, block in enumerate(blocks):
                longer = min(number // (size + 1), left)
                first = longer * (size + 1)
                first += (number - first) // size * size if longer == left else 0
                first_of.update(dict.fromkeys(block, blocks[first][0]))
            layers = self.values.layer_of.items()
            layer_of = {number: first_of.get(layer, layer) for number, layer in layers}
            self._known[joined] = replace(self.values, layer_of=layer_of, joined=joined)
        return self._known[joined]

    @cached_property
    def _blocks(self) -> Sequence[Sequence[int]]:
        """Layers one after the other, up to one of which the backward pass reads what it passes.

        The last layer is in none if its backward pass follows at once.
        """
        values = self.values
        readers = readers_of(values.parts.body.eqns)
        ends = {
            values.layer_of[values.maker[var]]
            for var in values.crossing
            if not values.late.isdisjoint(readers.get(var, ()))
        }
        layers = sorted({*values.layer_of.values()})
        found, block = list[list[int]](), list[int]()
        for layer in layers[: len(layers) - values.at_once]:
            block.append(layer)
            if layer in ends:
                found.append(block)
                block = []
        return [*found, block] if block else found

    def _at(self, joined: int, price: float) -> KeptChoice:
        return self.of(joined).at(price, every_layer=not self.values.at_once)

    @cached_property
    def _price(self) -> float:
        """About the least price of a byte at which the last choice spares as much as at any."""
        low, high = self.of(len(self)).prices
        most = self._at(len(self), high).saved_bytes
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            if self._at(len(self), middle).saved_bytes >= (1 - HARDLY) * most:
                high = middle
            else:
                low = middle
        return high
