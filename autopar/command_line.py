"""What the commands of `autopar` share: what they read, how they answer, and how they fail."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import io
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.text import Text
from typer.core import TyperGroup

from autopar.absent_devices import tracing_for
from autopar.base.cluster import Cluster
from autopar.base.errors import AutoparError, MemoryLimitError, OptionError, did_you_mean
from autopar.base.user_code import is_users, shorten
from autopar.requests import ClusterOrName

_P = ParamSpec("_P")
_R = TypeVar("_R")

NO, TROUBLE, INTERRUPTED = 1, 2, 130
"""Exit codes beside 0: the answer is no (plans differ, nothing fits), it could not be found, and
Ctrl-C."""

UsageError: Any = typer.BadParameter.__base__  # Typer brings its own, or Click's

_PIPED_WIDTH, _ERROR_WIDTH = 120, 88


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; 120 columns where the output goes to a file or a program."""
    file = sys.stderr if stderr else sys.stdout
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="replace")  # not every output can show lines and blocks
    is_free = file.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, width=None if is_free else _PIPED_WIDTH)


def show(shown: RenderableType) -> None:
    """Prints for people."""
    console().print(shown, highlight=False)


def show_json(plain: Any) -> None:
    """Prints for programs."""
    json.dump(plain, sys.stdout, indent=2)
    sys.stdout.write("\n")


def show_record(found: Any, as_json: bool) -> None:
    """Prints a dataclass that Rich can show, for programs or for people."""
    if as_json:
        show_json(dataclasses.asdict(found))
    else:
        show(found)


def note(text: str) -> None:
    """Says something beside the answer, on standard error."""
    console(stderr=True).print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def note_local_devices() -> None:
    """Says for which devices a step is planned where none are named, and how others are."""
    from autopar.report.summaries import describe_cluster

    here = describe_cluster(Cluster.local().to_dict())
    note(f'Planning for what is here, {here}; for others: --cluster "8x8 h100".')


