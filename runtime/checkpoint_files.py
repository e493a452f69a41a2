"""The files of checkpoints: a folder for each step, which is there as a whole or not at all.

    checkpoints/
      autopar_checkpoints.json      says what this folder is
      step_00000020/
        contents.json               the leaves by path: shape, dtype, the items that hold them
        driver/ plan_0_actor_1.../  items: arrays by name, each written by one process (Orbax)
      step_00000030.writing-1f3a/   half-written: ignored, and removed when a step is saved

An item says nothing of meshes, so any plan can read it. It has checksums of its arrays, since what
a disk or a copy changes may still be readable.

On the network (`file_paths.py`) nothing is renamed: a step's folder has its name from the start. It
is ignored until it has contents, and removed when a step is saved. Orbax writes an item into a
folder of this machine, and it is sent from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autopar.base.errors import CheckpointError, DamagedCheckpointError
from autopar.runtime.file_paths import (
    fetched,
    is_remote,
    names_in,
    path_of,
    reaching,
    remove_folder,
    sent_to,
)

MARKER, CONTENTS, FORMAT = "autopar_checkpoints.json", "contents.json", 2
CHECKSUMS = "autopar_checksums.json"
_STEP = re.compile(r"step_(\d+)")
_HALF = re.compile(r"step_\d+\.writing-[0-9a-f]+")


class LostItem(Exception):
    """An actor was lost before it had written its item, or what it was to write."""


class StoredPiece(NamedTuple):
    """A part of a leaf, with a name in an item; `start` is the index of its first element."""

    item: str
    name: str
    start: tuple[int, ...]


@dataclass(frozen=True)
class StoredLeaf:
    """A leaf of a saved state.

    The path is that of `jax.tree_util.keystr`; the dtype a name, or "Python int", "Python float",
    "Python bool" or "Python complex". It has no pieces where it has no elements.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> StoredLeaf:
        """The inverse of `dataclasses.asdict`, after JSON."""
        pieces = tuple(StoredPiece(item, name, tuple(at)) for item, name, at in plain["pieces"])
        return cls(plain["path"], tuple(plain["shape"]), plain["dtype"], pieces)


def orbax() -> Any:
    """Orbax's module.

    Raises:
      CheckpointError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ModuleNotFoundError as error:
        raise CheckpointError(
            "Checkpoints need Orbax, which is not installed.",
            why=str(error),
            hint="pip install 'autopar[checkpoint]'.",
        ) from error
    return orbax.checkpoint


def write_item(folder: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, none of them without elements, as one item; its checksums come last.

    The folder is a path of any kind, or its text.
    """
    folder = path_of(folder)
    try:
        _write_arrays(folder, arrays)
    except Exception:
        if _may_start_threads():
            raise
        _write_apart(folder, arrays)
    sums = {name: _checksum(array) for name, array in arrays.items()}
    with reaching(folder):
        _write(folder / CHECKSUMS, json.dumps(sums, indent=1))


def _write_arrays(folder: Any, arrays: Mapping[str, np.ndarray]) -> None:
    if is_remote(folder):
        with sent_to(folder) as scratch:
            _write_arrays(scratch, arrays)
        return
    ocp = orbax()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(folder, args=ocp.args.PyTreeSave(dict(arrays)))


def _may_start_threads() -> bool:
    """Whether this process does not end yet; one that ends starts none from Python 3.12 on."""
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        return False
    return True


_APART = """
import pickle, sys
from autopar.runtime import checkpoint_files as files
files._write_arrays(files.path_of(sys.argv[1]), pickle.load(sys.stdin.buffer))
"""


