"""A pipelined plan under Ray: where every leaf of a call and of its result lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

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
from autopar.runtime.ray.transport.mesh_processes import actors_of_meshes, num_processes
from autopar.runtime.stage_programs import spec_of

Parts = tuple[MeshSharding, ...]


class RayPipeline:
    """A pipelined plan for Ray actors; nothing is started yet.

    Args:
      runnable: what the meshes run.
      twins: by donated leaf, the number of the result that the next call takes in its place.
      devices_per_node: of the cluster: a mesh has an actor for each node.
      options: the cluster and the deadline.
      name: of the step.
      plan: its summary.

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
    ) -> None:
        self.runnable, self.options, self.name, self.plan = runnable, options, name, plan
        self.num_processes = num_processes(
            runnable.program.schedule, runnable.pieces.programs, devices_per_node
        )
        self.homes, returned = home_values(runnable), result_values(runnable)
        known: dict[Parts, Parts] = {}
        leaves = [
            self._kind(group, values, LeafPlace("argument", number), known)
            for number, (group, values) in enumerate(zip(runnable.leaves, self.homes, strict=True))
        ]
        results = [
            self._kind(group, values, LeafPlace("result", number), known)
            for number, (group, values) in enumerate(zip(runnable.results, returned, strict=True))
        ]
        self._kinds = leaves
        self.results = tuple(zip(returned, results, strict=True))
        self.in_shardings = tuple(kind.sharding for kind in leaves)
        self.out_shardings = tuple(kind.sharding for kind in results)
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

    def _kind(
        self,
        group: Sequence[LeafRows],
        values: Sequence[int],
        place: LeafPlace,
        known: dict[Parts, Parts],
    ) -> ArrayKind:
        """The kind of a leaf, from the values of its parts."""
        pieces, program = self.runnable.pieces, self.runnable.program
        processes, ends = actors_of_meshes(self.num_processes), ends_of(group)
        parts = []
        for value in values:
            stage, mesh = program.value_of[value].stage, program.mesh_of(value)
            sharded = pieces.programs[stage]
            spec, _ = spec_of(pieces.versions[value], sharded)
            parts.append(
                MeshSharding(mesh, processes[mesh], stage, sharded.mesh, sharded.axis_names, spec)
            )
        # Equal parts are one object: calls compare the shardings of leaves. The
        # shardings themselves are not: each is known as that of its leaf.
        same = known.setdefault(tuple(parts), tuple(parts))
        aval: Any = pieces.versions[values[0]].atom.aval
        shape = list(aval.shape)
        if ends:
            shape[group[0].axis] = ends[-1]
        weak = bool(getattr(aval, "weak_type", False))
        sharding = RaySharding(same, group[0].axis, ends)
        return ArrayKind(tuple(shape), aval.dtype, sharding, place, weak)
