"""Checkpoints and weights on the network: here, in a store of objects by name that is in memory."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from etils.epath import backend
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import autopar
from autopar.base.errors import AutoparWarning, CheckpointError
from autopar.runtime.weight_files import open_weights


class Bucket(MemoryFileSystem):
    """In the place of s3fs; it has files by name, and no folders."""

    protocol = "s3"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).replace("s3://", "/", 1))

    def mkdir(self, *_: Any, **__: Any) -> None: ...
    def makedirs(self, *_: Any, **__: Any) -> None: ...


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The objects by name."""
    monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", lambda name: Bucket())
    yield Bucket.store
    Bucket.store.clear()


STATE = {"w": jnp.arange(12.0).reshape(3, 4), "none": jnp.zeros((0, 2)), "count": 3}


def test_checkpoints(files: dict[str, Any]) -> None:
    directory = "s3://bucket/runs/one"
    with autopar.Checkpoints(directory, keep=2) as checkpoints:
        assert checkpoints.latest is None
        for step in (1, 2, 3):
            checkpoints.save(step, {**STATE, "count": step}, extra={"position": step})
    assert not [name for name in files if "step_00000001" in name]
    other = autopar.Checkpoints(directory)
    assert other.steps == (2, 3)
    step, state, extra = other.restore(STATE)
    assert (step, state["count"], extra) == (3, 3, {"position": 3})
    np.testing.assert_array_equal(state["w"], STATE["w"])
    # Without its contents, a step is half-written: ignored, and then removed.
    del files["/bucket/runs/one/step_00000003/contents.json"]
    assert other.restore(STATE).step == 2
    other.save(4, {"count": 4})
    other.wait()
    assert other.restore({"count": 0}).state == {"count": 4}
    assert not [name for name in files if "step_00000003" in name]
    files["/bucket/mine.txt"] = files["/bucket/runs/one/autopar_checkpoints.json"]
    with pytest.raises(CheckpointError, match="other files"):
        autopar.Checkpoints("s3://bucket")


def test_damaged_checkpoints(files: dict[str, Any]) -> None:
    with autopar.Checkpoints("s3://bucket/run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, STATE)
    (name,) = [name for name in files if "step_00000002/driver/_METADATA" in name]
    del files[name]
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoints.restore(STATE)
    with pytest.warns(AutoparWarning, match="step 1 is restored"):
        assert checkpoints.restore(STATE, fallback=True).step == 1


def test_a_network_that_fails_is_no_damage(
    files: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with autopar.Checkpoints("s3://bucket/run") as checkpoints:
        checkpoints.save(1, STATE)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("Access Denied")

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "_open", refuse)
        for fallback in (False, True):
            with pytest.raises(CheckpointError, match=r"cannot be reached(.|\n)*Access Denied"):
                checkpoints.restore(STATE, fallback=fallback)
        checkpoints.save(2, STATE)
        with pytest.raises(CheckpointError, match="Access Denied"):
            checkpoints.wait()
    assert checkpoints.steps == (1,)


def test_weights(files: dict[str, Any], tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"a": np.arange(6.0), "b.c": np.ones((2, 3), np.float32)}
    np.savez(tmp_path / "weights.npz", **arrays)
    with Bucket().open("s3://bucket/weights.npz", "wb") as file:
        file.write((tmp_path / "weights.npz").read_bytes())
    for name, array in arrays.items():
        with Bucket().open(f"s3://bucket/arrays/{name}.npy", "wb") as file:
            np.save(file, array)
    for source in ("s3://bucket/weights.npz", "s3://bucket/arrays"):
        found = open_weights(source)
        assert found.keys() == arrays.keys()
        np.testing.assert_array_equal(found["b.c"].read((slice(1, 2), slice(0, 2))), [[1, 1]])
    with pytest.raises(CheckpointError, match="does not exist"):
        open_weights("s3://bucket/none.npz")


def test_weights_in_a_folder_of_orbax(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import orbax.checkpoint as ocp

    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": {"c": np.ones(4, np.float32)}}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", arrays)
    for file in (tmp_path / "orbax").rglob("*"):
        if file.is_file():
            name = file.relative_to(tmp_path).as_posix()
            files[f"/bucket/{name}"] = MemoryFile(Bucket(), f"/bucket/{name}", file.read_bytes())
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    found = open_weights("s3://bucket/orbax")
    assert found.keys() == {"a", "b.c"}
    np.testing.assert_array_equal(found["a"].read((slice(1, 2), slice(0, 2))), [[3, 4]])
    np.testing.assert_array_equal(found["b.c"].read((slice(0, 4),)), np.ones(4))
    assert found["b.c"].dtype == np.float32
    assert len(list((tmp_path / "scratch").iterdir())) == 1
    del found
    gc.collect()
    assert not list((tmp_path / "scratch").iterdir())
    with pytest.raises(CheckpointError, match="holds no weights"):
        files["/bucket/empty/x.txt"] = files["/bucket/orbax/_METADATA"]
        open_weights("s3://bucket/empty")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"no package for {name}")

    monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", absent)
    for attempt in (autopar.Checkpoints, open_weights):
        with pytest.raises(CheckpointError, match=r"no package for gcs(.|\n)*pip install gcsfs"):
            attempt("gs://bucket/run")
        with pytest.raises(CheckpointError, match=r"unknown kind(.|\n)*gs://, s3://"):
            attempt("ftp://host/run")
