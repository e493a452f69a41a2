"""Our kernels for grouped products in whole plans, with matrices that lie as they were gathered."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.errors import AutoparError
from autopar.passes.primitives.group_kernels import KernelTiles
from autopar.passes.primitives.group_tiling import GroupedMeans
from autopar.passes.sharding.compiler_rules import CPU, RULES
from autopar.passes.sharding.kernel_orders import gathered_for_kernels, orders_of_sums
from autopar.runtime.verification.targets import target_named

LAYERS, EXPERTS, WIDTH, INNER, BATCH, LENGTH = 2, 4, 16, 32, 8, 6
SHAPES = {
    "router": (LAYERS, WIDTH, EXPERTS),
    "in": (LAYERS, EXPERTS, WIDTH, INNER),
    "out": (LAYERS, EXPERTS, INNER, WIDTH),
}


def train_step(weights: Any, x: Any) -> Any:
    """A layer of experts, or a scan of them, computed again; rows are sorted over the batch."""

    def layer(x: Any, row: Any) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        choice = jnp.argmax(rows.astype(jnp.float32) @ row["router"], axis=-1)
        order = jnp.argsort(choice)
        sizes = jnp.bincount(choice, length=row["router"].shape[-1])
        inside, out = row["in"], row["out"]
        made = jax.lax.ragged_dot(
            jnp.tanh(jax.lax.ragged_dot(rows[order], inside, sizes)), out, sizes
        )
        return x + made[jnp.argsort(order)].reshape(x.shape), None

    def loss_fn(weights: Any) -> Any:
        short = {k: w if k == "router" else w.astype(jnp.bfloat16) for k, w in weights.items()}
        y = x.astype(jnp.bfloat16)
        if weights["in"].ndim == 3:
            y, _ = jax.checkpoint(layer)(y, short)
        else:
            y, _ = jax.lax.scan(jax.checkpoint(layer), y, short)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def arguments() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    weights = {k: (0.3 * random.normal(size=s)).astype(np.float32) for k, s in SHAPES.items()}
    return weights, random.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch, small_trials: None) -> dict[str, int]:
    """CPUs have our kernels, as programs; what has another order in memory is counted."""
    grouped = GroupedMeans(tiles=KernelTiles(16, 16, 16, 4, 3, 2, 0.5), interpret=True)
    rules = dataclasses.replace(RULES[CPU], turns_gathers=True, grouped=grouped)
    monkeypatch.setitem(RULES, CPU, rules)
    noted = {"gathered": 0, "sums": 0}

    def noting(name: str, find: Any) -> Any:
        def counted(*given: Any) -> Any:
            found = find(*given)
            noted[name] += len(found)
            return found

        return counted

    spmd = "autopar.runtime.spmd"
    monkeypatch.setattr(f"{spmd}.gathered_for_kernels", noting("gathered", gathered_for_kernels))
    monkeypatch.setattr(f"{spmd}.orders_of_sums", noting("sums", orders_of_sums))
    return noted


@pytest.mark.parametrize("cut", [1, 2, 3], ids=lambda dim: f"cut along {dim}")
@pytest.mark.parametrize("form", ["scan", "scan in microbatches", "one layer"])
def test_the_numbers_are_those_of_the_plain_step(
    with_kernels: dict[str, int], cut: int, form: str
) -> None:
    weights, x = arguments()
    if form == "one layer":
        weights = {name: array[0] for name, array in weights.items()}
    spec: list[Any] = [None] * weights["in"].ndim
    spec[cut - (form == "one layer")] = "x"
    step = autopar.compile(
        train_step,
        weights,
        x,
        method="zero3",
        microbatches=2 if form == "scan in microbatches" else 1,
        pins={"*/in": tuple(spec), "*/out": tuple(spec)},
        devices=jax.devices()[:4],
    )
    wanted, found = jax.jit(train_step)(weights, x), step(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2), found, wanted)
    across = cut > 1 and form == "one layer"
    assert bool(with_kernels["gathered"]) == bool(with_kernels["sums"]) == across


@pytest.mark.parametrize("gpu", ["h100", "a100"])
@pytest.mark.parametrize("cut", [1, 2, 3], ids=lambda dim: f"cut along {dim}")
def test_compilers_of_gpus_take_the_kernels(gpu: str, cut: int) -> None:
    """In as much memory as planned: nothing is copied into another order."""
    try:
        target_named(f"gpu:{gpu}").require(8)
    except AutoparError:
        pytest.skip("its compiler is not installed")
    large = {"router": (LAYERS, 512, 16), "in": (LAYERS, 16, 512, 1024)}
    large["out"] = (LAYERS, 16, 1024, 512)
    weights = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in large.items()}
    x = jax.ShapeDtypeStruct((64, 128, 512), jnp.float32)
    spec: list[Any] = [None] * 4
    spec[cut] = "x"
    pins = {"*/in": tuple(spec), "*/out": tuple(spec)}
    plan = autopar.plan(train_step, weights, x, cluster=f"8x{gpu}", method="zero3", pins=pins)
    made = plan.verify(f"gpu:{gpu}", cache=False, processes=1)
    assert not made.failures
    (stage,) = made.stages
    assert stage.compiled_bytes and stage.planned_bytes > 0.97 * stage.compiled_bytes
