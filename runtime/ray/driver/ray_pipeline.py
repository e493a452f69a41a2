"""A pipelined plan under Ray, as the driver calls it: leaves in, leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar.arrays.ray_array import ArrayKind, LeafPlace, MeshSharding, RaySharding
from autopar.base.ray_options import Ray
from autopar.passes.pieces.pieces import Runnable
from autopar.passes.slicing.stage_graphs import LeafRows
from autopar.plans.plan import Plan
from autopar.runtime.ray.actor.partition import (
    ends_of,
    home_values,
    result_values,
)
from autopar.runtime.ray.driver.ray_step import RayStep
from autopar.runtime.ray.transport.mesh_processes import actors_of_meshes, num_processes
from autopar.runtime.stage_programs import spec_of

Parts = tuple[MeshSharding, ...]


class RayPipeline:
    """A pipelined plan for Ray actors; nothing is started before `compile`.

    Args:
      runnable: what the meshes run.
      twins: by donated leaf, the number of the result that the next call takes in its place.
      devices_per_node: of the cluster: a mesh has an actor for each node.
      options: the cluster and the deadline.
      name: of the step.
      plan: its summary.
      replan: a plan for so many actors, where less hardware is no error.

    Attributes:
      num_processes: how many actors each mesh has.
      homes: for every leaf of the arguments and constants, the value of each of its parts.
      results: for every leaf of the result, the value of each of its parts, and its kind.
      carried: those of `twins` that lie where the leaf does; none, if one is no array of its own.
    """

    def __init__(
        self,
        runnable: Runnable,
        twins: Mapping[int, int],
        devices_per_node: int,
        options: Ray,
        name: str,
        plan: Plan,
        replan: Callable[[int], RayPipeline] | None = None,
    ) -> None:
        self.runnable, self.options, self.name, self.plan = runnable, options, name, plan
        self._replan = replan
        self.num_processes = num_processes(
            runnable.program.schedule, runnable.pieces.programs, devices_per_node
        )
        self.homes, returned = home_values(runnable), result_values(runnable)
        known: dict[Parts, Parts] = {}
        self.in_shardings = tuple(
            self._sharding(group, values, known)
            for group, values in zip(runnable.leaves, self.homes, strict=True)
        )
        self.out_shardings = tuple(
            self._sharding(group, values, known)
            for group, values in zip(runnable.results, returned, strict=True)
        )
        versions = runnable.pieces.versions
        self._kinds = tuple(
            _kind_of(group, versions[values[0]].atom.aval, sharding, LeafPlace("argument", number))
            for number, (group, values, sharding) in enumerate(
                zip(runnable.leaves, self.homes, self.in_shardings, strict=True)
            )
        )
        self.results = tuple(
            (
                values,
                _kind_of(group, versions[values[0]].atom.aval, sharding, LeafPlace("result", n)),
            )
            for n, (group, values, sharding) in enumerate(
                zip(runnable.results, returned, self.out_shardings, strict=True)
            )
        )
        self.carried = self._carried(twins)

    def _carried(self, twins: Mapping[int, int]) -> dict[int, int]:
        found = {
            leaf: result
            for leaf, result in twins.items()
            if self.in_shardings[leaf] == self.out_shardings[result]
        }
        count = Counter(value for values, _ in self.results for value in values)
        is_own = all(count[value] == 1 for x in found.values() for value in self.results[x][0])
        return found if is_own else {}

    def at(self, place: LeafPlace, weak: bool) -> tuple[tuple[int, ...], ArrayKind]:
        """What lies in a place: the values of its parts, and its kind but for the weak type."""
        if place.kind == "argument":
            values, kind = self.homes[place.leaf], self._kinds[place.leaf]
        else:
            values, kind = self.results[place.leaf]
        return values, kind._replace(weak_type=weak)

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
                    actors_of_meshes(self.num_processes)[program.mesh_of(value)],
                    stage,
                    sharded.mesh,
                    sharded.axis_names,
                    spec_of(pieces.versions[value], sharded)[0],
                )
            )
        # Equal parts are one object: calls compare the shardings of leaves. The
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


def _kind_of(
    group: Sequence[LeafRows], aval: Any, sharding: RaySharding, place: LeafPlace
) -> ArrayKind:
    """The kind of an array; `aval` is that of its first part."""
    shape = list(aval.shape)
    ends = ends_of(group)
    if ends:
        shape[group[0].axis] = ends[-1]
    weak = bool(getattr(aval, "weak_type", False))
    return ArrayKind(tuple(shape), aval.dtype, sharding, place, weak)
