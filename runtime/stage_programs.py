"""What every runtime of a pipeline shares: compiled pieces, and what instructions do to buffers.

Every piece is one `jax.jit` of a fully manual `jax.shard_map` on its stage's mesh, compiled ahead
of time. A runtime has the meshes of all stages (`local.py`) or those of its process (`ray/`).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.arrays.split_array import HOST_MEMORY
from autopar.base.errors import DeviceError
from autopar.base.run_flags import absent_options, ordered_options, overlapped_options
from autopar.passes.graph.jax_compat import with_type_of
from autopar.passes.pieces.pieces import Pieces, Port, StagePiece
from autopar.passes.pipeline.instructions import (
    Accumulate,
    Buffer,
    Free,
    PipelineProgram,
    Reshard,
    Run,
)
from autopar.passes.sharding.compiler_rules import CPU, TPU, backend_of, rules_of
from autopar.passes.sharding.layout import Layout, num_parts
from autopar.passes.sharding.spmd_program import Loop, ShardedValue, SpmdProgram
from autopar.runtime.ahead import compile_ahead
from autopar.runtime.compiled_pieces import CompileOnce, are_absent
from autopar.runtime.kernel_check import rules_here
from autopar.runtime.spmd import block_function, partition_spec

Action = Callable[[dict[Buffer, Any], Any], None]
"""An instruction, as a function of buffers and what a runtime adds: transfers, a step's number."""

FRUGAL: dict[str, str | bool] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""XLA's order of work on CPUs; by default, what needs arguments alone is done first, and kept."""

KEEPING_BARRIERS: dict[str, str | bool] = {
    "xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"
}
"""XLA on CPUs takes barriers away first, and what is computed again for the first time's result.

Eight layers in `jax.checkpoint`, each a product and what is elementwise, then hold 17.1 MiB where
they hold 9.1 with the barriers (and 24.1 without `jax.checkpoint`), with the same numbers. The
second pass makes one kernel of a small loop (`small_while_loop_hoisting_pass.cc`), and kernels
with a barrier end the process.
"""


@dataclass(frozen=True)
class Place:
    """Where a value is: its sharding, and how many devices it is unreduced over (1: none).

    An unreduced value is held with one more leading dimension, of that size, so that what the
    devices hold is what JAX believes that they hold.
    """

    sharding: NamedSharding
    partial: int


@dataclass(frozen=True)
class PieceFunction:
    """A piece on its stage's mesh, as a function that takes and returns global arrays.

    The values are the numbers of those that it takes, once for each array.
    """

    call: Callable[..., list[Any]]
    values: tuple[int, ...]
    in_shardings: list[NamedSharding]
    out_shardings: list[NamedSharding]
    mesh: Mesh


