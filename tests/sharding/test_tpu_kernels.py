"""Which values XLA:TPU writes, when, and what room they take, on programs that can be counted."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal

from autopar.passes.sharding.compiler_rules import RULES, TPU, CompilerRules
from autopar.passes.sharding.epilogues import InstructionValues
from autopar.passes.sharding.fused_peak import SPARE_BYTES
from autopar.passes.sharding.heap import in_order, live_bytes
from autopar.passes.sharding.held_values import HeldValues, held_values
from autopar.passes.sharding.layout import replicated
from autopar.passes.sharding.moments import Moments
from autopar.passes.sharding.peak_memory import MemoryPeak, peak
from autopar.passes.sharding.spmd_program import Block, Compute, Loop, ShardedValue, SpmdProgram
from autopar.passes.sharding.tiles import tiled_elements
from sharding.steps import shaped

Values = list[InstructionValues[Any]]


def held_of(
    function: Any, *shapes: Any, rules: CompilerRules = RULES[TPU]
) -> tuple[Values, HeldValues[Any]]:
    """The instructions of a function, and which of its values XLA:TPU would write."""
    jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
    program = [
        InstructionValues(
            eqn,
            tuple(None if isinstance(v, Literal) else v for v in eqn.invars),
            tuple(eqn.outvars),
        )
        for eqn in jaxpr.eqns
    ]

    def elements(value: Any) -> int:
        return math.prod(value.aval.shape)

    def num_bytes(value: Any) -> int:
        return elements(value) * int(value.aval.dtype.itemsize)

    return program, held_values(program, jaxpr.invars, jaxpr.outvars, num_bytes, elements, rules)


def written(function: Any, *shapes: Any) -> list[str]:
    """The primitives whose results are buffers."""
    program, held = held_of(function, *shapes)
    return [x.eqn.primitive.name for x in program if x.eqn and any(map(held.is_held, x.results))]


ROWS, WIDE = shaped(4096, 512), shaped(512, 512)


def test_those_who_read_parts_read_what_is_cut() -> None:
    def function(x: Any, w: Any, v: Any) -> Any:
        whole = jnp.sin(x @ w) * (x @ v) + jnp.cos(x @ (w + v))
        first, second = jnp.split(whole, 2, axis=1)
        read = [first @ w[:256], first @ v[:256], first.T @ x, second @ w[256:]]
        return [jnp.sum(y) for y in read]

    # Three products would be read four times, or their sum written once: by the last of them.
    names = written(function, ROWS, WIDE, WIDE)
    assert "split" not in names
    assert names.count("dot_general") == 6 and names.count("add") == 1


def test_a_kernel_that_writes_one_part_writes_all() -> None:
    def function(x: Any, w: Any, places: Any) -> Any:
        first, second = jnp.split(x @ w, 2, axis=1)
        sums = jnp.zeros((64, 256)).at[places].add(first)
        return jnp.sum(sums), jnp.sum(second @ w[256:])

    places = jax.ShapeDtypeStruct((4096,), jnp.int32)
    program, held = held_of(function, ROWS, WIDE, places)
    (parts,) = (x.results for x in program if x.eqn and x.eqn.primitive.name == "split")
    assert all(map(held.is_held, parts))


def test_gathers_write_rows_and_scatters_read_them() -> None:
    def function(table: Any, places: Any, w: Any) -> Any:
        rows = jnp.sin(table[places] @ w)
        return jnp.sum(table.at[places].add(rows))

    places = jax.ShapeDtypeStruct((4096,), jnp.int32)
    names = written(function, shaped(512, 512), places, WIDE)
    assert "gather" in names
    assert "dot_general" not in names, "it writes the sine, which the scatter reads"
    assert "sin" in names


def test_an_epilogue_runs_when_all_that_it_reads_is_there() -> None:
    def function(sums: Any, x: Any, w: Any) -> Any:
        gradient = x.T @ x
        y = jnp.sin(x @ w) @ w
        return sums + gradient, jnp.sum(y)  # as at the end of a loop's trip

    program, held = held_of(function, WIDE, ROWS, WIDE)
    names = [x.eqn.primitive.name for x in program if x.eqn]
    times = held.run_times(program)
    product, added = names.index("dot_general"), names.index("add")
    assert product < added == times.index(times[added], product + 1)
    assert times[added] == product
    others = [number for number in range(len(names)) if number != added]
    assert [times[number] for number in others] == others


def test_a_product_that_others_read_is_no_last_one_of_a_sum() -> None:
    def function(x: Any, w: Any, v: Any) -> Any:
        first = x @ w
        second = x @ v
        return jnp.exp(first) + second, jnp.sum(second * second)

    program, held = held_of(function, ROWS, WIDE, WIDE)
    first, second = (x for x in program if x.eqn and x.eqn.primitive.name == "dot_general")
    assert not held.is_held(first.results[0]) and held.is_held(second.results[0])


def test_scores_over_a_vocabulary_are_not_written_again_for_their_maximum() -> None:
    def loss(x: Any, w: Any, places: Any) -> Any:
        logits = x @ w
        wide = logits.astype(jnp.float32)
        largest = jax.lax.stop_gradient(wide.max(axis=-1))
        sums = jnp.log(jnp.sum(jnp.exp(wide - largest[:, None] * 1.0), axis=-1)) + largest
        picked = jnp.take_along_axis(logits, places[:, None], axis=1)[:, 0]
        return jnp.sum(sums - picked.astype(jnp.float32))

    bfloat16 = jnp.bfloat16
    shapes = shaped(4096, 512, dtype=bfloat16), shaped(512, 8192, dtype=bfloat16)
    program, held = held_of(loss, *shapes, jax.ShapeDtypeStruct((4096,), jnp.int32))
    large = [v for x in program for v in x.results if v.aval.shape == (4096, 8192)]
    assert [str(v.aval.dtype) for v in large if held.is_held(v)] == ["bfloat16"]


def program_of(function: Any, *shapes: Any) -> SpmdProgram:
    """A function as the program of one device; its loops as well."""
    jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr

    def whole(atom: Any) -> ShardedValue:
        return ShardedValue(atom, replicated(len(atom.aval.shape)))

    def block(inner: Any) -> Block:
        made = []
        for eqn in inner.eqns:
            values = tuple(map(whole, eqn.invars)), tuple(map(whole, eqn.outvars))
            is_loop = eqn.primitive.name == "scan"
            body = block(eqn.params["jaxpr"].jaxpr) if is_loop else None
            made.append(Compute(eqn, *values) if body is None else Loop(eqn, *values, body))
        inputs, outputs = tuple(map(whole, inner.invars)), tuple(map(whole, inner.outvars))
        return Block(inputs, tuple(made), outputs)

    return SpmdProgram((1,), ("x",), block(jaxpr), RULES[TPU])


def peak_of(function: Any, *shapes: Any) -> MemoryPeak:
    return peak(program_of(function, *shapes), {}, [False] * len(shapes))


def test_what_loops_carry_is_filled_when_the_program_begins() -> None:
    def function(x: Any, rows: Any) -> Any:
        large = jnp.exp(x @ x.T)  # the worst moment, before the loop
        total = jnp.sum(jax.lax.cumsum(large, axis=1))

        def trip(sums: Any, row: Any) -> Any:
            return sums + row[:, None] * row[None, :], None

        sums, _ = jax.lax.scan(trip, jnp.zeros((1024, 1024)), rows + total)
        return sums

    found = peak_of(function, shaped(2048, 256), shaped(4, 1024))
    sizes = [size for _, size in found.alive]
    assert max(sizes) == 2048 * 2048 * 4
    assert 1024 * 1024 * 4 in sizes


def test_tiles_are_whole_and_convolutions_choose_which() -> None:
    images, filters = shaped(8, 32, 32, 160), shaped(3, 3, 160, 160)

    def convolved(x: Any, w: Any) -> Any:
        order = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=order)

    # The features lie along the lanes, though 32 rows of an image would leave as much empty.
    room = 8 * 32 * 32 * 256 * 4
    found = [size for _, size in peak_of(convolved, images, filters).alive]
    assert sorted(found)[-2:] == [room, room]
    assert tiled_elements((8, 128, 128, 160)) == 8 * 128 * 128 * 160, "else 128 may lie there"
    assert tiled_elements((5, 100)) == 8 * 128
    assert tiled_elements((7,)) == 7 and tiled_elements((0, 3)) == 0


def test_what_a_loop_reads_stays_while_it_runs() -> None:
    def function(x: Any, rows: Any) -> Any:
        table = x @ x.T  # read by the loop alone

        def trip(total: Any, row: Any) -> Any:
            scores = jnp.exp(table + row[:, None]) @ table
            return total + jnp.sum(jax.lax.cumsum(scores, axis=1)), None

        return jax.lax.scan(trip, 0.0, rows)[0]

    program = program_of(function, shaped(1024, 256), shaped(4, 1024))
    moments = Moments(program.block, program.mesh, program.rules, (), ())
    moments.worst()
    # The table beside the exponentials' product and its sums.
    assert live_bytes(in_order(moments.buffers)) >= 3 * 1024 * 1024 * 4


def test_a_full_device_computes_again_what_would_wait_in_a_loop() -> None:
    """Of a tied table: the logits, until the gradient of what was gathered from it is there."""

    def trip(table: Any, sums: Any, x: Any, places: Any) -> Any:
        logits = x @ table.T
        gradient = logits.T @ x
        wide = jax.lax.cumsum(x @ (logits @ table).T, axis=1)  # when the logits might be gone
        rows = jnp.zeros_like(table).at[places].add(wide @ x)
        return sums + (gradient + rows)

    def looped(table: Any, sums: Any, xs: Any, places: Any) -> Any:
        return jax.lax.scan(lambda s, x: (trip(table, s, x, places), None), sums, xs)[0]

    places = jax.ShapeDtypeStruct((2048,), jnp.int32)
    table, x, xs = shaped(4096, 256), shaped(2048, 256), shaped(2, 2048, 256)
    logits = 2048 * 4096 * 4

    def at(function: Any, x: Any, memory: int | None = None) -> int:
        program = program_of(function, table, table, x, places)
        return peak(program, {}, [False, True, False, False], memory=memory).bytes

    for function, values, is_less in ((trip, x, False), (looped, xs, True)):
        full = at(function, values, 1)
        limit = full - logits // 8
        assert at(function, values, limit) == (limit if is_less else full)
        assert at(function, values, full - logits) == full, "it would not come down to that"
        plenty = at(function, values)
        assert at(function, values, plenty + SPARE_BYTES) == plenty >= full


def test_softmaxes_are_written_where_products_write_their_own_results() -> None:
    def attention(q: Any, k: Any) -> Any:
        scores = q @ k.T
        mask = jnp.tril(jnp.ones(scores.shape, bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        return weights @ k, weights.T @ q

    rules = dataclasses.replace(RULES[TPU], products_write_epilogues=False)
    program, held = held_of(attention, shaped(1024, 256), shaped(1024, 256), rules=rules)
    made = {x.eqn.primitive.name: x.results[0] for x in program if x.eqn}
    assert held.is_held(made["exp"])


@pytest.mark.parametrize("batches", [1, 4])
def test_batched_products_read_what_they_see_in_fewer_dimensions(batches: int) -> None:
    def experts(x: Any, up: Any, down: Any) -> Any:
        if batches == 1:
            x, up, down = x[0], up[0], down[0]
            return jnp.sum(jnp.tanh(x @ up) @ down)
        y = jnp.tanh(jnp.einsum("egcm,emh->egch", x, up))
        return jnp.sum(jnp.einsum("egch,ehm->egcm", y, down))

    shapes = shaped(batches, 8, 512, 256), shaped(batches, 256, 512), shaped(batches, 512, 256)
    assert ("tanh" in written(experts, *shapes)) == (batches > 1)
