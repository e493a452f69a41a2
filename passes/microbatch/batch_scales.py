"""Factors that are one number of the whole batch: taken out of what is linear in them.

The gradient of `sqrt(mean(losses))` is a sum over the batch times 0.5 / sqrt(mean(losses)), which
is known when all rows have been seen. A backward pass is linear in the gradients that it begins
with, so it is evaluated without that factor, row by row, and its sums are multiplied by it after
the loop. With several such numbers a value is a sum of terms, each with a factor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph import graph as graphs
from autopar.passes.graph import jax_compat
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Atom, Graph
from autopar.passes.graph.primitives import KEEPS_ZERO, LINEAR_EACH, RESHAPES
from autopar.passes.graph.scans import ScanParts
from autopar.passes.microbatch.new_program import NewProgram
from autopar.passes.microbatch.propagate import Forward
from autopar.passes.primitives.linearity import linear_operands

MAX_TERMS = 3
Terms = dict[Var | None, Atom]  # by factor (None: one), what it multiplies
Flags = Sequence[bool]


def without_batch_scales(graph: Graph, found: Forward) -> Graph | None:
    """The same program with such factors multiplied last; None if it has none.

    Args:
      graph: the traced step.
      found: the states of its values: late scalars are the factors.
    """
    pass_ = _Pass(found, graphs.batch_sizes(graph))
    for eqn in graph.jaxpr.eqns:
        pass_.visit(eqn)
    if not pass_.started:
        return None
    for var in graphs.variables(graph.jaxpr.outvars):
        pass_.complete(var)
    jaxpr = graph.jaxpr.replace(
        eqns=pass_.program.eqns,
        outvars=[pass_.program.read(atom) for atom in graph.jaxpr.outvars],
    )
    return graphs.with_jaxpr(graph, graphs.eliminate_dead_code(jaxpr))


class _Pass:
    """One walk over the program: what is held as terms, and the equations of the new program."""

    def __init__(self, found: Forward, batch_sizes: Collection[int]):
        self.found, self.batch_sizes = found, batch_sizes
        self.program = NewProgram()
        self.terms: dict[Var, Terms] = {}
        self.uniform: dict[Var, Var] = {}  # values all of whose elements are one late number
        self.started = False

    def visit(self, eqn: JaxprEqn) -> None:
        if self._is_repeated(eqn):
            (atom,), (var,) = eqn.invars, eqn.outvars
            self.uniform[var] = self.uniform.get(atom, atom)
        elif self._concerns(eqn):
            if self._factored(eqn):
                return
            for var in graphs.variables(eqn.invars):
                self.complete(var)
        self.program.take(eqn)

    def _is_repeated(self, eqn: JaxprEqn) -> bool:
        """Whether the result is one late number, repeated."""
        repeats = eqn.primitive.name in {*RESHAPES, "convert_element_type"}
        return repeats and self._is_uniform(eqn.invars[0]) and _can_scale(eqn.outvars[0])

    def _concerns(self, eqn: JaxprEqn) -> bool:
        """Whether an operand is held as terms, or rows of the batch meet a late number."""
        if any(map(self._is_factored, eqn.invars)):
            return True
        uniform = list(map(self._is_uniform, eqn.invars))
        others = [atom for atom, flag in zip(eqn.invars, uniform, strict=True) if not flag]
        return any(uniform) and (
            any(self.found.state(atom).kind == "split" for atom in others)
            or any(map(self._grows, eqn.outvars))
        )

    def _is_factored(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and atom in self.terms

    def _is_uniform(self, atom: Atom) -> bool:
        if not isinstance(atom, Var):
            return False
        if atom in self.uniform:
            return True
        state = self.found.state(atom)
        return state.kind in ("late", "partial") and not atom.aval.shape and _can_scale(atom)

    def _grows(self, var: Var) -> bool:
        """Whether a value seems to have a row for each example.

        A late number that has been repeated for every example counts as a sum itself.
        """
        state, sizes = self.found.states[var], var.aval.shape
        return state.wide or (
            state.kind == "partial"
            and any(n and n % rows == 0 for n in sizes for rows in self.batch_sizes)
        )

    def terms_of(self, atom: Atom) -> Terms:
        """An atom as terms; one that is not held so is one without a factor, zeros are none."""
        if self._is_factored(atom):
            return self.terms[atom]
        if self._is_uniform(atom):
            scale, aval = self.uniform.get(atom, atom), atom.aval
            (ones,) = self._made(lambda: [lax.full(aval.shape, 1, aval.dtype)], [], [aval])
            return {scale: ones}
        return {} if self._is_zero(atom) else {None: atom}

    def _is_zero(self, atom: Atom) -> bool:
        return not self._is_factored(atom) and self.found.state(atom).zero

    def _factored(self, eqn: JaxprEqn) -> bool:
        """Evaluate an equation term by term, if it is linear; false if it is not."""
        held = [self._is_factored(atom) or self._is_uniform(atom) for atom in eqn.invars]
        if eqn.effects or not all(map(_can_scale, eqn.outvars)):
            return False
        name = eqn.primitive.name
        if sum(held) == 2 and name in LINEAR_EACH:
            return self._product(eqn)
        if name == "div" and held[1] and self._is_uniform(eqn.invars[1]):
            return self._quotient(eqn)
        zero = [self._is_zero(atom) for atom in eqn.invars]
        linear = linear_flags(eqn, held, zero)
        if linear is None:
            return False
        operands, results = linear
        given = {k: self.terms_of(eqn.invars[k]) for k, flag in enumerate(operands) if flag}
        scales = list(dict.fromkeys(scale for terms in given.values() for scale in terms))
        if len(scales) > MAX_TERMS:
            return False
        made: list[Terms] = [{} for _ in eqn.outvars]
        for number, scale in enumerate(scales):
            invars = list(eqn.invars)
            for k, terms in given.items():
                invars[k] = terms[scale] if scale in terms else self._zeros(invars[k].aval)
            outvars = [
                var if not flag and number == 0 else jax_compat.new_var(var.aval)
                for var, flag in zip(eqn.outvars, results, strict=True)
            ]
            self.program.take(eqn.replace(invars=invars, outvars=outvars))
            for k, flag in enumerate(results):
                if flag:
                    made[k][scale] = outvars[k]
        self._hold(eqn, results, made)
        return True

    def _product(self, eqn: JaxprEqn) -> bool:
        """A product of two factored values: their factors are multiplied."""
        one, other = (self.terms_of(atom) for atom in eqn.invars)
        if len(one) != 1 or len(other) != 1:
            return False
        ((first, a),), ((second, b),) = one.items(), other.items()
        assert first is not None or second is not None
        scale = first if second is None else second
        if first is not None and second is not None:
            (scale,) = self._made(
                lambda x, y: [lax.mul(x, lax.convert_element_type(y, x.dtype))],
                [first, second],
                [first.aval],
            )
        (var,) = eqn.outvars
        new = jax_compat.new_var(var.aval)
        self.program.take(eqn.replace(invars=[a, b], outvars=[new]))
        self._hold(eqn, [True], [{scale: new}])
        return True

    def _quotient(self, eqn: JaxprEqn) -> bool:
        """Divided by one number of the whole batch: its inverse is the factor."""
        over, under = eqn.invars
        terms = self.terms_of(over)
        number = self.uniform.get(under, under)

        def inverse(x: Any, *scale: Any) -> list[Any]:
            top = lax.convert_element_type(scale[0], x.dtype) if scale else jnp.ones_like(x)
            return [lax.div(top, x)]

        made: Terms = {}
        for scale, term in terms.items():
            read = [number] if scale is None else [number, scale]
            (new,) = self._made(inverse, read, [number.aval])
            made[new] = self._repeated(term, eqn.outvars[0].aval)
        self._hold(eqn, [True], [made])
        return True

    def _hold(self, eqn: JaxprEqn, results: Flags, made: Sequence[Terms]) -> None:
        """Keep results as terms; those that do not grow with the batch are completed at once."""
        self.started = True
        for var, flag, terms in zip(eqn.outvars, results, made, strict=True):
            if flag and not isinstance(var, DropVar):
                self.terms[var] = terms
                if not self._grows(var):
                    self.complete(var)

    def complete(self, var: Var) -> None:
        """Make the value of its terms, where that is not the variable already."""
        if var not in self.terms:
            return
        terms = self.terms.pop(var)
        scales = [scale for scale in terms if scale is not None]
        aval = var.aval

        def total(*values: Any) -> list[Any]:
            known = dict(zip(reads, values, strict=True))
            parts = [_scaled(known[t], None if s is None else known[s]) for s, t in terms.items()]
            result = parts[0] if parts else jnp.zeros(aval.shape, aval.dtype)
            for part in parts[1:]:
                result = lax.add(result, part)
            return [jax_compat.with_type_of(result, aval)]

        terms = {scale: self._repeated(term, aval) for scale, term in terms.items()}
        reads = list(dict.fromkeys([*graphs.variables(terms.values()), *scales]))
        self.program.trace(total, reads, [var])

    def _repeated(self, atom: Atom, aval: Any) -> Var:
        """An atom as a variable of a result's shape, where a literal may be a scalar."""
        if isinstance(atom, Var):
            if atom.aval.shape == aval.shape:
                return atom
            (var,) = self._made(lambda x: [jnp.broadcast_to(x, aval.shape)], [atom], [aval])
        else:
            (var,) = self._made(lambda: [lax.full(aval.shape, atom.val, aval.dtype)], [], [aval])
        return var

    def _zeros(self, aval: Any) -> Var:
        (var,) = self._made(lambda: [lax.full(aval.shape, 0, aval.dtype)], [], [aval])
        return var

    def _made(
        self, function: Callable[..., list[Any]], operands: Sequence[Var], avals: Sequence[Any]
    ) -> list[Var]:
        """New variables that a function computes."""
        made = [jax_compat.new_var(aval) for aval in avals]
        self.program.trace(function, operands, made)
        return made


