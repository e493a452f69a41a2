"""Forward equations clustered into layers, and layers into stages.

Between two heavy equations there is one place where the program may be cut: where the fewest bytes
are alive (the last such place, so that a convolution keeps its norm). Of these places those are
dropped that lie next to a clearly cheaper one. A dynamic program over the remaining places balances
the layers' FLOPs, forward plus backward, against what crosses. A scan over layers may be cut
between its iterations.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.base.errors import OptionError
from autopar.passes.graph import graph as graphs
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import user_source
from autopar.passes.graph.primitives import HEAVY
from autopar.passes.graph.scans import ScanParts
from autopar.passes.primitives.factor_rule import FactorRule
from autopar.passes.slicing.anatomy import Anatomy, bytes_of, flops_of
from autopar.passes.slicing.layer_scans import find_layer_scans
from autopar.passes.slicing.primals import find_primals
from autopar.passes.slicing.stage_graphs import Layer, Layers

# Layers get no finer than about this share of the loop's FLOPs, however deep the program is.
_MAX_LAYERS = 64
# A place is dropped if, nearer than this share of the FLOPs, one has fewer bytes by this ratio.
_NEAR = 1 / 6
_FEWER = 1.5
# Stages may be this much slower than the best balance if fewer bytes cross then.
_SLACK = 1.05


Entry = tuple[int, int, int]  # an equation, the first of its iterations, behind the last (0: all)


@dataclass(frozen=True)
class _Chain:
    """The forward equations in order: their numbers, FLOPs, and bytes alive behind each.

    A scan over layers is several entries, one for each iteration (or few of them, if many).
    """

    entries: list[Entry]
    forward: list[int]
    backward: list[int]
    alive: list[int]

    def flops_until(self) -> list[int]:
        """FLOPs of the first n entries, for all n."""
        both = (f + b for f, b in zip(self.forward, self.backward, strict=True))
        return list(itertools.accumulate(both, initial=0))


def layers_of(parts: Anatomy, rules: Mapping[JaxprEqn, FactorRule], *, at_least: int = 1) -> Layers:
    """The layers of a microbatched program's loop.

    Args:
      parts: a program with a loop over microbatches.
      rules: the factor rules of its equations.
      at_least: if there are fewer, expensive cuts are made as well; there may still be fewer.
    """
    chain = _chain(parts, rules)
    if not chain.entries:
        return Layers(())
    places, front = _places(parts, chain)
    cuts = _choose(chain, _cheap_places(chain, places, front))
    if len(cuts) + 1 < at_least:
        cuts = _choose(chain, places)
    if len(cuts) + 1 < at_least:
        cuts = places
    if len(cuts) + 1 < at_least:
        cuts = _anywhere(chain, cuts, at_least)
    made = []
    for first, last in itertools.pairwise((0, *cuts, len(chain.entries))):
        entries = chain.entries[first:last]
        numbers = list(dict.fromkeys(index for index, *_ in entries))
        iterations = _iterations(parts, entries)
        heaviest = max(range(first, last), key=lambda i: chain.forward[i] + chain.backward[i])
        made.append(
            Layer(
                equations=tuple(numbers),
                forward_flops=sum(chain.forward[first:last]),
                backward_flops=sum(chain.backward[first:last]),
                cut_bytes=chain.alive[last - 1],
                digest=_digest(parts, numbers, [stop - start for _, start, stop in iterations]),
                source=user_source(parts.body.eqns[chain.entries[heaviest][0]]),
                iterations=iterations,
            )
        )
    return Layers(tuple(made))


def _iterations(parts: Anatomy, entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The scans of which these entries are a part only."""
    found: dict[int, tuple[int, int]] = {}
    for index, start, stop in entries:
        if stop:
            first, last = found.get(index, (start, stop))
            found[index] = (min(first, start), max(last, stop))
    lengths = {index: int(parts.body.eqns[index].params["length"]) for index in found}
    return tuple(
        (index, start, stop)
        for index, (start, stop) in found.items()
        if stop - start < lengths[index]
    )


