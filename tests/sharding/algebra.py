"""What each resharding step does to a layout, stated independently of the code that emits steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from autopar.passes.graph import jax_compat
from autopar.passes.sharding.layout import Layout, cuts_product, divides
from autopar.passes.sharding.reshard import ReshardStep
from autopar.passes.sharding.scopes import aval_shape
from autopar.passes.sharding.spmd_program import (
    Block,
    Branch,
    Loop,
    Relayout,
    ShardedValue,
    SpmdProgram,
)


@st.composite
def layouts(
    draw: st.DrawFn, shape: Sequence[int], mesh: Sequence[int], monoids: Sequence[str] = ("sum",)
) -> Layout:
    """Each axis cuts a dimension, leaves the value unreduced, or does nothing."""
    dims: list[tuple[int, ...]] = [() for _ in shape]
    partial: list[tuple[int, str]] = []
    for axis in range(len(mesh)):
        place = draw(st.sampled_from([None, *range(len(shape)), *monoids]))
        if isinstance(place, str):
            partial.append((axis, place))
        elif place is not None:
            dims[place] = (*dims[place], axis)
            if not divides(shape, Layout(tuple(dims)), mesh):
                dims[place] = dims[place][:-1]
    return Layout(tuple(dims), tuple(partial))


def after(step: ReshardStep, layout: Layout, mesh: Sequence[int]) -> Layout:
    """The layout that a step leaves; asserts that the step can be taken."""
    assert step.axes
    dims, partial = [list(axes) for axes in layout.dims], dict(layout.partial)
    free = [a for a in step.axes if a not in layout.used]
    if step.kind == "slice":
        assert free == list(step.axes)
        dims[step.dim] += step.axes
    elif step.kind == "to-partial":
        assert free == list(step.axes)
        partial |= dict.fromkeys(step.axes, "sum")
    elif step.kind == "all-reduce":
        for axis in step.axes:
            assert partial.pop(axis) == step.monoid
    elif step.kind == "reduce-scatter":
        for axis in step.axes:
            assert partial.pop(axis) == "sum"
        dims[step.dim] += step.axes
    else:
        assert tuple(dims[step.dim][-len(step.axes) :]) == step.axes
        del dims[step.dim][-len(step.axes) :]
        if step.kind == "all-to-all":
            assert step.target != step.dim
            dims[step.target] += step.axes
        else:
            assert step.kind == "all-gather"
    result = Layout(tuple(map(tuple, dims)), tuple(sorted(partial.items())))
    assert step.parts_in == cuts_product(layout, mesh)
    assert step.parts_out == cuts_product(result, mesh)
    return result


def check_steps(
    steps: Iterable[ReshardStep],
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    mesh: Sequence[int],
) -> None:
    """Assert that steps lead from `source` to `target`, and that every cut on the way divides."""
    layout = source
    for step in steps:
        layout = after(step, layout, mesh)
        assert divides(shape, layout, mesh), (source, target, step)
    assert layout == target, (source, target, steps)


def check_program(program: SpmdProgram) -> None:
    """Assert that versions are made before they are read, and that cuts and steps are possible."""
    _check_block(program.block, program.mesh)


def _check_block(block: Block, mesh: tuple[int, ...]) -> None:
    known = set(block.inputs)

    def read(versions: Iterable[ShardedValue]) -> None:
        for version in versions:
            assert hasattr(version.atom, "val") or version in known, version

    def write(versions: Iterable[ShardedValue]) -> None:
        for version in versions:
            assert divides(aval_shape(version.atom), version.layout, mesh), version
            known.add(version)

    write(block.inputs)
    for instruction in block.instructions:
        if isinstance(instruction, Relayout):
            source, target = instruction.source, instruction.target
            read([source])
            shape = aval_shape(source.atom)
            check_steps(instruction.steps, source.layout, target.layout, shape, mesh)
            write([target])
            continue
        read(instruction.operands)
        if isinstance(instruction, Loop):
            inner = instruction.body.inputs
            num_consts, num_carry = jax_compat.scan_counts(instruction.eqn.params)
            count = num_consts + num_carry
            outer = [v.layout for v in instruction.operands]
            assert [v.layout for v in inner[:count]] == outer[:count]
            carried = instruction.body.outputs[:num_carry]
            assert [v.layout for v in carried] == [v.layout for v in inner[num_consts:count]]
            _check_block(instruction.body, mesh)
        elif isinstance(instruction, Branch):
            read([instruction.index])
            for branch in instruction.blocks:
                assert len(branch.inputs) == len(instruction.operands)
                wanted = [v.layout for v in instruction.results]
                assert [v.layout for v in branch.outputs] == wanted
                _check_block(branch, mesh)
        write(instruction.results)
    read(block.outputs)
