"""`WholeArray`: arrays that JAX does not know behave as the `jax.Array` that they become."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OTHERS = ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs")
_NAMES = [*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS]
_METHODS = frozenset(name for name in dir(jax.Array) if not name.startswith("_")) | {"real", "imag"}


class WholeArray:
    """Base of arrays in several places: operators, and the methods of `jax.Array` that they lack.

    A class has `shape`, `dtype` and `__jax_array__`, which brings the array together.
    """

    __slots__ = ()

    shape: Any
    dtype: Any

    def __jax_array__(self) -> jax.Array:
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * int(self.dtype.itemsize)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.__jax_array__()[index]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return int(self.shape[0])

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.__jax_array__())

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            return getattr(self.__jax_array__(), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _operator(name: str) -> Any:
    def whole(value: Any) -> Any:
        return value.__jax_array__() if isinstance(value, WholeArray) else value

    def method(self: Any, *others: Any) -> Any:
        return getattr(whole(self), name)(*map(whole, others))

    method.__name__ = method.__qualname__ = name
    return method


for _name in _NAMES:
    setattr(WholeArray, f"__{_name}__", _operator(f"__{_name}__"))
WholeArray.__hash__ = None  # type: ignore[assignment]  # as that of jax.Array: == compares elements
