"""Equations with an effect on the host (`jax.debug.callback`), which the first device alone runs.

What a user's callback raises is kept until the device has done its part of everything: one that
broke off would leave the others waiting in a collective, for ever or until XLA ends the process.
Of several errors of a run the first is raised, as if the run had ended there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.arrays.typed_keys import is_key
from autopar.passes.primitives.cuts import bind_with
from autopar.passes.primitives.localize import bind_local

CALLBACKS = frozenset(("pure_callback", "io_callback"))
"""Primitives that take values from the host."""


class HostCallbacks:
    """The callbacks of one device's program, and what they have raised.

    JAX compiles no callback for devices that are not there, which have no hosts (`has_hosts`):
    effects are left out, and zeros stand for what a callback returns.
    """

    def __init__(self, has_hosts: bool = True) -> None:
        self._errors: list[BaseException] = []
        self._has_hosts, self._may_raise = has_hosts, False

    def called(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """What a callback returns, on every device."""
        if self._has_hosts:
            return bind_with(eqn, operands, {})
        made = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        made, _ = lax.optimization_barrier((made, list(operands)))
        return list(made)

    def once(self, eqn: Any, operands: Sequence[Any], is_first: jax.Array) -> None:
        """Runs an equation on the first device; an error of its callback waits."""
        if not self._has_hosts:
            return
        if eqn.primitive.name == "debug_callback":
            self._may_raise = True
            callback = self._holding(eqn.params["callback"])
            eqn = eqn.replace(params={**eqn.params, "callback": callback})

        def run(*values: Any) -> None:
            whole = [(None,) * len(atom.aval.shape) for atom in (*eqn.invars, *eqn.outvars)]
            bind_local(eqn, values, whole[: len(values)], whole[len(values) :])

        lax.cond(is_first, run, lambda *values: None, *operands)

    def raised_after(self, results: list[Any], is_first: Callable[[], jax.Array]) -> list[Any]:
        """The results, when these are there, of which the first device raises what has waited."""
        if self._may_raise:
            # A number of each, since a barrier does not keep the order in which CPUs run.
            numbers = [_number_of(x) for x in results if not is_key(x.dtype) and x.size]
            lax.cond(
                is_first(),
                lambda *made: jax.debug.callback(self._raise, *made),
                lambda *made: None,
                *numbers,
            )
        return results

    def _holding(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arrays: Any) -> Any:
            try:
                return callback(*arrays)
            except BaseException as error:
                self._errors.append(error)
                return ()

        return called

    def _raise(self, *made: Any) -> None:
        if self._errors:
            errors, self._errors = self._errors, []
            raise errors[0]


def _number_of(array: jax.Array) -> jax.Array:
    """The first element, as a type that every callback takes."""
    first = lax.slice(array.reshape(-1), (0,), (1,))
    first = lax.real(first) if jnp.iscomplexobj(first) else first
    return lax.convert_element_type(first, jnp.float32)
