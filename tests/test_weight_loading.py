"""`step.load_weights`: arrays of files in a plan's layout, read part by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.arrays.split_array import SplitArray
from autopar.base.errors import CheckpointError, TraceError
from autopar.runtime import weight_files
from autopar.runtime.weight_files import open_weights

random = np.random.default_rng(0)
LAYERS = random.normal(size=(4, 8, 8)).astype(np.float32)
HEAD = random.normal(size=(8, 4)).astype(np.float32)
NARROW = random.normal(size=8).astype(jnp.bfloat16)
PARAMS: dict[str, Any] = {"layers": {"kernel": LAYERS}, "head": HEAD, "scale": NARROW}


def train(state: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        y = jax.lax.scan(layer, x * params["scale"], params["layers"]["kernel"])[0]
        return jnp.mean((y @ params["head"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
    return {"params": new, "mu": gradients}, value


LIKE = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, PARAMS))


@pytest.fixture(scope="module", params=["zero3", "stages"])
def step(request: pytest.FixtureRequest) -> autopar.Executable:
    pipeline: dict[str, Any] = {"stages": 2, "microbatches": 2, "schedule": "gpipe"}
    asked: dict[str, Any] = {"method": "zero3"} if request.param == "zero3" else pipeline
    x = jax.ShapeDtypeStruct((8, 8), np.float32)
    return autopar.compile(train, {"params": LIKE, "mu": LIKE}, x, **asked)


def write_safetensors(file: Path, arrays: dict[str, np.ndarray]) -> Path:
    """As the format's page says."""
    kinds = {"float32": "F32", "bfloat16": "BF16", "int64": "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        places = [len(data), len(data) + array.nbytes]
        data += array.tobytes()
        shape = list(array.shape)
        kind = kinds[array.dtype.name]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": places}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


FLAT = {"layers.kernel": LAYERS, "head": HEAD, "scale": NARROW}


def sources(folder: Path) -> dict[str, Any]:
    """The same arrays in files of every kind."""
    import orbax.checkpoint as ocp

    parts = folder / "parts"
    parts.mkdir()
    write_safetensors(parts / "model-1.safetensors", {"layers.kernel": LAYERS})
    write_safetensors(parts / "model-2.safetensors", {"head": HEAD, "scale": NARROW})
    wide: dict[str, Any] = {name: array.astype(np.float32) for name, array in FLAT.items()}
    np.savez(folder / "weights.npz", **wide)
    (folder / "arrays").mkdir()
    for name, array in wide.items():
        np.save(folder / "arrays" / f"{name}.npy", array)
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(folder / "orbax", PARAMS)
    return {
        "safetensors": write_safetensors(folder / "model.safetensors", FLAT),
        "several files": parts,
        "npz": folder / "weights.npz",
        "npy": str(folder / "arrays"),
        "orbax": folder / "orbax",
        "mapping": FLAT,
    }


def test_every_kind_of_file(step: autopar.Executable, tmp_path: Path) -> None:
    wanted = step.in_shardings[0]["params"]
    for kind, source in sources(tmp_path).items():
        found = step.load_weights(LIKE, source)
        for path, leaf in jax.tree_util.tree_leaves_with_path(found):
            where = jax.tree_util.keystr(path)
            expected = dict(jax.tree_util.tree_leaves_with_path(PARAMS))[path]
            np.testing.assert_array_equal(np.asarray(leaf), expected, f"{kind}{where}")
            assert leaf.dtype == expected.dtype
        assert jax.tree.map(lambda x: x.sharding, found) == wanted, kind
    if len(step.plan.stages) > 1:
        assert isinstance(found["layers"]["kernel"], SplitArray)
    state = {"params": found, "mu": jax.tree.map(jnp.zeros_like, PARAMS)}
    x = np.ones((8, 8), np.float32)
    _, loss = step(state, x)
    _, plain = jax.jit(train)({"params": PARAMS, "mu": PARAMS}, x)
    np.testing.assert_allclose(loss, plain, rtol=1e-5)


def test_only_parts_are_read(
    step: autopar.Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_safetensors(tmp_path / "model.safetensors", FLAT)
    read: dict[tuple[int, ...], list[int]] = {}
    plain = weight_files._read_rows

    def counted(*arguments: Any) -> np.ndarray:
        found = plain(*arguments)
        read.setdefault(arguments[2], []).append(found.size)
        return found

    monkeypatch.setattr(weight_files, "_read_rows", counted)
    step.load_weights(LIKE, file)
    assert max(read[LAYERS.shape]) <= LAYERS.size // 2


def test_other_names_and_transposed(step: autopar.Executable) -> None:
    theirs = {"h.weight": np.swapaxes(LAYERS, 1, 2), "out.weight": HEAD.T, "norm": NARROW}

    def names(path: str) -> str | tuple[str, tuple[int, ...]]:
        known: dict[str, Any] = {
            "layers.kernel": ("h.weight", (0, 2, 1)),
            "head": ("out.weight", (1, 0)),
            "scale": "norm",
        }
        found: str | tuple[str, tuple[int, ...]] = known[path]
        return found

    found = step.load_weights(LIKE, theirs, names)
    np.testing.assert_array_equal(found["layers"]["kernel"], LAYERS)
    np.testing.assert_array_equal(found["head"], HEAD)


def test_what_does_not_fit_is_named(step: autopar.Executable, tmp_path: Path) -> None:
    bad: dict[str, np.ndarray] = {"layers.kernal": LAYERS, "head": HEAD.T}
    bad["scale"] = np.zeros(8, np.int64)
    file = write_safetensors(tmp_path / "bad.safetensors", bad)
    with pytest.raises(CheckpointError) as caught:
        step.load_weights(LIKE, file)
    text = " ".join(str(caught.value).split())
    assert "layers.kernel: there is no array 'layers.kernel'" in text and "kernal" in text
    assert "head: [8, 4], and 'head' has [4, 8]" in text
    assert "scale: bfloat16, and 'scale' has int64" in text and "names=" in text
    with pytest.raises(TraceError, match="takes no such leaf as other"):
        step.load_weights({"other": LIKE["head"]}, {"other": HEAD})
    file.write_bytes(file.read_bytes()[:-20])
    for source, message in {
        file: "not where the header says",
        tmp_path / "none.safetensors": "does not exist",
        tmp_path / "w.pt": "does not exist",
        tmp_path: "not where the header says",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            open_weights(source)


def test_files_that_are_no_local_paths(tmp_path: Path) -> None:
    """Ranges are read where a file cannot be mapped into memory."""
    file = write_safetensors(tmp_path / "model.safetensors", FLAT)

    class Remote:
        name = file.name

        def open(self, mode: str) -> Any:
            return file.open(mode)

    arrays = weight_files.safetensors(Remote())
    for rows in ((slice(1, 3), slice(2, 5), slice(0, 8)), (slice(0, 4), slice(0, 8), slice(0, 1))):
        np.testing.assert_array_equal(arrays["layers.kernel"].read(rows), LAYERS[rows])
    np.testing.assert_array_equal(arrays["scale"].read((slice(0, 8),)), NARROW)


def test_files_that_the_package_writes(tmp_path: Path) -> None:
    writer = pytest.importorskip("safetensors.numpy")
    arrays = {"a": LAYERS, "number": np.array(3.0), "empty": np.zeros((0, 3)), "i": np.arange(3)}
    writer.save_file(arrays, tmp_path / "a.safetensors", metadata={"by": "us"})
    found = open_weights(tmp_path / "a.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        whole = found[name].read(tuple(slice(0, n) for n in array.shape))
        np.testing.assert_array_equal(whole, array)
        assert whole.dtype == array.dtype


def test_hostile_and_garbled_files(step: autopar.Executable, tmp_path: Path) -> None:
    deep, garbled = b"[" * 200_000, tmp_path / "garbled.npz"
    places = {"dtype": "F32", "shape": [8, 4], "data_offsets": [0.0, 128.0]}
    real = json.dumps({"head": places}).encode()
    files = [(1 << 63, b""), (len(deep), deep), (len(real), real + bytes(128))]
    for length, content in files:
        file = tmp_path / "bad.safetensors"
        file.write_bytes(length.to_bytes(8, "little") + content)
        with pytest.raises(CheckpointError, match="cannot be read"):
            open_weights(file)
    folder = tmp_path / "arrays"
    folder.mkdir()
    for file, source in ((garbled, garbled), (folder / "head.npy", folder)):
        for content in (b"", b"garbage", b"PK"):
            file.write_bytes(content)
            with pytest.raises(CheckpointError, match="cannot be read"):
                open_weights(source)
    np.savez(garbled, head=HEAD)
    garbled.write_bytes(garbled.read_bytes()[:-30])
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_weights(garbled)


def test_names_and_orders_that_are_none(step: autopar.Executable) -> None:
    answers: dict[str, Any] = {
        "layers.kernel": None,
        "head": ("head", (0, 0)),
        "scale": ("scale", (1,)),
    }
    with pytest.raises(CheckpointError) as caught:
        step.load_weights(LIKE, FLAT, lambda path: answers[path])
    text = " ".join(str(caught.value).split())
    assert "layers.kernel: names says None, which is no name" in text
    assert "head: [0, 0] is no order of the 2 dimensions of 'head'" in text
    assert "scale: [1] is no order" in text
    for value in (None, {"kernel": LAYERS}, jax.random.key(0)):
        with pytest.raises(CheckpointError, match=r"no array of numbers(.|\n)*where: layers"):
            step.load_weights(LIKE, {"layers": value, **FLAT})
