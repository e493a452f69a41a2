"""Paths of files on this machine, and by `etils.epath` on the network (`gs://`, `s3://`, `az://`).

An object store has no folders, renames nothing at once, and has a file when all of it was sent. So
what shall be there as a whole has one file there that is written last.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autopar.base.errors import CheckpointError

_PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "hf": "huggingface_hub"}
_CHUNK_BYTES = 8 << 20


def path_of(source: str | os.PathLike[str]) -> Any:
    """A `pathlib.Path`, or a path of epath's of what begins with `gs://` and the like.

    Raises:
      CheckpointError: it begins with something else, or there is no epath.
    """
    text = os.fspath(source)
    scheme, found, _ = text.partition("://")
    if not found:
        return Path(text)
    if scheme not in _PACKAGES:
        raise CheckpointError(
            "The path is of an unknown kind.",
            where=text,
            why=f"paths on the network begin with {', '.join(f'{x}://' for x in _PACKAGES)}.",
            hint="use such a path, or that of a folder on this machine.",
        )
    try:
        from etils import epath
    except ImportError as error:
        raise CheckpointError(
            "A path on the network needs a package that is not here.",
            where=text,
            why=str(error),
            hint=f"pip install 'etils[epath]' {_PACKAGES[scheme]}.",
        ) from error
    return epath.Path(text)


def is_remote(path: Any) -> bool:
    """Whether a path is one on the network."""
    return not isinstance(path, Path)


@contextmanager
def reaching(path: Any) -> Iterator[None]:
    """What a file system on the network raises becomes one error; a missing file stays one.

    Raises:
      CheckpointError: it cannot be reached, or lacks a package.
    """
    try:
        yield
    except (CheckpointError, FileNotFoundError):
        raise
    except Exception as error:
        if not is_remote(path):
            raise
        package = _PACKAGES.get(os.fspath(path).partition("://")[0], "its package")
        hint = "see that the path exists, and that this process may use it."
        if isinstance(error, ImportError):
            hint = f"pip install {package}."
        raise CheckpointError(
            "The file system of a path cannot be reached.",
            where=os.fspath(path),
            why=f"{type(error).__name__}: {error}",
            hint=hint,
        ) from error


def names_in(directory: Any) -> list[str]:
    """The names in a folder, as they are now."""
    if not is_remote(directory):
        return os.listdir(directory)
    # Packages of file systems keep what they listed; other processes may have written since.
    file_system = getattr(getattr(directory, "_backend", None), "fs", None)
    if file_system is not None:
        file_system(directory).invalidate_cache()
    return [name for child in directory.iterdir() if (name := child.name)]


def remove_folder(folder: Any) -> None:
    """Remove a folder with all that is in it, as far as that goes."""
    if is_remote(folder):
        try:
            folder.rmtree()
        except OSError:
            return
    else:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def sent_to(folder: Any) -> Iterator[Path]:
    """A folder to be made on this machine; its files are sent to one on the network at the end."""
    with tempfile.TemporaryDirectory(prefix="autopar_") as scratch:
        made = Path(scratch) / "folder"
        yield made
        with reaching(folder):
            for file in sorted(made.rglob("*")):
                if file.is_file():
                    target = folder.joinpath(*file.relative_to(made).parts)
                    with file.open("rb") as source, target.open("wb") as sink:
                        shutil.copyfileobj(source, sink, _CHUNK_BYTES)


@contextmanager
def fetched(folder: Any) -> Iterator[Path]:
    """A folder on this machine with the files of one on the network.

    Raises:
      FileNotFoundError: there is none.
    """
    with tempfile.TemporaryDirectory(prefix="autopar_") as scratch:
        with reaching(folder):
            _fetch(folder, Path(scratch))
        yield Path(scratch)


class LocalCopy:
    """A folder on this machine with the files of one on the network, while this object is there.

    Attributes:
      path: the folder.

    Raises:
      FileNotFoundError: there is none on the network.
      CheckpointError: it cannot be reached.
    """

    def __init__(self, folder: Any):
        self.path = Path(tempfile.mkdtemp(prefix="autopar_"))
        self._end = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        with reaching(folder):
            _fetch(folder, self.path)


def _fetch(folder: Any, into: Path) -> None:
    into.mkdir(exist_ok=True)
    for name in names_in(folder):
        child = folder / name
        if child.is_dir():
            _fetch(child, into / name)
        else:
            with child.open("rb") as source, (into / name).open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK_BYTES)
