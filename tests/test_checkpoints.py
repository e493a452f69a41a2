"""States in files: what comes back is what was saved, for any plan, or nothing comes back."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_actors.small_step import layers_step

import autopar
from autopar import checkpoint_writing as module
from autopar.arrays.split_array import SplitArray
from autopar.base.errors import AutoparWarning, CheckpointError

STATE = {
    "matrix": jnp.arange(6.0).reshape(2, 3),
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(1), 4),
    "old key": jax.random.PRNGKey(2),
    "bfloat16": jnp.linspace(0, 1, 5, dtype=jnp.bfloat16),
    "int8": jnp.array([1, -2], jnp.int8),
    "bool": jnp.array([True, False]),
    "nothing": jnp.zeros((0, 3)),
    "no keys": jax.random.split(jax.random.key(1), 0),
    "scalar": jnp.float32(2.5),
    "weak": jnp.asarray(3),
    "weak row": jnp.full(3, 0.5),
    "numpy": np.arange(3, dtype=np.float64),
    "numpy number": np.float64(0.1),
    "strange/[name]'.": [jnp.ones(2), (jnp.zeros(1),)],
    "int": 5,
    "float": 0.1,
    "flag": True,
    "complex": 1j,
    "none": None,
}


def assert_equal(left: Any, right: Any) -> None:
    """Equal in type, dtype, weak type and every bit."""

    def check(a: Any, b: Any) -> None:
        assert type(a) is type(b)
        for name in ("dtype", "shape", "weak_type"):
            assert getattr(a, name, None) == getattr(b, name, None)
        if hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    jax.tree.map(check, left, right)


def test_every_kind_of_leaf_comes_back(tmp_path: Path) -> None:
    position: list[Any] = [1, None]
    with autopar.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(7, STATE, extra={"position": position})
        position.append(2)
        assert checkpoints.extra() == {"position": [1, None]}
    step, state, extra = autopar.Checkpoints(tmp_path / "run").restore(STATE)
    assert (step, extra) == (7, {"position": [1, None]})
    assert_equal(state, STATE)


def test_shapes_are_enough_to_restore(tmp_path: Path) -> None:
    made = {name: leaf for name, leaf in STATE.items() if isinstance(leaf, jax.Array)}
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, made)
        assert_equal(checkpoints.restore(jax.eval_shape(lambda: made)).state, made)


def test_a_python_number_and_an_array_of_it(tmp_path: Path) -> None:
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"step": 300})
        assert checkpoints.restore({"step": jnp.asarray(0)}).state["step"] == 300
        with pytest.raises(CheckpointError, match=r"300 is no number of int8(.|\n)*'step'"):
            checkpoints.restore({"step": np.int8(0)})
        checkpoints.save(2, {"step": jnp.asarray(4)})
        assert checkpoints.restore({"step": 0}).state == {"step": 4}


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    with autopar.Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 5, 10, 200):
            checkpoints.save(step, jnp.full(3, float(step)))
    assert list(checkpoints.steps) == [10, 200]
    assert checkpoints.latest == 200
    np.testing.assert_array_equal(checkpoints.restore(jnp.zeros(3), step=10).state, [10] * 3)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5\.(.|\n)*are 10, 200"):
        checkpoints.restore(jnp.zeros(3), step=5)
    with pytest.raises(CheckpointError, match="Step 200 cannot be saved after step 200"):
        checkpoints.save(200, jnp.zeros(3))


def test_what_is_half_written_is_ignored_and_removed(tmp_path: Path) -> None:
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, jnp.ones(2))
    half = tmp_path / "step_00000002.writing-0123abcd"
    half.mkdir()
    (half / "driver").mkdir()
    cut = tmp_path / "step_00000003"  # as a copy that was cut short
    cut.mkdir()
    checkpoints = autopar.Checkpoints(tmp_path)
    assert list(checkpoints.steps) == [1]
    assert checkpoints.restore(jnp.zeros(2)).step == 1
    assert half.exists()  # another process may be writing it
    cut.rmdir()
    checkpoints.save(4, jnp.ones(2))
    checkpoints.wait()
    assert not half.exists()
    assert list(checkpoints.steps) == [1, 4]


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"no folder of checkpoints(.|\n)*other files"):
        autopar.Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="it is a file"):
        autopar.Checkpoints(tmp_path / "notes.txt")
    empty = autopar.Checkpoints(tmp_path / "new")
    assert empty.steps == ()
    with pytest.raises(CheckpointError, match=r"There is no checkpoint\.(.|\n)*no step"):
        empty.restore(jnp.zeros(2))
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_of_another_state(tmp_path: Path) -> None:
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": jnp.ones((2, 3)), "b": jnp.ones(2), "c": jnp.ones(1)})
    like = {"a": jnp.ones((3, 2)), "b": jnp.ones(2, jnp.int32), "d": jnp.ones(1)}
    with pytest.raises(CheckpointError) as found:
        checkpoints.restore(like)
    for line in (
        "- ['d']: not in the checkpoint",
        "- ['c']: not in the state",
        "- ['a']: saved as float32[2, 3], wanted as float32[3, 2]",
        "- ['b']: saved as float32[2], wanted as int32[2]",
    ):
        assert line in str(found.value)


@pytest.mark.parametrize("what", ["contents", "item"])
def test_a_damaged_checkpoint(tmp_path: Path, what: str) -> None:
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, jnp.ones(3))
    if what == "contents":
        (tmp_path / "step_00000001" / "contents.json").write_text("{")
    else:
        for file in (tmp_path / "step_00000001" / "driver").rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read") as found:
        checkpoints.restore(jnp.zeros(3))
    assert "it is the only one here" in str(found.value)
    with pytest.raises(CheckpointError, match="cannot be read") as found:
        checkpoints.restore(jnp.zeros(3), fallback=True)
    assert "all earlier checkpoints" in found.value.__notes__[0]


def test_flipped_bytes_are_named(tmp_path: Path) -> None:
    state = {"kept": jnp.zeros(3), "w": jax.random.normal(jax.random.key(0), (64, 64))}
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    with autopar.Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, half)
    data = (tmp_path / "step_00000002" / "driver").rglob("*")
    file = max((f for f in data if f.is_file()), key=lambda f: f.stat().st_size)
    content, named = file.read_bytes(), 0
    for place in (len(content) // 3, len(content) // 2, 2 * len(content) // 3):
        flipped = bytearray(content)
        flipped[place] ^= 4
        file.write_bytes(flipped)
        try:
            read = checkpoints.restore(half).state
        except CheckpointError as error:
            if "is damaged" in str(error):
                named += 1
                assert "['w']" in str(error) and "['kept']" not in str(error)
                assert "fallback=True" in str(error) and "step=1" in str(error)
                with pytest.warns(AutoparWarning, match=r"step 1 is restored.*step 2.*\['w'\]"):
                    found = checkpoints.restore(half, fallback=True)
                assert found.step == 1
                np.testing.assert_array_equal(found.state["w"], half["w"])
        else:  # of what nobody reads
            np.testing.assert_array_equal(read["w"], half["w"])
    assert named
    np.testing.assert_array_equal(checkpoints.restore(half, step=1).state["w"], half["w"])
    file.write_bytes(content)
    (tmp_path / "step_00000002" / "driver" / "autopar_checksums.json").unlink()  # of an old version
    np.testing.assert_array_equal(checkpoints.restore(half).state["w"], half["w"])


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    checkpoints = autopar.Checkpoints(tmp_path / "run")
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(CheckpointError, match=r"was consumed(.|\n)*\['a'\]"):
        checkpoints.save(1, {"a": gone})
    with pytest.raises(CheckpointError, match=r"is a str(.|\n)*\['a'\]"):
        checkpoints.save(1, {"a": "text"})
    with pytest.raises(CheckpointError, match=r"is a int(.|\n)*64 bits"):
        checkpoints.save(1, {"a": 1 << 80})
    with pytest.raises(CheckpointError, match=r"no JSON"):
        checkpoints.save(1, {"a": jnp.ones(3)}, extra={"b": jnp.ones(3)})
    with pytest.raises(CheckpointError, match="keep=0"):
        autopar.Checkpoints(tmp_path, keep=0)
    assert not (tmp_path / "run").exists()


def test_an_error_while_writing_is_told_by_who_looks_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    checkpoints = autopar.Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_item", full)
        checkpoints.save(1, jnp.ones(3))
        with pytest.raises(CheckpointError, match=r"step 1 cannot be written(.|\n)*no space left"):
            checkpoints.save(2, jnp.ones(3))
    checkpoints.save(2, jnp.ones(3))
    checkpoints.wait()
    assert checkpoints.steps == (2,)


ENDS_AT_ONCE = """
import os, sys, threading
import jax.numpy as jnp, autopar
from autopar import checkpoint_writing as module
commit, ends = module.commit, threading.Event()
def late(*arguments):
    assert ends.wait(100)
    if "fails" in sys.argv:
        raise OSError("the disk is full")
    commit(*arguments)
