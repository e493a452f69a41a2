"""Runs a pipelined plan in one process: every mesh's instructions, on its own devices.

Every piece is one `jax.jit` of a fully manual `jax.shard_map` on its stage's mesh, compiled ahead
of time. A step dispatches the instruction lists in their one global order, that of the program, and
never waits: JAX runs what is dispatched asynchronously. One order for all meshes means that no
mesh's collectives can wait for another's that was never dispatched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.errors import DeviceError
from autopar.passes.logical import no_mesh
from autopar.passes.pipeline import (
    Accumulate,
    Buffer,
    Free,
    Recv,
    Reshard,
    Run,
    Send,
)
from autopar.passes.pipeline.lasting import lasting_writes
from autopar.passes.sharding.layout import Layout, num_parts
from autopar.passes.sharding.program import Program, Version
from autopar.passes.stages.candidate import Runnable
from autopar.passes.stages.pieces import Port, StagePiece
from autopar.passes.stages.result import LeafRows
from autopar.runtime.spmd import block_function, partition_spec, typed
from autopar.split_array import SplitArray, SplitSharding, put_parts

Action = Callable[[dict[Buffer, Any], dict[int, Any]], None]


@dataclass(frozen=True)
class Place:
    """Where a value is: its sharding, and how many devices it is unreduced over (1: none).

    An unreduced value is held with one more leading dimension, of that size, so that what the
    devices hold is what JAX believes that they hold.
    """

    sharding: NamedSharding
    partial: int


class LocalPipeline:
    """A pipelined plan on the devices of this process.

    Args:
      runnable: what the meshes run, and in which order.
      devices: those of all meshes, mesh by mesh.

    Raises:
      DeviceError: there are fewer devices than the plan needs.
    """

    def __init__(self, runnable: Runnable, devices: Sequence[jax.Device]) -> None:
        self.pieces, self.program = pieces, program = runnable.pieces, runnable.program
        self.leaves, self.results = runnable.leaves, runnable.results
        schedule = program.schedule
        self.meshes = _meshes(pieces.programs, schedule.mesh_of_stage, devices)
        self.places = {
            number: self._place(program.value_of[number].stage, version)
            for number, version in pieces.versions.items()
        }
        self.in_shardings = tuple(
            self._sharding(group, [pieces.inputs[rows.number][0] for rows in group])
            for group in self.leaves
        )
        self.out_shardings = tuple(
            self._sharding(group, [pieces.outputs[rows.number] for rows in group])
            for group in self.results
        )

    def _sharding(
        self, group: Sequence[LeafRows], values: Sequence[int]
    ) -> NamedSharding | SplitSharding:
        """Where a leaf is whose rows are these values."""
        shardings = tuple(self.places[value].sharding for value in values)
        ends = [rows.stop for rows in group if rows.stop is not None]
        return SplitSharding(group[0].axis, tuple(ends), shardings) if ends else shardings[0]

    def _place(self, stage: int, version: Version) -> Place:
        mesh, program = self.meshes[stage], self.pieces.programs[stage]
        layout, names = version.layout, program.axis_names
        axes = tuple(axis for axis, _ in layout.partial)
        spec = partition_spec(layout, names)
        if axes:
            spec = PartitionSpec(tuple(names[a] for a in axes), *spec)
        return Place(NamedSharding(mesh, spec), num_parts(axes, program.mesh))

    def variants(self) -> dict[tuple[str, tuple[int, ...]], Any]:
        """A compiled function for every piece and every set of values that it donates."""
        found: dict[tuple[str, tuple[int, ...]], Any] = {}
        by_name = {piece.name: piece for piece in self.pieces.pieces}
        for instructions in self.program.meshes:
            for x in instructions:
                if isinstance(x, Run):
                    key = (x.piece, _donated_numbers(x))
                    if key not in found:
                        found[key] = self._compile(by_name[x.piece], key[1])
        return found

    def _compile(self, piece: StagePiece, donated: tuple[int, ...]) -> Any:
        program, mesh = self.pieces.programs[piece.stage], self.meshes[piece.stage]
        count = self.program.schedule.num_microbatches
        run = block_function(program.mesh, program.axis_names, piece.block)
        ins = [(port, count if port.stacked else 1) for port in piece.inputs]
        outs = [(port, count if port.stacked else 1) for port in piece.outputs]

        def local(*arrays: Any) -> list[Any]:
            values, left = [], iter(arrays)
            for port, number in ins:
                parts = [_whole(next(left), port.version.layout) for _ in range(number)]
                values.append(jnp.stack(parts) if port.stacked else parts[0])
            results = []
            for (port, number), result in zip(outs, run(values), strict=True):
                rows = [result[i] for i in range(number)] if port.stacked else [result]
                results += [_held(row, port.version.layout) for row in rows]
            return results

        def place(port: Port) -> Place:
            return self.places[port.value]

        in_places = [place(port) for port, number in ins for _ in range(number)]
        out_places = [place(port) for port, number in outs for _ in range(number)]
        out_avals = [port.version.atom.aval for port, number in outs for _ in range(number)]
        sharded = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=tuple(p.sharding.spec for p in in_places),
            out_specs=[p.sharding.spec for p in out_places],
            check_vma=False,
        )

        def step(*arrays: Any) -> list[Any]:
            return [typed(x, aval) for x, aval in zip(sharded(*arrays), out_avals, strict=True)]

        step.__name__ = step.__qualname__ = piece.name.replace(" ", "_").replace(".", "_")
        gone = set(donated)
        numbers = [port.value for port, number in ins for _ in range(number)]
        jitted = jax.jit(
            step,
            in_shardings=[p.sharding for p in in_places],
            out_shardings=[p.sharding for p in out_places],
            donate_argnums=tuple(i for i, n in enumerate(numbers) if n in gone),
        )
        shapes = [self._struct(number) for number in numbers]
        return jitted.lower(*shapes).compile()

    def _struct(self, number: int) -> jax.ShapeDtypeStruct:
        aval, place = self.pieces.versions[number].atom.aval, self.places[number]
        shape = aval.shape if place.partial == 1 else (place.partial, *aval.shape)
        return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

    def compile(
        self,
        name: str,
        donated: Sequence[int],
        kept: Sequence[int],
        shapes: Sequence[jax.ShapeDtypeStruct],
        constants: Sequence[jax.Array],
    ) -> PipelineStep:
        """Compile every piece; arguments as those of `LocalProgram.compile`."""
        del name
        with no_mesh():
            return PipelineStep(self, donated, kept, shapes, constants)


class PipelineStep:
    """A compiled pipelined step: (donated leaves, kept leaves, constants) -> all output leaves."""

    def __init__(
        self,
        pipeline: LocalPipeline,
        donated: Sequence[int],
        kept: Sequence[int],
        shapes: Sequence[jax.ShapeDtypeStruct],
        constants: Sequence[jax.Array],
    ):
        self.pipeline = pipeline
        self.variants = pipeline.variants()
        self.actions = tuple(self._actions())
        places = pipeline.places
        groups = [
            [number for rows in group for number in pipeline.pieces.inputs[rows.number]]
            for group in pipeline.leaves
        ]
        self.donated = [self._target(i) for i in donated]
        self.kept = [self._target(i) for i in kept]
        self.donated_types = [(shapes[i].shape, shapes[i].dtype) for i in donated]
        self.kept_types = [(shapes[i].shape, shapes[i].dtype) for i in kept]
        # What a step must not lose: outputs that are inputs as they came.
        outputs = set(pipeline.pieces.outputs)
        self.passed = [not outputs.isdisjoint(groups[i]) for i in donated]
        self.constants: dict[Buffer, Any] = {}
        for value, group in zip(constants, groups[len(shapes) :], strict=True):
            for number in group:
                placed = jax.device_put(value, places[number].sharding)
                self.constants[Buffer(number, None)] = placed

    def _target(self, leaf: int) -> _Target:
        pipeline = self.pipeline
        sharding = pipeline.in_shardings[leaf]
        groups = [pipeline.pieces.inputs[rows.number] for rows in pipeline.leaves[leaf]]
        return _Target(
            sharding if isinstance(sharding, SplitSharding) else None,
            tuple(
                tuple((Buffer(n, None), pipeline.places[n].sharding) for n in group)
                for group in groups
            ),
        )

    def _actions(self) -> Iterator[Action]:
        """The instructions in their global order, each as a function of buffers and transfers."""
        program, places = self.pipeline.program, self.pipeline.places
        targets = {
            x.tag: [places[b.value].sharding for b in x.buffers]
            for instructions in program.meshes
            for x in instructions
            if isinstance(x, Recv)
        }
        paces = [_Pace() for _ in program.meshes]
        lasting = lasting_writes(program)
        for mesh, index in program.order:
            x = program.meshes[mesh][index]
            if isinstance(x, Run):
                compiled = self.variants[x.piece, _donated_numbers(x)]
                yield _run(
                    compiled, x, paces[mesh], self._waited(x, lasting.get((mesh, index), ()))
                )
            elif isinstance(x, Send):
                yield _send(x, targets[x.tag])
            elif isinstance(x, Recv):
                yield _recv(x)
            elif isinstance(x, Reshard):
                yield _reshard(x, places[x.target.value].sharding)
            elif isinstance(x, Accumulate):
                yield _accumulate(x)
            else:
                yield _free(x)

    def _waited(self, run: Run, lasting: Sequence[Buffer]) -> Buffer | None:
        """What to wait for on virtual CPU devices, the smallest result that stays.

        The caller's next step may take over what this one returns, so that is left out.
        """
        devices = self.pipeline.meshes[run.stage].devices
        if devices.size == 1 or devices.flat[0].platform != "cpu":
            return None
        outputs, values = set(self.pipeline.pieces.outputs), self.pipeline.program.value_of
        inner = [buffer for buffer in lasting if buffer.value not in outputs]
        return min(inner, key=lambda b: values[b.value].bytes_per_device, default=None)

    def __call__(
        self, donated: Sequence[Any], kept: Sequence[Any], constants: Sequence[Any]
    ) -> list[Any]:
        """One step: dispatches everything, and waits for no result (but see `_waited`).

        Raises:
          TypeError: a leaf has another shape or dtype than the program was compiled for.
        """
        buffers = self.place(donated, kept)
        sent: dict[int, Any] = {}
        for action in self.actions:
            action(buffers, sent)
        for leaf, is_passed in zip(donated, self.passed, strict=True):
            if not is_passed and isinstance(leaf, jax.Array | SplitArray) and not leaf.is_deleted():
                leaf.delete()
        outputs = [buffers[Buffer(number, None)] for number in self.pipeline.pieces.outputs]
        return [
            outputs[group[0].number]
            if group[0].stop is None
            else SplitArray([outputs[rows.number] for rows in group], group[0].axis)
            for group in self.pipeline.results
        ]

    def place(self, donated: Sequence[Any], kept: Sequence[Any]) -> dict[Buffer, Any]:
        """The inputs where the first instructions want them.

        Raises:
          TypeError: a leaf has another shape or dtype than the program was compiled for.
        """
        _check(donated, self.donated_types)
        _check(kept, self.kept_types)
        buffers = dict(self.constants)
        for leaves, targets in ((donated, self.donated), (kept, self.kept)):
            for leaf, target in zip(leaves, targets, strict=True):
                if target.split is not None:
                    parts = put_parts(leaf, target.split)
                else:
                    parts = [leaf.__jax_array__() if isinstance(leaf, SplitArray) else leaf]
                for part, places in zip(parts, target.places, strict=True):
                    for name, sharding in places:
                        buffers[name] = jax.device_put(part, sharding)
        return buffers

    # -- what was compiled -----------------------------------------------------------------------

    def as_text(self) -> str:
        """The compiled pieces, as XLA's text (HLO), one behind the other."""
        texts = [f"// piece {name}\n{x.as_text()}" for (name, _), x in self.variants.items()]
        return "\n".join(texts)

    def memory_analysis(self) -> dict[str, Any]:
        """XLA's account of one device's memory, for every piece."""
        return {name: x.memory_analysis() for (name, _), x in self.variants.items()}

    def cost_analysis(self) -> dict[str, Any]:
        """XLA's count of operations, for every piece."""
        return {name: x.cost_analysis() for (name, _), x in self.variants.items()}