def _write_apart(folder: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """The same in another process: Orbax needs threads, and this one ends.

    Raises:
      OSError: it failed; with the last line of what it said.
    """
    if not is_remote(folder):
        for left in (folder, *folder.parent.glob(f"{folder.name}.orbax-checkpoint-tmp*")):
            shutil.rmtree(left, ignore_errors=True)
    paths = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryFile() as words:
        writer = subprocess.Popen(
            [sys.executable, "-c", _APART, str(folder)],
            stdin=subprocess.PIPE,
            stderr=words,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
        )
        assert writer.stdin is not None
        with contextlib.suppress(BrokenPipeError), writer.stdin as pipe:
            pickle.dump(dict(arrays), pipe, protocol=5)
        if writer.wait():
            words.seek(0)
            last = words.read().decode(errors="replace").strip().splitlines()[-1:]
            raise OSError(f"a process that was to write it failed: {' '.join(last)}")


def _damaged(folder: Path, arrays: Mapping[str, np.ndarray]) -> frozenset[str]:
    """Names of an item's arrays that are not those that were written; items of old have no sums."""
    try:
        sums = json.loads((folder / CHECKSUMS).read_text())
    except FileNotFoundError:
        return frozenset()
    if not isinstance(sums, dict):
        raise ValueError(f"{CHECKSUMS} holds no checksums")
    return frozenset(name for name, array in arrays.items() if sums.get(name) != _checksum(array))


def _checksum(array: np.ndarray) -> int:
    """CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _text_checksum(contents: Mapping[str, Any]) -> int:
    """CRC-32 of what is written as JSON."""
    return zlib.crc32(json.dumps(contents).encode())


Item = tuple[dict[str, np.ndarray], frozenset[str]]
"""The arrays of an item by name, and the names of those that are damaged."""


def read_item(folder: Any) -> Item:
    """An item.

    Raises:
      ValueError: it is garbled; OSError and others of Orbax's: it cannot be read.
      CheckpointError: the file system on the network cannot be reached.
    """
    if is_remote(folder):
        with fetched(folder) as scratch:
            return read_item(scratch)
    arrays = _read_arrays(folder)
    return arrays, _damaged(folder, arrays)


def _read_arrays(folder: Path) -> dict[str, np.ndarray]:
    ocp = orbax()
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            names = reader.metadata(folder).item_metadata.tree
            kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
            found = reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=kinds))
    except (AttributeError, TypeError, KeyError) as error:  # Orbax's, of what it did not expect
        raise ValueError("the list of its arrays, which Orbax wrote, is garbled") from error
    return {name: np.asarray(array) for name, array in found.items()}


def steps_in(directory: Any) -> tuple[int, ...]:
    """The steps whose checkpoints are whole, ascending.

    Raises:
      CheckpointError: it is there and no folder of checkpoints, or cannot be reached.
    """
    with reaching(directory):
        if not directory.exists():
            return ()
        entries = _listed(directory)
        if entries and MARKER not in entries:
            raise CheckpointError(
                "This is no folder of checkpoints.",
                where=str(directory),
                why=f"it has other files, and no {MARKER}.",
                hint="name a new or an empty folder, or one that autopar.Checkpoints has made.",
            )
        found = [match for name in entries if (match := _STEP.fullmatch(name))]
        return tuple(sorted(int(x[1]) for x in found if (directory / x.string / CONTENTS).exists()))


def begin(directory: Any, step: int) -> Any:
    """A new folder for what is written of a step; earlier half-written ones are removed.

    Raises:
      CheckpointError: the directory is something else, or cannot be written.
    """
    whole = set(map(name_of, steps_in(directory)))
    try:
        with reaching(directory):
            if not is_remote(directory):
                directory.mkdir(parents=True, exist_ok=True)
            marker = directory / MARKER
            if not marker.exists():
                _write(marker, json.dumps({"format": FORMAT}))
            half = _STEP if is_remote(directory) else _HALF
            for name in set(_listed(directory)) - whole:
                if half.fullmatch(name):
                    remove_folder(directory / name)
            if is_remote(directory):
                return directory / name_of(step)
            folder = directory / f"{name_of(step)}.writing-{secrets.token_hex(4)}"
            folder.mkdir()
    except OSError as error:
        raise CheckpointError(
            "A checkpoint cannot be written.", where=str(directory), why=str(error)
        ) from error
    return folder


def commit(folder: Any, step: int, leaves: list[StoredLeaf], extra: Any) -> None:
    """Make a folder that holds all items the checkpoint of a step.

    Raises:
      CheckpointError: an item is not there.
    """
    items = {item for leaf in leaves for item, *_ in leaf.pieces}
    with reaching(folder):
        for item in items:
            if not (folder / item / CHECKSUMS).exists():
                raise CheckpointError(
                    f"The checkpoint of step {step} has no item {item!r}.",
                    where=str(folder),
                    why="its actor has written it, but it cannot be seen from here.",
                    hint="use a directory on a file system that all nodes of the cluster share.",
                )
        # A state without arrays has no items, and its folder is not there on the network.
        there = _listed(folder) if items or not is_remote(folder) else []
        for name in set(there) - items:  # of actors that were lost
            remove_folder(folder / name)
        plain = [asdict(leaf) for leaf in leaves]
        contents = {"format": FORMAT, "step": step, "extra": extra, "leaves": plain}
        contents["checksum"] = _text_checksum(contents)
        _write(folder / CONTENTS, json.dumps(contents, indent=1))
    if is_remote(folder):
        return
    os.replace(folder, folder.parent / name_of(step))
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_last(directory: Any, count: int) -> None:
    """Remove all but the last checkpoints; one is never half there under its name."""
    for step in steps_in(directory)[:-count]:
        dying = directory / name_of(step)
        if is_remote(directory):
            with reaching(directory):
                (dying / CONTENTS).unlink()
        else:
            half = directory / f"{name_of(step)}.writing-{secrets.token_hex(4)}"
            os.replace(dying, half)
            dying = half
        remove_folder(dying)


def read_contents(directory: Any, step: int) -> tuple[dict[str, StoredLeaf], Any]:
    """The leaves of a checkpoint by path, and what else was saved with them.

    Raises:
      DamagedCheckpointError: it cannot be read.
      CheckpointError: the file system on the network cannot be reached.
    """
    file = directory / name_of(step) / CONTENTS
    try:
        with reaching(file):
            text = file.read_text()
        contents = json.loads(text)
        if contents["format"] != FORMAT:
            raise ValueError(f"it has format {contents['format']}, and this version reads {FORMAT}")
        known = contents.pop("checksum", None)  # there is none in those of old
        if known is not None and known != _text_checksum(contents):
            raise ValueError("it is not what was written: its checksum differs")
        leaves = [StoredLeaf.from_dict(plain) for plain in contents["leaves"]]
        return {leaf.path: leaf for leaf in leaves}, contents["extra"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(
            f"The checkpoint of step {step} cannot be read.",
            where=str(file),
            why=f"{type(error).__name__}: {error}",
        ) from error


def name_of(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step_{step:08}"


def _listed(directory: Any) -> list[str]:
    try:
        return names_in(directory)
    except NotADirectoryError as error:
        raise CheckpointError(
            "This is no folder of checkpoints.", where=str(directory), why="it is a file."
        ) from error


def _write(file: Any, text: str) -> None:
    """Write a file that is whole when it has its name, also after a loss of power."""
    if is_remote(file):
        file.write_text(text)
        return
    new = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    with open(new, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)
