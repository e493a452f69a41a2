"""Equations, pieces and functions as bytes that another process with the same JAX can read.

A jaxpr pickles but for its primitives, which are pickled as the names under which modules hold
them, and its source lines, which are left out.
"""

from __future__ import annotations

import functools
import importlib
import io
import sys
from typing import Any

import jax
import numpy as np
from ray import cloudpickle

from autopar.arrays.typed_keys import is_key
from autopar.base.errors import TraceError
from autopar.passes.graph import jax_compat


def dumps(value: Any, what: str) -> bytes:
    """Anything as bytes; functions are pickled with what they close over.

    Raises:
      TraceError: something in it cannot be pickled; says what, and in what.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except Exception as error:
        raise TraceError(
            f"{what} cannot be sent to another process: {error}",
            why="a function in it (such as the callback of jax.debug.callback or "
            "jax.pure_callback) holds an object that cannot be pickled.",
            hint="create such objects (locks, files, sessions) inside the function, or use "
            "runtime='local'.",
        ) from error
    return stream.getvalue()


def loads(data: bytes) -> Any:
    """The inverse of `dumps`."""
    return cloudpickle.loads(data)


class _Pickler(cloudpickle.CloudPickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.primitives: dict[int, tuple[str, str]] | None = None

    def reducer_override(self, value: Any) -> Any:
        if jax_compat.is_primitive(value):
            return _named, self.home_of(value)
        if jax_compat.is_traceback(value):
            return type(None), ()
        if isinstance(value, (jax.custom_jvp, jax.custom_vjp)):  # made anew without arguments
            return _with_rules, (type(value), vars(value))
        typed = jax_compat.typed_array_parts(value)
        if typed is not None:
            return jax_compat.typed_array, typed
        if isinstance(value, jax.Array) and is_key(value.dtype):
            data = np.asarray(jax.random.key_data(value))
            wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(value))
            return wrap, (data,)
        return super().reducer_override(value)

    def home_of(self, primitive: Any) -> tuple[str, str]:
        """The module that holds a primitive, and its name there."""
        if self.primitives is None:
            self.primitives = {
                id(value): (name, attribute)
                for name, module in list(sys.modules.items())
                if module is not None
                for attribute, value in list(vars(module).items())
                if jax_compat.is_primitive(value)
            }
        home = self.primitives.get(id(primitive))
        if home is None:
            raise TypeError(f"the primitive {primitive.name!r} is held by no module")
        return home


def _with_rules(kind: Any, attributes: dict[str, Any]) -> Any:
    """A function with derivative rules of its own."""
    function = kind(attributes["fun"])
    vars(function).update(attributes)
    return function


def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
