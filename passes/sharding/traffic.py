"""What a program reads and writes in memory once XLA has fused it.

Elementwise operations, broadcasts, slices and other moves are evaluated where their results are
read: they are written only where something reads them that XLA does not fuse with (a matrix
product, a gather, control flow), where they leave the program, or a barrier keeps them. Every
such value is made by a kernel, which reads what its chain of operations begins with: the
*frontier* of written values. A reduction ends a kernel and takes its operand's chain into it.
Kernels that read the same value and wait for nothing of each other are one (XLA's fusion of
siblings, with several results), and a kernel goes on with what it writes; so a value counts once
for all kernels of one *level*, the longest chain of kernels before them. An operation that is
read in several kernels is computed in each of them, and costs no memory.

XLA's GPU backend decides so by its cost model (`xla/service/gpu/transforms/priority_fusion.cc`,
`multi_output_fusion.cc`); that it never refuses is the simplification here.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Atom, inner_jaxprs
from autopar.passes.graph.primitives import (
    CONTROL_FLOW,
    ELEMENTWISE,
    KERNELS,
    PRODUCTS,
    REDUCTIONS,
    RESHAPES,
    SCATTERS,
    UNFUSED,
    keeps_order,
)
from autopar.passes.graph.scans import ScanParts
from autopar.passes.sharding.compiler_rules import reduces_rows
from autopar.passes.sharding.scopes import aval_shape, itemsize, value_bytes

# A view of the same bytes: nothing is moved.
_VIEWS = RESHAPES - {"broadcast_in_dim", "transpose"} | {
    "bitcast_convert_type",
    "constrain",
    "copy",
    "name",
    "random_unwrap",
    "random_wrap",
    "stop_gradient",
}
# Kernels of their own on both sides. XLA fuses a concatenation as it does a slice.
_ALONE = UNFUSED - REDUCTIONS - {"concatenate", "optimization_barrier"}
_WORD, _SECTOR = 4, 32
"""Bytes: of what memory adds to by itself, and of what a GPU's cache moves at once. Narrower
numbers that several updates may add to are compared and swapped, each by a sector of its own: rows
of bfloat16 took 29 (H100) to 35 (H200) bytes of their bandwidth a number, of float32 12."""
_SPREADING = ELEMENTWISE | {"broadcast_in_dim"}
_ROW_SUMS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
# They read of an operand only what they return.
_PARTS = frozenset({"dynamic_slice", "gather", "slice", "split", "unstack"})


class Traffic(NamedTuple):
    """What an equation adds to its kernel, and how many kernels it starts.

    The kernel reads and writes `bytes` in memory for it; `inner_bytes` are of a result that is made
    where it is read. It `has_rows` if it reduces rows that meet the result, or is where they meet,
    as in softmaxes and norms. Of what is stacked in a trip of a loop, `stack_bytes` are filled
    before and, where no elementwise kernel makes it, copied. On GPUs `added_bytes` are moved beside
    to add narrow numbers.
    """

    bytes: int
    inner_bytes: int
    kernels: int
    has_rows: bool = False
    stack_bytes: int = 0
    added_bytes: int = 0


_NONE = Traffic(0, 0, 0)


class MemoryTraffic:
    """The traffic of every equation of a program, also inside of control flow, by identity.

    Where `gathers_read_buffers`, what a gather takes from is written for it; else a gather of few
    numbers computes them.
    """

    def __init__(self, jaxpr: Jaxpr, gathers_read_buffers: bool = False):
        self._gathers_read_buffers = gathers_read_buffers
        self._found: dict[int, tuple[JaxprEqn, Traffic]] = {}
        self._walk(jaxpr)

    def of(self, eqn: JaxprEqn) -> Traffic:
        """Whole, as one device would have it. Of an equation of no program: as if it were alone."""
        known = self._found.get(id(eqn))
        return alone(eqn) if known is None or known[0] is not eqn else known[1]

    def _walk(self, jaxpr: Jaxpr, loop: JaxprEqn | None = None) -> None:
        for eqn, traffic in zip(jaxpr.eqns, self._scope(jaxpr, loop), strict=True):
            self._found[id(eqn)] = eqn, traffic
            if eqn.primitive.name in CONTROL_FLOW:
                for body in inner_jaxprs(eqn):
                    self._walk(body, eqn if eqn.primitive.name == "scan" else None)

    def _scope(self, jaxpr: Jaxpr, loop: JaxprEqn | None) -> tuple[Traffic, ...]:
        """The traffic of each equation of one scope, in order; control flow has none of its own.

        The scope may be the body of a `loop`.
        """
        source = _views(jaxpr)
        written = _written(jaxpr, source, self._gathers_read_buffers)
        first = _FusionWalk(source, written)
        for eqn in jaxpr.eqns:
            first.traffic(eqn)
        second = _FusionWalk(source, written, _kernels_of(jaxpr, source, first), first.met)
        each = tuple(map(second.traffic, jaxpr.eqns))
        return each if loop is None else tuple(_with_stacks(jaxpr, loop, source, each))


def alone(eqn: JaxprEqn) -> Traffic:
    """An equation that is a kernel of its own."""
    if eqn.primitive.name in CONTROL_FLOW or is_barrier(eqn) or eqn.primitive.name in _VIEWS:
        return _NONE
    operands = [atom for atom in eqn.invars if isinstance(atom, Var)]
    read = sum(value_bytes(atom) for atom in operands)
    return Traffic(_own_bytes(eqn, read), 0, 1, added_bytes=_added_bytes(eqn))


def _own_bytes(eqn: JaxprEqn, read: int) -> int:
    """What a kernel of one equation moves, if its operands have `read` bytes."""
    name, written = eqn.primitive.name, sum(map(value_bytes, eqn.outvars))
    if name in _PARTS:
        return 2 * written + sum(map(value_bytes, eqn.invars[1:]))
    if name == "dynamic_update_slice":  # in place
        return 2 * value_bytes(eqn.invars[1])
    if name in SCATTERS:  # in place: indices, updates, and what they are combined with
        return value_bytes(eqn.invars[1]) + 3 * value_bytes(eqn.invars[2])
    return read + written


def _added_bytes(eqn: JaxprEqn) -> int:
    """What a GPU moves beside, to add numbers that its memory does not add by itself: `_SECTOR`."""
    name, updates = eqn.primitive.name, None
    if SCATTERS.get(name) is not None and not eqn.params["unique_indices"]:
        updates, known = eqn.invars[2], 3
    elif name == "select_and_scatter_add":  # the gradient of a maximum over windows
        updates, known = eqn.invars[0], 0
    if updates is None or itemsize(updates.aval) >= _WORD:
        return 0
    each = _SECTOR - known * itemsize(updates.aval)
    return each * math.prod(aval_shape(updates))


class _FusedChain(NamedTuple):
    """The written values from which an operation is computed, and the bytes read of each.

    Whether the operations up to it have rows: `Traffic`.
    """

    frontier: Mapping[Var, int]
    level: int
    has_rows: bool = False

    @property
    def bytes(self) -> int:
        """Read by each kernel that computes it."""
        return sum(self.frontier.values())


def _with_stacks(
    jaxpr: Jaxpr, loop: JaxprEqn, source: Mapping[Var, Var], each: Sequence[Traffic]
) -> Iterator[Traffic]:
    """What a trip moves beside: to and from stacks.

    A stack is filled before the loop. Elementwise kernels read and write parts of stacks in place;
    what products read is copied out of a stack first, once, and what they make is copied into it.
    What is stacked as it came, or by loops and branches inside, is not counted.
    """
    parts = ScanParts.of(loop)
    slices = {var: var for var in parts.operands(jaxpr.invars)[2]}
    stacks = parts.results(jaxpr.outvars)[1]
    stacked = Counter(source.get(x, x) for x in stacks if isinstance(x, Var))
    for eqn, traffic in zip(jaxpr.eqns, each, strict=True):
        read = [source.get(x, x) for x in eqn.invars if isinstance(x, Var)]
        if is_barrier(eqn) and len(read) == len(eqn.outvars):
            passed = zip(eqn.outvars, read, strict=True)
            slices.update({new: slices[old] for new, old in passed if old in slices})
        filled = stack_passes(eqn) * sum(stacked[var] * value_bytes(var) for var in eqn.outvars)
        copied = 0
        if eqn.primitive.name in PRODUCTS | KERNELS:
            taken = {slices[var] for var in read if var in slices}
            copied = 2 * sum(map(value_bytes, taken))
            slices = {var: base for var, base in slices.items() if base not in taken}
        yield traffic._replace(bytes=traffic.bytes + copied, stack_bytes=filled)


def stack_passes(eqn: JaxprEqn) -> int:
    """How often memory is passed for what an equation makes and a loop stacks.

    To fill the stack; a product's results are then read and written once more.
    """
    return 3 if eqn.primitive.name in PRODUCTS | KERNELS else 1


class _FusionWalk:
    """One walk over a scope in order.

    Args:
      source: for each view of a value, that value.
      written: the values that are written anyhow.
      kernels: how many kernels compute a value that is not. Where it costs less to write it and to
        read it in each of these than to read there what it is made from, it is written, too: a
        residual stream, which is a longer sum from block to block.
      met: results of reduced rows that these rows meet, as a walk before found.
    """

    def __init__(
        self,
        source: Mapping[Var, Var],
        written: Set[Var],
        kernels: Mapping[Var, int] | None = None,
        met: Set[Var] = frozenset(),
    ):
        self.source, self.written, self.kernels = source, written, kernels or {}
        self.met = set(met)
        self.levels: dict[Var, int] = {}  # of written values; what enters has 0
        self.chains: dict[Var, _FusedChain] = {}  # of what is computed where it is read
        self._reduced: dict[Var, Set[Var]] = {}  # results of reduced rows: of what values
        self._of_rows: dict[Var, Set[Var]] = {}  # what is made of such results, as small: of which
        self._seen: set[tuple[Var, int]] = set()
        self._open: set[Var] = set()  # what its kernel may go on with

    def traffic(self, eqn: JaxprEqn) -> Traffic:
        """That of the next equation."""
        name, results = eqn.primitive.name, eqn.outvars
        if results and results[0] in self.source:
            return _NONE
        made = self._chain(eqn)
        if name in CONTROL_FLOW or is_barrier(eqn) or name in _ALONE:
            self.levels.update(dict.fromkeys(results, made.level + 1))
            own = Traffic(_own_bytes(eqn, made.bytes), 0, 1, added_bytes=_added_bytes(eqn))
            return own if name in _ALONE else _NONE
        kept = [var for var in results if name in REDUCTIONS or self._is_kept(var, made)]
        self.chains.update((var, made) for var in results if var not in kept)
        if not kept:
            return Traffic(0, sum(map(value_bytes, results)), 0)
        level = made.level + 1
        self.levels.update(dict.fromkeys(kept, level))
        if name not in REDUCTIONS:
            self._open.update(kept)
        fresh = {
            read: size
            for read, size in made.frontier.items()
            if (read, level) not in self._seen and not self._is_made_in(read, level)
        }
        self._seen.update((var, level) for var in fresh)
        joins = len(fresh) < len(made.frontier)
        moved = sum(fresh.values()) + sum(map(value_bytes, kept))
        return Traffic(moved, 0, 0 if joins else 1, made.has_rows)

    def _is_made_in(self, var: Var, level: int) -> bool:
        """Whether a kernel of that level goes on with a value that it writes."""
        return var in self._open and self.levels[var] == level

    def _is_kept(self, var: Var, made: _FusedChain) -> bool:
        if var in self.written:
            return True
        count = self.kernels.get(var, 1)
        return count > 1 and (count - 1) * made.bytes > (count + 1) * value_bytes(var)

    def _meets_rows(self, eqn: JaxprEqn, frontier: Set[Var]) -> bool:
        """Whether an equation reduces rows that meet the result, or is where they meet.

        The frontier is that of the equation.
        """
        name = eqn.primitive.name
        if name in _ROW_SUMS:
            (result,) = eqn.outvars
            if reduces_rows(eqn) and result not in self.written and _count(result) > 1:
                self._reduced[result] = frozenset(frontier)
                self._of_rows[result] = frozenset((result,))
            return result in self.met
        if name not in _SPREADING or len(eqn.outvars) != 1:
            return False
        (result,) = eqn.outvars
        small = [self.source.get(x, x) for x in eqn.invars if isinstance(x, Var)]
        small = [var for var in small if var in self._of_rows]
        if not small:
            return False
        of = frozenset[Var]().union(*(self._of_rows[var] for var in small))
        if max(map(_count, small)) == _count(result):
            self._of_rows[result] = of
            return False
        meeting = {var for var in of if not self._reduced[var].isdisjoint(frontier)}
        self.met |= meeting
        return bool(meeting)

    def _chain(self, eqn: JaxprEqn) -> _FusedChain:
        frontier: Mapping[Var, int] = {}
        level, has_rows = 0, False
        for place, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal):
                continue
            var = self.source.get(atom, atom)
            inner = self.chains.get(var)
            if inner is None:
                size = value_bytes(var)
                if place == 0 and eqn.primitive.name in _PARTS:
                    size = min(size, value_bytes(eqn.outvars[0]))
                before = self.levels.get(var, 0) - (var in self._open)
                inner = _FusedChain({var: size}, before)
            if inner.frontier is not frontier:
                frontier = _joined(frontier, inner.frontier) if frontier else inner.frontier
            level, has_rows = max(level, inner.level), has_rows or inner.has_rows
        meets = self._meets_rows(eqn, frontier.keys())
        return _FusedChain(frontier, level, has_rows or meets)


def _joined(one: Mapping[Var, int], other: Mapping[Var, int]) -> dict[Var, int]:
    """The bytes that are read of each value, by whoever reads more."""
    joined = {**one, **other}
    for var in one.keys() & other.keys():
        joined[var] = max(one[var], other[var])
    return joined


def _kernels_of(jaxpr: Jaxpr, source: Mapping[Var, Var], first: _FusionWalk) -> dict[Var, int]:
    """For values that are computed where they are read: in how many kernels that is.

    Kernels of one level count as one.
    """
    used: dict[Var, set[int]] = defaultdict(set)
    for eqn in reversed(jaxpr.eqns):
        (result, *_) = eqn.outvars or (None,)
        if result in first.levels:
            levels = {first.levels[result]}
        else:
            levels = set().union(*(used[source.get(var, var)] for var in eqn.outvars))
        for atom in eqn.invars:
            if isinstance(atom, Var) and source.get(atom, atom) in first.chains:
                used[source.get(atom, atom)] |= levels
    return {var: len(levels) for var, levels in used.items()}


def _views(jaxpr: Jaxpr) -> dict[Var, Var]:
    """For each view of a value: that value."""
    source: dict[Var, Var] = {}
    for eqn in jaxpr.eqns:
        is_view = eqn.primitive.name in _VIEWS or keeps_order(eqn)
        if is_view and isinstance(eqn.invars[0], Var):
            source[eqn.outvars[0]] = source.get(eqn.invars[0], eqn.invars[0])
    return source


def _written(jaxpr: Jaxpr, source: dict[Var, Var], gathers_read_buffers: bool) -> set[Var]:
    """What is read by something that XLA does not fuse with it, or leaves the scope."""
    found: set[Var] = set()

    def keep(atom: Atom) -> None:
        if isinstance(atom, Var):
            found.add(source.get(atom, atom))

    for atom in jaxpr.outvars:
        keep(atom)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in CONTROL_FLOW or is_barrier(eqn) or name in _ALONE:
            first = 0 if gathers_read_buffers else _computed_operands(eqn)
            for atom in eqn.invars[first:]:
                keep(atom)
    return found


def _computed_operands(eqn: JaxprEqn) -> int:
    """How many of the first operands a kernel computes where it reads them.

    A gather of few numbers (of a loss, one of each row of logarithms) does so: they are written for
    it no more than for anyone else.
    """
    if eqn.primitive.name != "gather":
        return 0
    return int(value_bytes(eqn.outvars[0]) < value_bytes(eqn.invars[0]))


def _count(var: Var) -> int:
    """Elements of a variable."""
    return math.prod(aval_shape(var))
