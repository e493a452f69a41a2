"""A hash of what a program computes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal, Var

from autopar.passes.graph.graph import Atom, jaxprs_in


def fingerprint(jaxpr: Jaxpr) -> str:
    """A content hash of the program: primitives, params, shapes and wiring, not names or lines."""
    digest = hashlib.sha256()
    _digest_jaxpr(jaxpr, digest.update)
    return digest.hexdigest()


def _digest_jaxpr(jaxpr: Jaxpr, update: Callable[[bytes], None]) -> None:
    numbers: dict[Var, int] = {}

    def define(var: Var) -> str:
        numbers[var] = len(numbers)
        return f"{numbers[var]}:{var.aval.str_short()}:{getattr(var.aval, 'weak_type', False)}"

    def use(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return f"={atom.aval.str_short()}:{np.asarray(atom.val).tobytes().hex()}"
        return str(numbers[atom])

    update(",".join(define(v) for v in (*jaxpr.constvars, *jaxpr.invars)).encode())
    for eqn in jaxpr.eqns:
        update(f"\n{eqn.primitive.name}({','.join(map(use, eqn.invars))})".encode())
        for key in sorted(eqn.params):
            value = eqn.params[key]
            inner = jaxprs_in({key: value})
            update(f" {key}={'' if inner else _param_text(value)}".encode())
            for body in inner:
                update(b"{")
                _digest_jaxpr(body, update)
                update(b"}")
        update(f"->{','.join(define(v) for v in eqn.outvars)}".encode())
    update(f"\nreturn {','.join(map(use, jaxpr.outvars))}".encode())


def _param_text(value: Any) -> str:
    """A param as text that does not depend on this process (no addresses)."""
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(map(_param_text, value)) + ")"
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
