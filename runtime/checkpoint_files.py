"""The files of checkpoints: a folder for each step, which is there as a whole or not at all.

    checkpoints/
      autopar_checkpoints.json      says what this folder is
      step_00000020/
        contents.json               the leaves by path: shape, dtype, the items that hold them
        driver/ plan_0_actor_1.../  items: arrays by name, each written by one process (Orbax)
      step_00000030.writing-1f3a/   half-written: ignored, and removed when a step is saved

An item says nothing of meshes, so any plan can read it. It has checksums of its arrays, since what
a disk or a copy changes may still be readable.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autopar.base.errors import CheckpointError, DamagedCheckpointError

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


def write_item(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, none of them without elements, as one item."""
    ocp = orbax()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(folder, args=ocp.args.PyTreeSave(dict(arrays)))
    sums = {name: _checksum(array) for name, array in arrays.items()}
    _write(folder / CHECKSUMS, json.dumps(sums, indent=1))


def damaged(folder: Path, arrays: Mapping[str, np.ndarray]) -> frozenset[str]:
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


def read_item(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of an item, by name.

    Raises:
      ValueError: it is garbled; OSError and others of Orbax's: it cannot be read.
    """
    ocp = orbax()
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            names = reader.metadata(folder).item_metadata.tree
            kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
            found = reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=kinds))
    except (AttributeError, TypeError, KeyError) as error:  # Orbax's, of what it did not expect
        raise ValueError("the list of its arrays, which Orbax wrote, is garbled") from error
    return {name: np.asarray(array) for name, array in found.items()}


def steps_in(directory: Path) -> tuple[int, ...]:
    """The steps whose checkpoints are whole, ascending.

    Raises:
      CheckpointError: it is there and no folder of checkpoints.
    """
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


def begin(directory: Path, step: int) -> Path:
    """A new folder for what is written of a step; earlier half-written ones are removed.

    Raises:
      CheckpointError: the directory is something else, or cannot be written.
    """
    steps_in(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        marker = directory / MARKER
        if not marker.exists():
            _write(marker, json.dumps({"format": FORMAT}))
        for name in _listed(directory):
            if _HALF.fullmatch(name):
                shutil.rmtree(directory / name, ignore_errors=True)
        folder = directory / f"{name_of(step)}.writing-{secrets.token_hex(4)}"
        folder.mkdir()
    except OSError as error:
        raise CheckpointError(
            "A checkpoint cannot be written.", where=str(directory), why=str(error)
        ) from error
    return folder


def commit(folder: Path, step: int, leaves: list[StoredLeaf], extra: Any) -> None:
    """Make a folder that holds all items the checkpoint of a step.

    Raises:
      CheckpointError: an item is not there.
    """
    items = {item for leaf in leaves for item, *_ in leaf.pieces}
    for item in items:
        if not (folder / item).is_dir():
            raise CheckpointError(
                f"The checkpoint of step {step} has no item {item!r}.",
                where=str(folder),
                why="its actor has written it, but it cannot be seen from here.",
                hint="use a directory on a file system that all nodes of the cluster share.",
            )
    for name in set(_listed(folder)) - items:  # of actors that were lost
        shutil.rmtree(folder / name, ignore_errors=True)
    plain = [asdict(leaf) for leaf in leaves]
    contents = {"format": FORMAT, "step": step, "extra": extra, "leaves": plain}
    contents["checksum"] = _text_checksum(contents)
    _write(folder / CONTENTS, json.dumps(contents, indent=1))
    os.replace(folder, folder.parent / name_of(step))
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_last(directory: Path, count: int) -> None:
    """Remove all but the last checkpoints."""
    for step in steps_in(directory)[:-count]:
        dying = directory / f"{name_of(step)}.writing-{secrets.token_hex(4)}"
        os.replace(directory / name_of(step), dying)  # never half there under its name
        shutil.rmtree(dying, ignore_errors=True)


def read_contents(directory: Path, step: int) -> tuple[dict[str, StoredLeaf], Any]:
    """The leaves of a checkpoint by path, and what else was saved with them.

    Raises:
      DamagedCheckpointError: it cannot be read.
    """
    file = directory / name_of(step) / CONTENTS
    try:
        contents = json.loads(file.read_text())
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


def _listed(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except NotADirectoryError as error:
        raise CheckpointError(
            "This is no folder of checkpoints.", where=str(directory), why="it is a file."
        ) from error


def _write(file: Path, text: str) -> None:
    """Write a file that is whole when it has its name, also after a loss of power."""
    new = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    with open(new, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)