@dataclass(frozen=True)
class _Target:
    """The buffers that take a leaf, for each of its parts, and where they are.

    Args:
      split: how the leaf is split over meshes, if it is.
      places: of each part.
    """

    split: SplitSharding | None
    places: tuple[tuple[tuple[Buffer, NamedSharding], ...], ...]


def _check(leaves: Sequence[Any], types: Sequence[tuple[tuple[int, ...], Any]]) -> None:
    for leaf, (shape, dtype) in zip(leaves, types, strict=True):
        aval = leaf if isinstance(leaf, SplitArray) else jax.typeof(leaf)
        if aval.shape != shape or aval.dtype != dtype:
            raise TypeError(
                f"compiled for {dtype}{list(shape)}, called with {aval.dtype}{list(aval.shape)}"
            )


def _donated_numbers(run: Run) -> tuple[int, ...]:
    return tuple(buffer.value for buffer in run.donates)


IN_FLIGHT = 12
"""Runs that one mesh of virtual CPU devices may be behind what is dispatched (see `pace.py`)."""


class _Pace:
    """Waits until a mesh is no more than `IN_FLIGHT` runs behind."""

    def __init__(self) -> None:
        self.results: deque[Any] = deque()

    def __call__(self, result: Any) -> None:
        """Remember a run by one of its results; wait for an earlier run if there are too many."""
        self.results.append(result)
        if len(self.results) > IN_FLIGHT:
            self.results.popleft().block_until_ready()


