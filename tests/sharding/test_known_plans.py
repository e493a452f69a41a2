"""Plans that engineers make by hand are what the search finds, at the sizes where they pay."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.base.cluster import Cluster
from sharding.layers import mixture, mixture_shapes, norm
from sharding.steps import shaped

H100 = Cluster.preset("dgx-h100")


def planned(loss: Any, weights: Any, *batch: int, cluster: Cluster = H100) -> autopar.Plan:
    """The plan of a step of gradient descent on eight devices."""

    def step(weights: Any, x: Any) -> Any:
        gradients = jax.grad(lambda w: (loss(w, x).astype(jnp.float32) ** 2).mean())(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients)

    x = shaped(*batch, dtype=jnp.bfloat16)
    return autopar.plan(
        step, weights, x, cluster=cluster, logical_mesh=(8,), microbatches=1, stages=1
    )


def block(weights: Any, x: Any) -> Any:
    """Two layers' feed-forward parts, with their norms and residuals."""
    for layer in weights:
        up, down = (layer[name].astype(x.dtype) for name in ("up", "down"))
        x = x + jax.nn.gelu(norm(x, layer["scale"]) @ up) @ down
    return x


def test_megatron_with_its_sequence_parallelism() -> None:
    """Columns, then rows of the weights are cut; norms and residuals along the sequence."""
    width = 8192
    layer = {"scale": (width,), "up": (width, 4 * width), "down": (4 * width, width)}
    weights = [{name: shaped(*shape) for name, shape in layer.items()} for _ in range(2)]
    # It pays where what is not a product, and what is fused of it, takes its time.
    slow = dataclasses.replace(H100.device, memory_bandwidth=H100.device.memory_bandwidth / 4)
    cluster = dataclasses.replace(H100, device=slow)
    plan = planned(block, weights, 1, 2048, width, cluster=cluster)
    specs = {t.path.split("'")[1]: t.spec for t in plan.inputs if "[" in t.path}
    assert specs["up"] == ((), ("x",)) and specs["down"] == (("x",), ())
    (stage,) = plan.stages
    large = [c for c in stage.collectives if c.bytes >= 2 * 2048 * width]
    assert {c.kind for c in large} == {"all-gather", "reduce-scatter"}
    assert not any(c.bytes >= 4 * width * width for c in large)  # no weight is moved


@pytest.mark.parametrize(("experts", "width", "hidden"), [(8, 4096, 14336), (64, 2048, 2048)])
def test_expert_parallelism(experts: int, width: int, hidden: int) -> None:
    """Experts and batch are cut by the same devices; tokens go to experts and back."""
    tokens, weights = 2048, mixture_shapes(experts, width, hidden)
    plan = planned(mixture, weights, 16, tokens, width)
    specs = {t.path: t.spec for t in plan.inputs}
    cut_first = (("x",), (), ())
    assert list(specs.values()).count(cut_first) == 3  # both weights and the batch
    large = Counter(c.kind for c in plan.stages[0].collectives if c.bytes > 2**20)
    assert set(large) == {"all-to-all"}
