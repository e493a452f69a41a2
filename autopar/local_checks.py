"""`autopar.check_rule`: the rule of a function of `autopar.local`, checked with numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from autopar.base.errors import OptionError
from autopar.local_functions import local
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import flatten
from autopar.passes.primitives.cuts import Cuts, take
from autopar.passes.primitives.local_calls import LocalBody, loop_cuts
from autopar.passes.primitives.localize import bind_local

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "cut": lambda one, other: one,  # they are alike
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
}


def check_rule(
    function: Callable[..., Any],
    rule: str,
    *args: Any,
    cut: str = "",
    sum: str = "",
    max: str = "",
    min: str = "",
) -> None:
    """Check that a rule for `autopar.local` is true: what slices give, put together, is the whole.

    Each loop that may be cut is cut in its least number of parts, forward and backward, and the
    numbers are compared.

    Args:
      function: as for `autopar.local`.
      rule: likewise.
      *args: arrays of the function, small ones will do. Loops of one iteration are not checked.
      cut: as for `autopar.local`; likewise the others.
      sum: see there.
      max: see there.
      min: see there.

    Raises:
      OptionError: names the first loop along which the function cannot be cut, and how far off
        the numbers are.

    >>> import jax.numpy as jnp
    >>> x = jnp.arange(8.0).reshape(4, 2)
    >>> check_rule(jnp.sin, "b d -> b d", x, cut="b d")
    >>> check_rule(lambda x: x - x.mean(0), "b d -> b d", x, cut="d")
    """
    called = local(function, rule, cut=cut, sum=sum, max=max, min=min)
    name = getattr(function, "__name__", None) or type(function).__name__

    def both(*args: Any) -> Any:
        results, pullback = jax.vjp(called, *args)
        return results, pullback(jax.tree.map(_gradient, results))

    closed = flatten(jax.make_jaxpr(both)(*args))
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True))
    where = "forward"
    for eqn in closed.jaxpr.eqns:
        operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        results = jax_compat.bind(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
        if eqn.primitive.name == "local_call":
            _check(eqn, operands, results, where, rule, name)
            where = "backward"


def _gradient(result: Any) -> Any:
    if not jnp.issubdtype(result.dtype, jnp.inexact):
        return np.zeros(result.shape, jax.dtypes.float0)
    numbers = np.random.default_rng(0).standard_normal(result.shape)
    return jnp.asarray(numbers, result.dtype)


def _check(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    wholes: Sequence[Any],
    where: str,
    rule: str,
    function: str,
) -> None:
    """Compare one call with what it gives on slices, loop by loop."""
    body: LocalBody = eqn.params["body"]
    for name, kind in body.loops.kinds:
        size = dict(body.sizes)[name]
        parts = next((p for p in range(2, size + 1) if size % p == 0), None)
        if parts is None:
            continue
        error = OptionError(
            f"The rule {rule!r} is not true of {function}: it cannot be cut along {name!r}.",
            hint=f"do not name {name!r} among the loops that may be cut.",
        )
        made, cuts = [], list[list[Cuts]]()
        for index in range(parts):
            read, written = loop_cuts(body, name, parts, index)
            slices = [take(jnp.asarray(x), c) for x, c in zip(operands, read, strict=True)]
            try:
                made.append(bind_local(eqn, slices, read, written))
            except Exception as cause:  # it is the user's
                error.why = f"{where}, it fails on slices along {name!r}: {cause}"
                raise error from cause
            cuts.append(written)
        for number, whole in enumerate(wholes):
            values = [np.asarray(results[number]) for results in made]
            of_result = [written[number] for written in cuts]
            if any(of_result[0]):
                pairs = [
                    (value, np.asarray(take(whole, c)))
                    for value, c in zip(values, of_result, strict=True)
                ]
            else:
                pairs = [(functools.reduce(_COMBINE[kind], values), np.asarray(whole))]
            off = _largest([np.abs(_wide(a) - _wide(b)) for a, b in pairs])
            largest = _largest([np.abs(_wide(whole))])
            if not off <= _tolerance(whole.dtype) * largest:
                error.why = (
                    f"{where}, {parts} slices along {name!r} make result {number} differ by up to"
                    f" {off:.3g}, where its numbers go up to {largest:.3g}."
                )
                raise error


def _wide(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array if array.dtype.kind == "c" else array.astype(np.float64)


def _largest(arrays: Sequence[np.ndarray]) -> float:
    return float(np.max([np.max(array, initial=0.0) for array in arrays]))


def _tolerance(dtype: Any) -> float:
    """Of the largest number: sums are added up in another order."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return float(jnp.finfo(dtype).eps) ** 0.5 / 10
