"""From which line and scope of the user's an equation comes.

No public name reads or builds JAX's `SourceInfo` (`jax_compat.py` has what else has none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

from jax._src import source_info_util
from jax.extend.core import JaxprEqn

from autopar.base.user_code import is_of_a_model, is_own, is_users, named


def with_outer_source(eqn: JaxprEqn, outer: JaxprEqn) -> Any:
    """The source info of an inlined equation: the outer name stack before its own.

    An equation that comes from a cached jit may carry no traceback; it inherits the outer one's.
    """
    inner_info, outer_info = eqn.source_info, outer.source_info
    name_stack = outer_info.name_stack + inner_info.name_stack
    traceback = inner_info.traceback
    if traceback is None or next(_frames(traceback), None) is None:
        traceback = outer_info.traceback
    return inner_info.replace(name_stack=name_stack, traceback=traceback)


def source_context(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """A context in which newly traced equations carry `eqn`'s name stack and source line."""
    info = eqn.source_info
    return source_info_util.user_context(info.traceback, name_stack=info.name_stack)


def source_named(name: str) -> Any:
    """The source info of an equation that no line of the user's made: a name stack alone."""
    return source_info_util.SourceInfo(None, source_info_util.new_name_stack(name))


def within(info: Any, outer: Any) -> Any:
    """The source info of an equation that was traced `unscoped`, in what has `outer`."""
    if not info.name_stack.stack:
        return outer
    return outer.replace(name_stack=outer.name_stack + info.name_stack)


def unscoped(info: Any) -> AbstractContextManager[Any]:
    """A context in which newly traced equations carry a source line, and no scope but their own."""
    stack = source_info_util.new_name_stack()
    return source_info_util.user_context(info.traceback, name_stack=stack)


def current_source() -> Any:
    """The source info of an equation that is traced now."""
    return source_info_util.current()


def _frames(traceback: Any) -> Iterator[tuple[str, int, str]]:
    for frame in source_info_util.user_frames(traceback):
        yield frame.file_name, frame.start_line, frame.function_name


def user_frame(eqn: JaxprEqn) -> tuple[str, int, str] | None:
    """(file, line, function) of the innermost frame that is neither a library nor autopar.

    Falls back to the innermost frame outside JAX and autopar, then to None. A notebook's cell is
    a file (`user_code.named`).
    """
    return _user_frame(eqn.source_info.traceback)


def model_frame(eqn: JaxprEqn) -> tuple[str, int, str] | None:
    """(file, line, function) of the innermost frame of the user's or of a library of models."""
    return _model_frame(eqn.source_info.traceback)


@lru_cache(4096)  # equations of one line have equal tracebacks
def _user_frame(traceback: Any) -> tuple[str, int, str] | None:
    return _innermost(traceback, is_users)


@lru_cache(4096)
def _model_frame(traceback: Any) -> tuple[str, int, str] | None:
    return _innermost(traceback, is_of_a_model)


def _innermost(traceback: Any, wanted: Callable[[str], bool]) -> tuple[str, int, str] | None:
    """The innermost frame of such a file, else the first that is not autopar's."""
    first = None
    for file, line, function in _frames(traceback):
        if first is None and not is_own(file):
            first = named(file), line, function
        if wanted(file):
            return named(file), line, function
    return first


def value_frame(value: Any) -> tuple[str, int, str] | None:
    """(file, line, function) of the user's code that made a traced value."""
    info = getattr(value, "_line_info", None)
    return None if info is None else _user_frame(info.traceback)
