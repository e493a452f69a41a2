"""Attention by cuDNN is planned where neither a GPU nor cuDNN is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.passes.graph import absent_cudnn
from autopar.passes.graph.absent_cudnn import ASSUMED_CUDNN, answering_for

assert absent_cudnn.ATTENTION is not None
CUDNN: Any = absent_cudnn.ATTENTION


def attended(weights: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("btm,mhd->bthd", x, w) for w in weights)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def train_step(weights: Any, x: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        return jnp.mean(attended(weights, x).astype(jnp.float32) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def shapes(size: int = 64) -> tuple[Any, Any]:
    weight = jax.ShapeDtypeStruct((256, 4, size), jnp.bfloat16)
    return (weight,) * 3, jax.ShapeDtypeStruct((32, 128, 256), jnp.bfloat16)


@pytest.fixture(autouse=True)
def no_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not installed, also where it is."""

    def absent() -> Any:
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(CUDNN, "check_cudnn_version", absent)
    monkeypatch.setattr(CUDNN, "check_compute_capability", lambda least: False)


def test_a_step_is_planned_for_gpus_that_are_elsewhere() -> None:
    plan = autopar.plan(train_step, *shapes(), cluster="8xh100", method="data")
    assert plan.stages[0].num_devices == 8
    assert {x.kind for x in plan.stages[0].collectives} <= {"all-reduce"}, "attention is cut"


@pytest.mark.parametrize("cluster", ["cpu", "1x8 v100", "4 v5e"])
def test_devices_without_it_are_told(cluster: str) -> None:
    asked = autopar.Cluster.preset("cpu") if cluster == "cpu" else cluster
    with pytest.raises(autopar.errors.TraceError, match="devices that have none") as caught:
        autopar.plan(train_step, *shapes(), cluster=asked)
    assert "test_absent_gpus.py" in str(caught.value.where)
    assert "None" in str(caught.value.hint)


def test_larger_heads_need_a_newer_gpu() -> None:
    """JAX allows them from compute capability 9.0 on, which the cluster tells."""
    autopar.plan(train_step, *shapes(256), cluster="8xh100", method="data")
    with pytest.raises(autopar.errors.TraceError, match="head dim must be <= 128"):
        autopar.plan(train_step, *shapes(256), cluster="8xa100", method="data")


def test_shapes_are_found_for_gpus_that_are_elsewhere() -> None:
    with autopar.tracing_for("2x8 h100"):
        found = jax.eval_shape(attended, *shapes())
    assert found.shape == (32, 128, 4, 64)
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        jax.eval_shape(lambda *args: attended(*args), *shapes())  # JAX remembers functions
    for wrong in (8, None):
        with (
            pytest.raises(autopar.errors.OptionError, match="is not possible"),
            autopar.tracing_for(wrong),  # type: ignore[arg-type]
        ):
            pass


def test_sizes_that_it_does_not_take_are_told() -> None:
    with pytest.raises(autopar.errors.TraceError, match="which does not take these") as caught:
        autopar.plan(train_step, *shapes(60), cluster="8xh100")
    assert "multiple of 8" in str(caught.value) and "test_absent_gpus.py" in str(caught.value.where)


def test_outside_jax_answers_as_before() -> None:
    """Also after an error, within itself, and in other threads meanwhile."""
    with pytest.raises(ZeroDivisionError), answering_for(9):
        with answering_for(8):
            assert not CUDNN.check_compute_capability("9.0")
        assert CUDNN.check_compute_capability("9.0")
        assert CUDNN.check_cudnn_version() == ASSUMED_CUDNN
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        CUDNN.check_cudnn_version()


def test_another_thread_neither_waits_nor_is_answered() -> None:
    with autopar.tracing_for("8xh100"), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(CUDNN.check_cudnn_version)
        with pytest.raises(RuntimeError, match="cuDNN is not detected"):
            asked.result(timeout=60)
        plan = pool.submit(autopar.plan, train_step, *shapes(), cluster="8xh100", method="data")
        assert plan.result(timeout=120).stages[0].num_devices == 8


def test_a_gpu_that_is_there_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not wheels alone: they say a release, and of no GPU what it can do."""
    monkeypatch.setattr(CUDNN, "check_cudnn_version", lambda: 90500)
    monkeypatch.setattr(CUDNN, "check_compute_capability", lambda least: least == "8.0")
    with answering_for(9):
        assert CUDNN.check_cudnn_version() == ASSUMED_CUDNN
        assert CUDNN.check_compute_capability("9.0")
    monkeypatch.setattr(absent_cudnn, "has_gpu", lambda: True)
    with answering_for(9):
        assert CUDNN.check_cudnn_version() == 90500
        assert CUDNN.check_compute_capability("8.0")
        assert not CUDNN.check_compute_capability("9.0")


def test_several_clusters_are_traced_for_the_oldest_gpus() -> None:
    with pytest.raises(autopar.errors.TraceError, match="head dim must be <= 128"):
        autopar.scaling(train_step, *shapes(264), clusters=["8xh100", "8xa100"], method="data")
