"""Casts in a scan's body are made before it, of the stack, so that narrow numbers are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.passes.graph.casts_ahead import with_casts_ahead
from autopar.passes.graph.graph import check, inner_jaxprs
from autopar.passes.trace.trace import trace

LAYERS, WIDTH, HIDDEN, BATCH = 4, 64, 128, 32
STACKED = 2 * LAYERS * WIDTH * HIDDEN * 2  # bytes of "up" and "down" in bfloat16


def block(x: Any, params: Any) -> Any:
    """A layer as MaxText has it: bfloat16 but for the norm and the residual stream's sums."""
    half = jnp.bfloat16
    norm = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)
    h = (x.astype(jnp.float32) * norm * params["scale"]).astype(half)
    h = jax.nn.gelu(h @ params["up"].astype(half) + params["bias"].astype(half))
    return x + h @ params["down"].astype(half), None


def step_of(remat: bool) -> Callable[..., Any]:
    body = jax.checkpoint(block) if remat else block

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        h = x.astype(jnp.bfloat16) @ params["embed"].astype(jnp.bfloat16)
        h, _ = jax.lax.scan(body, h, params["layers"])
        return jnp.mean(jnp.square(h.astype(jnp.float32) - y))

    def step(params: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def arguments() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, jnp.float32)

    layers = {
        "scale": 1 + normal(LAYERS, WIDTH),
        "up": normal(LAYERS, WIDTH, HIDDEN),
        "bias": normal(LAYERS, HIDDEN),
        "down": normal(LAYERS, HIDDEN, WIDTH),
    }
    params = {"embed": normal(WIDTH, WIDTH), "layers": layers}
    return params, normal(BATCH, WIDTH), normal(BATCH, WIDTH)


def converts(jaxpr: Any, inside: bool = False) -> list[tuple[bool, tuple[int, ...]]]:
    """Casts from float32 to bfloat16: whether in a body, and of which shape."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type":
            types = (str(eqn.invars[0].aval.dtype), str(eqn.outvars[0].aval.dtype))
            if types == ("float32", "bfloat16"):
                found.append((inside, eqn.outvars[0].aval.shape))
        for body in inner_jaxprs(eqn):
            found += converts(body, inside=True)
    return found


@pytest.mark.parametrize("remat", [False, True])
def test_casts_of_slices_are_made_of_the_stack_once(remat: bool) -> None:
    graph = trace(step_of(remat), arguments(), batch_argnums=(1, 2)).graph
    ahead = with_casts_ahead(graph)
    check(ahead)
    weights = {(WIDTH, HIDDEN), (HIDDEN, WIDTH), (HIDDEN,)}
    assert weights <= {shape for inside, shape in converts(graph.jaxpr) if inside}
    casts = converts(ahead.jaxpr)
    assert not weights & {shape for inside, shape in casts if inside}
    for shape in weights:  # one cast for the forward and the backward scan
        assert casts.count((False, (LAYERS, *shape))) == 1
    expected, found = (
        jax.jit(jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(g.jaxpr, ())))(
            *jax.tree.leaves(arguments()), *g.constants
        )
        for g in (graph, ahead)
    )
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_the_body_also_reads_as_it_is_stays() -> None:
    def step(params: Any, x: Any) -> Any:
        def body(h: Any, w: Any) -> Any:
            h = h @ w.astype(jnp.bfloat16)
            return (h.astype(jnp.float32) + jnp.sum(w)).astype(jnp.bfloat16), None

        def loss_fn(params: Any) -> Any:
            return jnp.mean(jax.lax.scan(body, x, params)[0].astype(jnp.float32))

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_fn)(params))

    shapes = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), "bfloat16")
    graph = trace(step, shapes, batch_argnums=(1,)).graph
    assert with_casts_ahead(graph) is graph


def test_a_weight_that_all_layers_share_is_cast_once_also_through_two_loops() -> None:
    def step(params: Any, x: Any) -> Any:
        def inner(h: Any, _: Any) -> Any:
            return jnp.tanh(h @ params["w"].astype(jnp.bfloat16)), None

        def outer(h: Any, w: Any) -> Any:
            h = h @ w.T.astype(jnp.bfloat16)
            return jax.lax.scan(inner, h, None, length=2)[0], None

        return params, jnp.sum(jax.lax.scan(outer, x, params["stack"])[0].astype(jnp.float32))

    params = {"w": jnp.ones((8, 8)), "stack": jnp.ones((3, 8, 8))}
    graph = with_casts_ahead(trace(step, (params, jnp.ones((16, 8), "bfloat16"))).graph)
    check(graph)
    assert converts(graph.jaxpr) == [(False, (8, 8)), (False, (3, 8, 8))]


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_zero3_gathers_what_was_cast(remat: bool, microbatches: int) -> None:
    step, args = step_of(remat), arguments()
    options: dict[str, Any] = {
        "method": "zero3",
        "batch_argnums": (1, 2),
        "microbatches": microbatches,
    }
    compiled = autopar.compile(step, *args, **options)
    gathers = [c for c in compiled.plan.stages[0].collectives if c.kind == "all-gather"]
    gathered = [c for c in gathers if c.bytes * c.times >= STACKED // 2]
    assert {c.dtype for c in gathered} == {"bfloat16"}
    assert sum(c.bytes * c.times for c in gathered) == STACKED
    expected, result = jax.jit(step)(*args), compiled(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(result), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-4)


def test_stages_cast_their_own_layers() -> None:
    step, args = step_of(remat=True), arguments()
    options: dict[str, Any] = {
        "stages": 2,
        "microbatches": 4,
        "method": "zero3",
        "batch_argnums": (1, 2),
    }
    compiled = autopar.compile(step, *args, **options)
    for stage in compiled.plan.stages:
        gathered = [c for c in stage.collectives if c.kind == "all-gather" and c.bytes > 2**13]
        assert gathered and {c.dtype for c in gathered} == {"bfloat16"}
    expected, result = jax.jit(step)(*args), compiled(*args)
    result = jax.device_get(compiled.gather(result))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(result), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-4)
