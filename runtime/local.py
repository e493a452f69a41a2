"""The embedded runtime: one process, all its devices, every mesh's instructions on its own ones.

A plan of one piece is one jitted program. Else a step dispatches the instruction lists in their one
global order, that of the program, and never waits: JAX runs what is dispatched asynchronously. One
order for all meshes means that no mesh's collectives can wait for another's that was never
dispatched.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.arrays.split_array import SplitArray, SplitSharding, placed, put_parts
from autopar.base.errors import DeviceError
from autopar.passes.graph.logical import no_mesh
from autopar.passes.pieces.pieces import Runnable
from autopar.passes.pipeline.instructions import Accumulate, Buffer, Recv, Reshard, Run, Send
from autopar.passes.pipeline.lasting import lasting_writes
from autopar.passes.sharding.spmd_program import SpmdProgram
from autopar.passes.slicing.stage_graphs import LeafRows
from autopar.runtime import stage_programs as stages
from autopar.runtime.ahead import AroundCompiled
from autopar.runtime.compiled_pieces import CompiledPieces
from autopar.runtime.distributed import name_stages
from autopar.runtime.pace import paced
from autopar.runtime.stage_programs import Action, Pace, StagePrograms, donated_numbers


class LocalProgram(StagePrograms):
    """A plan on the devices of this process.

    Args:
      runnable: what the meshes run, and in which order.
      devices: those of all meshes, mesh by mesh; by default all visible ones in their own order.

    Raises:
      DeviceError: there are fewer devices than the plan needs.
    """

    def __init__(self, runnable: Runnable, devices: Sequence[jax.Device] | None = None) -> None:
        devices = jax.devices() if devices is None else devices
        pieces, program = runnable.pieces, runnable.program
        self.leaves, self.results = runnable.leaves, runnable.results
        self.meshes = _meshes(pieces.programs, program.schedule.mesh_of_stage, devices)
        homes = dict(zip(program.schedule.mesh_of_stage, self.meshes, strict=True))
        theirs = [device for mesh in homes.values() for device in mesh.devices.flat]
        # What one mesh hands to another on the same devices would be taken over or freed twice.
        self.may_alias = False if len(set(theirs)) < len(theirs) else None
        if len(self.meshes) > 1:
            name_stages(self.meshes)
        super().__init__(pieces, program, dict(enumerate(self.meshes)))
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

    def stages_of_leaf(self, leaf: int) -> tuple[int, ...]:
        """The stage of an input leaf, or of each of its parts; the first one that reads it."""
        numbers = (self.pieces.inputs[rows.number][0] for rows in self.leaves[leaf])
        return tuple(self.program.value_of[number].stage for number in numbers)

    def compile(
        self,
        name: str,
        donated: Sequence[int],
        kept: Sequence[int],
        shapes: Sequence[jax.ShapeDtypeStruct],
        constants: Sequence[jax.Array | jax.ShapeDtypeStruct],
    ) -> jax.stages.Compiled | AroundCompiled | CompiledPieces:
        """The compiled step: (donated leaves, kept leaves, constants) -> all output leaves.

        One piece is one jitted program; several are compiled one by one. For devices that are not
        there, what is compiled cannot be called.

        Args:
          name: of the step, for profiles.
          donated: numbers of the input leaves whose memory may be taken.
          kept: numbers of the others.
          shapes: of all input leaves.
          constants: the program's own arrays, already in place; or their shapes and places.
        """
        with no_mesh():
            if self.program.schedule.num_stages > 1:
                if self.are_absent:
                    return CompiledPieces(self.variants())
                return PipelineStep(self, donated, kept, shapes, constants, self.variants())
            made = self.function_of(self.pieces.pieces[0])

            def step(first: list[Any], second: list[Any], constants: list[Any]) -> list[Any]:
                arrays = dict(zip((*donated, *kept), (*first, *second), strict=True))
                return made.call(*(arrays[i] for i in sorted(arrays)), *constants)

            step.__name__ = step.__qualname__ = name

            def parts(values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                return [values[i] for i in donated], [values[i] for i in kept]

            # jit itself would compile again for arrays on our mesh.
            compiled = self.compile_ahead(
                step,
                *parts(shapes),
                list(constants),
                in_shardings=(*parts(made.in_shardings), [value.sharding for value in constants]),
                out_shardings=made.out_shardings,
                donate_argnums=(0,),
                compiler_options=self.compiler_options(0, is_whole=True) or None,
            )
            return compiled if self.are_absent else paced(compiled, made.mesh)

    def instructions_of(
        self,
        compiled: jax.stages.Compiled | AroundCompiled | PipelineStep,
        donated: Sequence[int],
        kept: Sequence[int],
        shapes: Sequence[jax.ShapeDtypeStruct],
        constants: Sequence[jax.Array],
    ) -> PipelineStep:
        """What `compile` returned for the other arguments, to be run instruction by instruction."""
        if isinstance(compiled, PipelineStep):
            return compiled

        def run(*arrays: Any) -> list[Any]:
            first, second = [arrays[i] for i in donated], [arrays[i] for i in kept]
            results: list[Any] = compiled(first, second, list(arrays[len(shapes) :]))
            return results

        run.memory_analysis = compiled.memory_analysis  # type: ignore[attr-defined]
        (instructions,) = self.program.meshes
        variants = {(x.piece, donated_numbers(x)): run for x in instructions if isinstance(x, Run)}
        return PipelineStep(self, donated, kept, shapes, constants, variants)


class PipelineStep(CompiledPieces):
    """A compiled pipelined step: (donated leaves, kept leaves, constants) -> all output leaves."""

    def __init__(
        self,
        pipeline: LocalProgram,
        donated: Sequence[int],
        kept: Sequence[int],
        shapes: Sequence[jax.ShapeDtypeStruct],
        constants: Sequence[Any],
        variants: Mapping[tuple[str, tuple[int, ...]], Any],
    ):
        super().__init__(variants)
        self.pipeline = pipeline
        self.actions = tuple(self._actions())
        places = pipeline.places
        groups = [
            [number for rows in group for number in pipeline.pieces.inputs[rows.number]]
            for group in pipeline.leaves
        ]
        self.targets = [self._target(i) for i in (*donated, *kept)]
        self.types = [shapes[i] for i in (*donated, *kept)]
        # What a step must not lose: outputs that are inputs as they came.
        outputs = set(pipeline.pieces.outputs)
        self.passed = [not outputs.isdisjoint(groups[i]) for i in donated]
        self.constants = {
            Buffer(number, None): jax.device_put(value, places[number].sharding)
            for value, group in zip(constants, groups[len(shapes) :], strict=True)
            for number in group
        }
        # What the caller or this step goes on using; as results they are copies.
        of_kept = (Buffer(number, None) for leaf in kept for number in groups[leaf])
        self.lasting = (*of_kept, *self.constants)

    def _target(
        self, leaf: int
    ) -> tuple[SplitSharding | None, list[list[tuple[Buffer, NamedSharding]]]]:
        """How a leaf is split over meshes, if it is; what buffers take each part, and where."""
        pipeline = self.pipeline
        sharding = pipeline.in_shardings[leaf]
        groups = (pipeline.pieces.inputs[rows.number] for rows in pipeline.leaves[leaf])
        places = [[(Buffer(n, None), pipeline.places[n].sharding) for n in ns] for ns in groups]
        return sharding if isinstance(sharding, SplitSharding) else None, places

    def _actions(self) -> Iterator[Action]:
        """The instructions in their global order, each as a function of buffers and transfers."""
        program, places = self.pipeline.program, self.pipeline.places
        targets = {
            x.tag: [places[b.value].sharding for b in x.buffers]
            for instructions in program.meshes
            for x in instructions
            if isinstance(x, Recv)
        }
        paces = [Pace() for _ in program.meshes]
        lasting = lasting_writes(program)
        for mesh, index in program.order:
            x = program.meshes[mesh][index]
            if isinstance(x, Run):
                compiled = self.variants[x.piece, donated_numbers(x)]
                waited = self.pipeline.waited(x, lasting.get((mesh, index), ()))
                yield stages.run_action(compiled, x, paces[mesh], waited)
            elif isinstance(x, Send):
                yield _send(x, targets[x.tag], self.pipeline.may_alias)
            elif isinstance(x, Recv):
                yield _recv(x)
            elif isinstance(x, Reshard):
                yield stages.reshard_action(x, places[x.target.value].sharding)
            elif isinstance(x, Accumulate):
                yield stages.accumulate_action(x)
            else:
                yield stages.free_action(x)

    def __call__(
        self, donated: Sequence[Any], kept: Sequence[Any], constants: Sequence[Any]
    ) -> list[Any]:
        """One step: dispatches everything, and waits for no result (but see `waited`).

        Raises:
          TypeError: a leaf has another shape or dtype than the program was compiled for.
        """
        with no_mesh():
            return self._run(donated, kept)

    def _run(self, donated: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        buffers = self.place(donated, kept)
        lasting = {id(buffers[name]) for name in self.lasting}
        sent: dict[int, Any] = {}
        for action in self.actions:
            action(buffers, sent)
        for leaf, is_passed in zip(donated, self.passed, strict=True):
            if not is_passed and isinstance(leaf, jax.Array | SplitArray) and not leaf.is_deleted():
                leaf.delete()
        outputs = [buffers[Buffer(number, None)] for number in self.pipeline.pieces.outputs]
        for number, output in enumerate(outputs):
            if id(output) in lasting:  # the next step may take the result over
                outputs[number] = jax.device_put(output, output.sharding, may_alias=False)
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
        leaves = (*donated, *kept)
        for leaf, wanted in zip(leaves, self.types, strict=True):
            stages.check_type(leaf if isinstance(leaf, SplitArray) else jax.typeof(leaf), wanted)
        buffers = dict(self.constants)
        may_alias = self.pipeline.may_alias
        for leaf, (split, places_of_parts) in zip(leaves, self.targets, strict=True):
            if split is not None:
                parts = put_parts(leaf, split)
            else:
                parts = [leaf.__jax_array__() if isinstance(leaf, SplitArray) else leaf]
            for part, places in zip(parts, places_of_parts, strict=True):
                for name, sharding in places:
                    # What the last step returned is there already: most leaves of most calls.
                    if isinstance(part, jax.Array) and part.sharding == sharding:
                        buffers[name] = part
                    else:
                        buffers[name] = placed(part, sharding, may_alias=may_alias)
        return buffers


def _send(x: Send, shardings: list[NamedSharding], may_alias: bool | None) -> Action:
    """Start the transfer at once: the next run may take over the memory of what is sent."""

    def action(buffers: dict[Buffer, Any], sent: dict[int, Any]) -> None:
        sent[x.tag] = jax.device_put(
            [buffers[b] for b in x.buffers], shardings, may_alias=may_alias
        )

    return action


def _recv(x: Recv) -> Action:
    def action(buffers: dict[Buffer, Any], sent: dict[int, Any]) -> None:
        buffers.update(zip(x.buffers, sent.pop(x.tag), strict=True))

    return action


def _meshes(
    programs: Sequence[SpmdProgram], mesh_of_stage: Sequence[int], devices: Sequence[jax.Device]
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
            why=f"it was made for a logical mesh of {' x '.join(map(str, programs[0].mesh))}."
            if len(programs) == 1
            else f"its stages have {', '.join(str(sizes[m]) for m in sorted(sizes))} devices each "
            "on a mesh of their own.",
            hint="plan for the devices at hand, or set jax_num_cpu_devices before JAX is used.",
        )
    numbers = sorted(sizes)
    ends = dict(zip(numbers, itertools.accumulate(sizes[m] for m in numbers), strict=True))
    for home in numbers:
        own = devices[ends[home] - sizes[home] : ends[home]]
        if len(set(own)) < len(own):
            raise DeviceError(
                f"Mesh {home} of the plan would have {own[0]} twice.",
                where="devices=",
                why="only stages on different meshes may share a device.",
                hint=f"name the devices mesh by mesh; these have {list(sizes.values())} devices.",
            )
    return tuple(
        stages.mesh_of(program, devices[ends[home] - sizes[home] :])
        for home, program in zip(mesh_of_stage, programs, strict=True)
    )
