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
from autopar.passes.primitives.localize import bind_local


class HostCallbacks:
    """The callbacks of one device's program, and what they have raised."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []
        self._may_raise = False

    def once(self, eqn: Any, operands: Sequence[Any], is_first: jax.Array) -> None:
        """Runs an equation on the first device; an error of its callback waits."""
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