module.commit = late
autopar.Checkpoints(sys.argv[1]).save(3, {"w": jnp.arange(3.0)})
threading._register_atexit(ends.set)  # is called before what was registered earlier
if "forks" in sys.argv and os.fork() == 0:
    raise SystemExit(0)  # has no thread that writes
raise SystemExit(7)
"""


@pytest.mark.parametrize("how", ["well", "fails", "forks"])
def test_a_process_that_ends_completes_its_checkpoint(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    arguments = [sys.executable, "-c", ENDS_AT_ONCE, str(folder), how]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, done.stderr
    assert ("the disk is full" in done.stderr) == (how == "fails")
    assert done.stderr.count("step 3") == (how == "fails")
    assert autopar.Checkpoints(folder).steps == (() if how == "fails" else (3,))


def test_without_orbax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(CheckpointError, match=r"need Orbax(.|\n)*pip install 'autopar"):
        autopar.Checkpoints(tmp_path).save(1, jnp.ones(3))


def test_a_state_may_be_consumed_at_once(tmp_path: Path) -> None:
    @autopar.parallelize(method="zero3")
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    w, x = jnp.ones((8, 4)), jnp.ones((16, 8))
    saved = []
    with autopar.Checkpoints(tmp_path) as checkpoints:
        for number in range(1, 4):
            w = step(w, x)
            saved.append(np.array(w))
            checkpoints.save(number, w)
    for number, wanted in enumerate(saved, 1):
        found = checkpoints.restore(w, step=number).state
        assert found.sharding == w.sharding
        np.testing.assert_array_equal(found, wanted)


def test_rows_on_several_stages_for_other_stages(tmp_path: Path) -> None:
    def init() -> Any:
        return {"w": jax.random.normal(jax.random.key(0), (6, 8, 8)) / 4, "b": jnp.zeros((6, 8))}

    x = jax.random.normal(jax.random.key(1), (16, 8))
    shapes = jax.eval_shape(init)

    def compiled(stages: int) -> Any:
        return autopar.compile(
            layers_step,
            shapes,
            x,
            stages=stages,
            microbatches=2,
            cluster=autopar.Cluster.preset("cpu", devices_per_node=2 * stages),
        )

    two, three, one = compiled(2), compiled(3), compiled(1)
    after, _ = two(init(), x)
    assert isinstance(after["w"], SplitArray)
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, after)
        wanted = jax.device_get(after)
        for step in (two, three, one):
            like = step.initialize(init)
            found = checkpoints.restore(like).state
            assert found["w"].sharding.is_equivalent_to(like["w"].sharding, 3)
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), wanted)
            loss = step(found, x)[1]
            np.testing.assert_allclose(loss, two(wanted, x)[1], rtol=1e-5)


# Orbax's reads that are still going on when one has failed end after their loop of events.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_reason_is_told_whatever_file_is_garbled(tmp_path: Path) -> None:
    state = {"w": jnp.arange(2000.0), "none": jnp.zeros((0, 3)), "count": 3}
    with autopar.Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, extra={"position": 70 + step})
    files = [x for x in (tmp_path / "step_00000002").rglob("*") if x.is_file()]
    for file in files:
        content = file.read_bytes()
        for garbled in (b"", b"garbage", b"[]", content[: len(content) // 2]):
            file.write_bytes(garbled)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                found = checkpoints.restore(state, fallback=True)
            np.testing.assert_array_equal(found.state["w"], state["w"])
            text = "".join(str(each.message) for each in told)
            assert ("step 1 is restored" in text) == (found.step == 1)
            assert "AttributeError" not in text, text
        file.write_bytes(content)
    contents = tmp_path / "step_00000002" / "contents.json"
    text = contents.read_text()
    for old, new in (("72", "92"), ('"2"', '"6"'), ("2000", "2001")):
        assert old in text
        contents.write_text(text.replace(old, new))
        with pytest.raises(CheckpointError, match="its checksum differs"):
            checkpoints.restore(state)
    plain = json.loads(text)  # as versions without a checksum wrote it
    del plain["checksum"]
    contents.write_text(json.dumps(plain))
    assert checkpoints.restore(state).extra == {"position": 72}
    contents.write_text(json.dumps(plain).replace('"2"', '"6"'))
    with pytest.raises(CheckpointError, match=r"an array \(6\) is not there"):
        checkpoints.restore(state)
