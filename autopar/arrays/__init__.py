"""Kinds of arrays beside `jax.Array`, and the memory that several of them share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.base import lazy

if TYPE_CHECKING:
    from .ray_array import RayArray
    from .split_array import SplitArray
else:
    homes = {"RayArray": ".ray_array", "SplitArray": ".split_array"}
    __getattr__, __dir__ = lazy.exports(__name__, homes)

__all__ = ["RayArray", "SplitArray"]
