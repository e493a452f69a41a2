"""`Displayed`: values that notebooks show as a page instead of a line."""

from __future__ import annotations

import importlib
from typing import ClassVar


class Displayed:
    """What has a page in `autopar.notebook`, whose rooms stand above all that they show.

    So a value cannot import its page; it says which one it has, and it is loaded when a notebook
    asks for it.
    """

    __slots__ = ()

    page: ClassVar[tuple[str, str]]
    """The module of `autopar.notebook`, and the function there that makes HTML of the value."""

    def _repr_html_(self) -> str:
        module, function = self.page
        html: str = getattr(importlib.import_module(f"autopar.notebook.{module}"), function)(self)
        return html
