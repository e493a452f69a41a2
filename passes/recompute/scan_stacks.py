"""What a scan stacks for the backward scan that reads it, and what that computes again instead.

The backward pass of `lax.scan` is another scan, and JAX has the first one stack every value that a
derivative reads. Of loops, no compiler takes anything out of a stack: all of it is written, kept
until the backward scan, and read. So what to stack is the cheapest cut of the forward scan's body
(`cheapest_cut`), and the backward scan computes the rest in the iteration that reads it, from its
slices of the stacks, of what the forward scan has slices of, and of what an iteration began with,
which is stacked where that is cheaper. `jax.checkpoint` in a scan makes the same two scans, with
all but what an iteration begins with computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var

from autopar.arrays.typed_keys import is_key
from autopar.passes.graph import jax_compat
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import (
    Atom,
    Graph,
    made_from,
    makers_of,
    read_atom,
    readers_of,
    variables,
    with_jaxpr,
)
from autopar.passes.graph.jumps import compared, is_jump, is_real
from autopar.passes.graph.microbatched import Carried, LoopPhase, scan_like, stacked
from autopar.passes.graph.name_stacks import marked_again
from autopar.passes.graph.primitives import CONTROL_FLOW
from autopar.passes.graph.scans import ScanParts
from autopar.passes.slicing.anatomy import bytes_of
from autopar.passes.slicing.cheapest_cut import KEPT, LARGEST_PRICE, PRICES, cheapest_cut


@dataclass(frozen=True)
class StackCut:
    """What runs again in a backward scan, and what the forward scan stacks for it.

    Args:
      again: numbers of the forward body's equations.
      kept: the forward body's values.
    """

    again: frozenset[int]
    kept: frozenset[Var]


@dataclass(frozen=True)
class ScanPair:
    """A scan, and another one that alone reads some of its stacks.

    Args:
      forward: the scan that stacks.
      backward: the scan that reads.
      alone: those stacks, outside of the scans.
      given: what is there when the backward scan begins, whatever it reads.
    """

    forward: JaxprEqn
    backward: JaxprEqn
    alone: frozenset[Var]
    given: Collection[Var]

    @cached_property
    def first(self) -> LoopPhase:
        """The parts of the scan that stacks."""
        return LoopPhase(self.forward)

    @cached_property
    def second(self) -> LoopPhase:
        """The parts of the scan that reads."""
        return LoopPhase(self.backward)

    @property
    def length(self) -> int:
        """Iterations of both."""
        return int(self.forward.params["length"])

    @cached_property
    def maker(self) -> dict[Var, int]:
        """The forward body's equation that makes a value."""
        return makers_of(self.first.body.eqns)

    @cached_property
    def stacks(self) -> dict[Var, Var]:
        """The stacks, outside, that may be left out, with what the forward body stacks there."""
        made = {*self.maker, *(item.carry for item in self.first.accumulators)}
        pairs = ((outer, atom) for atom, outer in self.first.stacks if outer in self.alone)
        return {outer: atom for outer, atom in pairs if isinstance(atom, Var) and atom in made}

    @cached_property
    def wanted(self) -> tuple[Var, ...]:
        """What the forward body stacks there."""
        return tuple(dict.fromkeys(self.stacks.values()))

    def saved_bytes(self, cut: StackCut) -> int:
        """What is stacked less with a cut than without."""
        kept = (var for var in cut.kept if var not in self.first.consts)
        before, after = (sum(map(bytes_of, values)) for values in (self.wanted, kept))
        return self.length * (before - after)

    def equations(self, cut: StackCut) -> list[JaxprEqn]:
        """What runs again in every iteration."""
        return [self.first.body.eqns[number] for number in sorted(cut.again)]

    @cached_property
    def outside(self) -> dict[Var, Atom]:
        """Of the forward body's constants and slices, the values outside."""
        return {**self.first.consts, **self.first.slices}

    @cached_property
    def at_hand(self) -> dict[Var, Atom]:
        """The forward body's values that the backward body may read, with those outside."""
        there = {*self.given, *variables(self.backward.invars)}
        pairs = self.outside.items()
        found = {v: outer for v, outer in pairs if isinstance(outer, Literal) or outer in there}
        others = (pair for pair in self.first.stacks if pair[1] not in self.stacks)
        return found | {x: outer for x, outer in others if isinstance(x, Var) and outer in there}

    @cached_property
    def _compared(self) -> frozenset[Var]:
        """The forward body's values that the backward body compares: they are the same bits."""
        inside, slices = compared(self.second.body.eqns), self.second.slices.items()
        outer = (x for inner, x in slices if inner in inside and isinstance(x, Var))
        return frozenset(self.stacks[x] for x in outer if x in self.stacks)

    @cached_property
    def _drawn(self) -> frozenset[Var]:
        """The forward body's values that follow from keys, integers and numbers, as masks do."""
        body, numbers = self.first.body, {v for v in self.first.consts if v.aval.size == 1}
        found = {var for var in body.invars if var in numbers or not is_real(var)}
        for eqn in body.eqns:
            if found.issuperset(variables(eqn.invars)) and not eqn.effects:
                found.update(eqn.outvars)
        return frozenset(found)

    def cut(
        self, keeping: Callable[[Var, int | None], int], again: Callable[[JaxprEqn], int | None]
    ) -> StackCut:
        """The cheapest choice.

        Args:
          keeping: the price of a value of the forward body, made by the equation of a number or,
            as what an iteration begins with, by none.
          again: the price of running an equation again; None: it may not.
        """
        eqns, there = self.first.body.eqns, self.at_hand

        def price(number: int) -> int | None:
            eqn = eqns[number]
            jumps = is_jump(eqn) and not self._drawn.issuperset(variables(eqn.invars))
            jumps = jumps or not self._compared.isdisjoint(eqn.outvars)
            fixed = eqn.effects or is_barrier(eqn) or jumps
            return None if fixed or eqn.primitive.name in CONTROL_FLOW else again(eqn)

        def kept(var: Var) -> int:
            """The price; a constant is there for all iterations at once."""
            stacked_key = is_key(var.aval.dtype) and var not in self.outside
            if stacked_key:
                return LARGEST_PRICE
            price = keeping(var, self.maker.get(var))
            return max(price // self.length, 1) if var in self.first.consts else price

        numbers, values = cheapest_cut(
            [var for var in self.wanted if var not in there],
            self.maker.get,
            lambda number: [v for v in variables(eqns[number].invars) if v not in there],
            kept,
            price,
        )
        return StackCut(frozenset(numbers), frozenset(values))

    def rewritten(self, cut: StackCut) -> tuple[JaxprEqn, JaxprEqn]:
        """Both scans with what is chosen."""
        loop, kept = self.first, dict[Var, Var]()
        for outer, var in self.stacks.items():
            if var in cut.kept:
                kept.setdefault(var, outer)
        for var in (*(item.carry for item in loop.accumulators), *self.maker):
            if var in cut.kept:
                kept.setdefault(var, stacked(var, self.length))
        others = [(atom, outer) for atom, outer in loop.stacks if outer not in self.stacks]
        stacks = [*others, *kept.items()]
        results = [*(item.result for item in loop.accumulators), *(atom for atom, _ in stacks)]
        alive = made_from(loop.body.eqns, results)
        eqns = [eqn for n, eqn in enumerate(loop.body.eqns) if n in alive or eqn.effects]
        read = {*variables(results), *(v for eqn in eqns for v in variables(eqn.invars))}
        consts, slices = (
            [pair for pair in pairs.items() if pair[0] in read]
            for pairs in (loop.consts, loop.slices)
        )
        forward = scan_like(self.forward, consts, loop.accumulators, slices, stacks, eqns)
        return forward, _Reading(self, cut, kept).scan()


class _Reading:
    """The backward scan, with what runs again just before what reads it.

    Args:
      pair: both scans.
      cut: what runs again.
      kept: the forward body's values that are stacked, with the stacks.
    """

    def __init__(self, pair: ScanPair, cut: StackCut, kept: Mapping[Var, Var]):
        self.pair, self.cut, self.kept = pair, cut, kept
        slices = pair.second.slices.items()
        gone = {outer for outer, var in pair.stacks.items() if kept.get(var) is not outer}
        consts = pair.second.consts.items()
        # A body may have several variables for one value outside.
        self.consts = {outer: inner for inner, outer in consts if isinstance(outer, Var)}
        self.slices = {outer: inner for inner, outer in slices if isinstance(outer, Var)}
        left = (x for x in slices if isinstance(x[1], Literal) or x[1] not in gone)
        self.given: tuple[list[tuple[Var, Atom]], ...] = [*consts], [*left]
        self.source = {
            inner: pair.stacks[outer]
            for inner, outer in slices
            if isinstance(outer, Var) and outer in gone
        }
        self.known: dict[Var, Atom] = {}  # the forward body's values, as the backward body has them
        self.out: list[JaxprEqn] = []

    def scan(self) -> JaxprEqn:
        """The scan."""
        loop = self.pair.second
        for eqn in loop.body.eqns:
            eqn = eqn.replace(invars=[self.read(atom) for atom in eqn.invars])
            self.out.append(eqn)
        carries = [
            Carried(item.carry, item.start, self.read(item.result), item.total)
            for item in loop.accumulators
        ]
        stacks = [(self.read(atom), outer) for atom, outer in loop.stacks]
        consts, slices = self.given
        return scan_like(self.pair.backward, consts, carries, slices, stacks, self.out)

    def read(self, atom: Atom) -> Atom:
        """What stands for a value of the backward body; of what is gone, what is made again."""
        if isinstance(atom, Literal) or atom not in self.source:
            return atom
        return self.again(self.source[atom])

    def again(self, wanted: Var) -> Atom:
        """A value of the forward body, made of what is there."""
        eqns, stack = self.pair.first.body.eqns, [(wanted, False)]
        while stack:
            var, ready = stack.pop()
            if var in self.known:
                continue
            number = self.pair.maker.get(var, -1)
            if var in self.kept or number not in self.cut.again:
                self.known[var] = self.there(var)
                continue
            eqn = eqns[number]
            if not ready:
                stack.append((var, True))
                stack += [(v, False) for v in variables(eqn.invars)]
                continue
            made = [
                v if isinstance(v, DropVar) else jax_compat.new_var(v.aval) for v in eqn.outvars
            ]
            operands = [read_atom(self.known, atom) for atom in eqn.invars]
            self.out.append(marked_again(eqn, operands, made))
            self.known.update(zip(eqn.outvars, made, strict=True))
        return self.known[wanted]

    def there(self, var: Var) -> Atom:
        """A value of the forward body that does not run again."""
        pair = self.pair
        outer = self.kept.get(var) or pair.at_hand.get(var, pair.outside.get(var))
        assert outer is not None, f"{var} is neither stacked nor given"
        if isinstance(outer, Literal):
            return outer
        is_const = var in pair.first.consts
        known, given = (self.consts if is_const else self.slices), self.given[not is_const]
        if outer not in known:
            known[outer] = jax_compat.new_var(var.aval)
            given.append((known[outer], outer))
        return known[outer]


def scan_pairs(
    eqns: Sequence[JaxprEqn], results: Collection[Atom], given: Collection[Var]
) -> Iterator[tuple[int, int, ScanPair]]:
    """Scans of which another scan alone reads stacks, both with their numbers.

    Of several that do, the one that reads most. It need not be a backward pass.

    Args:
      eqns: of one scope, in order.
      results: what leaves it.
      given: what enters it.
    """
    readers = readers_of(eqns)
    for number in range(len(eqns)):
        found = _pair_of(number, eqns, readers, results, given)
        if found is not None:
            yield number, *found


def _pair_of(
    number: int,
    eqns: Sequence[JaxprEqn],
    readers: Mapping[Var, list[int]],
    results: Collection[Atom],
    given: Collection[Var],
) -> tuple[int, ScanPair] | None:
    """The scan that reads stacks of the one of a number."""
    eqn = eqns[number]
    if eqn.primitive.name != "scan" or eqn.effects or eqn.params["jaxpr"].consts:
        return None
    alone: dict[int, set[Var]] = {}
    for _, outer in LoopPhase(eqn).stacks:
        reading = set(readers.get(outer, ())) if outer not in results else set()
        if len(reading) == 1 and _reads_slices(eqns[(reader := reading.pop())], eqn, outer):
            alone.setdefault(reader, set()).add(outer)
    if not alone:
        return None
    reader = max(alone, key=lambda i: (sum(map(bytes_of, alone[i])), -i))
    pair = ScanPair(eqn, eqns[reader], frozenset(alone[reader]), given)
    return (reader, pair) if pair.stacks else None


def _reads_slices(eqn: JaxprEqn, forward: JaxprEqn, stack: Var) -> bool:
    """Whether an equation is a scan that reads slices of a stack, one in each iteration."""
    if eqn.primitive.name != "scan" or eqn.params["length"] != forward.params["length"]:
        return False
    if eqn.params["jaxpr"].consts:
        return False
    consts, carries, _ = ScanParts.of(eqn).operands(eqn.invars)
    return not any(atom is stack for atom in (*consts, *carries))


def with_lean_stacks(graph: Graph, prices: Mapping[str, int] = PRICES) -> Graph:
    """The same program, whose scans stack nothing that is quicker to compute again than to keep.

    Only element by element: that is fused into what reads it, and costs no memory.

    Args:
      graph: the program.
      prices: of an element that a primitive computes again.
    """
    jaxpr = _lean(graph.jaxpr, prices)
    return graph if jaxpr is graph.jaxpr else with_jaxpr(graph, jaxpr)


def _lean(jaxpr: Jaxpr, prices: Mapping[str, int]) -> Jaxpr:
    def again(eqn: JaxprEqn) -> int | None:
        price = prices.get(eqn.primitive.name)
        return None if price is None else price * sum(int(v.aval.size) for v in eqn.outvars)

    eqns = [_with_lean_body(eqn, prices) for eqn in jaxpr.eqns]
    changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    results, given = set(variables(jaxpr.outvars)), set(jaxpr.invars)
    readers = readers_of(eqns)
    for number in range(len(eqns)):
        found = _pair_of(number, eqns, readers, results, given)
        if found is None:
            continue
        reader, pair = found
        cut = pair.cut(lambda var, number: KEPT * bytes_of(var), again)
        if pair.saved_bytes(cut) > 0:
            eqns[number], eqns[reader] = pair.rewritten(cut)
            readers, changed = readers_of(eqns), True
    return jaxpr.replace(eqns=eqns) if changed else jaxpr


def _with_lean_body(eqn: JaxprEqn, prices: Mapping[str, int]) -> JaxprEqn:
    """A scan with other scans in its body, these with lean stacks."""
    if eqn.primitive.name != "scan":
        return eqn
    closed = eqn.params["jaxpr"]
    body = _lean(closed.jaxpr, prices)
    if body is closed.jaxpr:
        return eqn
    return eqn.replace(params={**eqn.params, "jaxpr": ClosedJaxpr(body, closed.consts)})