def mesh_of(program: SpmdProgram, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of a program, on the first of these devices."""
    own = np.asarray(devices[: math.prod(program.mesh)]).reshape(program.mesh)
    return Mesh(own, program.axis_names, axis_types=(AxisType.Auto,) * len(program.mesh))


def _in_host(sharding: NamedSharding) -> NamedSharding:
    """The same parts in the memory of the hosts.

    Raises:
      DeviceError: the devices have no such memory.
    """
    devices = list(sharding.mesh.devices.flat)
    own = (device for device in devices if device.process_index == jax.process_index())
    device = next(own, devices[0])  # others' devices do not say
    kinds = [memory.kind for memory in device.addressable_memories()]
    if kinds and HOST_MEMORY not in kinds:  # devices that are absent have none
        raise DeviceError(
            f"The plan puts arrays into the hosts' memory, and {device.device_kind} cannot.",
            why=f"JAX offers it the memory kinds {', '.join(kinds)}, not {HOST_MEMORY}.",
            hint="plan with offload='none'.",
        )
    return sharding.with_memory_kind(HOST_MEMORY)


def check_type(found: Any, wanted: jax.ShapeDtypeStruct) -> None:
    """See that a leaf's shape and dtype are as compiled for.

    Raises:
      TypeError: they are not.
    """
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise TypeError(
            f"compiled for {wanted.dtype}{list(wanted.shape)}, "
            f"called with {found.dtype}{list(found.shape)}"
        )


def spec_of(version: ShardedValue, program: SpmdProgram) -> tuple[PartitionSpec, int]:
    """How the array that holds a value is cut, and how many devices the value is unreduced over."""
    layout, names = version.layout, program.axis_names
    axes = tuple(axis for axis, _ in layout.partial)
    spec = partition_spec(layout, names)
    if axes:
        spec = PartitionSpec(tuple(names[a] for a in axes), *spec)
    return spec, num_parts(axes, program.mesh)


class StagePrograms:
    """The pieces of some stages on real devices.

    Args:
      pieces: of the whole program.
      program: which pieces are run, and what they donate.
      stage_meshes: the meshes of the stages that this process runs.

    Attributes:
      compile_ahead: what compiles.
      named_by_kind: whether compiled pieces are called "F", not "F0": JAX's cache, which several
        processes may have in common, tells programs apart by their names.
    """

    def __init__(
        self, pieces: Pieces, program: PipelineProgram, stage_meshes: Mapping[int, Mesh]
    ) -> None:
        self.pieces, self.program, self.stage_meshes = pieces, program, stage_meshes
        self.are_absent = are_absent(stage_meshes.values())
        has_several = self.are_absent or len(stage_meshes) > 1
        self.compile_ahead: Callable[..., Any] = CompileOnce() if has_several else compile_ahead
        self.named_by_kind = False
        self.places: dict[int, Place] = {}
        for number, version in pieces.versions.items():
            stage = program.value_of[number].stage
            if stage in stage_meshes:
                spec, partial = spec_of(version, pieces.programs[stage])
                sharding = NamedSharding(stage_meshes[stage], spec)
                if version.layout.in_host:
                    sharding = _in_host(sharding)
                self.places[number] = Place(sharding, partial)

    def variants(self) -> dict[tuple[str, tuple[int, ...]], Any]:
        """A compiled function for every piece and every set of values that it donates."""
        own = (piece.name for piece in self.pieces.pieces if piece.stage in self.stage_meshes)
        return {key: self.variant(key) for key in variants_of(self.program, own)}

    def variant(self, key: tuple[str, tuple[int, ...]]) -> Any:
        """One of them."""
        piece = next(piece for piece in self.pieces.pieces if piece.name == key[0])
        return self._compile(piece, key[1])

    def function_of(self, piece: StagePiece) -> PieceFunction:
        """A piece as a function of global arrays, to be called inside a `jax.jit`."""
        program, mesh = self.pieces.programs[piece.stage], self.stage_meshes[piece.stage]
        count = self.program.schedule.num_microbatches
        devices = list(mesh.devices.flat)
        absent, kind = self.are_absent, devices[0].device_kind
        rules = rules_of(kind) if absent else rules_here(devices, [piece.block])
        run = block_function(program.mesh, program.axis_names, piece.block, rules, not absent)

        def size(port: Port) -> int:
            return count if port.stacked else 1

        def local(*arrays: Any) -> list[Any]:
            values, left = [], iter(arrays)
            for port in piece.inputs:
                parts = [_whole(next(left), port.version.layout) for _ in range(size(port))]
                values.append(jnp.stack(parts) if port.stacked else parts[0])
            results = []
            for port, result in zip(piece.outputs, run(values), strict=True):
                rows = [result[i] for i in range(count)] if port.stacked else [result]
                results += [_held(row, port.version.layout) for row in rows]
            return results

        ins, outs = (
            [port for port in ports for _ in range(size(port))]
            for ports in (piece.inputs, piece.outputs)
        )
        in_shardings = [self.places[port.value].sharding for port in ins]
        out_shardings = [self.places[port.value].sharding for port in outs]
        sharded = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=tuple(sharding.spec for sharding in in_shardings),
            out_specs=[sharding.spec for sharding in out_shardings],
            check_vma=False,
        )

        def step(*arrays: Any) -> list[Any]:
            results = zip(sharded(*arrays), outs, strict=True)
            return [with_type_of(x, port.version.atom.aval) for x, port in results]

        return PieceFunction(step, tuple(x.value for x in ins), in_shardings, out_shardings, mesh)

    def _compile(self, piece: StagePiece, donated: tuple[int, ...]) -> Any:
        made = self.function_of(piece)
        name = piece.kind if self.named_by_kind else piece.name
        name = name.replace(" ", "_").replace(".", "_")
        made.call.__name__ = made.call.__qualname__ = name
        return self.compile_ahead(
            made.call,
            *(self._struct(number) for number in made.values),
            in_shardings=made.in_shardings,
            out_shardings=made.out_shardings,
            donate_argnums=tuple(i for i, n in enumerate(made.values) if n in donated),
            compiler_options=self.compiler_options(piece.stage) or None,
        )

    def compiler_options(self, stage: int, is_whole: bool = False) -> dict[str, str | bool]:
        """What XLA is told for a piece of a stage, or for a step that is one piece."""
        device = self.stage_meshes[stage].devices.flat[0]
        backend = backend_of(device.platform)
        if backend == CPU:
            return KEEPING_BARRIERS if is_whole else FRUGAL | KEEPING_BARRIERS
        program = self.pieces.programs[stage]
        if backend == TPU:
            has_loops = any(isinstance(x, Loop) for x in program.block.instructions)
            return {} if has_loops else ordered_options()
        options = overlapped_options() if program.overlapped else {}
        return options | absent_options(device.device_kind) if self.are_absent else options

    def _struct(self, number: int) -> jax.ShapeDtypeStruct:
        aval, place = self.pieces.versions[number].atom.aval, self.places[number]
        shape = aval.shape if place.partial == 1 else (place.partial, *aval.shape)
        return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

    def waited(self, run: Run, lasting: Sequence[Buffer]) -> Buffer | None:
        """What to wait for on virtual CPU devices, the smallest result that stays.

        The caller's next step may take over what this one returns, so that is left out.
        """
        devices = self.stage_meshes[run.stage].devices
        if devices.size == 1 or devices.flat[0].platform != "cpu":
            return None
        outputs, values = set(self.pieces.outputs), self.program.value_of
        inner = [buffer for buffer in lasting if buffer.value not in outputs]
        return min(inner, key=lambda b: values[b.value].bytes_per_device, default=None)


def variants_of(
    program: PipelineProgram, pieces: Iterable[str]
) -> list[tuple[str, tuple[int, ...]]]:
    """Of these pieces every one with every set of values that it donates, as they first run."""
    own = {*pieces}
    runs = (x for x in itertools.chain(*program.meshes) if isinstance(x, Run) and x.piece in own)
    return list(dict.fromkeys((x.piece, donated_numbers(x)) for x in runs))


def donated_numbers(run: Run) -> tuple[int, ...]:
    """The values that a run takes over."""
    return tuple(buffer.value for buffer in run.donates)


IN_FLIGHT = 12
"""Runs that one mesh of virtual CPU devices may lag what is dispatched (see `pace.py`)."""


class Pace:
    """Waits until a mesh has no more than `IN_FLIGHT` runs to do."""

    def __init__(self) -> None:
        self.results: deque[Any] = deque()

    def __call__(self, result: Any) -> None:
        """Remember a run by one of its results; wait for an earlier run if there are too many."""
        self.results.append(result)
        if len(self.results) > IN_FLIGHT:
            self.results.popleft().block_until_ready()


def run_action(compiled: Any, x: Run, pace: Pace, waited: Buffer | None) -> Action:
    """Dispatch a piece."""
    reads, writes, donates = x.reads, x.writes, x.donates

    def action(buffers: dict[Buffer, Any], _: Any) -> None:
        results = compiled(*(buffers[b] for b in reads))
        for buffer in donates:
            del buffers[buffer]
        buffers.update(zip(writes, results, strict=True))
        if waited is not None:
            pace(buffers[waited])

    return action


def reshard_action(
    x: Reshard, sharding: NamedSharding, put: Callable[..., jax.Array] = jax.device_put
) -> Action:
    """Put a buffer where another stage of the mesh wants it."""

    def action(buffers: dict[Buffer, Any], _: Any) -> None:
        buffers[x.target] = put(buffers[x.source], sharding)

    return action


def accumulate_action(x: Accumulate) -> Action:
    """Add a part to a sum."""

    def action(buffers: dict[Buffer, Any], _: Any) -> None:
        known = buffers.get(x.target)
        part = buffers[x.addend]
        buffers[x.target] = part if known is None else _add(known, part)

    return action


_add = jax.jit(jnp.add)


def free_action(x: Free) -> Action:
    """Forget buffers."""

    def action(buffers: dict[Buffer, Any], _: Any) -> None:
        for buffer in x.buffers:
            buffers.pop(buffer, None)

    return action


def _whole(array: Any, layout: Layout) -> Any:
    """What a device holds, without the leading dimension of an unreduced value."""
    return array[0] if layout.partial else array


def _held(array: Any, layout: Layout) -> Any:
    return jnp.asarray(array)[None] if layout.partial else array