def _chain(parts: Anatomy, rules: Mapping[JaxprEqn, FactorRule]) -> _Chain:
    eqns = parts.body.eqns
    scans = {index: scan.length for index, scan in find_layer_scans(parts).items()}
    entries: list[Entry] = []
    for index in parts.trunk():
        if index in scans:
            runs = _runs(index, scans[index])
            entries += runs[::-1] if eqns[index].params["reverse"] else runs
        else:
            entries.append((index, 0, 0))
    twins: dict[int, int] = {}
    for index, twin in find_primals(parts).items():
        twins[twin] = twins.get(twin, 0) + flops_of(eqns[index], parts.body, rules)
    own = {index: flops_of(eqns[index], parts.body, rules) for index, *_ in entries}

    def share(total: int, entry: Entry) -> int:
        index, start, stop = entry
        return total * stop // scans[index] - total * start // scans[index] if stop else total

    made: dict[Var, int] = {}
    until: dict[Var, int] = {}
    alive = np.zeros(len(entries), np.int64)
    for place, (index, _, stop) in enumerate(entries):
        eqn = eqns[index]
        carried: Sequence[int] = ()
        if stop:
            scan = ScanParts.of(eqn)
            _, carried, _ = scan.operands(range(len(eqn.invars)))
            if place + 1 < len(entries) and entries[place + 1][0] == index:
                alive[place] += sum(bytes_of(var) for var in scan.results(eqn.outvars)[0])
        later = place > 0 and entries[place - 1][0] == index
        for position, var in enumerate(eqn.invars):
            taken = later and position in carried  # by the first iteration
            if not isinstance(var, Literal) and var in made and not taken:
                until[var] = place
        made.update((var, place) for var in eqn.outvars)
    change = np.zeros(len(entries) + 1, np.int64)
    for var, last in until.items():
        change[made[var]] += bytes_of(var)
        change[last] -= bytes_of(var)
    alive += np.cumsum(change[:-1])
    return _Chain(
        entries=entries,
        forward=[share(own[entry[0]], entry) for entry in entries],
        backward=[share(twins.get(entry[0], 0), entry) for entry in entries],
        alive=[int(x) for x in alive],
    )


def _runs(index: int, length: int) -> list[Entry]:
    """A scan's iterations one by one; if there are many, in runs."""
    count = min(length, _MAX_LAYERS)
    ends = [length * place // count for place in range(count + 1)]
    return [(index, start, stop) for start, stop in itertools.pairwise(ends)]


def _places(parts: Anatomy, chain: _Chain) -> tuple[list[int], list[int]]:
    """Where the chain may be cut, ascending: before the equations of these places.

    Apart from these, the places that leave nearly no work in front: a cut there is of no use, but
    places next to it compare with it.
    """
    count = len(chain.entries)
    total = sum(chain.forward) + sum(chain.backward)
    heavy = [
        place
        for place, (index, *_) in enumerate(chain.entries)
        if parts.body.eqns[index].primitive.name in HEAVY
    ]
    if len(heavy) < 2:
        big = total / _MAX_LAYERS
        heavy = [i for i in range(count) if chain.forward[i] + chain.backward[i] >= big]
    best = []
    for one, other in itertools.pairwise((0, *heavy)):
        gap = range(one + 1, other + 1)
        if gap:
            best.append(min(gap, key=lambda place: (chain.alive[place - 1], -place)))
    until = chain.flops_until()
    least = total / (2 * _MAX_LAYERS)
    return (
        [place for place in best if least <= until[place] <= total - least],
        [place for place in best if until[place] < least],
    )


def _cheap_places(chain: _Chain, places: Sequence[int], front: Sequence[int]) -> list[int]:
    """Without those that lie next to a clearly cheaper one."""
    until = chain.flops_until()
    kept: list[int] = []
    for place in sorted((*places, *front), key=lambda place: (chain.alive[place - 1], place)):
        near = [
            other
            for other in kept
            if abs(until[other] - until[place]) < _NEAR * until[-1]
            and chain.alive[other - 1] * _FEWER < chain.alive[place - 1]
        ]
        if not near:
            bisect.insort(kept, place)
    return [place for place in kept if place not in front]


def _choose(chain: _Chain, places: Sequence[int]) -> list[int]:
    """The places that minimise sum(share of FLOPs squared) + weight * sum(relative bytes)."""
    if not places:
        return []
    until = chain.flops_until()
    total = until[-1] or 1
    unit = float(np.median([chain.alive[place - 1] for place in places])) or 1.0
    weight = 1 / (2 * _MAX_LAYERS**2)
    ends = [0, *places, len(chain.entries)]
    at = np.array([until[end] / total for end in ends])
    cost = np.zeros(len(ends))
    before = np.zeros(len(ends), int)
    for end in range(1, len(ends)):
        options = cost[:end] + (at[end] - at[:end]) ** 2
        before[end] = int(np.argmin(options))
        crossing = chain.alive[ends[end] - 1] / unit if end < len(ends) - 1 else 0.0
        cost[end] = options[before[end]] + weight * crossing
    cuts = []
    end = int(before[-1])
    while end:
        cuts.append(ends[end])
        end = int(before[end])
    return cuts[::-1]


def _anywhere(chain: _Chain, cuts: Sequence[int], count: int) -> list[int]:
    """`count` layers, or as many as there are equations: cuts where next few bytes are alive.

    For programs with fewer heavy equations than stages are asked for.
    """
    others = [place for place in range(1, len(chain.entries)) if place not in cuts]
    others.sort(key=lambda place: (chain.alive[place - 1], place))
    return sorted((*cuts, *others[: count - 1 - len(cuts)]))


def _digest(parts: Anatomy, numbers: Sequence[int], lengths: Sequence[int]) -> str:
    """The content hash of a layer, with the free equations that it reads left outside."""
    eqns = [parts.body.eqns[index] for index in numbers]
    made = {var for eqn in eqns for var in eqn.outvars}
    read = [v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal) and v not in made]
    jaxpr = jax_compat.replace_jaxpr(
        parts.body, eqns=eqns, invars=list(dict.fromkeys(read)), outvars=[]
    )
    return "-".join([graphs.fingerprint(jaxpr), *map(str, lengths)])


