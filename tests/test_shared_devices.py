"""Stages of a pipeline on the same devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.cluster import Cluster
from autopar.base.errors import DeviceError, OptionError

BATCH = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)


def make() -> Any:
    keys = jax.random.split(jax.random.key(0), 4)
    # Both ends read the first, as tied embeddings are.
    return {"w": [jax.random.normal(key, (32, 32)) / 6 for key in keys], "seen": jnp.int32(0)}


def step(state: Any, x: Any) -> tuple[Any, Any]:
    def loss(w: Any) -> Any:
        h = x
        for one in (*w, w[0]):
            h = jnp.tanh(h @ one)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(state["w"])
    new = jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], grads)
    return {"w": new, "seen": state["seen"] + 1}, value


def devices(*numbers: int) -> list[Any]:
    return [jax.devices()[n] for n in numbers]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ((0, 0), {"stages": 2}),
        ((1, 1, 1, 1), {"stages": 4, "schedule": "gpipe"}),
        ((0, 0), {"stages": 2, "num_chunks": 2}),
        ((0, 1, 0, 1), {"stages": 2}),
        ((0, 1, 1, 0), {"stages": 2}),
    ],
)
def test_stages_share_devices(given: Sequence[int], options: Any) -> None:
    compiled = autopar.compile(
        step,
        jax.eval_shape(make),
        BATCH,
        devices=devices(*given),
        microbatches=4,
        progress=False,
        **options,
    )
    assert len(compiled.plan.stages) > 1
    plain, state, wanted = jax.jit(step), compiled.initialize(make), make()
    for _ in range(3):  # what a step takes over is not what the next one reads
        state, found = compiled(state, BATCH)
        wanted, value = plain(wanted, BATCH)
        np.testing.assert_allclose(found, value, rtol=1e-5)
    assert compiled.gather(state["seen"]) == 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, wanted)
    total = compiled.apply(lambda s: sum(jnp.sum(w**2) for w in s["w"]), state)
    np.testing.assert_allclose(total, sum(np.sum(np.square(w)) for w in wanted["w"]), rtol=1e-5)
    used = {d for leaf in jax.tree.leaves(state) for d in leaf.sharding.device_set}
    assert used == set(devices(*given))


def test_a_mesh_has_a_device_once() -> None:
    arguments: Any = (step, jax.eval_shape(make), BATCH)
    with pytest.raises(OptionError, match="is there 2 times"):
        autopar.compile(*arguments, devices=devices(0, 0))
    with pytest.raises(OptionError, match="is there 2 times"):
        autopar.compile(*arguments, devices=devices(0, 0, 1), stages=3)
    with pytest.raises(DeviceError, match=r"Mesh 0 of the plan would have .* twice"):
        autopar.compile(
            *arguments, devices=devices(0, 0, 1, 1), stages=2, microbatches=4, progress=False
        )


def test_a_device_that_stages_share_is_planned_in_parts() -> None:
    class Device:
        platform, device_kind, process_index = "gpu", "NVIDIA H100 80GB HBM3", 0

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 60_000_000_000}

    device = Device()
    whole, half = Cluster.local([device]), Cluster.local([device, device])
    assert half.num_devices == 2
    assert half.device.memory_bytes == 30_000_000_000
    assert half.device.memory_bandwidth == whole.device.memory_bandwidth / 2
    assert half.device.peak_flops == {k: v / 2 for k, v in whole.device.peak_flops.items()}
