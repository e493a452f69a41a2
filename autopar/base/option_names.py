"""Names of options: what says of one that is not there which are, and which is the closest."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from autopar.base.errors import OptionError, did_you_mean
from autopar.base.user_code import shortens

_P = ParamSpec("_P")
_R = TypeVar("_R")


def no_such_option(name: str, known: Sequence[str], where: str | None = None) -> OptionError:
    """The error of an option that does not exist."""
    return OptionError(
        f"There is no option {name!r}.",
        where=where,
        why=f"the options are {', '.join(known)}.",
        hint=did_you_mean(name, known),
    )


def names_options(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """A method that users call: an option that it does not have is named; it `shortens`."""
    known = tuple(inspect.signature(method).parameters)[1:]

    @functools.wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in known:
                raise no_such_option(name, known, method.__qualname__)
        return method(*args, **kwargs)

    return shortens(run)
