"""Primitives that libraries write as functions of JAX are planned as what they stand for."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import mlir

import autopar
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import flatten, jaxprs_in, walk

scaled_p = Primitive("scaled_by_library")


def scaled(x: Any, *, factor: float) -> Any:
    return jnp.tanh(x) * factor


scaled_p.def_impl(scaled)
scaled_p.def_abstract_eval(lambda x, *, factor: x)
mlir.register_lowering(scaled_p, mlir.lower_fun(partial(scaled), multiple_results=False))


def normal(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def same(step: Any, *args: Any, **options: Any) -> None:
    """The step has the numbers of `jax.jit`, and nobody is warned of unknown operations."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.errors.UnknownPrimitiveWarning)
        run = autopar.parallelize(step, donate_argnums=(), **options)
        found = run.gather(run(*args))
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(*args)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_a_function_stands_for_a_librarys_primitive() -> None:
    closed = flatten(jax.make_jaxpr(lambda x: scaled_p.bind(x, factor=3.0))(jnp.ones((8, 4))))
    assert [eqn.primitive.name for eqn in walk(closed.jaxpr)] == ["tanh", "mul"]

    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * (x.T @ scaled_p.bind(x @ w, factor=0.5)), jnp.mean(x)

    same(step, normal(0, 4, 4), normal(1, 16, 4), method="data")


def test_other_primitives_stand_for_themselves() -> None:
    """Those of JAX, and those whose lowering writes operations of XLA."""
    own = Primitive("own_lowering")
    mlir.register_lowering(own, lambda ctx, x: [x])
    on_one = Primitive("on_one_platform")
    mlir.register_lowering(on_one, mlir.lower_fun(lambda x: x, multiple_results=False))
    mlir.register_lowering(
        on_one, mlir.lower_fun(lambda x: 2 * x, multiple_results=False), platform="cuda"
    )
    never = Primitive("never_lowered")
    known = [jax.lax.tanh_p, jax.lax.linalg.cholesky_p]
    assert {jax_compat.library_function(x) for x in (own, on_one, never, *known)} == {None}
    assert jax_compat.library_function(scaled_p) is not None


def test_what_is_in_place_of_a_body_is_passed_over() -> None:
    """Equinox keeps the structure of a closed program among its params, without the program."""

    class Structure(ClosedJaxpr):
        jaxpr = object()

    empty = object.__new__(Structure)
    assert jaxprs_in({"several": (empty,), "one": empty}) == []


@pytest.mark.filterwarnings("ignore:One trip is counted:autopar.errors.AutoparWarning")
@pytest.mark.filterwarnings("ignore:.*devices compute alike:autopar.errors.AutoparWarning")
@pytest.mark.parametrize("options", [{"method": "data"}, {"logical_mesh": (4, 2)}])
def test_a_solver_of_equinox_loops_is_divided(options: Any) -> None:
    """A neural ODE under `jax.vmap`, as Diffrax runs it: a loop whose gradient is checkpointed.

    How long it runs is tested of all rows together, for which Equinox has a primitive.
    """
    rows, width = 16, 8

    def solve(mlp: Any, start: Any) -> Any:
        def goes_on(carry: Any) -> Any:
            time, y = carry
            return (time < 1) & (jnp.max(jnp.abs(y)) < 4)

        def body(carry: Any) -> Any:
            time, y = carry
            return time + 0.25, y + 0.25 * mlp(y)

        loop = partial(eqx.internal.while_loop, max_steps=8, kind="checkpointed", checkpoints=3)
        return loop(goes_on, body, (jnp.zeros(()), start))[1]

    mlp = eqx.nn.MLP(width, width, 16, 2, key=jax.random.key(0))
    weights, static = eqx.partition(mlp, eqx.is_inexact_array)

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            found = jax.vmap(partial(solve, eqx.combine(weights, static)))(batch[0])
            return jnp.mean((found - batch[1]) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, gradients), value

    batch = normal(1, rows, width), normal(2, rows, width)
    same(step, weights, batch, **options)
    if "method" in options:
        alone = autopar.plan(step, weights, batch, cluster="1x1 h100", method="data")
        eight = autopar.plan(step, weights, batch, cluster="1x8 h100", method="data")
        assert eight.estimates.peak_bytes_per_device < 0.5 * alone.estimates.peak_bytes_per_device