def _can_scale(var: Var) -> bool:
    """Whether it is of floats of a wide range: without its factor a value may be large."""
    dtype = var.aval.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    return bool(jnp.finfo(dtype).maxexp >= jnp.finfo(np.float32).maxexp)


def _scaled(value: jax.Array, scale: jax.Array | None) -> jax.Array:
    if scale is None:
        return value
    dtype = jnp.promote_types(value.dtype, scale.dtype)
    wide = lax.convert_element_type(scale, dtype)
    product = lax.mul(lax.convert_element_type(value, dtype), jnp.broadcast_to(wide, value.shape))
    return lax.convert_element_type(product, value.dtype)


# In what an equation is linear, where its bodies count too.


def linear_flags(eqn: JaxprEqn, held: Flags, zero: Flags) -> tuple[list[bool], list[bool]] | None:
    """The operands in which an equation is jointly linear, with the results that are; or None.

    Args:
      eqn: the equation.
      held: operands that must be among them, at least one.
      zero: operands that are zeros, and so may be.
    """
    if eqn.primitive.name == "scan":
        return _linear_scan(eqn, held, zero)
    if eqn.primitive.name == "cond":
        return _linear_cond(eqn, held, zero)
    if is_barrier(eqn):
        return list(held), list(held)
    wanted = {k for k, flag in enumerate(held) if flag}
    sets = linear_operands(eqn, rounding=True)
    jointly = next((positions for positions in sets if wanted <= positions), None)
    if jointly is None:
        return None
    return [k in jointly for k in range(len(held))], [True] * len(eqn.outvars)


