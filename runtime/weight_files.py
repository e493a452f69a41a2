"""Arrays in files of several kinds, by name, of which only what is asked for is read.

The safetensors format (https://github.com/huggingface/safetensors, "Format") is eight bytes with
the length of a header, the header in JSON, and the arrays' bytes in row-major order; so a slice of
an array is a range of the file, and no package is needed to read it.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from autopar.arrays.typed_keys import is_key
from autopar.base.errors import CheckpointError
from autopar.runtime.file_paths import LocalCopy, is_remote, path_of, reaching

Rows = tuple[slice, ...]


@dataclass(frozen=True)
class StoredArray:
    """An array in a file: what it is, and how to read a part of it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[Rows], np.ndarray]


def open_weights(source: Any) -> dict[str, StoredArray]:
    """The arrays of a file, a folder, or a mapping, by name.

    Args:
      source: see `AroundStep.load_weights`.

    Raises:
      CheckpointError: it is not there, or no such file.
    """
    if isinstance(source, Mapping):
        return {str(name): _in_memory(str(name), value) for name, value in source.items()}
    path = path_of(source)
    with reaching(path):
        return _opened(path)


def _opened(path: Any) -> dict[str, StoredArray]:
    if path.is_dir():
        files = sorted(path.iterdir(), key=str)
        tensors = [file for file in files if file.name.endswith(".safetensors")]
        if tensors:
            return {name: x for file in tensors for name, x in safetensors(file).items()}
        arrays = [file for file in files if file.name.endswith(".npy")]
        if arrays:
            return {file.name.removesuffix(".npy"): _of_numpy(_numpy_file, file) for file in arrays}
        return dict(_orbax(path))
    if not path.exists():
        raise CheckpointError("There are no weights.", where=str(path), why="it does not exist.")
    if path.name.endswith(".safetensors"):
        return safetensors(path)
    if path.name.endswith(".npz"):
        return _of_numpy(lambda file: dict(_numpy_archive(file)), path)
    raise CheckpointError(
        "The weights are in a file of an unknown kind.",
        where=str(path),
        why="it is none of .safetensors, .npz, a folder of .safetensors or .npy files, a folder "
        "that Orbax wrote.",
        hint="read it with its own library, and pass the mapping of names to arrays.",
    )


# safetensors

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16,
    "U32": np.uint32, "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16,
    "BF16": jnp.bfloat16, "F32": np.float32, "F64": np.float64, "C64": np.complex64,
    "F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2,
}  # fmt: skip
_LARGEST_HEADER = 100 << 20


