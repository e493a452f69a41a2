"""What the equations of a microbatched program are: forward, backward, or copied.

An equation is *free* if it is cheap and depends on no large state leaf: masks, positions, random
bits, slices of the batch, counters. In the loop, what is made element by element from parameters
and free values is free as well: the parameters move once a step, their sum with a mask would move
once a microbatch. Free equations are copied to every stage that reads them; all others are
evaluated on one stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.arrays.typed_keys import is_key
from autopar.base.errors import OptionError
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Atom, Graph, variables
from autopar.passes.graph.microbatched import LoopPhase, Microbatched
from autopar.passes.graph.name_stacks import is_transposed
from autopar.passes.graph.primitives import ELEMENTWISE, HEAVY, RESHAPES
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.primitives.flops import total_flops

# Each result element from one element of every operand.
_PLAIN = ELEMENTWISE | RESHAPES


@dataclass(frozen=True)
class Anatomy:
    """A microbatched program, its loop over the microbatches, and what its equations are.

    Args:
      free: variables, inside and outside, that are computed wherever they are read. Those that the
        loop computes may depend on parameters.
      backward: numbers of the body's equations that belong to the backward pass.
    """

    step: Microbatched
    loop: LoopPhase
    free: frozenset[Var]
    backward: frozenset[int]

    @property
    def graph(self) -> Graph:
        return self.step.graph

    @property
    def body(self) -> Jaxpr:
        return self.loop.body

    @cached_property
    def value_numbers(self) -> dict[Var, int]:
        """Equal numbers for variables of the body that hold equal values.

        They are numbered by what computes them; barriers are transparent.
        """
        return _numbered(self.body)

    @cached_property
    def leaves(self) -> dict[Var, frozenset[int]]:
        """The held state leaves that a value before the loop, or a free value, is made from."""
        return _leaves(self)

    def trunk(self) -> list[int]:
        """Numbers of the body's forward equations that are evaluated on one stage."""
        others = self.loop.combining | self.backward
        eqns = enumerate(self.body.eqns)
        return [index for index, eqn in eqns if index not in others and not self.is_free(eqn)]

    def is_free(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is copied to where its results are read."""
        return not eqn.effects and all(var in self.free for var in eqn.outvars)


def dissect(step: Microbatched) -> Anatomy:
    """Find out what may be copied and what is backward.

    Raises:
      OptionError: the program has no loop over microbatches.
    """
    loop = step.loop
    if loop is None:
        raise OptionError(
            "The program has no loop over microbatches that could be cut into stages.",
            why="pipeline stages work on different microbatches at the same time, and nothing of "
            "the step is computed for one microbatch after another.",
            hint="use microbatches of at least 2; with these, compute the loss of arguments that "
            "hold the batch (what is drawn from the state is whole in each), or use stages=1.",
        )
    return Anatomy(step, loop, free := _free(step, loop), _backward(loop, free))


def flops_of(eqn: JaxprEqn, jaxpr: Jaxpr, rules: Rules) -> int:
    """Floating-point operations of one equation of a jaxpr, control flow included."""
    return total_flops(jaxpr.replace(eqns=[eqn]), rules)


def is_small(aval: Any) -> bool:
    """A scalar or a random key: copied and sent without a thought."""
    if is_key(aval.dtype):
        return bool(aval.size <= 1)
    return bool(aval.size <= (4 if aval.dtype == "uint32" else 1))


def held_leaves(graph: Graph) -> dict[Var, int]:
    """The state leaves that live on one stage, as does what depends on them: input numbers."""
    leaves = enumerate(zip(graph.jaxpr.invars, graph.inputs, strict=True))
    return {v: n for n, (v, label) in leaves if label.role == "state" and not is_small(v.aval)}


def _free(step: Microbatched, loop: LoopPhase) -> frozenset[Var]:
    free = set(step.graph.jaxpr.invars) - held_leaves(step.graph).keys()
    _spread(step.prologue, free)
    entering = {**loop.consts, **loop.slices}
    free |= {v for v, atom in entering.items() if isinstance(atom, Literal) or atom in free}
    _spread(loop.body.eqns, free)
    known = free | entering.keys()
    for eqn in loop.body.eqns:
        if eqn.primitive.name in _PLAIN and known.issuperset(variables(eqn.invars)):
            known.update(eqn.outvars)
            free.update(eqn.outvars)
    # After the loop, what is computed from scalars alone is computed wherever it is read.
    for eqn in step.epilogue:
        large = [v for v in variables(eqn.invars) if v not in free and not is_small(v.aval)]
        scalars = all(is_small(v.aval) for v in eqn.outvars) and not large
        if _cheap(eqn) and (scalars or free.issuperset(variables(eqn.invars))):
            free.update(eqn.outvars)
    return frozenset(free)


def _spread(eqns: Iterable[JaxprEqn], free: set[Var]) -> None:
    for eqn in eqns:
        if _cheap(eqn) and free.issuperset(variables(eqn.invars)):
            free.update(eqn.outvars)


def _cheap(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name not in HEAVY and not eqn.effects


def _backward(loop: LoopPhase, free: frozenset[Var]) -> frozenset[int]:
    """Equations that transposition made, and what depends on them; a stage's tasks say it."""
    carries = {item.carry for item in loop.accumulators}
    found, late = set[int](), set[Var]()
    for index, eqn in enumerate(loop.body.eqns):
        operands, is_free = variables(eqn.invars), free.issuperset(eqn.outvars) and not eqn.effects
        if is_free or not carries.isdisjoint(operands):
            continue
        transposed = is_transposed(eqn) or late & {*operands}
        if loop.tasks[index] != "F" if loop.tasks else transposed:
            found.add(index)
            late.update(eqn.outvars)
    return frozenset(found)


def bytes_of(var: Any) -> int:
    """Bytes of a value; a random key counts as its four words."""
    itemsize = 16 if is_key(var.aval.dtype) else var.aval.dtype.itemsize
    return int(math.prod(var.aval.shape) * itemsize)


def _leaves(parts: Anatomy) -> dict[Var, frozenset[int]]:
    found = {var: frozenset({number}) for var, number in held_leaves(parts.graph).items()}

    def through(eqn: JaxprEqn) -> None:
        leaves = [found[v] for v in variables(eqn.invars) if v in found]
        if leaves:
            union = frozenset().union(*leaves)
            found.update((var, union) for var in eqn.outvars)

    for eqn in parts.step.prologue:
        through(eqn)
    for var, atom in {**parts.loop.consts, **parts.loop.slices}.items():
        if not isinstance(atom, Literal) and atom in found:
            found[var] = found[atom]
    for eqn in parts.body.eqns:
        if parts.is_free(eqn):
            through(eqn)
    return found


def _numbered(body: Jaxpr) -> dict[Var, int]:
    numbers: dict[Var, int] = {}
    known: dict[Hashable, list[int]] = {}
    fresh = itertools.count()

    def key(atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return ("literal", str(atom.val), str(atom.aval))
        return numbers[atom]

    numbers.update((var, next(fresh)) for var in body.invars)
    for eqn in body.eqns:
        if is_barrier(eqn):
            for var, operand in zip(eqn.outvars, eqn.invars, strict=True):
                numbers[var] = next(fresh) if isinstance(operand, Literal) else numbers[operand]
            continue
        # Bodies of control flow are equal if they are one object.
        params = tuple((name, _param(value)) for name, value in sorted(eqn.params.items()))
        signature = (eqn.primitive.name, params, tuple(map(key, eqn.invars)))
        made = known.get(signature)
        if made is None or eqn.effects:
            made = known[signature] = [next(fresh) for _ in eqn.outvars]
        numbers.update(zip(eqn.outvars, made, strict=True))
    return numbers


def _param(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value
