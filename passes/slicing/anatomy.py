"""A microbatched program taken apart: prologue, loop, epilogue; forward, backward, and copied.

An equation is *free* if it is cheap and depends on no large state leaf: masks, positions, random
bits, slices of the batch, counters. In the loop, what is made element by element from parameters
and free values is free as well: the parameters move once a step, their sum with a mask would move
once a microbatch. Free equations are copied to every stage that reads them; all others are
evaluated on one stage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.base.errors import OptionError
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom, Graph, Input
from autopar.passes.primitives.factor_rule import FactorRule
from autopar.passes.primitives.flops import total_flops
from autopar.passes.primitives.shardings import is_key
from autopar.passes.primitives.table import ELEMENTWISE, HEAVY, RESHAPES

# Each result element from one element of every operand.
_PLAIN = ELEMENTWISE | RESHAPES
_TRANSPOSED = re.compile(r"(^|[/(])transpose\(")


@dataclass(frozen=True)
class Carried:
    """A value that the loop carries: an accumulator.

    Args:
      carry: the body's variable for what has been accumulated so far.
      start: what it is before the loop, outside of the body.
      combine: numbers of the body's equations that read the carry, directly or not.
      total: the variable behind the loop.
    """

    carry: Var
    start: Atom
    combine: tuple[int, ...]
    result: Atom
    total: Var


@dataclass(frozen=True)
class Anatomy:
    """The parts of a microbatched program.

    Args:
      graph: the whole program.
      loop: number of the scan among its equations.
      body: the scan's body.
      consts: the body's variables for values that are the same in every microbatch, each with the
        value outside.
      slices: the body's variables for slices, each with the stacked value outside.
      carried: the accumulators.
      stacked: values that leave the body stacked, each with the variable outside.
      free: variables, inside and outside, that are computed wherever they are read. Those that the
        loop computes may depend on parameters.
      backward: numbers of the body's equations that belong to the backward pass.
    """

    graph: Graph
    loop: int
    body: Jaxpr
    consts: Mapping[Var, Atom]
    slices: Mapping[Var, Atom]
    carried: tuple[Carried, ...]
    stacked: tuple[tuple[Atom, Var], ...]
    free: frozenset[Var]
    backward: frozenset[int]

    @property
    def scan(self) -> JaxprEqn:
        """The loop."""
        return self.graph.jaxpr.eqns[self.loop]

    @property
    def prologue(self) -> list[JaxprEqn]:
        """The equations before the loop."""
        return self.graph.jaxpr.eqns[: self.loop]

    @property
    def epilogue(self) -> list[JaxprEqn]:
        """The equations behind the loop."""
        return self.graph.jaxpr.eqns[self.loop + 1 :]

    @property
    def num_microbatches(self) -> int:
        """How often the loop runs."""
        return int(self.scan.params["length"])

    @property
    def combining(self) -> frozenset[int]:
        """Numbers of the body's equations that add to accumulators."""
        return frozenset(index for item in self.carried for index in item.combine)

    def trunk(self) -> list[int]:
        """Numbers of the body's forward equations that are evaluated on one stage."""
        combining = self.combining
        return [
            index
            for index, eqn in enumerate(self.body.eqns)
            if index not in combining and index not in self.backward and not self.is_free(eqn)
        ]

    def is_free(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is copied to where its results are read."""
        return not eqn.effects and all(var in self.free for var in eqn.outvars)


def dissect(graph: Graph, rules: Mapping[JaxprEqn, FactorRule]) -> Anatomy:
    """Take a microbatched program apart.

    Raises:
      OptionError: the program has no loop over microbatches.
    """
    loop = _find_loop(graph, rules)
    scan = graph.jaxpr.eqns[loop]
    body = scan.params["jaxpr"].jaxpr
    num_consts, num_carry = jax_compat.scan_counts(scan.params)
    last = num_consts + num_carry
    consts = dict(zip(body.invars[:num_consts], scan.invars[:num_consts], strict=True))
    slices = dict(zip(body.invars[last:], scan.invars[last:], strict=True))
    readers = _readers(body)
    carried = tuple(
        Carried(carry, start, _combining(body, readers, carry), result, total)
        for carry, start, result, total in zip(
            body.invars[num_consts:last],
            scan.invars[num_consts:last],
            body.outvars[:num_carry],
            scan.outvars[:num_carry],
            strict=True,
        )
    )
    free = _free(graph, loop, consts, slices, {c.carry for c in carried})
    return Anatomy(
        graph=graph,
        loop=loop,
        body=body,
        consts=consts,
        slices=slices,
        carried=carried,
        stacked=tuple(zip(body.outvars[num_carry:], scan.outvars[num_carry:], strict=True)),
        free=free,
        backward=_backward(body, free, {c.carry for c in carried}),
    )


def _find_loop(graph: Graph, rules: Mapping[JaxprEqn, FactorRule]) -> int:
    """The heaviest scan that counts its iterations, as the loop over microbatches does."""
    made_by = {var: eqn for eqn in graph.jaxpr.eqns for var in eqn.outvars}
    found: list[tuple[int, int]] = []
    for index, eqn in enumerate(graph.jaxpr.eqns):
        if eqn.primitive.name != "scan":
            continue
        num_consts, num_carry = jax_compat.scan_counts(eqn.params)
        slices = eqn.invars[num_consts + num_carry :]
        if not slices or isinstance(slices[0], Literal):
            continue
        counter = made_by.get(slices[0])
        if counter is not None and counter.primitive.name == "iota":
            found.append((flops_of(eqn, graph.jaxpr, rules), -index))
    if not found:
        raise OptionError(
            "The program has no loop over microbatches that could be cut into stages.",
            why="pipeline stages work on different microbatches at the same time.",
            hint="use microbatches of at least 2.",
        )
    return -max(found)[1]


def flops_of(eqn: JaxprEqn, jaxpr: Jaxpr, rules: Mapping[JaxprEqn, FactorRule]) -> int:
    """Floating-point operations of one equation of a jaxpr, control flow included."""
    return total_flops(jaxpr.replace(eqns=[eqn]), rules)


def _readers(body: Jaxpr) -> dict[Var, list[int]]:
    readers: dict[Var, list[int]] = {}
    for index, eqn in enumerate(body.eqns):
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                readers.setdefault(atom, []).append(index)
    return readers


def _combining(body: Jaxpr, readers: Mapping[Var, list[int]], carry: Var) -> tuple[int, ...]:
    found: set[int] = set()
    stack = [carry]
    while stack:
        for index in readers.get(stack.pop(), ()):
            if index not in found:
                found.add(index)
                stack += body.eqns[index].outvars
    return tuple(sorted(found))


# What is free.


def is_small(aval: Any) -> bool:
    """A scalar or a random key: copied and sent without a thought."""
    if is_key(aval):
        return bool(aval.size <= 1)
    return bool(aval.size <= (4 if aval.dtype == "uint32" else 1))


def holds(label: Input, aval: Any) -> bool:
    """Whether a leaf lives on one stage and makes what depends on it live on one stage."""
    return label.role == "state" and not is_small(aval)


def _free(
    graph: Graph,
    loop: int,
    consts: Mapping[Var, Atom],
    slices: Mapping[Var, Atom],
    carries: set[Var],
) -> frozenset[Var]:
    free: set[Var] = {
        var
        for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True)
        if not holds(label, var.aval)
    }
    _spread(graph.jaxpr.eqns[:loop], free)
    free |= {v for v, a in (*consts.items(), *slices.items()) if _is_free(a, free)}
    body = graph.jaxpr.eqns[loop].params["jaxpr"].jaxpr
    assert not carries & free
    _spread(body.eqns, free)
    known = free | consts.keys() | slices.keys()
    for eqn in body.eqns:
        if eqn.primitive.name in _PLAIN and all(_is_free(atom, known) for atom in eqn.invars):
            known.update(eqn.outvars)
            free.update(eqn.outvars)
    _spread(graph.jaxpr.eqns[loop + 1 :], free)
    # Behind the loop, what is computed from scalars alone is computed wherever it is read.
    for eqn in graph.jaxpr.eqns[loop + 1 :]:
        scalars = all(is_small(v.aval) for v in eqn.outvars) and all(
            _is_free(v, free) or is_small(v.aval) for v in eqn.invars
        )
        if _cheap(eqn) and (scalars or all(_is_free(v, free) for v in eqn.invars)):
            free.update(eqn.outvars)
    return frozenset(free)


def _spread(eqns: Iterable[JaxprEqn], free: set[Var]) -> None:
    for eqn in eqns:
        if _cheap(eqn) and all(_is_free(atom, free) for atom in eqn.invars):
            free.update(eqn.outvars)


def _is_free(atom: Atom, free: set[Var]) -> bool:
    return isinstance(atom, Literal) or atom in free


def _cheap(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name not in HEAVY and not eqn.effects


def _backward(body: Jaxpr, free: frozenset[Var], carries: set[Var]) -> frozenset[int]:
    """Equations that transposition made, and what depends on them."""
    found: set[int] = set()
    late: set[Var] = set()
    for index, eqn in enumerate(body.eqns):
        if not eqn.effects and all(var in free for var in eqn.outvars):
            continue
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        if any(v in carries for v in operands):
            continue
        if _TRANSPOSED.search(str(eqn.source_info.name_stack)) or any(v in late for v in operands):
            found.add(index)
            late.update(eqn.outvars)
    return frozenset(found)


def bytes_of(var: Any) -> int:
    """Bytes of a value; a random key counts as its four words."""
    aval = var.aval
    if is_key(aval):
        return 16 * math.prod(aval.shape)
    return int(math.prod(aval.shape) * aval.dtype.itemsize)


def leaves_of(parts: Anatomy) -> dict[Var, frozenset[int]]:
    """The held state leaves that a value before the loop, or a free value, is made from."""
    graph = parts.graph
    found: dict[Var, frozenset[int]] = {}
    for number, (var, label) in enumerate(zip(graph.jaxpr.invars, graph.inputs, strict=True)):
        if holds(label, var.aval):
            found[var] = frozenset({number})

    def through(eqn: JaxprEqn) -> None:
        leaves = [found[v] for v in eqn.invars if not isinstance(v, Literal) and v in found]
        if leaves:
            union = frozenset().union(*leaves)
            found.update((var, union) for var in eqn.outvars)

    for eqn in parts.prologue:
        through(eqn)
    for var, atom in (*parts.consts.items(), *parts.slices.items()):
        if not isinstance(atom, Literal) and atom in found:
            found[var] = found[atom]
    for eqn in parts.body.eqns:
        if parts.is_free(eqn):
            through(eqn)
    return found
