"""Strategies that are shared by rules whose loops the mesh divides alike are those of each rule."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

from autopar.passes.primitives.linearity import linear_operands
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding import strategies as st
from autopar.passes.sharding.strategy_tables import StrategyTables, tables_of


def step(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(x @ w).reshape(x.shape[0], 6, -1)
    return jax.nn.softmax((hidden.transpose(1, 0, 2) @ v).sum(0)) * 2


def shapes(rows: int, width: int, out: int) -> list[st.Shape]:
    arguments = jnp.zeros((width, 6 * width)), jnp.zeros((width, out)), jnp.zeros((rows, width))
    jaxpr = jax.make_jaxpr(step)(*arguments).jaxpr
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name not in ("jit", "pjit")]
    rules = populate(jaxpr)
    linear = (tuple(sorted(linear_operands(eqn, False), key=sorted)) for eqn in eqns)
    return [st.shape_of(rules[eqn], each) for eqn, each in zip(eqns, linear, strict=True)]


@pytest.mark.parametrize("mesh", [(8,), (4, 2), (3, 2), (1, 6)])
def test_canonical_shapes_have_the_same_strategies(mesh: tuple[int, ...]) -> None:
    tables = StrategyTables(mesh)
    sizes = itertools.product((1, 4, 5, 12), (8, 9), (16, 7))
    found = [shape for each in sizes for shape in shapes(*each)]
    for shape in found:
        canonical = tables.canonical(shape)
        for linear in (False, True):
            choices = st.choices(shape, mesh, linear=linear)
            assert st.choices(canonical, mesh, linear=linear) == choices
            for choice in choices:
                assert tables.strategy(canonical, choice) == st.strategy(shape, choice, mesh)
                for lead, layout in enumerate(st.strategy(shape, choice, mesh).operands):
                    (followed,) = tables.follow(canonical, lead, tables.interned([layout]))
                    assert followed.choice == st.follow(shape, lead, layout, mesh)
    assert len({id(tables.canonical(shape)) for shape in found}) < len(set(found))


def test_a_mesh_has_one_table() -> None:
    assert tables_of((4, 2)) is tables_of((4, 2)) is not tables_of((2, 4))
