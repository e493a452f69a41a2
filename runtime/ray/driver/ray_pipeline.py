"""A pipelined plan under Ray: where every leaf of a call and of its result lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.arrays.ray_array import ArrayKind, LeafPlace, MeshSharding, RaySharding
from autopar.base.ray_options import Ray
from autopar.passes.pieces.pieces import Runnable
from autopar.passes.slicing.stage_graphs import LeafRows
from autopar.plans.plan import Plan
from autopar.runtime.ray.actor.actor_plan import result_values
from autopar.runtime.ray.transport.routes import actors_of_meshes, num_processes
from autopar.runtime.stage_programs import spec_of

Parts = tuple[MeshSharding, ...]


class RayPipeline:
    """A pipelined plan for Ray actors; nothing is started yet.

    A mesh has an actor for each node. `twins` are, by donated leaf, the number of the result that
    the next call takes in its place; `replan` makes a plan for so many actors, for
    `on_loss="replan"`.

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
        self.replan = replan
        self.runnable, self.options, self.name, self.plan = runnable, options, name, plan
        self.num_processes = num_processes(
            runnable.program.schedule, runnable.pieces.programs, devices_per_node
        )
        inputs, returned = runnable.pieces.inputs, result_values(runnable)
        self.homes = tuple(tuple(inputs[x.number][0] for x in group) for group in runnable.leaves)
        known: dict[Parts, Parts] = {}
        leaves = self._kinds = [
            self._kind(group, values, LeafPlace("argument", number), known)
            for number, (group, values) in enumerate(zip(runnable.leaves, self.homes, strict=True))
        ]
        results = [
            self._kind(group, values, LeafPlace("result", number), known)
            for number, (group, values) in enumerate(zip(runnable.results, returned, strict=True))
        ]
        self.results = tuple(zip(returned, results, strict=True))
        self.in_shardings = tuple(kind.sharding for kind in leaves)
        self.out_shardings = tuple(kind.sharding for kind in results)
        found = {i: x for i, x in twins.items() if self.in_shardings[i] == self.out_shardings[x]}
        count = Counter(value for values, _ in self.results for value in values)
        is_own = all(count[value] == 1 for x in found.values() for value in self.results[x][0])
        self.carried = found if is_own else {}

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
        processes = actors_of_meshes(self.num_processes)
        ends = tuple(rows.stop for rows in group if rows.stop is not None)
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