def _run(compiled: Any, x: Run, pace: _Pace, waited: Buffer | None) -> Action:
    reads, writes, donates = x.reads, x.writes, x.donates

    def action(buffers: dict[Buffer, Any], sent: dict[int, Any]) -> None:
        results = compiled(*(buffers[b] for b in reads))
        for buffer in donates:
            del buffers[buffer]
        buffers.update(zip(writes, results, strict=True))
        if waited is not None:
            pace(buffers[waited])

    return action


def _send(x: Send, shardings: list[NamedSharding]) -> Action:
    """Start the transfer at once: the next run may take over the memory of what is sent."""

    def action(buffers: dict[Buffer, Any], sent: dict[int, Any]) -> None:
        sent[x.tag] = jax.device_put([buffers[b] for b in x.buffers], shardings)

    return action


def _recv(x: Recv) -> Action:
    def action(buffers: dict[Buffer, Any], sent: dict[int, Any]) -> None:
        buffers.update(zip(x.buffers, sent.pop(x.tag), strict=True))

    return action


def _reshard(x: Reshard, sharding: NamedSharding) -> Action:
    def action(buffers: dict[Buffer, Any], sent: dict[int, Any]) -> None:
        buffers[x.target] = jax.device_put(buffers[x.source], sharding)

    return action


