"""On CPUs, what communicates waits for loops that do, and they for what did before."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import PartitionSpec as P

import autopar
from autopar.passes.graph.graph import inner_jaxprs, variables, walk
from autopar.passes.sharding.compiler_rules import CPU, GPU, RULES
from autopar.passes.sharding.layout import local_shape
from autopar.runtime import stage_programs
from autopar.runtime.spmd import block_function

DEVICES, WIDTH, LAYERS, BATCH = 4, 16, 3, 8


def scanned(h: Any, weights: Any) -> Any:
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w[0]) @ w[1], None), h, weights)[0]


def counted(h: Any, weights: Any) -> Any:
    def layer(n: Any, h: Any) -> Any:
        return h + jnp.tanh(h @ weights[0][n]) @ weights[1][n]

    return lax.fori_loop(0, LAYERS, layer, h)


def towers(tower: Any, params: Any, x: Any) -> Any:
    """Two towers that are loops, and the norm of a table that neither reads."""
    table = jnp.sum(jnp.square(params["table"]))
    return tower(x, params["one"]), tower(2 * x, params["two"]), jnp.sqrt(table)


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) / 4, "float32")

    layers = {
        name: (normal(LAYERS, WIDTH, 4 * WIDTH), normal(LAYERS, 4 * WIDTH, WIDTH))
        for name in ("one", "two")
    }
    return {**layers, "table": normal(4 * WIDTH, WIDTH)}, normal(BATCH, WIDTH)


def communicates(eqn: JaxprEqn) -> bool:
    inside = itertools.chain(*map(walk, inner_jaxprs(eqn)))
    return any(x.primitive.name.startswith("psum") for x in (eqn, *inside))


def unordered(jaxpr: Jaxpr) -> list[tuple[str, str]]:
    """Pairs that communicate, one of them a loop, of which none waits for the other."""
    after: dict[Var, set[int]] = {}
    found, told = [], list[JaxprEqn]()
    for eqn in jaxpr.eqns:
        before = set[int]().union(*(after.get(v, set()) for v in variables(eqn.invars)))
        is_loop = eqn.primitive.name == "scan"
        if communicates(eqn):
            found += [
                (other.primitive.name, eqn.primitive.name)
                for number, other in enumerate(told)
                if number not in before and "scan" in (other.primitive.name, eqn.primitive.name)
            ]
            before.add(len(told))
            told.append(eqn)
        # Of a counter, XLA knows the last value without the loop.
        told_by = [
            v for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact) or not is_loop
        ]
        after.update(dict.fromkeys(told_by, before))
    assert sum(eqn.primitive.name == "scan" for eqn in told) == 2 and len(told) == 3
    return found


@pytest.mark.parametrize("tower", [scanned, counted])
def test_towers_communicate_one_after_the_other(
    tower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = list[Any]()

    def noted(*args: Any) -> Any:
        blocks.append(args)
        return block_function(*args)

    monkeypatch.setattr(stage_programs, "block_function", noted)
    devices = jax.devices()[:DEVICES]
    step = autopar.compile(
        functools.partial(towers, tower),
        *arguments(),
        devices=devices,
        logical_mesh=(1, DEVICES),
        method="megatron",
        pins={"table": P("y")},
    )
    ((mesh, names, block, *_),) = blocks

    def written(backend: str) -> Jaxpr:
        of_device = block_function(mesh, names, block, RULES[backend])
        local = [
            jax.ShapeDtypeStruct(local_shape(v.atom.aval.shape, v.layout, mesh), v.atom.aval.dtype)
            for v in block.inputs
        ]
        sharded = jax.shard_map(
            lambda *xs: of_device(xs),
            mesh=jax.make_mesh(mesh, names, devices=devices),
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )
        (eqn,) = jax.make_jaxpr(sharded)(*local).jaxpr.eqns
        return eqn.params["jaxpr"]

    assert len(unordered(written(GPU))) >= 2
    assert not unordered(written(CPU))
    found, expected = step(*arguments()), towers(tower, *arguments())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )


def test_a_loop_without_results_is_waited_for_by_nothing() -> None:
    """It prints a sum over devices in every trip."""
    seen = list[float]()

    def step(params: Any, x: Any) -> Any:
        def told(_: Any, w: Any) -> Any:
            jax.debug.callback(lambda s: seen.append(float(s)), (jnp.tanh(x @ w[0]) @ w[1]).sum())
            return None, None

        lax.scan(told, None, params["one"])
        return scanned(x, params["two"])

    mesh: dict[str, Any] = {"devices": jax.devices()[:DEVICES], "logical_mesh": (1, DEVICES)}
    run = autopar.compile(step, *arguments(), batch_argnums=(1,), method="megatron", **mesh)
    found, expected = run(*arguments()), scanned(arguments()[1], arguments()[0]["two"])
    jax.effects_barrier()
    assert len(seen) == LAYERS
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
