"""A program in float64, whatever dtypes it says: what it computes without its rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat, source_infos
from autopar.passes.graph.primitives import KERNELS
from autopar.passes.graph.scans import ScanParts, WhileParts

WIDE = jnp.dtype("float64")
_OWN_DTYPES = KERNELS | {"bitcast_convert_type", "random_bits", "threefry2x32"}
"""They are written for the dtypes of the program, or see the bits of their operands."""


def evaluate_widened(jaxpr: Jaxpr, values: Sequence[Any]) -> list[Any]:
    """A flat program's results, all floats in float64; JAX must allow these.

    Rounding that the program asks for (casts to narrower types) is left out, so a result says what
    the formulas are worth. Random bits are those of the program.
    """
    env: dict[Var, Any] = dict(zip(jaxpr.invars, map(_wide, values), strict=True))

    def read(atom: Any) -> Any:
        return _wide(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        with source_infos.source_context(eqn):
            results = _evaluate(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, map(_wide, results), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _wide(value: Any) -> Any:
    return jnp.asarray(value, WIDE) if _is_float(value) else value


def _is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(value), jnp.floating))


def _evaluate(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name == "scan":
        return _scan(eqn, operands)
    if name == "while":
        return _while(eqn, operands)
    if name == "cond":
        index, *rest = operands
        branches = [
            (lambda *given, body=branch.jaxpr: evaluate_widened(body, given))
            for branch in eqn.params["branches"]
        ]
        return list(lax.switch(index, branches, *rest))
    if name == "reduce_precision":
        return operands
    if name in _OWN_DTYPES:
        pairs = zip(operands, eqn.invars, strict=True)
        operands = [x.astype(atom.aval.dtype) if _is_float(x) else x for x, atom in pairs]
        return jax_compat.bind(eqn, operands)
    return jax_compat.bind(eqn, operands, **_wide_params(eqn.params))


def _wide_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The params that are dtypes of floats; limits of a type have become numbers long before."""
    found = {}
    for key, value in params.items():
        is_dtype = isinstance(value, (np.dtype, type)) and key.endswith(("dtype", "element_type"))
        if is_dtype and jnp.issubdtype(value, jnp.floating):
            found[key] = WIDE
    return found


def _scan(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    scan = ScanParts.of(eqn)
    consts, starts, stacked = scan.operands(operands)

    def body(carry: Any, xs: Any) -> Any:
        carried, rows = scan.results(evaluate_widened(scan.body, [*consts, *carry, *xs]))
        return list(carried), list(rows)

    params = eqn.params
    carried, stacks = lax.scan(
        body, list(starts), list(stacked), length=params["length"], reverse=params["reverse"]
    )
    return [*carried, *stacks]


def _while(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    parts = WhileParts.of(eqn)
    of_condition, of_body, starts = parts.operands(operands)

    def condition(carry: Any) -> Any:
        (going,) = evaluate_widened(parts.condition, [*of_condition, *carry])
        return jnp.asarray(going)

    def body(carry: Any) -> Any:
        return evaluate_widened(parts.body, [*of_body, *carry])

    return list(lax.while_loop(condition, body, list(starts)))
