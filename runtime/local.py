"""The embedded runtime: one process, all its devices, one jitted program for a one-stage plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from autopar.base.errors import DeviceError
from autopar.passes.graph.logical import no_mesh
from autopar.passes.planner.compiler import Compiled
from autopar.runtime.local_pipeline import LocalPipeline
from autopar.runtime.pace import Paced, paced
from autopar.runtime.spmd import block_function, partition_spec, typed


@dataclass(frozen=True)
class LocalProgram:
    """A plan of one stage on real devices.

    `local_fn(*arrays) -> list` takes global arrays, one per graph input (constants last), and is to
    be called inside a `jax.jit` with these shardings.
    """

    local_fn: Callable[..., list[Any]]
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    mesh: Mesh

    def compile(
        self,
        name: str,
        donated: Sequence[int],
        kept: Sequence[int],
        shapes: Sequence[jax.ShapeDtypeStruct],
        constants: Sequence[jax.Array],
    ) -> jax.stages.Compiled | Paced:
        """The compiled step: (donated leaves, kept leaves, constants) -> all output leaves.

        Args:
          name: of the step, for profiles.
          donated: numbers of the input leaves whose memory may be taken.
          kept: numbers of the others.
          shapes: of all input leaves.
          constants: the program's own arrays, already in place.
        """
        order = [*donated, *kept]
        places = sorted(range(len(order)), key=order.__getitem__)

        def step(donated: list[Any], kept: list[Any], constants: list[Any]) -> list[Any]:
            arrays = [*donated, *kept]
            return self.local_fn(*(arrays[i] for i in places), *constants)

        step.__name__ = step.__qualname__ = name

        def parts(values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            return [values[i] for i in donated], [values[i] for i in kept]

        jitted = jax.jit(
            step,
            in_shardings=(*parts(self.in_shardings), [value.sharding for value in constants]),
            out_shardings=list(self.out_shardings),
            donate_argnums=(0,),
        )
        # Compiled ahead of time: jit itself would compile again for arrays that lie on our mesh.
        with no_mesh():
            compiled = jitted.lower(*parts(shapes), list(constants)).compile()
        return paced(compiled, self.mesh)


def load(
    compiled: Compiled, devices: Sequence[jax.Device] | None = None
) -> LocalProgram | LocalPipeline:
    """Place a compiled plan on `devices` (all visible ones by default, in their own order).

    Raises:
      DeviceError: there are fewer devices than the plan needs.
    """
    devices = jax.devices() if devices is None else list(devices)
    if compiled.pipeline is not None:
        return LocalPipeline(compiled.pipeline, devices)
    return _load_one(compiled, devices)


def _load_one(compiled: Compiled, devices: Sequence[jax.Device]) -> LocalProgram:
    program = compiled.program
    needed = int(np.prod(program.mesh))
    if len(devices) < needed:
        raise DeviceError(
            f"The plan needs {needed} devices and {len(devices)} are visible.",
            why=f"it was made for a logical mesh of {' x '.join(map(str, program.mesh))}.",
            hint="plan for the devices at hand, or set jax_num_cpu_devices before JAX is used.",
        )
    mesh = Mesh(
        np.asarray(devices[:needed]).reshape(program.mesh),
        program.axis_names,
        axis_types=(AxisType.Auto,) * len(program.mesh),
    )

    names = program.axis_names
    in_specs = tuple(partition_spec(v.layout, names) for v in program.block.inputs)
    out_specs = [partition_spec(v.layout, names) for v in program.block.outputs]
    run = block_function(program.mesh, names, program.block)
    sharded = jax.shard_map(
        lambda *arrays: run(arrays),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )

    def function(*arrays: Any) -> list[Any]:
        avals = [version.atom.aval for version in program.block.outputs]
        return [typed(x, aval) for x, aval in zip(sharded(*arrays), avals, strict=True)]

    return LocalProgram(
        local_fn=function,
        in_shardings=tuple(NamedSharding(mesh, s) for s in in_specs),
        out_shardings=tuple(NamedSharding(mesh, s) for s in out_specs),
        mesh=mesh,
    )
