"""`jax.shard_map` inside a step: what it computes on the user's mesh, planned as all else is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from plain_jit import equals_plain_jit

import autopar

RANDOM = np.random.default_rng(0)
PARAMS = [RANDOM.normal(size=(8, 8)).astype(np.float32) / 3 for _ in range(2)]
X = RANDOM.normal(size=(64, 8)).astype(np.float32)
ROWS, COLUMNS, SAME = P("data"), P(None, "model"), P()


def user_mesh(axis_type: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes))


ONE, TWO = user_mesh(data=8), user_mesh(data=4, model=2)


def mapped(
    body: Callable[..., Any], specs: tuple[P, ...], out: P = ROWS, mesh: Any = TWO, **options: Any
) -> Callable[..., Any]:
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, **options)


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) + jnp.zeros((x.shape[0], 1))


def normalized(x: Any, w: Any) -> Any:
    y = x @ w
    return (y - lax.pmean(y.mean(0), "data")) * lax.axis_index("data")


def ring(x: Any, w: Any) -> Any:
    def body(carry: tuple[Any, Any], _: None) -> Any:
        x, y = carry
        x = lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])
        return (x, y + jnp.tanh(x @ w)), None

    return lax.scan(body, (x, jnp.zeros_like(x)), None, length=4)[0][1]


def counted(x: Any, w: Any) -> Any:
    """What devices exchange inside of a loop, of a value that is the same on all."""
    ones = lax.fori_loop(0, 3, lambda _, n: lax.psum(n, "data") / 2, jnp.float32(1))
    return jnp.tanh(x @ w) * ones


def over_both(x: Any, w: Any) -> Any:
    """Sums and statistics over rows of a device and over devices, as one collective."""

    def row(x: Any) -> Any:
        y, axes = x @ w, ("rows", "data")
        most = lax.pmax(lax.stop_gradient(y), axes)
        return (y - lax.pmean(y, axes)) * lax.psum(y, "rows") + most

    return jax.vmap(row, axis_name="rows")(x)


def scattered(x: Any, w: Any) -> Any:
    parts = lax.psum_scatter(x @ w, "model", scatter_dimension=1, tiled=True)
    return lax.all_gather(jnp.tanh(parts), "model", axis=1, tiled=True)


def exchanged(x: Any, w: Any) -> Any:
    x = lax.all_to_all(x.reshape(4, -1, 8), "data", 0, 0)
    return lax.all_to_all(jnp.tanh(x @ w), "data", 0, 0).reshape(-1, 8)


def noisy(x: Any, w: Any) -> Any:
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ w, 0)


def megatron(x: Any, w: Any, v: Any) -> Any:
    return lax.psum(jnp.tanh(x @ w) @ v, "model")


LOCAL: dict[str, Callable[[Any, Any], Any]] = {
    "a device each": mapped(layer, (ROWS, SAME), mesh=ONE),
    "fewer blocks than devices": mapped(layer, (ROWS, SAME)),
    "two axes": mapped(layer, (P(("data", "model")), SAME), P(("data", "model"))),
    "some axes": jax.jit(mapped(layer, (ROWS, SAME), axis_names={"data"})),
    "columns and rows": lambda x, w: mapped(megatron, (ROWS, COLUMNS, P("model")))(x, w, w.T),
    "a loss": lambda x, w: mapped(
        lambda x, w: lax.pmean(layer(x, w).mean(), "data"), (ROWS, SAME), SAME
    )(x, w),
    "not checked": mapped(scattered, (P("data", "model"), P("model")), check_vma=False),
    "a table": lambda x, w: mapped(
        jax.jit(lambda x, w: layer(x, w * jnp.asarray(PARAMS[0]))), (ROWS, SAME)
    )(x, w),
}
"""Bodies that do not ask for rows of other devices: as whole arrays, they need no dimension."""
BY_BLOCKS: dict[str, Callable[[Any, Any], Any]] = {
    "in a loop": mapped(counted, (ROWS, SAME), check_vma=False),
    "statistics": mapped(normalized, (ROWS, SAME)),
    "rows and devices": mapped(over_both, (ROWS, SAME), check_vma=False),
    "a ring": mapped(ring, (ROWS, SAME)),
    "all to all": mapped(exchanged, (ROWS, SAME)),
    "noise": mapped(noisy, (ROWS, SAME)),
}


def step_with(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean(function(jnp.tanh(x @ params[0]), params[1]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), value

    return step


@pytest.mark.parametrize("name", LOCAL)
def test_rows_stay_on_their_devices(name: str) -> None:
    compiled = equals_plain_jit(step_with(LOCAL[name]), PARAMS, X, method="data", microbatches=1)
    (stage,) = compiled.plan.stages
    assert {c.kind for c in stage.collectives} == {"all-reduce"}, compiled.plan
    assert sum(c.bytes for c in stage.collectives) <= 2 * PARAMS[0].nbytes + 256


@pytest.mark.parametrize(
    "options", [{"microbatches": 4}, {"microbatches": 4, "stages": 2}], ids=str
)
@pytest.mark.parametrize("name", ["fewer blocks than devices", "columns and rows"])
def test_rows_in_microbatches_and_stages(name: str, options: dict[str, Any]) -> None:
    equals_plain_jit(step_with(LOCAL[name]), PARAMS, X, **options)


def test_each_microbatch_is_cut_over_all_devices() -> None:
    options: dict[str, Any] = {"method": "data", "microbatches": 4}
    compiled = equals_plain_jit(step_with(LOCAL["fewer blocks than devices"]), PARAMS, X, **options)
    (stage,) = compiled.plan.stages
    assert {(c.kind, c.times) for c in stage.collectives} == {("all-reduce", 1)}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", BY_BLOCKS)
def test_what_devices_exchange_is_computed(name: str, microbatches: int) -> None:
    equals_plain_jit(step_with(BY_BLOCKS[name]), PARAMS, X, microbatches=microbatches)


@pytest.mark.parametrize("remat", [False, True])
def test_in_a_scan_over_layers(remat: bool) -> None:
    def stack(x: Any, w: Any) -> Any:
        body = lambda x, w: (LOCAL["fewer blocks than devices"](x, w), None)  # noqa: E731
        return lax.scan(jax.checkpoint(body) if remat else body, x, jnp.stack([w, 2 * w]))[0]

    equals_plain_jit(step_with(stack), PARAMS, X, microbatches=2)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_on_the_mesh_of_the_context(axis_type: AxisType) -> None:
    with jax.set_mesh(user_mesh(axis_type, data=4, model=2)):

        def function(x: Any, w: Any) -> Any:  # a shard_map keeps the mesh of its first call
            x = jax.sharding.reshard(x, ROWS) if axis_type == AxisType.Explicit else x
            return mapped(layer, (ROWS, SAME), mesh=None)(x, w)

        equals_plain_jit(step_with(function), PARAMS, X)


def of_groups(x: Any, w: Any) -> Any:
    groups = [[0, 1], [2, 3]]
    return layer(x, w) + lax.psum(x.sum(), "data", axis_index_groups=groups)


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "groups": (mapped(of_groups, (ROWS, SAME), check_vma=False), "axis_index_groups"),
    "to some": (
        mapped(lambda x, w: lax.ppermute(layer(x, w), "data", [(0, 1)]), (ROWS, SAME)),
        "Permutation",
    ),
    "pmap": (
        lambda x, w: jax.pmap(layer, in_axes=(0, None))(x.reshape(8, 8, 8), w),
        "here the plan decides",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_at_its_line(name: str) -> None:
    function, why = REFUSED[name]
    with pytest.raises(autopar.errors.TraceError, match=r"jax\.shard_map") as caught:
        autopar.plan(step_with(function), PARAMS, X)
    told = " ".join(str(caught.value).split())
    assert why in told and "test_shard_maps.py:" in told and "autopar.local" in told


def test_a_step_that_is_itself_a_pmap_is_refused_where_it_is_defined() -> None:
    with pytest.raises(autopar.errors.TraceError, match=r"jax\.pmap") as caught:
        autopar.plan(jax.pmap(layer, in_axes=(0, None)), X.reshape(8, 8, 8), PARAMS[0])
    assert "test_shard_maps.py:" in str(caught.value.where)


def test_rows_that_devices_exchange_are_refused_in_microbatches_at_their_line() -> None:
    """What puts the parts of all devices together is the user's line, too."""

    def body(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) * (1 + lax.axis_index("data"))

    exchanged = mapped(body, (ROWS, SAME), mesh=ONE)
    with pytest.raises(autopar.errors.InexactMicrobatchError) as caught:
        autopar.plan(step_with(exchanged), PARAMS, X, microbatches=16)
    assert "test_shard_maps.py:" in str(caught.value.where)


def test_what_a_body_prints(capfd: pytest.CaptureFixture[str]) -> None:
    def body(x: Any, w: Any) -> Any:
        jax.debug.print("rows {}", x.shape[0] + w[0, 0])
        return layer(x, w)

    with contextlib.suppress(autopar.errors.UnknownPrimitiveWarning):
        equals_plain_jit(step_with(mapped(body, (ROWS, SAME), check_vma=False)), PARAMS, X)
    jax.effects_barrier()
    assert "rows" in capfd.readouterr().out
