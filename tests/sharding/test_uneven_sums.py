"""Sums that XLA:TPU makes of padded parts run with their products; what is gathered is held."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.base.cluster import Cluster
from autopar.passes.sharding.boundary_copies import boundary_copies
from autopar.passes.sharding.compiler_rules import RULES, TPU
from autopar.passes.sharding.held_values import HeldValues, held_values
from autopar.passes.sharding.instruction_values import made_by
from autopar.passes.sharding.late_sums import late_times
from autopar.passes.sharding.moments import Moments
from autopar.passes.sharding.run_order import is_gradient_sum, products_left
from autopar.passes.sharding.spmd_program import (
    Compute,
    Relayout,
    SpmdProgram,
    local_bytes,
    reads,
    writes,
)
from autopar.passes.sharding.uneven_sums import TOGETHER, has_uneven_pieces
from sharding.steps import compiled, graph_of, shaped, sharded

ROWS = 4096
EVEN, UNEVEN = 768, 1024
"""Columns of matrices whose parts, of 6400 rows, have pieces of one size, or do not."""


@pytest.mark.parametrize(
    ("shape", "dim", "padded"),
    [
        ((51200, 1024), 0, 6512),
        ((51200, 1280), 0, 6480),
        ((51200, 1792), 0, 6552),
        ((51200, 2048), 0, 6536),
        ((8192, 2048), 0, 1064),
        ((2560, 2560), 0, 336),
        ((2304, 6912), 1, 896),
        ((32000, 4096), 0, 4032),
        ((51200, 768), 0, None),
        ((51200, 1536), 0, None),
        ((32000, 768), 0, None),
        ((4096, 4096), 0, None),
        ((7680, 2560), 0, None),
        ((2048, 8192), 1, None),
    ],
)
def test_parts_are_padded_where_pieces_are_not_of_one_size(
    shape: tuple[int, int], dim: int, padded: int | None
) -> None:
    assert has_uneven_pieces(shape, dim, 8) == (padded is not None)
    if padded is not None:  # as XLA pads it: then all pieces are of one size
        whole = list(shape)
        whole[dim] = 8 * padded
        assert not has_uneven_pieces(whole, dim, 8)


def zero2_program(columns: int, layers: int) -> SpmdProgram:
    def step(state: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for up, down in weights:
                y = jnp.tanh(y @ up.astype(y.dtype)) @ down.astype(y.dtype)
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        weights, moments = state
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(weights))
        return jax.tree.map(lambda w, m: w - 0.1 * jnp.tanh(m), weights, moments), moments

    weights = [(shaped(columns, 51200), shaped(51200, columns))] * layers
    batch = shaped(8, ROWS, columns, dtype=jnp.bfloat16)
    graph = graph_of(step, (weights, weights), batch, batch_argnums=(1,))
    tpus = Cluster.preset("tpu-v5e")
    return sharded(compiled(graph, tpus, method="zero2", microbatches=1, memory_limit=1 << 40))


def held_of(program: SpmdProgram) -> HeldValues[Any]:
    def size(value: Any) -> int:
        return local_bytes(value, program.mesh)

    block = program.block
    made = [made_by(x) for x in block.instructions]
    rules = program.rules
    return held_values(made, block.inputs, block.outputs, size, lambda v: size(v) // 4, rules)


def order_of(program: SpmdProgram) -> list[int]:
    block, mesh = program.block, program.mesh
    times = range(len(block.instructions))
    left = products_left(block, mesh)
    moments = late_times(block, held_of(program), times, mesh, left)
    return sorted(times, key=moments.__getitem__)


@pytest.mark.parametrize("columns", [EVEN, UNEVEN])
def test_the_first_uneven_sums_run_with_their_products(columns: int) -> None:
    program = zero2_program(columns, layers=2)
    order, instructions = order_of(program), program.block.instructions
    products = products_left(program.block, program.mesh)
    assert len(products) == 4
    others = [
        place
        for place, number in enumerate(order)
        if isinstance(x := instructions[number], Compute)
        and x.eqn.primitive.name == "dot_general"
        and not any(x is y for y in products)
    ]
    made = {v for x in products for v in writes(x)}
    sums = [
        place
        for place, number in enumerate(order)
        if is_gradient_sum(instructions[number]) and made & set(reads(instructions[number]))
    ]
    early = [place for place in sums if place < max(others)]
    assert len(early) == (TOGETHER if columns == UNEVEN else 0)
    # The others' products run there too.
    at = [order.index(n) for n, x in enumerate(instructions) if any(x is y for y in products)]
    assert sum(place > max(others) for place in at) == 4 - len(early)


def test_what_is_gathered_of_new_state_is_there_until_all_but_the_largest_is() -> None:
    program = zero2_program(EVEN, layers=2)
    order, instructions = order_of(program), program.block.instructions
    gathers = [
        place
        for place, number in enumerate(order)
        if isinstance(x := instructions[number], Relayout)
        and x.purpose == "state"
        and any(step.kind == "all-gather" for step in x.steps)
    ]
    *others, last = gathers
    added = [
        place
        for place, number in enumerate(order)
        for x in (instructions[order[others[0]]],)
        if isinstance(x, Relayout) and x.target in reads(instructions[number])
    ]
    assert len(gathers) == 4 and max(others) < min(added) < last


@pytest.mark.parametrize("rows", [1376 * 8, 1280 * 8])
def test_parameters_are_copied_into_the_order_in_which_updates_are_gathered(rows: int) -> None:
    def step(state: Any, x: Any) -> Any:
        def loss(weight: Any) -> Any:
            return jnp.mean(jnp.square((x @ weight.astype(x.dtype)).astype(jnp.float32)))

        weight, moment = state
        moment = 0.9 * moment + jax.grad(loss)(weight)
        return (weight - 0.1 * jnp.tanh(moment), moment)

    shapes = shaped(512, rows), shaped(8, ROWS, 512, dtype=jnp.bfloat16)
    graph = graph_of(step, (shapes[0], shapes[0]), shapes[1], batch_argnums=(1,))
    program = sharded(compiled(graph, Cluster.preset("tpu-v5e"), method="zero2", microbatches=1))
    copies = boundary_copies(program.block, program.mesh, held_of(program))
    assert [x.bytes for x in copies] == ([4 * 512 * rows] if rows % 2048 else [])


@pytest.mark.parametrize("method", ["zero1", "zero2", "zero3"])
def test_nothing_runs_before_what_it_reads(method: str) -> None:
    """Also where an update has products, or gathers what it computes of what was gathered."""

    def step(state: Any, x: Any) -> Any:
        weights, slow = state

        def loss(w: Any) -> Any:
            return jnp.mean(jnp.square(jnp.tanh(x @ w[0].astype(x.dtype)) @ w[1].astype(x.dtype)))

        def updated(w: Any, g: Any, slow: Any) -> Any:
            slow = slow + 0.5 * (w - 0.1 * (1.5 * g - 0.5 * (g @ g.T) @ g) - slow)
            return jnp.tanh(slow), slow

        made = map(updated, weights, jax.grad(loss)(weights), slow)
        return tuple(zip(*made, strict=True))

    weights = (shaped(256, 1024), shaped(1024, 256))
    args = ((weights, weights), shaped(64, 256, dtype=jnp.bfloat16))
    graph = graph_of(step, *args, batch_argnums=(1,))
    made = sharded(compiled(graph, method=method, microbatches=1))
    block = Moments(made.block, made.mesh, RULES[TPU], ()).block
    known = {*block.inputs, *(v for x in block.instructions for v in writes(x))}
    there = set(block.inputs)
    for instruction in block.instructions:
        assert there.issuperset(known.intersection(reads(instruction)))
        there.update(writes(instruction))
