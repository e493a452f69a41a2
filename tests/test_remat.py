"""Rematerialization costs no communication: plans with `jax.checkpoint` against those without."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar

WIDTH, HEADS, LAYERS, VOCABULARY = 32, 2, 2, 64
CLUSTER = autopar.Cluster.preset("dgx-h100")
MEGATRON = {"*qkv": (None, "y"), "*out": ("y",), "*up": (None, "y"), "*down": ("y",)}

_policies = jax.checkpoint_policies
REMAT: dict[str, Callable[..., Any]] = {
    "none": lambda function: function,
    "full": jax.checkpoint,
    "dots_saveable": functools.partial(jax.checkpoint, policy=_policies.dots_saveable),
    "names": functools.partial(jax.checkpoint, policy=_policies.save_only_these_names("attention")),
    "offload": functools.partial(
        jax.checkpoint,
        policy=_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["attention"],
            names_which_can_be_offloaded=["up"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
}


def layer(params: Any, x: Any) -> Any:
    """A transformer's layer; its mask is made inside, from nothing."""
    width = x.shape[-1]
    y = x * params["scale"] @ params["qkv"]
    q, k, v = jnp.split(y.reshape(*x.shape[:2], HEADS, 3 * width // HEADS), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / width**0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(x.shape)
    x = x + checkpoint_name(y @ params["out"], "attention")
    return x + jax.nn.gelu(checkpoint_name(x @ params["up"], "up")) @ params["down"]


def head_loss(params: Any, x: Any, targets: Any) -> Any:
    logits = jax.nn.log_softmax(x @ params)
    return -jnp.mean(jnp.take_along_axis(logits, targets[..., None], -1))


def step_of(remat: str, scan: bool) -> Callable[..., Any]:
    """A GPT's step with momentum; the head is rematerialized as well."""
    block, head = REMAT[remat](layer), REMAT[remat](head_loss)

    def loss_fn(params: Any, tokens: Any, targets: Any) -> Any:
        x = params["embed"][tokens]
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = block(p, x)
        return head(params["head"], x, targets)

    def step(state: Any, batch: Any) -> Any:
        params, velocity = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        return (jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity), loss

    return step


def shapes_of(
    scan: bool, layers: int = LAYERS, width: int = WIDTH, batch: int = 32, length: int = 16
) -> tuple[Any, Any]:
    def shaped(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def block(*lead: int) -> Any:
        return {
            "scale": shaped(*lead, width),
            "qkv": shaped(*lead, width, 3 * width),
            "out": shaped(*lead, width, width),
            "up": shaped(*lead, width, 4 * width),
            "down": shaped(*lead, 4 * width, width),
        }

    params = {
        "embed": shaped(VOCABULARY, width),
        "layers": block(layers) if scan else [block() for _ in range(layers)],
        "head": shaped(width, VOCABULARY),
    }
    tokens = shaped(batch, length, dtype=jnp.int32)
    return (params, params), (tokens, tokens)


def values_of(shapes: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(
            rng.integers(0, VOCABULARY, x.shape)
            if x.dtype == jnp.int32
            else rng.normal(size=x.shape) / 8,
            x.dtype,
        ),
        shapes,
    )


def moved(plan: autopar.Plan) -> Counter[tuple[str, str]]:
    """Bytes a step by kind and purpose, small ones left out: scales' gradients."""
    found: Counter[tuple[str, str]] = Counter()
    for item in (item for stage in plan.stages for item in stage.collectives):
        if item.bytes > 256:
            found[item.kind, item.purpose] += item.bytes * item.times
    return found


def places() -> Iterator[Any]:
    """Microbatches and stages, methods, and forms of the layers; by default every two of them."""
    turns = itertools.product(
        enumerate([(1, 1), (4, 1), (4, 2)]), enumerate(["data", "zero3"]), [False, True]
    )
    for (place, counts), (turn, method), scan in turns:
        marks = pytest.mark.full if (place + turn + scan) % 2 else ()
        name = f"{counts[0]}-{counts[1]}-{method}-{'scan' if scan else 'unrolled'}"
        yield pytest.param(*counts, method, scan, id=name, marks=marks)


@pytest.mark.parametrize(("microbatches", "stages", "method", "scan"), list(places()))
def test_remat_adds_no_collective(method: str, scan: bool, microbatches: int, stages: int) -> None:
    """But those of weights, which ZeRO-3 gathers for every time that they are used."""

    def planned(remat: str) -> Counter[tuple[str, str]]:
        plan = autopar.plan(
            step_of(remat, scan), *shapes_of(scan), cluster=CLUSTER,
            method=method, microbatches=microbatches, stages=stages,
        )  # fmt: skip
        return moved(plan)

    expected = planned("none")
    weights = expected["all-gather", "parameter"]
    for remat in ("full", "offload") if stages > 1 else REMAT:
        found = planned(remat)
        assert found["all-gather", "parameter"] <= 2 * weights
        found["all-gather", "parameter"] = weights
        assert found == expected, remat


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_tensor_parallelism_adds_what_the_second_forward_pass_needs(scan: bool) -> None:
    """Of Megatron's all-reduces a layer, that after attention; that of the layer's end is dead."""
    pins = {path: (None, *cut) if scan else cut for path, cut in MEGATRON.items()}
    arguments = shapes_of(scan, width=1024, batch=8, length=256)

    def planned(remat: str) -> autopar.Plan:
        return autopar.plan(
            step_of(remat, scan), *arguments, cluster=CLUSTER, pins=pins,
            logical_mesh=(4, 2), microbatches=1, stages=1,
        )  # fmt: skip

    def bytes_of(plan: autopar.Plan) -> int:
        return sum(size for (_, purpose), size in moved(plan).items() if purpose == "activation")

    expected = planned("none")
    activation = 4 * 8 * 256 * 1024 // 4  # bytes on one device, cut along the batch
    for remat in ("full", "names"):
        found = planned(remat)
        assert bytes_of(found) <= bytes_of(expected) + LAYERS * activation, remat
        # How buffers fall into holes of the memory differs by less than a part of a hundred.
        most = 1.01 * expected.stages[0].peak_bytes_per_device
        assert found.stages[0].peak_bytes_per_device <= most, remat


def test_no_plan_depends_on_where_variables_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables hash by their addresses, which decide the order of sets of them."""
    arguments = shapes_of(False, width=1024, batch=8, length=256)

    def planned(salt: int) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(jax.extend.core.Var, "__hash__", lambda var: hash((id(var), salt)))
            return autopar.plan(
                step_of("names", False), *arguments, cluster=CLUSTER, pins=MEGATRON,
                logical_mesh=(4, 2), microbatches=1, stages=1,
            ).to_json()  # fmt: skip

    first = planned(0)
    assert [planned(salt) == first for salt in range(1, 6)] == [True] * 5


@pytest.mark.parametrize("remat", ["full", "names", "offload"])
@pytest.mark.parametrize(
    ("scan", "options"),
    [
        (False, {"method": "zero3", "microbatches": 2}),
        (False, {"stages": 2, "microbatches": 4, "schedule": "1f1b"}),
        (True, {"method": "data", "microbatches": 2}),
    ],
    ids=["zero3", "stages", "scan"],
)
def test_numbers_stay(remat: str, scan: bool, options: dict[str, Any]) -> None:
    state, batch = values_of(shapes_of(scan))
    expected = jax.jit(step_of("none", scan))(state, batch)
    found = autopar.compile(step_of(remat, scan), state, batch, donate_argnums=(), **options)(
        state, batch
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_compiled_step_needs_less_memory() -> None:
    """Layers are a scan here: XLA's CPU compiler merges what unrolled layers compute again."""
    arguments = shapes_of(True, layers=4, batch=16, length=64)

    def temporary_bytes(remat: str) -> int:
        step = autopar.compile(step_of(remat, True), *arguments, method="data", microbatches=1)
        return step.memory_analysis().temp_size_in_bytes

    assert temporary_bytes("full") < 0.6 * temporary_bytes("none")