def boundaries_of(found: Layers, stages: int | Sequence[int]) -> tuple[int, ...]:
    """Where stages begin, in layers, the first one left out.

    Args:
      found: the program's layers.
      stages: how many stages, which then have about the same FLOPs, forward plus backward; or the
        boundaries themselves.

    Raises:
      OptionError: more stages than layers, or boundaries that are out of order or out of range.
    """
    count = len(found.layers)
    if not isinstance(stages, int):
        given = tuple(int(boundary) for boundary in stages)
        if any(not 0 < boundary < count for boundary in given) or any(
            one >= other for one, other in itertools.pairwise(given)
        ):
            raise OptionError(
                f"stages={list(given)} are not boundaries between layers.",
                why=f"the program has {count} layers; boundaries are numbers from 1 to {count - 1}"
                " in ascending order, and each is the first layer of a stage.",
            )
        return given
    if stages < 1:
        raise OptionError(f"stages={stages} is not a number of stages.", why="at least 1 is.")
    if stages > count:
        raise OptionError(
            f"{stages} stages are more than the program has layers.",
            why=f"it has {count} {'layer' if count == 1 else 'layers'}, even if it is cut between"
            " any two equations that are not recomputed everywhere.",
            hint=f"use at most {count} stages. A loop over parts of the batch, which accumulates "
            "gradients, is one layer: leave it to microbatches=.",
        )
    return _balanced(found.layers, stages)


def _balanced(found: Sequence[Layer], stages: int) -> tuple[int, ...]:
    """Of the partitions whose slowest stage is nearly the best possible, the one that sends least.

    Two dynamic programs over (stages, layers): the least bottleneck, then the least bytes under it.
    """
    count = len(found)
    until = list(itertools.accumulate((layer.flops for layer in found), initial=0))
    bottleneck = np.full((stages + 1, count + 1), np.inf)
    bottleneck[0, 0] = 0
    for number in range(1, stages + 1):
        for end in range(number, count + 1):
            bottleneck[number, end] = min(
                max(bottleneck[number - 1, start], until[end] - until[start])
                for start in range(number - 1, end)
            )
    limit = bottleneck[stages, count] * _SLACK
    crossing = [0, *(layer.cut_bytes for layer in found)]
    best: list[list[tuple[float, float, tuple[int, ...]] | None]] = [
        [None] * (count + 1) for _ in range(stages + 1)
    ]
    best[0][0] = (0.0, 0.0, ())
    for number in range(1, stages + 1):
        for end in range(number, count + 1):
            options = []
            for start in range(number - 1, end):
                previous = best[number - 1][start]
                work = until[end] - until[start]
                if previous is None or work > limit:
                    continue
                sent, slowest, cuts = previous
                starts = (*cuts, start) if start else cuts
                options.append((sent + crossing[start], max(slowest, work), starts))
            best[number][end] = min(options, default=None)
    chosen = best[stages][count]
    assert chosen is not None
    return chosen[2]
