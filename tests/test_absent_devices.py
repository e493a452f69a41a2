"""Compiling for devices that are given: some of those that are there, and those that are not."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_steps import with_a_table as step

import autopar
from autopar import compiled_only
from autopar.base.compiled_records import ProgramMemory
from autopar.base.errors import DeviceError, OptionError
from autopar.runtime import compiled_pieces

ROWS = jax.ShapeDtypeStruct((16, 8), jnp.float32)
WEIGHTS = {f"layer_{i}": jax.ShapeDtypeStruct((8, 8), jnp.float32) for i in range(4)}


def test_a_step_runs_on_the_devices_that_are_given() -> None:
    devices = jax.devices()[4:]
    made = autopar.compile(step, WEIGHTS, ROWS, devices=devices, method="zero3", microbatches=1)
    weights = {name: jnp.full((8, 8), 0.1) for name in WEIGHTS}
    rows = jnp.ones((16, 8))
    expected, loss = jax.jit(step)(weights, rows)
    found, found_loss = made(weights, rows)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
    assert found["layer_0"].sharding.device_set == set(devices)
    assert made.plan.stages[0].num_devices == 4
    memory = made.memory()["step"]
    analysis = made.memory_analysis()
    assert memory.arguments == analysis.argument_size_in_bytes
    assert memory.total == memory.arguments + memory.outputs - memory.aliased + memory.temporaries
    assert made.cost()["step"]["flops"] > 0
    assert made.hlo() == made.as_text()
    with pytest.raises(OptionError, match="no stage 1"):
        made.hlo(1)


@pytest.mark.parametrize("devices", [[], ["cpu:0"], 2, 2 * jax.devices()[:1]])
def test_what_is_no_device_is_refused(devices: Any) -> None:
    with pytest.raises(OptionError, match="devices="):
        autopar.compile(step, WEIGHTS, ROWS, devices=devices)


def test_too_few_devices_are_refused_before_planning() -> None:
    with pytest.raises(DeviceError, match="8 devices, and 2 are given"):
        autopar.compile(step, WEIGHTS, ROWS, cluster="8xh100", devices=jax.devices()[:2])


def refuses_all(made: Any) -> None:
    with pytest.raises(DeviceError, match="cannot run"):
        made({name: jnp.zeros((8, 8)) for name in WEIGHTS}, jnp.ones((16, 8)))
    for refused in (
        lambda: made.initialize(lambda: None),
        lambda: made.profile(WEIGHTS, ROWS),
        lambda: made.gather({}),
        lambda: made.apply(lambda x: x, {}),
    ):
        with pytest.raises(DeviceError, match="devices are not there"):
            refused()


def test_a_pipeline_for_absent_devices_compiles_every_distinct_piece_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (compiled_only, compiled_pieces):
        monkeypatch.setattr(module, "is_absent", lambda device: True)
    put: list[Any] = []
    monkeypatch.setattr(jax, "device_put", lambda *args, **kwargs: put.append(args))
    made = autopar.compile(
        step,
        WEIGHTS,
        ROWS,
        devices=jax.devices(),
        method="data",
        stages=4,
        microbatches=2,
        schedule="gpipe",
    )
    assert put == [], "constants travel as shapes"
    memory = made.memory()
    assert {"F0", "B0", "F3", "B3"} <= set(memory)
    assert memory["F1"] == memory["F2"]
    assert set(map(type, memory.values())) == {ProgramMemory}
    variants = made._compiled.variants
    assert len(set(map(id, variants.values()))) < len(variants)
    assert "// piece F1\n" in made.hlo(1) and "// piece F2\n" not in made.hlo(1)
    assert made.in_shardings[0]["layer_0"].mesh.size == 2
    refuses_all(made)


def test_absent_devices_call_nobody_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX compiles no callback for devices whose hosts are not there."""

    def told(weights: Any, rows: Any) -> Any:
        new, loss = step(weights, rows)
        jax.debug.print("loss {loss}", loss=loss)
        kind = jax.ShapeDtypeStruct(loss.shape, loss.dtype)
        return new, jax.pure_callback(np.asarray, kind, loss)

    options: Any = {"devices": jax.devices(), "method": "data", "microbatches": 1}
    assert "callback" in autopar.compile(told, WEIGHTS, ROWS, **options).hlo()
    for module in (compiled_only, compiled_pieces):
        monkeypatch.setattr(module, "is_absent", lambda device: True)
    assert "callback" not in autopar.compile(told, WEIGHTS, ROWS, **options).hlo()


GPU = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 core_count: 132
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3350000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 80000000000 shared_memory_per_block_optin: 232448 fpus_per_core: 128
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def topology(kind: str) -> Any:
    from jax.experimental import topologies

    if kind == "gpu":
        if importlib.util.find_spec("jax_cuda12_plugin") is None:
            pytest.skip("needs the wheel jax-cuda12-plugin")
        return topologies.get_topology_desc(
            "h100", "cuda", target_config=GPU, topology="1x1x8"
        ).devices
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the wheel libtpu")
    return topologies.get_topology_desc("v5e:2x4", "tpu").devices


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_the_compilers_of_accelerators_say_what_they_make(kind: str) -> None:
    devices = topology(kind)
    cluster = autopar.Cluster.local(devices)
    assert (cluster.num_nodes, cluster.devices_per_node) == (1, 8)
    assert (
        cluster.device.memory_bytes
        == autopar.Cluster.preset({"gpu": "h100", "tpu": "tpu-v5e"}[kind]).device.memory_bytes
    )
    made = autopar.compile(step, WEIGHTS, ROWS, devices=devices, method="zero3", microbatches=1)
    assert made.memory()["step"].arguments >= 4 * 8 * 8 * 4 / 8
    assert "all-gather" in made.hlo()
    refuses_all(made)
    # A TPU has four chips for a process; nothing runs, so stages may lie on those of several.
    two = autopar.compile(step, WEIGHTS, ROWS, devices=devices, stages=2, microbatches=2)
    assert len(two.plan.stages) == 2 and two.memory()