def _accumulate(x: Accumulate) -> Action:
    def action(buffers: dict[Buffer, Any], sent: dict[int, Any]) -> None:
        known = buffers.get(x.target)
        part = buffers[x.addend]
        buffers[x.target] = part if known is None else _add(known, part)

    return action


_add = jax.jit(jnp.add)


def _free(x: Free) -> Action:
    def action(buffers: dict[Buffer, Any], sent: dict[int, Any]) -> None:
        for buffer in x.buffers:
            buffers.pop(buffer, None)

    return action


def _whole(array: Any, layout: Layout) -> Any:
    """What a device holds, without the leading dimension of an unreduced value."""
    return array[0] if layout.partial else array


def _held(array: Any, layout: Layout) -> Any:
    return jnp.asarray(array)[None] if layout.partial else array


def _meshes(
    programs: Sequence[Program], mesh_of_stage: Sequence[int], devices: Sequence[jax.Device]
) -> tuple[Mesh, ...]:
    """The mesh of every stage; stages of one mesh share its devices."""
    sizes: dict[int, int] = {}
    for stage, program in enumerate(programs):
        size = int(np.prod(program.mesh))
        sizes[mesh_of_stage[stage]] = max(size, sizes.get(mesh_of_stage[stage], 0))
    needed = sum(sizes.values())
    if len(devices) < needed:
        raise DeviceError(
            f"The plan needs {needed} devices and {len(devices)} are visible.",
            why="its stages have "
            + ", ".join(f"{sizes[m]}" for m in sorted(sizes))
            + " devices each on a mesh of their own.",
            hint="plan for the devices at hand, or set jax_num_cpu_devices before JAX is used.",
        )
    starts: dict[int, int] = {}
    start = 0
    for number in sorted(sizes):
        starts[number] = start
        start += sizes[number]
    found = []
    for stage, program in enumerate(programs):
        first = starts[mesh_of_stage[stage]]
        own = devices[first : first + int(np.prod(program.mesh))]
        found.append(
            Mesh(
                np.asarray(own).reshape(program.mesh),
                program.axis_names,
                axis_types=(AxisType.Auto,) * len(program.mesh),
            )
        )
    return tuple(found)
