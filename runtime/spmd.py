"""Runs a sharded program's block on one device's slices, inside `jax.shard_map`.

Every instruction becomes ordinary JAX operations on local arrays, and every resharding step one
explicit collective, so the compiled program contains the collectives that the plan lists.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as Order
from jax.experimental.layout import with_layout_constraint
from jax.extend import core as jex_core
from jax.sharding import PartitionSpec

from autopar.arrays.typed_keys import is_key
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.scans import ScanParts
from autopar.passes.graph.source_infos import source_context
from autopar.passes.primitives.cuts import DimCut
from autopar.passes.primitives.localize import bind_local
from autopar.passes.sharding.compiler_rules import CPU, RULES, CompilerRules, is_filter_gradient
from autopar.passes.sharding.fills_in_turn import Fill, fills_in_turn
from autopar.passes.sharding.kernel_orders import (
    gathered_for_kernels,
    is_kernel,
    orders_of_sums,
    read_by_kernels,
)
from autopar.passes.sharding.layout import Layout, num_parts
from autopar.passes.sharding.reshard import HOST_COPIES, ReshardStep
from autopar.passes.sharding.run_order import after_ties, ties
from autopar.passes.sharding.spmd_program import (
    Block,
    Branch,
    Compute,
    Instruction,
    Loop,
    Relayout,
    ShardedValue,
    is_literal,
    reads,
    writes,
)
from autopar.passes.sharding.turned_gathers import turned_gathers
from autopar.passes.sharding.turned_sums import turned_sums
from autopar.passes.sharding.waiting import Tie
from autopar.runtime.all_reduce import all_reduce
from autopar.runtime.bind_for import bind_for
from autopar.runtime.collective_turns import CollectiveTurns
from autopar.runtime.filled_buffers import filled, stacks_of
from autopar.runtime.host_callbacks import HostCallbacks
from autopar.runtime.loop_carries import added_in_loop, as_carried, in_order
from autopar.runtime.loop_runs import run_loop
from autopar.runtime.sent_numbers import as_sent, is_sent_otherwise
from autopar.runtime.turned_arrays import TurnedArray

Env = dict[ShardedValue, Any]


def block_function(
    mesh: tuple[int, ...],
    axis_names: tuple[str, ...],
    block: Block,
    rules: CompilerRules = RULES[CPU],
    has_hosts: bool = True,
) -> Callable[[Sequence[Any]], list[Any]]:
    """The function of local arrays that `jax.shard_map` runs on every device of the mesh.

    Where `rules.keeps_order`, compilers keep to the block's order if that saves memory
    (`run_order`), and the gradients of filters are laid in the order of dimensions that the filters
    have. Devices without hosts, for which programs are compiled alone, call nobody back.
    """

    def of_device(arrays: Sequence[Any]) -> list[Any]:
        device = _Device(mesh, axis_names, rules)
        device.callbacks = HostCallbacks(has_hosts)
        return device.callbacks.raised_after(device.block(block, arrays), device.is_first)

    return of_device


def partition_spec(layout: Layout, axis_names: Sequence[str]) -> PartitionSpec:
    """A layout as JAX writes it; what is unreduced does not show."""

    def entry(axes: Sequence[int]) -> Any:
        names = tuple(axis_names[a] for a in axes)
        return names[0] if len(names) == 1 else names or None

    return PartitionSpec(*map(entry, layout.dims))


class _Device:
    """One device's view: its place on the mesh, and how it evaluates instructions."""

    def __init__(self, mesh: tuple[int, ...], names: tuple[str, ...], rules: CompilerRules):
        self.mesh, self.names, self.rules = mesh, names, rules
        # In which order kernels of ours write sums, and which matrices they read.
        self.orders: dict[ShardedValue, tuple[int, ...]] = {}
        self.by_kernels: frozenset[ShardedValue] = frozenset()
        self.places: dict[tuple[int, ...], Any] = {}  # along axes, as the current block knows them
        self.in_loop, self.callbacks = False, HostCallbacks()
        self.turns = CollectiveTurns()  # those of the current block

    def axes(self, axes: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.names[a] for a in axes)

    def index(self, axes: Sequence[int]) -> Any:
        """This device's place along several axes, the first one being the outermost."""
        key = tuple(axes)
        if key not in self.places:
            self.places[key] = lax.axis_index(self.axes(key))
        return self.places[key]

    def cuts(self, layout: Layout) -> tuple[DimCut | None, ...]:
        return tuple(
            DimCut(num_parts(axes, self.mesh), self.index(axes), axes=self.axes(axes))
            if axes
            else None
            for axes in layout.dims
        )

    def block(self, block: Block, arrays: Sequence[Any]) -> list[Any]:
        # A loop's body is a trace of its own.
        outer = self.places, self.orders, self.by_kernels, self.turns
        self.places, self.orders, self.by_kernels = {}, {}, frozenset()
        self.turns = CollectiveTurns(block if self.rules.backend == CPU else None)
        try:
            return self.run(block, arrays)
        finally:
            self.places, self.orders, self.by_kernels, self.turns = outer

    def run(self, block: Block, arrays: Sequence[Any]) -> list[Any]:
        env: Env = dict(zip(block.inputs, arrays, strict=True))
        waiting = ties(block, self.mesh, self.rules.keeps_order)
        orders = turned_sums(block, self.rules.turns_scatters) if self.rules.turns_sums else {}
        turned = {reads(block.instructions[n])[0]: order for n, order in orders.items()}
        as_gathered = turned_gathers(block) if self.rules.turns_gathers else frozenset()
        as_gathered |= gathered_for_kernels(block, self.rules.grouped)
        self.by_kernels = read_by_kernels(block, self.rules.grouped)
        of_sums = orders_of_sums(block, self.rules.grouped)
        orders |= of_sums
        self.orders = {reads(block.instructions[n])[0]: x for n, x in of_sums.items()}
        turned |= self.orders
        fills = fills_in_turn(block, self.mesh, self.rules)
        postponed = after_ties(block, waiting)
        later: dict[int, list[int]] = {}
        for number, after in postponed.items():
            later.setdefault(after, []).append(number)
        for number, instruction in enumerate(block.instructions):
            if number in waiting:
                for gather in waiting[number].gathers:
                    for place in gather.before:
                        self.one(env, block.instructions[place], None)
                        postponed[place] = number
                self.wait(env, waiting[number])
            for place in later.get(number, ()):
                self.one(env, block.instructions[place], orders.get(place))
            if number in postponed:
                continue
            if number in fills:
                self.fill(env, instruction, fills[number])
            elif isinstance(instruction, Relayout) and instruction.target in as_gathered:
                env[instruction.target] = self.gathered(env, instruction)
            elif isinstance(instruction, (Relayout, Compute)):
                self.one(env, instruction, orders.get(number))
                for value in writes(instruction):
                    if value in turned:  # at once, so that what waits for it does not part them
                        env[value] = lax.transpose(env[value], turned[value])
            elif isinstance(instruction, Loop):
                self.loop(env, instruction)
            else:
                self.branch(env, instruction)
        return [self.read(env, version) for version in block.outputs]

    def one(self, env: Env, instruction: Instruction, order: tuple[int, ...] | None) -> None:
        if isinstance(instruction, Compute):
            self.compute(env, instruction)
        else:
            self.move(env, instruction, order)

    def move(self, env: Env, instruction: Instruction, order: tuple[int, ...] | None) -> None:
        assert isinstance(instruction, Relayout)
        self.turns.take(env, instruction)
        value = self.read(env, instruction.source)
        if order is None:
            moved = self.relayout(instruction, value)
        else:
            moved = self.turned(instruction, value, order)
        if self.in_loop:
            moved = added_in_loop(instruction, moved, self.rules)
        env[instruction.target] = moved

    def wait(self, env: Env, tie: Tie) -> None:
        values = [tie.operand, *tie.results]
        passed = lax.optimization_barrier([env[v] for v in values])
        env.update(zip(values, passed, strict=True))

    def fill(self, env: Env, instruction: Instruction, fill: Fill) -> None:
        """An instruction that writes into buffers that are filled only when they are needed."""
        if isinstance(instruction, Loop):
            stacks, env[fill.after] = filled(stacks_of(instruction, self.mesh), env[fill.after])
            self.loop(env, instruction, stacks)
            return
        assert isinstance(instruction, Compute) and fill.constant is not None
        constant = self.read(env, fill.constant)
        (env[fill.constant],), env[fill.after] = filled([constant], env[fill.after])
        self.compute(env, instruction)
        env[fill.constant] = constant

    def read(self, env: Env, version: ShardedValue) -> Any:
        value = self.as_it_lies(env, version)
        return value.value if isinstance(value, TurnedArray) else value

    def as_it_lies(self, env: Env, version: ShardedValue) -> Any:
        if not isinstance(version.atom, jex_core.Literal):
            return env[version]
        value = version.atom.val
        if not version.layout.partial:
            return value
        array = jnp.asarray(value, version.atom.aval.dtype)
        return self.to_partial(array, [a for a, _ in version.layout.partial])

    def compute(self, env: Env, instruction: Compute) -> None:
        self.turns.take(env, instruction)
        eqn = instruction.eqn
        if is_barrier(eqn) and not self.by_kernels.isdisjoint(reads(instruction)):
            given = instruction.operands
            values = [env[x] if x in self.by_kernels else self.read(env, x) for x in given]
            passed = lax.optimization_barrier(values)
            env.update(zip(instruction.results, passed, strict=True))
            return
        operands = [self.read(env, version) for version in instruction.operands]
        bind = functools.partial(bind_for, self.rules, self.callbacks)
        with source_context(eqn):
            if instruction.once:
                self.callbacks.once(eqn, operands, self.is_first())
                return
            results = bind_local(
                eqn,
                operands,
                [self.cuts(v.layout) for v in instruction.operands],
                [self.cuts(v.layout) for v in instruction.results],
                functools.partial(bind, order=self.order(env, instruction)),
            )
        if self.rules.keeps_order and is_filter_gradient(eqn):
            results = [with_layout_constraint(x, Order(tuple(range(x.ndim)))) for x in results]
        env.update(zip(instruction.results, results, strict=True))

    def order(self, env: Env, instruction: Compute) -> tuple[int, ...]:
        """That of the matrices which a kernel of ours reads or writes, as they lie in memory."""
        usual = (0, 1, 2)
        if not is_kernel(instruction.eqn, self.rules.grouped):
            return usual
        if instruction.results[0] in self.orders:
            return self.orders[instruction.results[0]]
        matrices = instruction.operands[1]
        lies = None if is_literal(matrices) else env[matrices]
        return lies.order if isinstance(lies, TurnedArray) else usual

    def is_first(self) -> Any:
        """Whether it is the mesh's first device."""
        return self.index(range(len(self.mesh))) == 0

    def loop(self, env: Env, instruction: Loop, given: Sequence[Any] | None = None) -> None:
        """A scan, or what stands for a `while`; into stacks, if they are given."""
        self.turns.take(env, instruction)
        params, scan = instruction.eqn.params, ScanParts.of(instruction.eqn)
        operands = [self.as_it_lies(env, version) for version in instruction.operands]
        consts, starts, sliced = scan.operands(operands)
        stacked = [x for x in sliced if not isinstance(x, TurnedArray)]
        trips = jnp.arange(params["length"]) if len(stacked) < len(sliced) else None

        def body(carry: Any, trip_and_rows: Any) -> Any:
            trip, xs = trip_and_rows
            rows = iter(in_order(xs, self.rules))
            slices = [x.row(trip) if isinstance(x, TurnedArray) else next(rows) for x in sliced]
            outer, self.in_loop = self.in_loop, True
            results = self.block(instruction.body, [*consts, *carry, *slices])
            self.in_loop = outer
            carried, made = scan.results(results)
            return list(map(as_carried, carried, carry)), in_order(made, self.rules)

        init = [jnp.asarray(x.value if isinstance(x, TurnedArray) else x) for x in starts]
        with source_context(instruction.eqn):
            carried, stacks = run_loop(params, body, init, (trips, stacked), given)
        env.update(zip(instruction.results, [*carried, *stacks], strict=True))

    def branch(self, env: Env, instruction: Branch) -> None:
        self.turns.take(env, instruction)
        index = self.read(env, instruction.index)
        operands = [self.read(env, version) for version in instruction.operands]
        avals = [var.aval for var in instruction.eqn.outvars]

        def run(block: Block, *values: Any) -> list[Any]:
            results = self.block(block, values)
            return [
                r if is_key(a.dtype) else lax.convert_element_type(r, a.dtype)
                for r, a in zip(results, avals, strict=True)
            ]

        with source_context(instruction.eqn):
            branches = [functools.partial(run, block) for block in instruction.blocks]
            results = lax.switch(index, branches, *operands)
        env.update(zip(instruction.results, results, strict=True))

    def relayout(self, instruction: Relayout, value: Any) -> Any:
        """A value in another layout; sums over devices in the dtype that the plan says."""
        if not instruction.sum_dtype:
            for step in instruction.steps:
                value = self.step(step, value)
            return value
        value = jnp.asarray(value)
        own = value.dtype
        for step, dtype, _ in instruction.moves():
            value = self.step(step, value.astype(dtype))
        return value.astype(own)

    def gathered(self, env: Env, instruction: Relayout) -> TurnedArray:
        """What gathers make, each along the outermost dimension."""
        self.turns.take(env, instruction)
        value = TurnedArray.of(jnp.asarray(self.read(env, instruction.source)))
        for step in instruction.steps:
            turned = value.with_first(step.dim)
            first = lax.all_gather(turned.array, self.axes(step.axes), axis=0, tiled=True)
            value = dataclasses.replace(turned, array=first)
        return value

    def turned(self, instruction: Relayout, value: Any, order: Sequence[int]) -> Any:
        """The same, of a value whose dimensions are in another order, and back in its own."""

        def place(dim: int) -> int:
            return order.index(dim) if dim >= 0 else dim

        steps = tuple(
            dataclasses.replace(step, dim=place(step.dim), target=place(step.target))
            for step in instruction.steps
        )
        moved = dataclasses.replace(instruction, steps=steps)
        result = self.relayout(moved, value)
        return lax.transpose(result, tuple(map(order.index, range(len(order)))))

    def step(self, step: ReshardStep, value: Any) -> Any:
        if is_sent_otherwise(value.dtype):
            return as_sent(value, functools.partial(self.step, step))
        if step.kind in HOST_COPIES:
            to_host = step.kind == "to-host"
            space = jax.memory.Space.Host if to_host else jax.memory.Space.Device
            return jax.device_put(value, space)
        value = jnp.asarray(value)
        names = self.axes(step.axes)
        if step.kind == "slice":
            size = value.shape[step.dim] // num_parts(step.axes, self.mesh)
            start = self.index(step.axes) * size
            return lax.dynamic_slice_in_dim(value, start, size, step.dim)
        if step.kind == "to-partial":
            return self.to_partial(value, step.axes)
        if step.kind == "all-reduce":
            return all_reduce(value, names, step.monoid)
        if step.kind == "reduce-scatter":
            return self.reduce_scatter(value, step)
        if step.kind == "all-gather":
            return lax.all_gather(value, names, axis=step.dim, tiled=True)
        return lax.all_to_all(
            value, names, split_axis=step.target, concat_axis=step.dim, tiled=True
        )

    def reduce_scatter(self, value: Any, step: ReshardStep) -> Any:
        """The devices' sum, of which each keeps its part; products write it in the order it has."""
        names, dim = self.axes(step.axes), step.dim
        parts = num_parts(step.axes, self.mesh)
        if self.rules.is_scattered_across(value.shape, value.dtype.itemsize, dim, parts):
            turned = value.swapaxes(-1, -2)
            part = lax.psum_scatter(turned, names, scatter_dimension=dim - 1, tiled=True)
            return part.swapaxes(-1, -2)
        return lax.psum_scatter(value, names, scatter_dimension=dim, tiled=True)

    def to_partial(self, value: Any, axes: Sequence[int]) -> Any:
        """One device along `axes` keeps the value, the others hold zeros."""
        return jnp.where(self.index(axes) == 0, value, jnp.zeros_like(value))
