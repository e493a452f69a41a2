"""Whose code is where: the user's files, as against those of libraries and of autopar."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from autopar.base.errors import AutoparError, AutoparWarning

_P = ParamSpec("_P")
_R = TypeVar("_R")


@cache
def own_roots() -> tuple[str, ...]:
    """The folders of autopar itself."""
    top = Path(__file__).resolve().parents[2]
    here = Path(os.path.abspath(__file__)).parents[1]
    folders = (*(top / folder for folder in ("autopar", "passes", "runtime")), here)
    return tuple(dict.fromkeys(os.path.join(folder, "") for folder in folders))


PLUMBING = (
    *("absl", "autopar", "beartype", "chex", "decorator", "distrax", "einops", "equinox", "flax"),
    *("haiku", "jax", "jaxlib", "jaxtyping", "jmp", "jraph", "lineax", "ml_dtypes", "numpy"),
    *("optax", "optimistix", "orbax", "ray", "rlax", "scipy", "toolz", "tqdm", "treescope"),
    *("typeguard", "typing_extensions", "wandb"),
)
"""Packages with which models and their training are written, which are none themselves.

A list that is never complete: of a package that is not here, its own lines are told.
"""


@cache
def library_roots() -> tuple[str, ...]:
    """The folders of the standard library, of installed packages and of autopar itself."""
    paths = sysconfig.get_paths()
    roots = {paths[key] for key in ("stdlib", "platstdlib")}
    return (*(os.path.join(root, "") for root in roots), *package_roots(), *own_roots())


@cache
def package_roots() -> tuple[str, ...]:
    """The folders of installed packages."""
    paths = sysconfig.get_paths()
    sites = (path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    folders = dict.fromkeys((paths["purelib"], paths["platlib"], *sites))
    return tuple(os.path.join(folder, "") for folder in folders)


def is_own(file: str) -> bool:
    """Whether a file is autopar's."""
    return file.startswith(own_roots())


def is_users(file: str) -> bool:
    """Whether a file is the user's own: a script, a module of theirs, a cell of a notebook."""
    return not file.startswith((*library_roots(), "<frozen "))


@cache
def is_of_a_model(file: str) -> bool:
    """Whether a file is the user's, or of an installed package that may hold models."""
    if is_users(file):
        return True
    packages = (file[len(root) :] for root in package_roots() if file.startswith(root))
    name = next(packages, "").partition(os.sep)[0].removesuffix(".py")
    return bool(name) and name not in PLUMBING and not is_own(file)


def named(file: str) -> str:
    """A file as its user knows it: a notebook's cell by its number, `In[3]`.

    The code of a cell has the name of a temporary file, other in every process.
    """
    ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    told = getattr(getattr(ipython, "compile", None), "format_code_name", None)  # IPython 8
    cell = None if told is None else told(file)
    return file if cell is None else cell[1]


def place(file: str, line: int | None, function: str) -> str:
    """How an error names a line: `train.py:31 (train_step)`."""
    return f"{named(file)}:{line} ({function})"


def innermost(error: BaseException) -> str | None:
    """The user's innermost line that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (frame for frame in reversed(frames) if is_users(frame.filename))
    return next((place(f.filename, f.lineno, f.name) for f in own), None)


def callers() -> Iterator[FrameType]:
    """The frames of the caller's callers, the nearest first."""
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def calling_place() -> tuple[str, int, str] | None:
    """The file, line and function of the user's that runs now."""
    own = (frame for frame in callers() if is_users(frame.f_code.co_filename))
    codes = ((frame.f_code, frame.f_lineno) for frame in own)
    return next(((code.co_filename, line, code.co_name) for code, line in codes), None)


def warn(what: str, where: str | None, why: str, hint: str) -> None:
    """Warn in the form of an error, at the line of the user's that runs now."""
    warn_at_call(str(AutoparError(what, where=where, why=why, hint=hint)), AutoparWarning)


def warn_at_call(text: str, category: type[Warning]) -> None:
    """Warn at the line of the user's that runs now, by default once there, as `warnings.warn`."""
    frame = next((frame for frame in callers() if is_users(frame.f_code.co_filename)), None)
    if frame is None:
        warnings.warn_explicit(text, category, "autopar", 1)
        return
    known = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, registry=known)


def from_the_user_on(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without what comes before the user's first frame; None: it has none."""
    while trace is not None and not _runs_users(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _runs_users(frame: FrameType) -> bool:
    # What the standard library generates (a dataclass's __init__) has no file.
    module = str(frame.f_globals.get("__name__", ""))
    return is_users(frame.f_code.co_filename) and module.partition(".")[0] != "autopar"


def shorten(error: BaseException) -> None:
    """Take our frames before the user's first one out of an error that goes to the user.

    What goes wrong inside autopar, with no line of the user's after it, stays whole, but for
    autopar's own errors, which say where.
    """
    for each in (error, error.__cause__):
        if each is not None:
            rest = from_the_user_on(each.__traceback__)
            if rest is not None or isinstance(each, (AutoparError, FileNotFoundError)):
                each.__traceback__ = rest


def shortens(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """What users call: errors that leave it have been through `shorten`."""

    @functools.wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            shorten(error)
            raise

    return run
