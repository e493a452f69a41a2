"""Parameters that a scan's body casts are cast before the scan: what is gathered then is narrow.

Layers under a scan cast their slice of each stacked parameter (`w.astype(bfloat16)`), or a whole
one that all layers share. Where that is all that a body does with it, the stack is cast instead:
the same numbers, element by element, once a step and not once a layer and pass, and on each device
only for the part of the stack that it stores. Unrolled layers are that already: there the cast
follows the parameter, and what is gathered is its result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import (
    Atom,
    Graph,
    merge_equal_equations,
    read_atom,
    variables,
    with_jaxpr,
)
from autopar.passes.graph.primitives import RESHAPES
from autopar.passes.graph.scans import ScanParts


def with_casts_ahead(graph: Graph) -> Graph:
    """The same program, where no scan's body narrows what is stored between steps."""
    pairs = zip(graph.jaxpr.invars, graph.inputs, strict=True)
    jaxpr = _Level(var for var, label in pairs if label.role == "state").rewritten(graph.jaxpr)
    if jaxpr is graph.jaxpr:
        return graph
    return with_jaxpr(graph, merge_equal_equations(jaxpr))


class _Level:
    """One jaxpr: which of its variables are parameters or slices of them, and casts made there."""

    def __init__(self, parameters: Iterable[Var]):
        self.parameters = set(parameters)
        self.eqns: list[JaxprEqn] = []
        self.env: dict[Var, Atom] = {}
        self.casts: dict[Any, Var] = {}

    def rewritten(self, jaxpr: Jaxpr) -> Jaxpr:
        """The jaxpr with casts before its scans; itself where there is nothing to do."""
        if not self.parameters:
            return jaxpr
        for eqn in jaxpr.eqns:
            operands = [read_atom(self.env, atom) for atom in eqn.invars]
            if any(new is not old for new, old in zip(operands, eqn.invars, strict=True)):
                eqn = eqn.replace(invars=operands)
            if eqn.primitive.name == "scan":
                eqn = self.scan(eqn)
            elif _passes_on(eqn):
                pairs = zip(eqn.invars, eqn.outvars, strict=False)
                self.parameters.update(out for atom, out in pairs if self.is_parameter(atom))
            self.eqns.append(eqn)
        if all(new is old for new, old in zip(self.eqns, jaxpr.eqns, strict=False)):
            return jaxpr
        outvars = [read_atom(self.env, atom) for atom in jaxpr.outvars]
        return jaxpr.replace(eqns=self.eqns, outvars=outvars)

    def is_parameter(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and atom in self.parameters

    def scan(self, eqn: JaxprEqn) -> JaxprEqn:
        """A scan that reads cast stacks; the casts are made before it."""
        scan = ScanParts.of(eqn)
        consts, _, slices = scan.operands(list(zip(scan.body.invars, eqn.invars, strict=True)))
        read = {var: atom for var, atom in (*consts, *slices) if self.is_parameter(atom)}
        body = _Level(read).rewritten(scan.body)
        casts = {var: cast for var in read if (cast := _only_cast(body, var)) is not None}
        if not casts and body is scan.body:
            return eqn
        narrow = {var: _typed_like(c.outvars[0], var.aval.shape) for var, c in casts.items()}
        body = _with_narrow(body, narrow)
        operands = [
            self.cast(atom, casts[var]) if var in casts else atom
            for var, atom in zip(scan.body.invars, eqn.invars, strict=True)
        ]
        # A stack of the slices that the scan reads is the stack that it reads them from.
        stack_of = dict(zip(body.invars, operands, strict=True))
        sliced = {narrow[var] for var, _ in slices if var in narrow}
        kept = []
        for place, (atom, var) in enumerate(zip(body.outvars, eqn.outvars, strict=True)):
            if place >= scan.num_carry and isinstance(atom, Var) and atom in sliced:
                self.env[var] = stack_of[atom]
            else:
                kept.append(place)
        body = jax_compat.replace_jaxpr(body, outvars=[body.outvars[place] for place in kept])
        closed = ClosedJaxpr(body, eqn.params["jaxpr"].consts)
        params = jax_compat.scan_params(eqn.params, closed, scan.num_consts, scan.num_carry)
        outvars = [eqn.outvars[place] for place in kept]
        return eqn.replace(invars=operands, outvars=outvars, params=params)

    def cast(self, atom: Var, cast: JaxprEqn) -> Var:
        """What a body's cast makes of the whole of a parameter, once for all scans that read it."""
        aval = cast.outvars[0].aval
        key = (atom, aval.dtype, aval.weak_type)
        if key not in self.casts:
            self.casts[key] = result = _typed_like(cast.outvars[0], atom.aval.shape)
            self.eqns.append(cast.replace(invars=[atom], outvars=[result]))
        return self.casts[key]


def _only_cast(body: Jaxpr, var: Var) -> JaxprEqn | None:
    """The cast to a narrower float that is all that is done with a value; None: more is done."""
    if var in variables(body.outvars):
        return None
    found: list[JaxprEqn] = []
    for eqn in body.eqns:
        if var not in variables(eqn.invars):
            continue
        if _passes_on(eqn):
            pairs = zip(eqn.invars, eqn.outvars, strict=False)
            passed = [out for atom, out in pairs if atom is var]
            after = [_only_cast(body, out) for out in passed]
            if None in after:
                return None
            found += [cast for cast in after if cast is not None]
        elif _narrows(eqn):
            found.append(eqn)
        else:
            return None
    types = {(cast.outvars[0].aval.dtype, cast.outvars[0].aval.weak_type) for cast in found}
    return found[0] if len(types) == 1 else None


def _passes_on(eqn: JaxprEqn) -> bool:
    """Whether elements go through unchanged, to where their shape alone says, of any dtype."""
    return is_barrier(eqn) or eqn.primitive.name in RESHAPES


def _typed_like(var: Var, shape: tuple[int, ...]) -> Var:
    """A new variable of this shape."""
    aval = var.aval
    return jax_compat.new_var(jax_compat.array_type(shape, aval.dtype, aval.weak_type))


def _narrows(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "convert_element_type" or eqn.params.get("sharding") is not None:
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new))
    return floats and new.itemsize < old.itemsize


def _with_narrow(body: Jaxpr, narrow: dict[Var, Var]) -> Jaxpr:
    """A body that is given values as they were after the casts that it made of them."""
    if not narrow:
        return body
    given, env = dict(narrow), dict[Var, Atom]()  # given: as it was -> as it is now
    eqns: list[JaxprEqn] = []
    for eqn in body.eqns:
        if _passes_on(eqn):
            outvars = list(eqn.outvars)
            for place, (atom, out) in enumerate(zip(eqn.invars, eqn.outvars, strict=False)):
                if isinstance(atom, Var) and atom in given:
                    outvars[place] = given[out] = _typed_like(given[atom], out.aval.shape)
            invars = [read_atom(given, read_atom(env, atom)) for atom in eqn.invars]
            eqns.append(eqn.replace(invars=invars, outvars=outvars))
        elif eqn.invars and isinstance(eqn.invars[0], Var) and eqn.invars[0] in given:
            env[eqn.outvars[0]] = given[eqn.invars[0]]
        else:
            eqns.append(eqn.replace(invars=[read_atom(env, atom) for atom in eqn.invars]))
    invars = [narrow.get(var, var) for var in body.invars]
    outvars = [read_atom(env, atom) for atom in body.outvars]
    return jax_compat.replace_jaxpr(body, eqns=eqns, invars=invars, outvars=outvars)
