"""The options in the signatures and docstrings of what takes them: `help`, editors, the site."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar, cast

from autopar.base.options import Options
from autopar.base.user_code import shortens

PAGE = "the page Options"
"""Of the site, where each option is described: so docstrings call it."""

_F = TypeVar("_F", bound=Callable[..., Any])


def shows_options(fn: _F) -> _F:
    """What users call: its signature and its docstring tell every option; it `shortens`."""
    signature = inspect.signature(fn)
    *known, rest = signature.parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter(name, kind, default=value) for name, value in defaults().items()]
    more = [] if rest.name == "options" else [rest.replace(name="kwargs")]  # the step's own
    shown: Any = shortens(fn)
    shown.__signature__ = signature.replace(parameters=[*known, *options, *more])
    shown.__doc__ = described(inspect.getdoc(fn) or "")
    return cast(_F, shown)


def defaults() -> dict[str, Any]:
    """The default of every option, as a call without it has it."""
    known = {field.name: field.default for field in dataclasses.fields(Options)}
    return {**known, "progress": None}  # which is decided where it is shown


def described(docstring: str) -> str:
    """A docstring with what `Options` says of each option below the argument that takes them."""
    about = re.search(r"Args:\n(.*?)\n\n", inspect.getdoc(Options) or "", re.DOTALL)
    if about is None:  # python -OO
        return docstring
    each = textwrap.indent(about[1], "    ")
    taking = re.compile(r"^  \*\*options.*?(?=\n\n)", re.DOTALL | re.MULTILINE)
    return taking.sub(lambda item: f"{item[0].replace(f'on {PAGE}', 'follows')}\n{each}", docstring)