def _linear_scan(eqn: JaxprEqn, held: Flags, zero: Flags) -> tuple[list[bool], list[bool]] | None:
    scan = ScanParts.of(eqn)
    consts, carries, slices = scan.operands(list(zip(held, zero, strict=True)))
    while True:  # carries only become held, and stop being zeros
        found = _linear_body(scan.body, [*consts, *carries, *slices])
        if found is None:
            return None
        carried, stacks = scan.results(found)
        joined = [(a or b, y and z) for (a, y), (b, z) in zip(carries, carried, strict=True)]
        if joined == list(carries):
            break
        carries = joined
    if any(ours and not (h or z) for (ours, _), (h, z) in zip(carries, carried, strict=True)):
        return None  # it becomes something that has no factor
    totals = [flag for flag, _ in carries]
    operands = [flag for flag, _ in (*consts, *carries, *slices)]
    return operands, [*totals, *(flag for flag, _ in stacks)]


def _linear_cond(eqn: JaxprEqn, held: Flags, zero: Flags) -> tuple[list[bool], list[bool]] | None:
    given = list(zip(held, zero, strict=True))[1:]
    bodies = [_linear_body(branch.jaxpr, given) for branch in eqn.params["branches"]]
    flags = [any(body[k][0] for body in bodies if body) for k in range(len(eqn.outvars))]
    for body in bodies:
        if (
            held[0]
            or body is None
            or any(flag and not any(pair) for flag, pair in zip(flags, body, strict=True))
        ):
            return None
    return list(held), flags


def _linear_body(body: Jaxpr, given: Sequence[tuple[bool, bool]]) -> list[tuple[bool, bool]] | None:
    """Of each result, whether it is linear in what is held of the inputs, and whether it is zero.

    None if something is neither linear in it nor independent of it.
    """
    known = dict(zip(body.invars, given, strict=True))

    def read(atom: Atom) -> tuple[bool, bool]:
        if isinstance(atom, Literal):
            return False, not np.any(np.asarray(atom.val))
        return known.get(atom, (False, False))

    for eqn in body.eqns:
        pairs = [read(atom) for atom in eqn.invars]
        held, zero = [h for h, _ in pairs], [z for _, z in pairs]
        if not any(held):
            nothing = bool(zero) and all(zero) and eqn.primitive.name in KEEPS_ZERO
            known.update((var, (False, nothing)) for var in eqn.outvars)
            continue
        linear = linear_flags(eqn, held, zero)
        if linear is None or not all(
            h or z for flag, h, z in zip(linear[0], held, zero, strict=True) if flag
        ):
            return None
        known.update((var, (flag, False)) for var, flag in zip(eqn.outvars, linear[1], strict=True))
    return [read(atom) for atom in body.outvars]
