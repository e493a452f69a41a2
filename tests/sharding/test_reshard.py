"""Resharding: the algebra of layouts, and the collectives on real devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from autopar.base.cluster import axis_names
from autopar.passes.sharding.compiler_rules import CPU, GPU, RULES, TPU
from autopar.passes.sharding.layout import Layout, all_layouts, replicated
from autopar.passes.sharding.reshard import COLLECTIVES, ReshardStep, reshard_steps
from autopar.passes.sharding.spmd_program import Block, Compute, Relayout, ShardedValue
from autopar.passes.sharding.turned_sums import turned_sums
from autopar.runtime.spmd import block_function
from sharding.algebra import check_steps, layouts

MESHES = [(8,), (4, 2), (2, 2, 2)]
MONOIDS = ("sum", "max", "min", "prod")
COMBINE: Any = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


@settings(max_examples=150, deadline=None)
@given(data=st.data(), mesh=st.sampled_from(MESHES), reduce_scatter=st.booleans())
def test_every_pair_of_layouts_is_joined(
    data: st.DataObject, mesh: tuple[int, ...], reduce_scatter: bool
) -> None:
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), max_size=3))
    source = data.draw(layouts(sizes, mesh, MONOIDS))
    target = data.draw(layouts(sizes, mesh))
    steps = reshard_steps(source, target, mesh, reduce_scatter)
    check_steps(steps, source, target, sizes, mesh)
    assert bool(steps) == (source != target)
    assert reduce_scatter or all(step.kind != "reduce-scatter" for step in steps)
    if target == Layout(source.dims):  # what is only unreduced is completed at once
        monoids = {monoid for _, monoid in source.partial}
        assert [(step.kind, step.monoid) for step in steps] == [
            ("all-reduce", monoid) for monoid in sorted(monoids)
        ]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_pair_of_sums_and_cuts_of_a_matrix(mesh: tuple[int, ...]) -> None:
    every = all_layouts((8, 8), mesh, partial=True)
    assert len(every) == 4 ** len(mesh)
    for source, target in itertools.product(every, every):
        check_steps(reshard_steps(source, target, mesh), source, target, (8, 8), mesh)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        # Cutting what every device has costs no communication.
        (replicated(2), Layout(((0, 1), ())), "slice(0) slice(1)"),
        (Layout(((0, 1), ())), replicated(2), "all-gather(0,1)"),
        # An axis moves between dimensions by one all-to-all.
        (Layout(((0,), (1,))), Layout(((), (0,))), "all-gather(1) all-to-all(0)"),
        (Layout(((), (0,))), Layout(((0,), ())), "all-to-all(0)"),
        # Sums are scattered where they are wanted in slices, and completed elsewhere.
        (Layout(((), ()), ((0, "sum"),)), Layout(((0,), ())), "reduce-scatter(0)"),
        (Layout(((), ()), ((0, "max"),)), Layout(((0,), ())), "all-reduce(0) slice(0)"),
        (Layout(((), ()), ((0, "sum"), (1, "sum"))), replicated(2), "all-reduce(0,1)"),
        (
            Layout(((), ()), ((0, "sum"), (1, "sum"))),
            Layout(((0,), ())),
            "reduce-scatter(0) all-reduce(1)",
        ),
        # What stays unreduced is not touched; a maximum is no sum.
        (Layout(((1,), ()), ((0, "sum"),)), Layout(((), ()), ((0, "sum"),)), "all-gather(1)"),
        (
            Layout(((), ()), ((0, "max"),)),
            Layout(((), ()), ((0, "sum"),)),
            "all-reduce(0) to-partial(0)",
        ),
    ],
)
def test_steps(source: Layout, target: Layout, expected: str) -> None:
    steps = reshard_steps(source, target, (4, 2))
    assert " ".join(f"{s.kind}({','.join(map(str, s.axes))})" for s in steps) == expected


def test_zero1_completes_sums_before_it_cuts_them() -> None:
    source, target = Layout(((), ()), ((0, "sum"),)), Layout(((0,), ()))
    steps = reshard_steps(source, target, (8,), reduce_scatter=False)
    assert [step.kind for step in steps] == ["all-reduce", "slice"]


def test_a_step_counts_the_larger_buffer() -> None:
    gather = ReshardStep("all-gather", (0,), dim=0, parts_in=8, parts_out=2)
    assert gather.elements(64) == 32
    scatter = ReshardStep("reduce-scatter", (0,), dim=0, parts_in=2, parts_out=8)
    assert scatter.elements(64) == 32


# Real devices. A value is given to every device as its layout says, resharded, and put together
# again by NumPy.


def parts(value: np.ndarray, layout: Layout, mesh: Sequence[int], seed: int) -> np.ndarray:
    """What each device holds, stacked in the order of the devices."""
    random = np.random.default_rng(seed)

    def split(value: np.ndarray, remaining: tuple[tuple[int, str], ...]) -> Any:
        """{coordinates along the partial axes: part}; combining the parts gives the value."""
        if not remaining:
            return {(): value}
        (axis, monoid), rest = remaining[0], remaining[1:]
        pieces = []
        for _ in range(mesh[axis] - 1):
            noise = random.integers(1, 9, value.shape).astype(value.dtype)
            piece = {"sum": noise, "max": value - noise, "min": value + noise, "prod": noise**0}
            pieces.append(piece[monoid])
        last = value - sum(pieces) if monoid == "sum" else value
        return {
            (i, *others): part
            for i, piece in enumerate([*pieces, last])
            for others, part in split(piece, rest).items()
        }

    held = split(value, layout.partial)
    local = []
    for place in itertools.product(*map(range, mesh)):
        part = held[tuple(place[axis] for axis, _ in layout.partial)]
        local.append(part[slices(value.shape, layout, mesh, place)])
    return np.stack(local)


def slices(
    shape: Sequence[int], layout: Layout, mesh: Sequence[int], place: Sequence[int]
) -> tuple[slice, ...]:
    """Which part of the whole value the device at `place` holds."""
    found = []
    for size, axes in zip(shape, layout.dims, strict=True):
        start, length = 0, size
        for axis in axes:
            length //= mesh[axis]
            start += place[axis] * length
        found.append(slice(start, start + length))
    return tuple(found)


def check_parts(held: np.ndarray, value: np.ndarray, layout: Layout, mesh: Sequence[int]) -> None:
    """Assert that the devices' parts, combined along partial axes, are the value's slices."""
    held = held.reshape(*mesh, *held.shape[1:])
    for axis, monoid in layout.partial:
        held = COMBINE[monoid].reduce(held, axis=axis, keepdims=True)
    for place in itertools.product(*map(range, mesh)):
        known = tuple(0 if held.shape[a] == 1 else i for a, i in enumerate(place))
        expected = value[slices(value.shape, layout, mesh, place)]
        np.testing.assert_array_equal(held[known], expected, err_msg=str(layout))


def sample(mesh: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[Layout, Layout]]:
    random = np.random.default_rng(0)
    every = all_layouts(shape, mesh, partial=True)
    for _ in range(24):
        source, target = (every[random.integers(len(every))] for _ in range(2))
        yield source, target
    whole = replicated(len(shape))
    for monoid in MONOIDS:
        yield whole._replace(partial=((0, monoid),)), whole


@pytest.mark.parametrize("mesh", MESHES)
def test_resharding_keeps_the_value(mesh: tuple[int, ...]) -> None:
    shape = (8, 16)
    value = np.random.default_rng(1).integers(1, 9, shape).astype(np.float32)
    pairs = list(sample(mesh, shape))
    variables = jax.make_jaxpr(lambda *xs: xs)(*[value] * len(pairs)).jaxpr.invars
    sources = tuple(ShardedValue(v, a) for v, (a, _) in zip(variables, pairs, strict=True))
    targets = tuple(ShardedValue(v, b) for v, (_, b) in zip(variables, pairs, strict=True))
    reshards = tuple(
        Relayout(s, t, reshard_steps(s.layout, t.layout, mesh), "test", "")
        for s, t in zip(sources, targets, strict=True)
        if s != t
    )
    kinds = {step.kind for reshard in reshards for step in reshard.steps}
    assert kinds == {*COLLECTIVES, "slice", "to-partial"}
    names = axis_names(mesh)
    on_device = block_function(mesh, names, Block(sources, reshards, targets))
    one_each = PartitionSpec(names)
    run = jax.jit(
        jax.shard_map(
            lambda *held: [x[None] for x in on_device([x[0] for x in held])],
            mesh=jax.make_mesh(mesh, names, (AxisType.Auto,) * len(mesh)),
            in_specs=one_each,
            out_specs=one_each,
            check_vma=False,
        )
    )
    given_parts = [parts(value, a, mesh, seed) for seed, (a, _) in enumerate(pairs)]
    for held, (source, _) in zip(given_parts, pairs, strict=True):
        check_parts(held, value, source, mesh)
    for held, (_, target) in zip(run(*given_parts), pairs, strict=True):
        check_parts(np.asarray(held), value, target, mesh)


@pytest.mark.parametrize(
    ("shape", "dtype", "is_across"),
    [
        ((2, 4, 1024), "bfloat16", True),
        ((4, 2048), "bfloat16", False),
        ((4, 1024), "float32", False),
        ((1024,), "bfloat16", False),
    ],
)
def test_reduce_scatters_run_across_what_tpus_would_reduce_whole(
    shape: tuple[int, ...], dtype: str, is_across: bool
) -> None:
    last, mesh, names = len(shape) - 1, (8,), ("x",)
    whole = replicated(len(shape))
    partial, cut = whole._replace(partial=((0, "sum"),)), Layout((*whole.dims[:-1], (0,)))
    rows = (np.arange(8 * np.prod(shape)).reshape(8, *shape) % 7).astype(jnp.dtype(dtype))
    (variable,) = jax.make_jaxpr(lambda x: x)(rows[0]).jaxpr.invars
    source, target = ShardedValue(variable, partial), ShardedValue(variable, cut)
    move = Relayout(source, target, reshard_steps(partial, cut, mesh), "test", "")
    for backend in (CPU, TPU):
        run = block_function(mesh, names, Block((source,), (move,), (target,)), RULES[backend])
        step = jax.jit(
            jax.shard_map(
                lambda held, run=run: run([held[0]])[0],
                mesh=jax.make_mesh(mesh, names, (AxisType.Auto,)),
                in_specs=PartitionSpec(names),
                out_specs=PartitionSpec(*[None] * last, "x"),
            )
        )
        np.testing.assert_array_equal(step(rows), rows.sum(0))
        told = step.lower(rows).as_text().partition("scatter_dimension = ")[2]
        assert int(told.partition(" ")[0]) == last - (is_across and backend == TPU)


@pytest.mark.parametrize("is_turned_back", [False, True])
def test_tpus_add_gradients_in_the_order_in_which_they_are_read(is_turned_back: bool) -> None:
    def gradient(x: Any, y: Any) -> Any:
        turned = (y.T @ x).T
        return turned.T if is_turned_back else turned

    shapes = jnp.zeros((4, 8)), jnp.zeros((4, 16))
    jaxpr = jax.make_jaxpr(gradient)(*shapes).jaxpr
    (at,) = (n for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general")
    before, product, turns = jaxpr.eqns[:at], jaxpr.eqns[at], jaxpr.eqns[at + 1 :]
    whole = replicated(2)
    partial, cut = whole._replace(partial=((0, "sum"),)), Layout(((0,), ()))
    inputs = tuple(ShardedValue(v, whole) for v in jaxpr.invars)
    versions = dict(zip(jaxpr.invars, inputs, strict=True))
    instructions: list[Any] = []
    for eqn in before:
        versions[eqn.outvars[0]] = ShardedValue(eqn.outvars[0], whole)
        made = tuple(versions[v] for v in (*eqn.invars, *eqn.outvars))
        instructions.append(Compute(eqn, made[:-1], made[-1:]))
    variable = product.outvars[0]
    source, result = ShardedValue(variable, partial), ShardedValue(variable, cut)
    instructions += [
        Compute(product, tuple(versions[v] for v in product.invars), (source,)),
        Relayout(source, result, reshard_steps(partial, cut, (8,)), "gradient", ""),
    ]
    for eqn in turns:
        operand, layout = result, Layout(result.layout.dims[::-1])
        result = ShardedValue(eqn.outvars[0], layout)
        instructions.append(Compute(eqn, (operand,), (result,)))
    block = Block(inputs, tuple(instructions), (result,))
    assert list(turned_sums(block).values()) == ([] if is_turned_back else [(1, 0)])
    assert not turned_sums(block, scatters=False)
    rows = np.arange(32 * 8).reshape(32, 8) % 7, np.arange(32 * 16).reshape(32, 16) % 5
    places = []
    for backend in (CPU, TPU):
        run = block_function((8,), ("x",), block, RULES[backend])
        step = jax.jit(
            jax.shard_map(
                lambda x, y, run=run: run([x, y])[0],
                mesh=jax.make_mesh((8,), ("x",), (AxisType.Auto,)),
                in_specs=PartitionSpec("x"),
                out_specs=PartitionSpec("x") if is_turned_back else PartitionSpec(None, "x"),
            )
        )
        arguments = [jnp.asarray(x, jnp.float32) for x in rows]
        expected = rows[0].T @ rows[1]
        np.testing.assert_array_equal(step(*arguments), expected.T if is_turned_back else expected)
        text = step.lower(*arguments).as_text()
        places.append(int(text.partition("scatter_dimension = ")[2].partition(" ")[0]))
    assert places == [0, 0 if is_turned_back else 1]


def test_gpus_multiply_in_the_order_in_which_whole_gradients_are_read() -> None:
    def gradient(x: Any, y: Any) -> Any:
        return jax.lax.dot_general(y, x, (((0,), (0,)), ((), ()))).T

    jaxpr = jax.make_jaxpr(gradient)(jnp.zeros((4, 8)), jnp.zeros((4, 16))).jaxpr
    product, turn = jaxpr.eqns
    whole = replicated(2)
    partial = whole._replace(partial=((0, "sum"),))
    inputs = tuple(ShardedValue(v, whole) for v in jaxpr.invars)
    source, added = (ShardedValue(product.outvars[0], x) for x in (partial, whole))
    result = ShardedValue(turn.outvars[0], whole)
    instructions = (
        Compute(product, inputs[::-1], (source,)),
        Relayout(source, added, reshard_steps(partial, whole, (8,)), "gradient", ""),
        Compute(turn, (added,), (result,)),
    )
    run = block_function((8,), ("x",), Block(inputs, instructions, (result,)), RULES[GPU])
    step = jax.jit(
        jax.shard_map(
            lambda x, y: run([x, y])[0],
            mesh=jax.make_mesh((8,), ("x",), (AxisType.Auto,)),
            in_specs=PartitionSpec("x"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    rows = np.arange(32 * 8).reshape(32, 8) % 7, np.arange(32 * 16).reshape(32, 16) % 5
    arguments = [jnp.asarray(x, jnp.float32) for x in rows]
    np.testing.assert_array_equal(step(*arguments), rows[0].T @ rows[1])
    text = step.lower(*arguments).as_text()
    before, _, after = text.partition("all_reduce")
    assert "transpose" in before and "(tensor<8x16xf32>) -> tensor<8x16xf32>" in after