def answers(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """A command that says what is wrong without a traceback, unless autopar itself is."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:  # `autopar show plan.json | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(TROUBLE)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except (AutoparError, OSError) as error:
            if kwargs.get("as_json"):
                show_json({"error": _as_dict(error)})
            else:
                _show_error(error)
            sys.exit(NO if isinstance(error, MemoryLimitError) else TROUBLE)
        except Exception as error:
            shorten(error)
            if not _begins_in_users_code(error):
                raise
            traceback.print_exception(error)
            sys.exit(TROUBLE)

    return run


class Commands(TyperGroup):
    """The group of all commands: what is wrong with how one is called is JSON for programs too."""

    def make_context(self, info_name: Any, args: list[str], *more: Any, **extra: Any) -> Any:
        """Reads what stands before the command."""
        as_json = "--json" in args
        with _usage(as_json):
            context = super().make_context(info_name, args, *more, **extra)
        context.meta[_AS_JSON] = as_json
        return context

    def invoke(self, ctx: Any) -> Any:
        """Reads what stands after the command, and runs it."""
        with _usage(ctx.meta[_AS_JSON]):
            return super().invoke(ctx)


_AS_JSON = "autopar.as_json"


@contextlib.contextmanager
def _usage(as_json: bool) -> Iterator[None]:
    """Within it a usage error is told as JSON, if it is asked for, instead of in Typer's way."""
    try:
        yield
    except UsageError as error:
        if not as_json:
            raise
        show_json({"error": {"kind": "UsageError", "what": error.format_message()}})
        sys.exit(TROUBLE)


def _show_error(error: AutoparError | OSError) -> None:
    out = console(stderr=True)
    out.print(Text(type(error).__name__, "bold red"))
    text = error.text(min(out.width, _ERROR_WIDTH)) if isinstance(error, AutoparError) else error
    out.print(str(text), highlight=False, markup=False, soft_wrap=True)


def check_folder(output: Path | None) -> None:
    """Refuse a file that cannot be written there, before anything takes time."""
    if output is not None and not output.absolute().parent.is_dir():
        raise OptionError(f"There is no folder {str(output.parent)!r}.", where="--output")


def _begins_in_users_code(error: Exception) -> bool:
    frame = error.__traceback__
    return frame is not None and is_users(frame.tb_frame.f_code.co_filename)


def _as_dict(error: AutoparError | OSError) -> dict[str, Any]:
    if not isinstance(error, AutoparError):
        return {"kind": type(error).__name__, "what": str(error)}
    parts = {name: getattr(error, name) for name in ("what", "where", "why", "hint")}
    return {"kind": type(error).__name__, **{k: v for k, v in parts.items() if v is not None}}


def find_object(name: str, what: str) -> Any:
    """What `MODULE:NAME` means; a module is a dotted name or the path of its file.

    Raises:
      OptionError: there is no such module, or it has nothing of that name.
    """
    where, colon, path = name.rpartition(":")
    if not colon or not where or not path:
        raise OptionError(
            f"{what} is {name!r}.",
            why="it must be MODULE:NAME, where the module may be a file.",
            hint="for example train.py:train_step or package.train:train_step.",
        )
    found: Any = _load_module(where, what)
    top = found.__name__
    for part in path.split("."):
        if not hasattr(found, part):
            names = [each for each in dir(found) if not each.startswith("_")]
            own = [each for each in names if getattr(getattr(found, each), "__module__", 0) == top]
            raise OptionError(
                f"{where} has no {path!r}.",
                where=what,
                why=f"it has {', '.join(own)}." if own else None,
                hint=did_you_mean(part, names),
            )
        found = getattr(found, part)
    return found


def _load_module(where: str, what: str) -> types.ModuleType:
    """A module by its name or by its file, which may import its neighbours as a script may."""
    if not where.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):
                raise  # one that the user's module imports
            raise OptionError(
                f"There is no module {error.name!r}.",
                where=what,
                why=f"it is none of the installed ones, and not in {os.getcwd()}.",
                hint="run the command in its folder, or name the file: path/to/train.py:NAME.",
            ) from None
    file = Path(where)
    if not file.is_file():
        folder = file.absolute().parent
        raise OptionError(
            f"There is no file {where!r}.",
            where=what,
            why=f"looked in {folder}.",
            hint=did_you_mean(file.name, (each.name for each in folder.glob("*.py"))),
        )
    file = file.resolve()
    known = sys.modules.get(file.stem)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == file:
        return known
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_example(
    name: str, cluster: ClusterOrName | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that `--args MODULE:NAME` means, by position and by keyword.

    They are for a `cluster`, which may be elsewhere.

    Raises:
      OptionError: it is neither a tuple, a list nor a dict.
    """
    with contextlib.nullcontext() if cluster is None else tracing_for(cluster):
        found = find_object(name, "--args")
        made = found() if callable(found) else found
    if isinstance(made, Mapping):
        return (), dict(made)
    if isinstance(made, (tuple, list)):
        return tuple(made), {}
    raise OptionError(
        f"{name} gives an object of class {type(made).__name__}.",
        where="--args",
        why="it must be a tuple of the step's arguments, or a dict of those by keyword.",
        hint="return (state, batch), of arrays or of what jax.eval_shape gives.",
    )


def read_options(pairs: list[str]) -> dict[str, Any]:
    """Options from `NAME=VALUE`; a value is JSON, or Python's, or else text.

    Raises:
      OptionError: there is no `=`, or an option is given twice.
    """
    options = dict[str, Any]()
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise OptionError(f"--option {pair!r} is not possible.", why="it must be NAME=VALUE.")
        name = name.strip().replace("-", "_")
        if name in options:
            raise OptionError(f"{name} is given twice.", where=f"--option {name}=...")
        options[name] = read_value(text)
    return options


def read_value(text: str) -> Any:
    """JSON, or several such with commas between them, or a value of Python's, or text as it is.

    >>> read_value("8"), read_value("auto"), read_value("12,24"), read_value("(4, 2)")
    (8, 'auto', [12, 24], (4, 2))
    """
    for attempt in (text, f"[{text}]"):
        try:
            return json.loads(attempt)
        except json.JSONDecodeError:
            continue
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
