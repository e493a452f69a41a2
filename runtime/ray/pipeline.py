"""A pipelined plan under Ray, as the driver calls it: leaves in, leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar.passes.stages.candidate import Runnable
from autopar.passes.stages.result import LeafRows
from autopar.plans import Plan
from autopar.ray_array import MeshSharding, Place, RaySharding
from autopar.ray_options import Ray
from autopar.runtime.ray.parts import (
    ends_of,
    home_values,
    num_processes,
    processes_of,
    result_values,
    spec,
)
from autopar.runtime.ray.step import RayStep

Parts = tuple[MeshSharding, ...]


class RayPipeline:
    """A pipelined plan for Ray actors; nothing is started before `compile`.

    Args:
      runnable: what the meshes run.
      devices_per_node: of the cluster: a mesh has an actor for each node.
      options: the cluster and the deadline.
      name: of the step.
      plan: its summary.
      replan: a plan for so many actors, where less hardware is no error.

    Attributes:
      num_processes: how many actors each mesh has.
      homes: for every leaf of the arguments and constants, the value of each of its parts.
      returned: the same for every leaf of the result.
      types: shape, dtype and weak type of every leaf of the result.
      result_places: the place of every leaf of the result.
    """

    def __init__(
        self,
        runnable: Runnable,
        devices_per_node: int,
        options: Ray,
        name: str,
        plan: Plan,
        replan: Callable[[int], RayPipeline] | None = None,
    ) -> None:
        self.runnable, self.options, self.name, self.plan = runnable, options, name, plan
        self._replan = replan
        self.num_processes = num_processes(runnable, devices_per_node)
        self.homes, self.returned = home_values(runnable), result_values(runnable)
        known: dict[Parts, Parts] = {}
        self.in_shardings = tuple(
            self._sharding(group, values, known)
            for group, values in zip(runnable.leaves, self.homes, strict=True)
        )
        self.out_shardings = tuple(
            self._sharding(group, values, known)
            for group, values in zip(runnable.results, self.returned, strict=True)
        )
        self.result_places = tuple(Place("result", number) for number in range(len(self.returned)))
        versions = runnable.pieces.versions
        self._taken = tuple(
            _type_of(group, values, versions)
            for group, values in zip(runnable.leaves, self.homes, strict=True)
        )
        self.types = tuple(
            _type_of(group, values, versions)
            for group, values in zip(runnable.results, self.returned, strict=True)
        )

    def at(self, place: Place) -> tuple[RaySharding, tuple[int, ...], tuple[int, ...], Any]:
        """What lies in a place: its sharding, the values of its parts, its shape and dtype."""
        index = place.leaf
        if place.kind == "argument":
            return self.in_shardings[index], self.homes[index], *self._taken[index][:2]
        return self.out_shardings[index], self.returned[index], *self.types[index][:2]

    def _sharding(
        self, group: Sequence[LeafRows], values: Sequence[int], known: dict[Parts, Parts]
    ) -> RaySharding:
        pieces, program = self.runnable.pieces, self.runnable.program
        parts = []
        for value in values:
            stage = program.value_of[value].stage
            sharded = pieces.programs[stage]
            parts.append(
                MeshSharding(
                    program.mesh_of(value),
                    processes_of(self.num_processes)[program.mesh_of(value)],
                    stage,
                    sharded.mesh,
                    sharded.axis_names,
                    spec(pieces.versions[value], sharded),
                )
            )
        # Equal parts are one object: every call compares the shardings of all its leaves. The
        # shardings themselves are not: each is known as that of its leaf.
        same = known.setdefault(tuple(parts), tuple(parts))
        return RaySharding(same, group[0].axis, ends_of(group))

    def compile(
        self,
        name: str,
        donated: Sequence[int],
        kept: Sequence[int],
        shapes: Sequence[jax.ShapeDtypeStruct],
        constants: Sequence[Any],
    ) -> RayStep:
        """Start the actors, which compile their pieces; arguments as of `LocalProgram.compile`.

        Raises:
          AutoparError: as `Actors`.
        """
        del name
        return RayStep(self, donated, kept, shapes, constants, self._replan)


def _type_of(
    group: Sequence[LeafRows], values: Sequence[int], versions: Mapping[int, Any]
) -> tuple[tuple[int, ...], Any, bool]:
    """Shape, dtype and weak type of a result."""
    aval = versions[values[0]].atom.aval
    shape = list(aval.shape)
    ends = ends_of(group)
    if ends:
        shape[group[0].axis] = ends[-1]
    return tuple(shape), aval.dtype, bool(getattr(aval, "weak_type", False))
