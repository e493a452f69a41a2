"""Which dimensions hold the batch, and which state leaves are parameters, not optimizer state."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.extend.core import Jaxpr, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Graph
from autopar.passes.graph.primitives import CONTROL_FLOW
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.sharding.strategies import outer_factor

BatchDims = dict[Var, frozenset[int]]
NONE: frozenset[int] = frozenset()


def batch_dims(graph: Graph, rules: Rules) -> BatchDims:
    """A variable's dimensions whose outermost loop is the batch; a variable without may be missing.

    Variables of inner bodies are included.
    """
    found: BatchDims = {}
    for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True):
        found[var] = NONE if label.batch_axis is None else frozenset({label.batch_axis})
    _walk(graph.jaxpr, rules, found)
    return found


def _walk(jaxpr: Jaxpr, rules: Rules, found: BatchDims) -> None:
    def read(atom: Any) -> frozenset[int]:
        return NONE if isinstance(atom, jex_core.Literal) else found.get(atom, NONE)

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "scan":
            _scan(eqn, rules, found, read)
        elif name == "cond":
            for branch in eqn.params["branches"]:
                body = branch.jaxpr
                found.update(zip(body.invars, map(read, eqn.invars[1:]), strict=True))
                _walk(body, rules, found)
                for var, atom in zip(eqn.outvars, body.outvars, strict=True):
                    found[var] = found.get(var, NONE) | read(atom)
        elif name not in CONTROL_FLOW:
            rule = rules[eqn]
            factors = {
                outer_factor(rule, value, dim)
                for atom, value in zip(eqn.invars, rule.operands, strict=True)
                for dim in read(atom)
            } - {None}
            if factors:
                for var, value in zip(eqn.outvars, rule.results, strict=True):
                    found[var] = frozenset(
                        d for d in range(len(value)) if outer_factor(rule, value, d) in factors
                    )


def _scan(eqn: Any, rules: Rules, found: BatchDims, read: Any) -> None:
    body: Jaxpr = eqn.params["jaxpr"].jaxpr
    num_consts, num_carry = jax_compat.scan_counts(eqn.params)
    for i, (var, atom) in enumerate(zip(body.invars, eqn.invars, strict=True)):
        dims = read(atom)
        found[var] = frozenset(d - 1 for d in dims if d) if i >= num_consts + num_carry else dims
    while True:
        _walk(body, rules, found)
        grown = False
        for var, atom in zip(
            body.invars[num_consts : num_consts + num_carry], body.outvars[:num_carry], strict=True
        ):
            if not read(atom) <= found[var]:
                found[var] |= read(atom)
                grown = True
        if not grown:
            break
    for i, (var, atom) in enumerate(zip(eqn.outvars, body.outvars, strict=True)):
        found[var] = read(atom) if i < num_carry else frozenset(d + 1 for d in read(atom))


def parameters(graph: Graph, dims: BatchDims) -> frozenset[int]:
    """Indices of state inputs that meet the batch, so not of what an optimizer alone reads."""
    met = 0
    reach: dict[Var, int] = {}
    for index, (var, label) in enumerate(zip(graph.jaxpr.invars, graph.inputs, strict=True)):
        if label.role == "state":
            reach[var] = 1 << index

    def walk(jaxpr: Jaxpr) -> None:
        nonlocal met

        def read(atom: Any) -> int:
            return 0 if isinstance(atom, jex_core.Literal) else reach.get(atom, 0)

        for eqn in jaxpr.eqns:
            masks = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name == "scan":
                body = eqn.params["jaxpr"].jaxpr
                reach.update(zip(body.invars, masks, strict=True))
                walk(body)
                reach.update(zip(eqn.outvars, map(read, body.outvars), strict=True))
                continue
            if eqn.primitive.name == "cond":
                for branch in eqn.params["branches"]:
                    body = branch.jaxpr
                    reach.update(zip(body.invars, masks[1:], strict=True))
                    walk(body)
                    for var, atom in zip(eqn.outvars, body.outvars, strict=True):
                        reach[var] = reach.get(var, 0) | read(atom)
                continue
            union = 0
            for mask in masks:
                union |= mask
            if not union:
                continue
            atoms = [a for a in eqn.invars if not isinstance(a, jex_core.Literal)]
            if any(dims.get(v) for v in (*atoms, *eqn.outvars)):
                met |= union
            else:
                for var in eqn.outvars:
                    reach[var] = union

    walk(graph.jaxpr)
    return frozenset(i for i in range(len(graph.inputs)) if met >> i & 1)


def made_from_state(graph: Graph) -> frozenset[Var]:
    """Variables, of inner bodies too, that depend on leaves of the state larger than a scalar.

    PRNG keys do not count.
    """
    found: set[Var] = {
        var
        for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True)
        if label.role == "state"
        and not jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.extended)
        and math.prod(var.aval.shape) > (4 if var.aval.dtype == "uint32" else 1)  # raw keys
    }
    _depend(graph.jaxpr, found)
    return frozenset(found)


def _depend(jaxpr: Jaxpr, found: set[Var]) -> None:
    def depends(atom: Any) -> bool:
        return not isinstance(atom, jex_core.Literal) and atom in found

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            num_consts, num_carry = jax_compat.scan_counts(eqn.params)
            carried = body.invars[num_consts : num_consts + num_carry]
            found.update(v for v, a in zip(body.invars, eqn.invars, strict=True) if depends(a))
            while True:
                _depend(body, found)
                pairs = zip(carried, body.outvars, strict=False)
                grown = [v for v, a in pairs if depends(a) and v not in found]
                if not grown:
                    break
                found.update(grown)
            found.update(v for v, a in zip(eqn.outvars, body.outvars, strict=True) if depends(a))
        elif eqn.primitive.name == "cond":
            for closed in eqn.params["branches"]:
                inner = closed.jaxpr
                given = zip(inner.invars, eqn.invars[1:], strict=True)
                found.update(v for v, a in given if depends(a))
                _depend(inner, found)
                results = zip(eqn.outvars, inner.outvars, strict=True)
                found.update(v for v, a in results if depends(a))
        elif any(map(depends, eqn.invars)):
            found.update(eqn.outvars)
