"""Where a plan's numbers part from the program's: the first instruction that differs by itself.

A program is run twice, on its devices and whole on one of them, and hands out what its instructions
make. Every value is compared in order. A sum that is not yet complete is compared where it is. In
a loop whose results differ, the first trip's body is searched in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import DropVar
from jax.sharding import Mesh, NamedSharding

from autopar.arrays.typed_keys import is_key
from autopar.base.numerics_records import FirstDifference
from autopar.passes.graph.graph import user_source
from autopar.passes.graph.scans import ScanParts
from autopar.passes.sharding.layout import describe, without_partial
from autopar.passes.sharding.reshard import reshard_steps
from autopar.passes.sharding.spmd_program import (
    Block,
    Branch,
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    SpmdProgram,
    is_literal,
    reads,
    writes,
)
from autopar.runtime.spmd import block_function, partition_spec

Numbers = dict[ShardedValue, Any]


def first_difference(
    program: SpmdProgram, inputs: Sequence[Any], devices: Sequence[jax.Device], tolerance: float
) -> FirstDifference | None:
    """The first instruction whose results differ, if one of them does by itself.

    Args:
      program: of one mesh.
      inputs: whole arrays.
      devices: that run it.
      tolerance: by what share of a value's largest number results may differ.
    """
    return _search(program, program.block, list(inputs), devices, tolerance)


def _search(
    program: SpmdProgram,
    block: Block,
    inputs: list[Any],
    devices: Sequence[jax.Device],
    tolerance: float,
) -> FirstDifference | None:
    shape = program.mesh
    on_all = _run(program, block, inputs, devices[: math.prod(shape)], shape)
    on_one = _run(program, block, inputs, devices[:1], (1,) * len(shape))
    for instruction in block.instructions:
        for value in _seen(instruction):
            error = largest_error(on_all[value], on_one[value])
            if error <= tolerance:
                continue
            if isinstance(instruction, Loop):
                known = {**dict(zip(block.inputs, inputs, strict=True)), **on_one}
                entering = _first_trip(instruction, known)
                if entering is not None:
                    inside = _search(program, instruction.body, entering, devices, tolerance)
                    if inside is not None:
                        return inside
            return _told(instruction, error, program.axis_names)
    return None


def largest_error(found: Any, wanted: Any) -> float:
    """The largest difference, over the largest number that is wanted (or 1, if that is less)."""
    if is_key(jnp.asarray(wanted).dtype):
        found, wanted = jax.random.key_data(found), jax.random.key_data(wanted)
    one, other = (np.asarray(x) for x in (found, wanted))
    if not jnp.issubdtype(one.dtype, jnp.number):  # NumPy's own would not know bfloat16
        one, other = one.astype(np.int8), other.astype(np.int8)
    kind = np.complex128 if np.iscomplexobj(one) else np.float64
    one, other = one.astype(kind), other.astype(kind)
    alike = (one == other) | (np.isnan(one) & np.isnan(other))
    if alike.all():
        return 0.0
    finite = np.isfinite(one) & np.isfinite(other)
    if not (finite | alike).all():
        return math.inf
    scale = float(np.abs(other[np.isfinite(other)]).max(initial=0.0))
    return float(np.abs(one - other)[finite].max(initial=0.0)) / (scale or 1.0)


def _seen(instruction: Instruction) -> Iterator[ShardedValue]:
    """The results that are whole numbers of the program: no parts of sums, nothing dropped."""
    for value in writes(instruction):
        if not value.layout.partial and not isinstance(value.atom, DropVar):
            yield value


def _run(
    program: SpmdProgram,
    block: Block,
    inputs: Sequence[Any],
    devices: Sequence[jax.Device],
    shape: tuple[int, ...],
) -> Numbers:
    """All that a block's instructions make, as whole arrays."""
    wanted = list(dict.fromkeys(v for x in block.instructions for v in _seen(x)))
    given = [v._replace(layout=without_partial(v.layout)) for v in block.inputs]
    partial = tuple(
        Relayout(plain, value, reshard_steps(plain.layout, value.layout, shape), "", "")
        for plain, value in zip(given, block.inputs, strict=True)
        if value.layout.partial
    )
    whole = replace(
        block,
        inputs=tuple(given),
        instructions=(*partial, *block.instructions),
        outputs=tuple(wanted),
    )
    mesh = Mesh(np.array(devices).reshape(shape), program.axis_names)
    specs = [partition_spec(v.layout, program.axis_names) for v in given]
    function = block_function(shape, program.axis_names, whole)
    sharded = jax.shard_map(
        lambda *arrays: function(arrays),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=[partition_spec(v.layout, program.axis_names) for v in wanted],
        check_vma=False,
    )
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(inputs, specs, strict=True)
    ]
    return dict(zip(wanted, jax.jit(sharded)(*placed), strict=True))


def _first_trip(loop: Loop, known: Mapping[ShardedValue, Any]) -> list[Any] | None:
    """What a loop's body is given on its first trip; None where a part of it is not known."""

    def read(value: ShardedValue) -> Any:
        return value.atom.val if is_literal(value) else known.get(value)

    consts, carry, stacks = ScanParts.of(loop.eqn).operands([read(v) for v in loop.operands])
    first = -1 if loop.eqn.params["reverse"] else 0
    values = [*consts, *carry, *(None if x is None else x[first] for x in stacks)]
    for place, (value, inner) in enumerate(zip(values, loop.body.inputs, strict=True)):
        if value is None and inner.layout.partial:  # a sum before its first part
            values[place] = jnp.zeros(inner.atom.aval.shape, inner.atom.aval.dtype)
        elif value is None:
            return None
        elif is_literal(loop.operands[place]):
            values[place] = jnp.asarray(value, inner.atom.aval.dtype)
    return values


def _told(instruction: Instruction, error: float, axes: tuple[str, ...]) -> FirstDifference:
    def lying(values: Sequence[ShardedValue]) -> str:
        return " ".join(f"{v.atom.aval.str_short()}{describe(v.layout, axes)}" for v in values)

    layouts = f"{lying(reads(instruction))} -> {lying(writes(instruction))}"
    if isinstance(instruction, Relayout):
        kinds = ", ".join(step.kind for step in instruction.steps) or "as it is"
        return FirstDifference(kinds, instruction.where, error, layouts)
    assert isinstance(instruction, (Compute, Loop, Branch))
    eqn = instruction.eqn
    return FirstDifference(eqn.primitive.name, user_source(eqn), error, layouts)
