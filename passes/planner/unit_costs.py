"""What units cost on submeshes: planned alone, on every mesh, with free memory and at prices."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.passes.planner.free_ways import TOO_SLOW, FreeWays
from autopar.passes.planner.layer_units import Kind, Units
from autopar.passes.planner.layouts import logical_meshes, submesh
from autopar.passes.planner.least_memory import state_on_devices
from autopar.passes.planner.mesh_choice import stage_options
from autopar.passes.planner.planned_stage import PlaceInPipeline, PlannedStage
from autopar.passes.planner.split_step import SplitStep
from autopar.passes.planner.stage_costs import (
    NOTHING,
    EqualStages,
    Mesh,
    UnitCost,
    Way,
    evenly,
    in_equal_stages,
    joined,
)
from autopar.passes.planner.stage_shardings import MeshSearch, memory_limit_of
from autopar.passes.planner.timed_unit import TimedUnit
from autopar.passes.primitives.populate import populate
from autopar.passes.schedules.flight import ONE_IN_FLIGHT
from autopar.passes.sharding.integer_program import to_problem
from autopar.passes.sharding.memory_price import solve_at_price
from autopar.passes.sharding.memory_rows import StageMemory, memory_rows
from autopar.passes.slicing.stage_graphs import StageGraph

# What all of a device's memory costs, in the time of a step with which the devices share the work:
# where memory is short, plans are looked for that are smaller, though slower.
# What is kept for every microbatch in flight is there once, or as often as on a middle stage. The
# last one is tried if of the others only the dearest fits: where that does not, nothing cheaper
# does. The dearest one is tried anyway: it says with how few microbatches stages may fit.
DEAREST = (4.0, True)
PRICES = ((0.25, False), DEAREST, (0.25, True))
NEARLY = 1.05  # times the limit: what needs so much without narrow copies is priced without them
UNIT_WORK = 0.1  # deterministic work for the problem of a unit with any memory
HOPELESSLY_SLOW = 4.0  # the same of half as many devices, on several nodes: not planned with twice


class UnitCosts:
    """What units cost: those alike are planned once; on meshes that are quick for `alike` ones.

    `graphs` has the graph of the typical unit of each kind.
    """

    def __init__(
        self,
        units: Units,
        graphs: Mapping[Kind, StageGraph],
        options: Options,
        cluster: Cluster,
        num_microbatches: int,
        alike: UnitCosts | None = None,
    ) -> None:
        self.typical, self._kinds, self._runs = units.typical, units.kinds, units.runs
        self._graphs, self._options, self._cluster = graphs, options, cluster
        self._num_microbatches = num_microbatches
        self.limit, self._alike = memory_limit_of(options, cluster), alike
        self._heaviest = max(self.typical, key=self._flops)
        self._begun: dict[int, FreeWays] = {}
        self._free: dict[int, FreeWays] = {}
        self._splits: dict[int, SplitStep] = {}  # by identity of the labelled stages
        self._known: dict[int, tuple[PlannedStage, TimedUnit]] = {}  # by plans, which live
        self.is_useless: Callable[[int, UnitCost], bool] | None = None
        self._priced: dict[tuple[Mesh, Kind, tuple[float, bool]], PlannedStage] = {}

    def free_ways(self, size: int, longest: float = math.inf) -> list[tuple[Mesh, Way]]:
        """What `ways` has with any memory."""
        return [*self._free_ways(size, longest).ways.items()]

    def ways(self, size: int, longest: float = math.inf) -> list[tuple[Mesh, Way]]:
        """For each logical mesh of so many devices that is quick, and each price of memory.

        A price is not tried on a mesh that with any memory takes longer than `longest` seconds a
        step in equal stages, or is of no use.
        """
        free, limit = self._free_ways(size, longest), self.limit
        found = self.free_ways(size, longest)
        totals = {mesh: joined(way) for mesh, way in free.ways.items()}
        if all(self._needs(total) <= limit for total in totals.values()):
            return found
        enough, fits = set[Mesh](), dict[Mesh, bool]()  # meshes whose plans need no other price
        for price, (mesh, total) in itertools.product(PRICES, totals.items()):
            slow = self._step_seconds(total) > TOO_SLOW * self.least_seconds(size)
            slow = slow or self._evenly(size, total) > longest
            slow = slow or (self.is_useless is not None and self.is_useless(size, total))
            if mesh in enough or slow:
                continue
            known, before = free.planned[mesh], fits.get(mesh, False)
            priced = {kind: self._at_price(size, mesh, kind, price) for kind in self.typical}
            if any(priced[kind] is not known[kind] for kind in priced):
                found.append((mesh, self._way(priced, free.part)))
                equal = self._in_equal_stages(size, found[-1][1])
                fits[mesh] = equal is not None and equal.bytes <= limit
            if price == DEAREST and (before or not fits.get(mesh)):
                enough.add(mesh)
        return found

    def _at_price(
        self, size: int, mesh: Mesh, kind: Kind, price: tuple[float, bool]
    ) -> PlannedStage:
        """The plan of a kind on a mesh at one of the prices; found once."""
        key = mesh, kind, price
        if key not in self._priced:
            begun, (times, as_in_middle) = self._begun[size], price
            middle = max(self._cluster.num_devices // size // 2, 1)
            flight = dict.fromkeys(ONE_IN_FLIGHT, middle) if as_in_middle else ONE_IN_FLIGHT
            search, free = begun.searches[mesh][kind], begun.planned[mesh][kind]
            rows = memory_rows(search.built, StageMemory(flight, remat=False))
            often = self._kinds.count(self._heaviest)
            step = often * min(begun.heaviest.values()) * size / self._cluster.num_devices
            solution = solve_at_price(search.built, rows, times * step / self.limit, search.hurried)
            same = (x for k, x in self._priced.items() if k[:2] == (mesh, kind))
            alike = (x for x in (free, *same) if x.solution.assignment == solution.assignment)
            self._priced[key] = next(alike, None) or search.program(solution, False)
        return self._priced[key]

    def may_fit(self, size: int, crossing: int, spared: int = 0) -> bool:
        """Whether equal stages of so many devices may fit, as far as one kind of unit tells.

        That is the kind that computes most, with any memory or at the dearest price, with the
        microbatches in flight of a middle stage.

        Args:
          size: the devices of a stage.
          crossing: bytes of one microbatch that a stage receives.
          spared: bytes on all devices together that stages may do without.
        """
        begun, count = self._begin(size), self._num_microbatches
        if not begun.heaviest:
            return False
        stages = self._cluster.num_devices / size
        units = max(self._kinds.count(self._heaviest) / stages, 1.0)
        flight = min(max(stages // 2, 1), count)
        room = self.limit + spared / self._cluster.num_devices
        heaviest = self._heaviest
        meshes = begun.quickest()
        free = (begun.planned[mesh][heaviest] for mesh in meshes)
        priced = (self._at_price(size, mesh, heaviest, DEAREST) for mesh in meshes)
        for planned in itertools.chain(free, priced):
            cost = self._cost(heaviest, planned, begun.part)
            each = units * cost.bytes_per_microbatch
            kept = flight * each
            if self._options.remat != "none":
                kept = min(kept, each + flight * crossing / size)
            if units * cost.bytes_fixed + kept + cost.bytes_working <= room:
                return True
        return False

    def least_that_fits(self, size: int, ways: Sequence[tuple[Mesh, Way]]) -> float:
        """What a step takes in equal stages that fit, in the best of some ways; else infinite."""
        tried = (self._in_equal_stages(size, way) for _, way in ways)
        return min((x.seconds for x in tried if x and x.bytes <= self.limit), default=math.inf)

    def may_fit_casting(self, size: int, ways: Sequence[tuple[Mesh, Way]], spared: int) -> bool:
        """Whether equal stages may fit that do without so many bytes on all devices together."""
        room = NEARLY * self.limit + spared / self._cluster.num_devices
        tried = (self._in_equal_stages(size, way) for _, way in ways)
        return any(x.bytes <= room for x in tried if x)

    def may_take(self, size: int, longest: float) -> bool:
        """Whether equal stages of so many devices take at most so long, with any memory."""
        free = self._free_ways(size)
        return any(self._evenly(size, joined(way)) <= longest for way in free.ways.values())

    def guess(self, size: int, known: int) -> float:
        """About what a step takes in stages of so many devices, evenly and with any memory.

        The kind that computes most is slower there than on a `known` number of devices by so much.
        """
        there, here = self._begin(known).heaviest, self._begin(size).heaviest
        if not there or not here or not min(there.values()):
            return math.inf if there else 0.0
        slower = min(here.values()) / min(there.values())
        least = min(
            self._evenly(known, joined(way)) for way in self._free_ways(known).ways.values()
        )
        return least * slower * size / known

    def _in_equal_stages(self, size: int, way: Way) -> EqualStages | None:
        stages, left = divmod(self._cluster.num_devices, size)
        return None if left else in_equal_stages(way, stages, self._num_microbatches)

    def _evenly(self, size: int, total: UnitCost) -> float:
        """What a step takes where units are shared out evenly among stages of so many devices."""
        return evenly(total, self._cluster.num_devices / size, self._num_microbatches)

    def least_totals(self, size: int, *, known: bool = True) -> list[UnitCost]:
        """What all units take at the least in one of the ways to run them on so many devices.

        With any memory. More devices send more: together they take no less time than one alone, or
        than a part of as many on each of several. Of the kind that computes most, quick meshes may
        tell what is `known`; if not, those of the largest part whose plans there are.
        """
        if not self._begin(1).heaviest:
            return [NOTHING]
        ways = [*self._free_ways(1).ways.values()]
        if not known:
            parts = (x for x, y in self._begun.items() if x < size and size % x == 0 and y.heaviest)
            part = max(parts, default=1)
            totals = self.least_totals(part) if part > 1 else map(joined, ways)
            return [total.shared_by(size // part) for total in totals]
        return [*map(joined, self.least_ways(size).values())]

    def least_ways(self, size: int, *, needs: bool = False) -> dict[Mesh, Way]:
        """What each unit takes at the least in one of the ways to run them on so many devices.

        The kind that computes most on quick meshes, others as a part of one device alone, with any
        memory. None of the others is known where one device holds no unit. If asked for, with what
        the first kind `needs` at the least: at the dearest price.
        """
        begun, heaviest, found = self._begin(size), self._heaviest, dict[Mesh, Way]()
        alone = self._free_ways(1).ways.values() if self._begin(1).heaviest else ()
        others = min(alone, key=lambda way: self._step_seconds(joined(way)), default=None)
        units = [unit.shared_by(size) for unit in others or (NOTHING,) * len(self._kinds)]
        for mesh in begun.quickest():
            unit = self._time(heaviest, begun.planned[mesh][heaviest], begun.part)
            known = unit.cost
            if needs:
                dear = self._at_price(size, mesh, heaviest, DEAREST)
                known = unit.with_bytes.needing_at_most(self._cost(heaviest, dear, begun.part))
            kinds = zip(self._kinds, units, strict=True)
            found[mesh] = tuple(known if kind == heaviest else other for kind, other in kinds)
        return found

    def least_seconds(self, size: int) -> float:
        """What a step takes on so many devices with any memory; infinite if they hold no unit."""
        return min(self.seconds_by_mesh(size).values(), default=math.inf)

    def seconds_by_mesh(self, size: int, longest: float = math.inf) -> dict[Mesh, float]:
        """The same for each logical mesh of so many devices; of the slower ones a guess.

        They are as much slower as with the layers that compute most. But for the quickest, it is a
        guess of all that is expected to take more than the `longest` seconds.
        """
        free = self._free_ways(size, longest)
        found = {mesh: self._step_seconds(joined(way)) for mesh, way in free.ways.items()}
        if not found:
            return {}
        known = min(found, key=found.__getitem__)
        once = found[known] / free.heaviest[known] if free.heaviest[known] else 1.0
        return {mesh: found.get(mesh, x * once) for mesh, x in free.heaviest.items()}

    def _free_ways(self, size: int, longest: float = math.inf) -> FreeWays:
        """The plans with any memory on the logical meshes of so many devices that are quick.

        The kind that computes most says which these are. But for the quickest, units of that kind
        take at most so long in equal stages; or all units, on one mesh, if they are as much slower.
        Found once, for the first `longest`; what is known of other plans only makes it shorter.
        """
        if size not in self._free:
            self._free[size] = self._found_free_ways(size, longest)
        return self._free[size]

    def _begin(self, size: int) -> FreeWays:
        """The plans with any memory of the kind that computes most, on meshes with a prospect."""
        if size not in self._begun:
            self._begun[size] = self._found_heaviest(size)
        return self._begun[size]

    def _found_heaviest(self, size: int) -> FreeWays:
        part, options = submesh(self._cluster, size), self._options
        made = FreeWays(part, {}, {}, {}, {})
        held = (
            state_on_devices(self._graphs[kind].graph, options, self._cluster)
            for kind in self.typical
        )
        if min(held) > size * memory_limit_of(options, self._cluster):
            return made  # not even the smallest unit's state fits
        meshes = [
            logical_meshes(options, part, self._place(kind).graph.graph, of_stage=True)
            for kind in self.typical
        ]
        common = [mesh for mesh in meshes[0] if all(mesh in others for others in meshes)]
        if self._alike is not None:
            common = [mesh for mesh in self._alike.quickest(size) if mesh in common] or common
        half = self._begun.get(size // 2)
        slower_by = {mesh: half.slower_with_twice(mesh) if half else 1.0 for mesh in common}
        for mesh, slower in sorted(slower_by.items(), key=lambda each: each[1]):
            if slower > HOPELESSLY_SLOW and made.heaviest:
                made.heaviest[mesh] = slower * min(made.heaviest.values())
                continue
            planned = self._planned(made, mesh, self._heaviest)
            cost = self._time(self._heaviest, planned, part).cost
            made.heaviest[mesh] = self._step_seconds(cost)
        return made

    def quickest(self, size: int) -> list[Mesh]:
        """The logical meshes of so many devices on which all kinds may be planned."""
        return self._begin(size).quickest()

    def _planned(self, ways: FreeWays, mesh: Mesh, kind: Kind) -> PlannedStage:
        """The plan of a kind on a mesh with any memory, of which the ways take note."""
        search = self._search(self._place(kind), mesh, ways.part)
        ways.searches.setdefault(mesh, {})[kind] = search
        solution = search.hurried(to_problem(search.built, None), UNIT_WORK)
        planned = search.program(solution, False)
        ways.planned.setdefault(mesh, {})[kind] = planned
        return planned

    def _found_free_ways(self, size: int, longest: float) -> FreeWays:
        made = self._begin(size)
        quickest = made.quickest()
        is_whole = size == self._cluster.num_devices
        for mesh in quickest:
            planned = made.planned[mesh][self._heaviest]
            cost = self._time(self._heaviest, planned, made.part).cost
            least = self._evenly(size, cost.often(self._kinds.count(self._heaviest)))
            if is_whole and made.ways and made.heaviest[quickest[0]]:
                slower = made.heaviest[mesh] / made.heaviest[quickest[0]]
                least = slower * self._evenly(size, joined(made.ways[quickest[0]]))
            if mesh != quickest[0] and (least > longest or self._will_be_useless(size, mesh)):
                continue
            for kind in self.typical:
                if kind != self._heaviest:
                    self._planned(made, mesh, kind)
            made.ways[mesh] = self._way(made.planned[mesh], made.part)
        return made

    def _will_be_useless(self, size: int, mesh: Mesh) -> bool:
        """Whether all units surely are, as the kind that computes most tells."""
        if self.is_useless is None or not self._begin(1).heaviest:
            return False
        total = self.least_totals(size)[self.quickest(size).index(mesh)]
        return self.is_useless(size, total)

    def totals(self, size: int) -> list[tuple[Mesh, UnitCost]]:
        """What all units need on one mesh of so many devices, in ways to run them.

        With any memory; where that does not fit, at the dearest price; where that does, at a lower
        one as well, which is the quicker of the two.
        """
        free, cheaper = self._free_ways(size), PRICES[0]
        found = [(mesh, joined(way)) for mesh, way in free.ways.items()]
        for mesh, total in found[:]:
            fits = total.bytes_for_one <= self.limit
            if fits or self._step_seconds(total) > TOO_SLOW * self.least_seconds(size):
                continue
            for price in (DEAREST, cheaper):
                kinds = {kind: self._at_price(size, mesh, kind, price) for kind in self.typical}
                found.append((mesh, joined(self._way(kinds, free.part))))
                if found[-1][1].bytes_for_one > self.limit:
                    break
        return found

    def _flops(self, kind: Kind) -> float:
        """Of all units of a kind together."""
        own = (run for run, other in zip(self._runs, self._kinds, strict=True) if other == kind)
        return sum(layer.flops for run in own for layer in run)

    def _place(self, kind: Kind) -> PlaceInPipeline:
        return PlaceInPipeline(self._graphs[kind], ONE_IN_FLIGHT)

    def _search(self, place: PlaceInPipeline, mesh: Mesh, part: Cluster) -> MeshSearch:
        stage = place.graph
        own = dataclasses.replace(stage_options(stage, self._options), remat="none")
        return MeshSearch.of(self._split(place), mesh, own, part, None, place)

    def _split(self, place: PlaceInPipeline) -> SplitStep:
        """The unit's graph with what is known of it on all meshes."""
        stage = place.graph
        if id(stage) not in self._splits:
            self._splits[id(stage)] = SplitStep(stage.step, populate(stage.graph.jaxpr))
        return self._splits[id(stage)]

    def _way(self, planned: Mapping[Kind, PlannedStage], part: Cluster) -> Way:
        known = {kind: self._cost(kind, planned[kind], part) for kind in self.typical}
        return tuple(map(known.__getitem__, self._kinds))

    def _cost(self, kind: Kind, planned: PlannedStage, part: Cluster) -> UnitCost:
        """What the typical unit of a kind costs by a plan; found once."""
        return self._time(kind, planned, part).with_bytes

    def _time(self, kind: Kind, planned: PlannedStage, part: Cluster) -> TimedUnit:
        """What the typical unit of a kind takes by a plan; what it needs takes longer to count."""
        if id(planned) not in self._known:
            found = TimedUnit.of(self._graphs[kind], planned, part)
            self._known[id(planned)] = planned, found
        return self._known[id(planned)][1]

    def _needs(self, total: UnitCost) -> int:
        """Bytes per device of all units in one stage, with all microbatches in flight."""
        each = total.bytes_per_microbatch * self._num_microbatches
        return total.bytes_fixed + total.bytes_working + each

    def _step_seconds(self, total: UnitCost) -> float:
        return total.seconds * self._num_microbatches + total.once_seconds
