"""Operators and methods for arrays that JAX does not know: those of the `jax.Array` they become."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

T = TypeVar("T", bound=type)

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OTHERS = ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs")
_NAMES = [*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS]
_METHODS = frozenset(name for name in dir(jax.Array) if not name.startswith("_")) | {"real", "imag"}


def computes_as_jax_array(cls: T) -> T:
    """A class decorator: operators, and the methods of `jax.Array` that the class has not.

    Args:
      cls: has `__jax_array__`, which brings the array together.
    """

    def operator(name: str) -> Any:
        def whole(value: Any) -> Any:
            array: Any = value
            return array.__jax_array__() if isinstance(value, cls) else value

        def method(self: Any, *others: Any) -> Any:
            return getattr(whole(self), name)(*map(whole, others))

        method.__name__ = method.__qualname__ = name
        return method

    def __getattr__(self: Any, name: str) -> Any:
        if name in _METHODS:
            return getattr(self.__jax_array__(), name)
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")

    for name in _NAMES:
        setattr(cls, f"__{name}__", operator(f"__{name}__"))
    cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
    cls.__hash__ = None  # type: ignore[assignment]  # as that of jax.Array: == compares elements
    return cls