def safetensors(file: Any) -> dict[str, StoredArray]:
    """The arrays of one safetensors file.

    Raises:
      CheckpointError: it is no such file, or cut short.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _LARGEST_HEADER:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(stream.read(length))
            size = stream.seek(0, os.SEEK_END)
        header.pop("__metadata__", None)
        return {name: _tensor(file, 8 + length, size, x) for name, x in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            "A safetensors file cannot be read.",
            where=str(file),
            why=f"{type(error).__name__}: {error}",
            hint="was it copied to its end?",
        ) from error


def _tensor(file: Any, start: int, size: int, entry: Mapping[str, Any]) -> StoredArray:
    first, end = map(operator.index, entry["data_offsets"])
    shape, dtype = tuple(map(int, entry["shape"])), np.dtype(_DTYPES[entry["dtype"]])
    if not 0 <= first <= end <= size - start or end - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {list(shape)} is not where the header says")
    read = functools.partial(_read_rows, file, start + first, shape, dtype)
    return StoredArray(shape, dtype, read)


def _read_rows(
    file: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], rows: Rows
) -> np.ndarray:
    """A part of an array that lies in a file: the range of its first dimension, then the rest."""
    first, stop, _ = rows[0].indices(shape[0]) if shape else (0, 1, 1)
    per_row = math.prod(shape[1:]) * dtype.itemsize
    if isinstance(file, Path):
        whole = np.memmap(file, np.uint8, "r") if math.prod(shape) else np.zeros(0, np.uint8)
        found = whole[offset + first * per_row : offset + stop * per_row].view(dtype)
    else:
        with reaching(file), file.open("rb") as stream:
            stream.seek(offset + first * per_row)
            found = np.frombuffer(stream.read((stop - first) * per_row), dtype)
    if not shape:
        return np.array(found[0])
    part = found.reshape(stop - first, *shape[1:])[(slice(None), *rows[1:])]
    return np.array(part)  # in memory of its own


# NumPy and mappings


def _in_memory(name: str, value: Any) -> StoredArray:
    from autopar.arrays.foreign import on_host

    if not hasattr(value, "shape") or not hasattr(value, "dtype") or is_key(value.dtype):
        raise CheckpointError(
            "The weights hold what is no array of numbers.",
            where=name,
            why=f"it is a {type(value).__name__}.",
            hint="pass a mapping of names to arrays; of a tree, of its leaves' paths.",
        )

    def read(rows: Rows) -> np.ndarray:
        return np.asarray(on_host(value[rows] if rows else value))

    dtype = str(value.dtype).removeprefix("torch.")
    return StoredArray(tuple(map(int, value.shape)), np.dtype(getattr(jnp, dtype, dtype)), read)


T = TypeVar("T")


def _of_numpy(read: Callable[[Any], T], file: Any) -> T:
    """What is read of a file of NumPy's.

    Raises:
      CheckpointError: it is no such file, or cut short.
    """
    try:
        return read(file)
    except (OSError, ValueError, EOFError, AttributeError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            "A file of NumPy's cannot be read.",
            where=str(file),
            why=f"{type(error).__name__}: {error}",
            hint="was it copied to its end?",
        ) from error


def _numpy_file(file: Any) -> StoredArray:
    def load() -> np.ndarray:
        if isinstance(file, Path):
            return np.load(file, mmap_mode="r")
        with file.open("rb") as stream:
            found: np.ndarray = np.load(stream)
        return found

    whole = load()
    return StoredArray(whole.shape, whole.dtype, lambda rows: np.array(whole[rows]))


def _numpy_archive(file: Any) -> Iterator[tuple[str, StoredArray]]:
    """The arrays of an .npz file; of these only one is in memory at a time."""

    @functools.lru_cache(maxsize=1)
    def whole(name: str) -> np.ndarray:
        with file.open("rb") as stream, closing(np.load(stream)) as archive:
            found: np.ndarray = archive[name]
        return found

    with file.open("rb") as stream, closing(np.load(stream)) as archive:
        for name in archive.files:
            with archive.zip.open(f"{name}.npy") as member:
                version = np.lib.format.read_magic(member)
                reader = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
                shape, _, dtype = reader(member)
            yield name, StoredArray(shape, dtype, functools.partial(_of_whole, whole, name))


def _of_whole(whole: Callable[[str], np.ndarray], name: str, rows: Rows) -> np.ndarray:
    return np.array(whole(name)[rows])


# Orbax


def _orbax(path: Any) -> Iterator[tuple[str, StoredArray]]:
    """The arrays of a tree that Orbax wrote; each is read whole, one at a time.

    Orbax itself reads from this machine and from `gs://`; from elsewhere, the folder is fetched.
    """
    import jax

    from autopar.runtime.checkpoint_files import orbax

    ocp: Any = orbax()
    is_fetched = is_remote(path) and not os.fspath(path).startswith("gs://")
    copy = LocalCopy(path) if is_fetched else None
    folder = path if copy is None else copy.path
    checkpointer = ocp.PyTreeCheckpointer()
    try:
        metadata = checkpointer.metadata(folder)
        tree = getattr(metadata, "item_metadata", metadata)
        tree = getattr(tree, "tree", tree)
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0] if tree is not None else []
    except Exception as error:
        raise CheckpointError(
            "The folder holds no weights.",
            where=str(path),
            why=f"there are no .safetensors or .npy files in it, and Orbax says "
            f"{type(error).__name__}: {str(error).splitlines()[0]}",
        ) from error
    if not leaves:
        raise CheckpointError("The folder holds no weights.", where=str(path))

    @functools.lru_cache(maxsize=1)
    def whole(name: str) -> np.ndarray:
        number = names.index(name)
        keys = [_key(key) for key in leaves[number][0]]
        wanted: Any = jax.ShapeDtypeStruct(leaves[number][1].shape, leaves[number][1].dtype)
        arguments: Any = ocp.RestoreArgs(restore_type=np.ndarray)
        for key in reversed(keys):
            wanted, arguments = {key: wanted}, {key: arguments}
        asked = ocp.args.PyTreeRestore(item=wanted, restore_args=arguments, partial_restore=True)
        # Not `folder`: the copy is there as long as something refers to it.
        found: Any = checkpointer.restore(path if copy is None else copy.path, args=asked)
        for key in keys:
            found = found[key]
        return np.asarray(found)

    names = [".".join(map(str, map(_key, keys))) for keys, _ in leaves]
    for name, (_, leaf) in zip(names, leaves, strict=True):
        read = functools.partial(_of_whole, whole, name)
        yield name, StoredArray(tuple(leaf.shape), np.dtype(leaf.dtype), read)


def _key(key: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)
