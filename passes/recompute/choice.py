"""Which values of the forward pass are kept for the backward pass, at a price per byte: a cut.

Layers (`passes/slicing/layering.py`) end where few bytes are alive. What crosses from one layer to
another is always kept, so that a layer is computed again from its beginning, when its own backward
pass begins, and is gone after that (Chen et al., "Training deep nets with sublinear memory cost",
2016). Inside a layer, what is kept is the cheapest cut between what enters the layer and what the
backward pass reads: a kept byte costs the price, an operation that runs again its seconds (He and
Yu, "Min-cut optimal(*) recomputation", 2022). A higher price keeps less, and never anything that a
lower one did not: the choices are nested. Of equal cuts the one that is next to the layer's
beginning is taken, so layers that are alike are treated alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from autopar.arrays.typed_keys import is_key
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Atom, makers_of, readers_of, variables
from autopar.passes.graph.jumps import compared_by, is_jump
from autopar.passes.graph.microbatched import Microbatched
from autopar.passes.graph.primitives import CONTROL_FLOW
from autopar.passes.graph.read_whole import read_whole
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.recompute.kept_choice import KeptChoice
from autopar.passes.recompute.scan_stacks import ScanPair, StackCut, scan_pairs
from autopar.passes.slicing.anatomy import Anatomy, bytes_of, dissect
from autopar.passes.slicing.cheapest_cut import LARGEST_PRICE, cheapest_cut
from autopar.passes.slicing.layering import layers_of
from autopar.passes.slicing.slice_stages import LayersOfStep

Seconds = Callable[[JaxprEqn], float]

_UNITS = 1e15  # of a second, for capacities: at most, if all that runs again is not too much
_MUCH = 64  # times what runs again, with what it writes: far less than the largest price
_PRICES_TRIED = 24
HARDLY = 0.01  # of the most that a choice saves: what saves so little more is not looked at
_PRICES_APART = 1.25  # times a price, the next one that is not tried apart from it
HOST_SHARES = (
    0.25,
    0.5,
    0.75,
    1.0,
)  # of the layers whose kept values may wait in the hosts' memory
SMALL_SHARE = 1000  # smaller than the largest value over this: it stays on the devices


@dataclass(frozen=True)
class KeptValues:
    """A microbatched step's values that its backward pass reads, and what they are made from.

    Args:
      parts: the step's forward and backward equations.
      layer_of: for each forward equation that belongs to one, its layer.
      seconds_of: what an equation takes on one device.
      host_price: seconds for each byte that is put into the hosts' memory and brought back, on one
        device; 0: nothing is.
      at_once: the last layer's backward pass follows at once, so all that it reads is kept.
      write_seconds_of: for each byte of what an equation makes that is kept, and would not be
        written otherwise, on one device.
      stack_seconds_of: for each byte of what an equation makes that a loop stacks, on one device.
      joined: so many blocks are one layer with the one before them.
    """

    parts: Anatomy
    layer_of: Mapping[int, int]
    seconds_of: Seconds
    host_price: float = 0.0
    at_once: bool = True
    write_seconds_of: Seconds = lambda eqn: 0.0
    stack_seconds_of: Seconds = lambda eqn: 0.0
    joined: int = 0

    @classmethod
    def of(
        cls,
        step: Microbatched,
        rules: Rules,
        seconds_of: Seconds,
        host_price: float = 0.0,
        at_once: bool = True,
        write_seconds_of: Seconds = lambda eqn: 0.0,
        stack_seconds_of: Seconds = lambda eqn: 0.0,
        known: LayersOfStep | None = None,
    ) -> KeptValues:
        """Those of a step with a loop over its microbatches, whose layers may be known.

        Raises:
          OptionError: the step has no such loop.
        """
        if known is None or known.parts.step is not step:
            parts = dissect(step)
            known = LayersOfStep(parts, layers_of(parts, rules))
        layer_of = {i: n for n, layer in enumerate(known.found.layers) for i in layer.equations}
        more = seconds_of, host_price, at_once, write_seconds_of, stack_seconds_of
        return cls(known.parts, layer_of, *more)

    @cached_property
    def maker(self) -> Mapping[Var, int]:
        """The body's equation that makes a value."""
        return makers_of(self.parts.body.eqns)

    def maker_of(self, atom: Atom) -> int | None:
        """The body's equation that makes a value; None of what is given, or a literal."""
        return None if isinstance(atom, Literal) else self.maker.get(atom)

    @cached_property
    def late(self) -> frozenset[int]:
        """The body's equations for which layers keep values: what follows from the backward pass.

        What joins the microbatches' metrics of the forward pass, wherever it stands, reads them as
        they were made: a layer has not to run again for it.
        """
        late, made = set(self.parts.backward), set[Var]()
        for index, eqn in enumerate(self.parts.body.eqns):
            joins = index in self.parts.loop.combining
            if joins and not made.isdisjoint(variables(eqn.invars)):
                late.add(index)
            if index in late:
                made.update(eqn.outvars)
        return frozenset(late)

    @cached_property
    def wanted(self) -> Mapping[int, tuple[Var, ...]]:
        """For every layer, what the backward pass reads of it and what no other layer reads.

        What is computed everywhere (masks, random bits) belongs to the layer that reads it first.
        """
        eqns, layers = self.parts.body.eqns, self.layer_of
        late = self.late
        readers = readers_of(eqns)
        home = dict(layers)
        for index in reversed(range(len(eqns))):
            if index not in home and index not in late:
                read_by = (i for v in eqns[index].outvars for i in readers.get(v, ()))
                known = [home[i] for i in read_by if i in home]
                if known:
                    home[index] = min(known)
        found: dict[int, list[Var]] = {}
        results = set(variables(self.parts.body.outvars))
        for index, eqn in enumerate(eqns):
            for var in eqn.outvars if index in home else ():
                reading = [i for i in readers.get(var, ()) if not isinstance(var, DropVar)]
                crosses = {home[i] for i in reading if i in home} - {home[index]}
                if not crosses and var not in results and any(i in late for i in reading):
                    found.setdefault(home[index], []).append(var)
        return {layer: tuple(values) for layer, values in found.items()}

    @cached_property
    def family(self) -> tuple[KeptChoice, ...]:
        """The different choices, from the one that saves least to the one that keeps least."""
        found: dict[object, KeptChoice] = {}
        for kept in self._at_prices():
            if kept.again or any(cut.again for _, cut in kept.scans):
                found.setdefault((kept.values, kept.scans), kept)
        choices = sorted(found.values(), key=lambda kept: kept.saved_bytes)
        hardly = HARDLY * choices[-1].saved_bytes if choices else 0
        family = choices[:1]
        for kept in choices[1:]:
            if kept is choices[-1] or kept.saved_bytes > family[-1].saved_bytes + hardly:
                family.append(kept)
        if self.host_price:
            prices = dict.fromkeys((self.host_price, *(kept.price for kept in family[-1:])))
            hosting = [self.hosting(price, share) for price in prices for share in HOST_SHARES]
            hosting.sort(key=lambda kept: kept.saved_bytes)
            family += [kept for kept in hosting if kept.hosted]
        return tuple(family)

    def _at_prices(self) -> list[KeptChoice]:
        """The choices at some prices, more of these where choices differ most in what they save."""
        lowest, highest = self.prices
        if not highest:
            return []
        found = [self.at(price, every_layer=not self.at_once) for price in (lowest, highest)]
        while len(found) < _PRICES_TRIED:
            pairs = [
                (one.saved_bytes - other.saved_bytes, number)
                for number, (one, other) in enumerate(itertools.pairwise(found))
                if other.price > _PRICES_APART * one.price and other.saved_bytes > one.saved_bytes
            ]
            if not pairs:
                break
            _, number = min(pairs)
            middle = math.sqrt(found[number].price * found[number + 1].price)
            found.insert(number + 1, self.at(middle, every_layer=not self.at_once))
        return found

    def hosting(self, price: float, share: float) -> KeptChoice:
        """The best choice at a price, whose kept values are in the hosts' memory.

        Those of so large a share of the layers, the first ones. What the last layer's backward
        pass reads, which comes at once, is kept as it is, and all that scans stack.
        """
        kept = self.at(price, every_layer=False, scans=False)
        *layers, _ = sorted({*self.layer_of.values()})
        hosted = {
            var
            for layer in layers[: math.ceil(share * len(layers))]
            for var in self._kept_for(layer, kept)
        }
        size = sum(map(bytes_of, hosted))
        return replace(
            kept,
            saved_bytes=kept.saved_bytes + size,
            hosted=frozenset(hosted),
            hosted_bytes=size,
            host_share=share,
        )

    def _kept_for(self, layer: int, kept: KeptChoice) -> Iterator[Var]:
        """What is kept for a layer's backward pass and large, of what layers make."""
        eqns = self.parts.body.eqns
        numbers = (number for at, number in kept.again if at == layer)
        read = [v for number in sorted(numbers) for v in variables(eqns[number].invars)]
        for var in dict.fromkeys((*read, *self.wanted.get(layer, ()))):
            number = self.maker.get(var, -1)
            runs_again = (layer, number) in kept.again and not self.is_given(layer, var)
            is_kept = var in kept.values or not runs_again
            may_wait = number in self.layer_of and not is_key(var.aval.dtype)
            if is_kept and may_wait and bytes_of(var) * SMALL_SHARE >= self._largest:
                yield var

    @cached_property
    def _largest(self) -> int:
        eqns = self.parts.body.eqns
        return max((bytes_of(v) for i in self.layer_of for v in eqns[i].outvars), default=0)

    def at(self, price: float, *, every_layer: bool = True, scans: bool = True) -> KeptChoice:
        """The best choice at a price, of every layer or of all but the last; in `scans` as well."""
        again: set[tuple[int, int]] = set()
        values: set[Var] = set()
        last = max(self.layer_of.values(), default=-1)
        chosen = {k: v for k, v in self.wanted.items() if every_layer or k != last}
        for layer, wanted in chosen.items():
            numbers, kept = self._cut(layer, wanted, price)
            again.update((layer, number) for number in numbers)
            values |= kept
        read = {var for wanted in chosen.values() for var in wanted}
        saved = sum(map(bytes_of, read)) - sum(map(bytes_of, values))
        seconds = sum(self.seconds_of(self.parts.body.eqns[number]) for _, number in again)
        cuts = []
        for number, (_, pair) in self.pairs.items() if scans else ():
            cut = self._scan_cut(pair, price)
            cuts.append((number, cut))
            saved += pair.saved_bytes(cut)
            seconds += pair.length * sum(map(self.seconds_of, pair.equations(cut)))
            values -= pair.stacks.keys()
        return KeptChoice(
            price,
            frozenset(again),
            frozenset(values),
            saved,
            seconds,
            every_layer=every_layer,
            scans=tuple(cuts),
            joined=self.joined,
        )

    @cached_property
    def pairs(self) -> Mapping[int, tuple[int, ScanPair]]:
        """Forward scans by their numbers, each with the backward scan that reads what it stacks."""
        body = self.parts.body
        found = scan_pairs(body.eqns, set(variables(body.outvars)), set(body.invars))
        return {n: (m, pair) for n, m, pair in found if n not in self.late and m in self.late}

    def _scan_cut(self, pair: ScanPair, price: float) -> StackCut:
        """What a backward scan computes again at a price."""
        eqns = pair.first.body.eqns

        def keeping(var: Var, number: int | None) -> int:
            writing = 0.0
            if number is not None:
                writing = self.write_seconds_of(eqns[number]) + self.stack_seconds_of(eqns[number])
            return 1 + round((price + writing) * bytes_of(var) * self._units)

        inside, slices = read_whole(pair.second.body.eqns), pair.second.slices.items()
        outer = (x for inner, x in slices if inner in inside and isinstance(x, Var))
        whole = {pair.stacks[x] for x in outer if x in pair.stacks}
        return pair.cut(keeping, lambda eqn: self._price_again(eqn, whole))

    def _price_again(self, eqn: JaxprEqn, whole: Container[Var]) -> int:
        """Of an equation; what is read `whole` afterwards is written as well."""
        written = sum(bytes_of(var) for var in eqn.outvars if var in whole)
        seconds = self.seconds_of(eqn) + self.write_seconds_of(eqn) * written
        return 1 + round(seconds * self._units)

    @cached_property
    def _read_whole(self) -> frozenset[Var]:
        """What the backward pass reads as it is in memory."""
        return read_whole([self.parts.body.eqns[number] for number in sorted(self.late)])

    def is_given(self, layer: int, var: Var) -> bool:
        """Whether a value is there when the layer's backward pass begins, whatever is kept."""
        number = self.maker.get(var)
        return number is None or self.layer_of.get(number, layer) != layer or not self._own(var)

    def _own(self, var: Var) -> bool:
        """Whether no other layer reads a value that a layer makes."""
        number = self.maker[var]
        if number not in self.layer_of:
            return True
        return var not in self.crossing

    @cached_property
    def crossing(self) -> frozenset[Var]:
        """What one layer makes and another one reads."""
        eqns, layers = self.parts.body.eqns, self.layer_of
        return frozenset(
            var
            for index, layer in layers.items()
            for var in variables(eqns[index].invars)
            if layers.get(self.maker.get(var, -1), layer) != layer
        )

    def may_run_again(self, number: int) -> bool:
        """Whether an equation can be computed a second time, to the same effect."""
        eqn = self.parts.body.eqns[number]
        late = number in self.parts.backward or number in self.parts.loop.combining
        # Masks of random bits, which belong to no layer, are the same whenever they are made.
        jumps = is_jump(eqn) or not self._compared.isdisjoint(eqn.outvars)
        fixed = eqn.effects or is_barrier(eqn) or (jumps and number in self.layer_of)
        return not (late or fixed or eqn.primitive.name in CONTROL_FLOW)

    @cached_property
    def _compared(self) -> frozenset[Var]:
        """What the backward pass compares with what else follows from the same bits."""
        return frozenset(compared_by(self.parts.body.eqns, self.late))

    @cached_property
    def _seconds_again(self) -> list[float]:
        """Of the equations that may run again, those that take any time."""
        eqns = self.parts.body.eqns
        numbers = {number for number in self.layer_of if self.may_run_again(number)}
        inner = [pair.first.body for _, pair in self.pairs.values()]
        may = [eqns[n] for n in numbers] + [
            eqn for body in inner for eqn in body.eqns if eqn.primitive.name not in CONTROL_FLOW
        ]
        return [s for eqn in may if (s := self.seconds_of(eqn)) > 0]

    @cached_property
    def _units(self) -> float:
        """Of a second, so many that all that may run again, and write, costs below the largest."""
        return min(_UNITS, LARGEST_PRICE / (_MUCH * (sum(self._seconds_again) or 1.0)))

    @cached_property
    def prices(self) -> tuple[float, float]:
        """Prices between which the choices lie."""
        seconds = self._seconds_again
        sizes = [bytes_of(var) for values in self.wanted.values() for var in values]
        sizes += [bytes_of(var) for _, pair in self.pairs.values() for var in pair.wanted]
        sizes = [size for size in sizes if size]
        if not seconds or not sizes:
            return 0.0, 0.0
        return min(seconds) / max(sizes) / 4, 4 * sum(seconds) / min(s for s in sizes)

    def _cut(self, layer: int, wanted: Iterable[Var], price: float) -> tuple[set[int], set[Var]]:
        """Equations that run again for a layer, and its values that are kept."""
        eqns = self.parts.body.eqns

        def operands(number: int) -> list[Var]:
            read = (v for v in variables(eqns[number].invars) if v in self.maker)
            return [v for v in read if not self.is_given(layer, v)]

        def keeping(var: Var) -> int:
            each = price + self.write_seconds_of(eqns[self.maker[var]])
            return 1 + round(each * bytes_of(var) * self._units)

        def again(number: int) -> int | None:
            may = self.may_run_again(number)
            return self._price_again(eqns[number], self._read_whole) if may else None

        read = [var for var in wanted if not self.is_given(layer, var)]
        return cheapest_cut(read, self.maker.get, operands, keeping, again)
