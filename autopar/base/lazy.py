"""Re-exports that import their module when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def exports(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package that only re-exports.

    Args:
      package: the package's `__name__`.
      homes: for each public name, the module that defines it, relative to the package (".api"). A
        name whose home is itself ("errors" in ".errors") is that module.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name], package)
        value = module if homes[name] == f".{name}" else getattr(module, name)
        # The next access finds the value itself and does not come here again.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names
