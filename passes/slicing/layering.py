"""Forward equations clustered into layers, and layers into stages.

Between two heavy equations there is one place where the program may be cut: where the fewest bytes
are alive (the last such place, so that a convolution keeps its norm). Of these places those are
dropped that lie next to a clearly cheaper one, if they are not the ends of what `jax.checkpoint`
computes again, or of an iteration; inside of such a block what crosses counts twice, for it is kept
as well. A dynamic program over the remaining places balances the layers' FLOPs, forward plus
backward, against what crosses. A scan over layers may be cut between its iterations.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.base.errors import OptionError
from autopar.passes.graph import jax_compat
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.fingerprint import fingerprint
from autopar.passes.graph.graph import (
    makers_of,
    readers_of,
    user_source,
    variables,
)
from autopar.passes.graph.primitives import HEAVY
from autopar.passes.graph.scans import ScanParts
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.slicing.anatomy import Anatomy, bytes_of, flops_of
from autopar.passes.slicing.layer_scans import find_layer_scans
from autopar.passes.slicing.primals import find_primals
from autopar.passes.slicing.stage_graphs import Boundaries, Layer, Layers, StageParts

# Layers get no finer than about this share of the loop's FLOPs, however deep the program is.
_MAX_LAYERS = 64
# A place is dropped if, nearer than this share of the FLOPs, one has fewer bytes by this ratio.
_NEAR = 1 / 6
_FEWER = 1.5
# Stages may be this much slower than the best balance if fewer bytes cross then.
_SLACK = 1.05


Entry = tuple[int, int, int]  # an equation, the first of its iterations, after the last (0: all)


@dataclass(frozen=True)
class _Chain:
    """The forward equations in order, and of each its FLOPs and the bytes alive after it.

    A scan over layers is several entries, one for each iteration (or few of them, if many).

    Attributes:
      again: of the bytes alive, those that the backward pass would compute again.
      until: FLOPs, forward and backward, of the first n entries, for all n.
    """

    entries: list[Entry]
    forward: list[int]
    backward: list[int]
    alive: list[int]
    again: list[int]
    until: list[int]

    def bytes_at(self, place: int) -> int:
        """Bytes that cross a cut before this entry."""
        return self.alive[place - 1]

    def cost_at(self, place: int) -> int:
        """The same, and those that are kept only because of the cut: the receiver keeps them."""
        return self.alive[place - 1] + self.again[place - 1]

    def flops(self, place: int) -> int:
        """Of one entry, forward and backward."""
        return self.forward[place] + self.backward[place]


def layers_of(parts: Anatomy, rules: Rules, *, at_least: int = 1) -> Layers:
    """The layers of a microbatched program's loop.

    If there are fewer than `at_least`, expensive cuts are made as well; there may still be fewer.
    """
    chain = _chain(parts, rules)
    if not chain.entries:
        return Layers(())
    places, front = _places(parts, chain)
    cuts = _choose(chain, _cheap_places(chain, places, front))
    if len(cuts) + 1 < at_least:
        cuts = _choose(chain, places)
    if len(cuts) + 1 < at_least:
        cuts = _anywhere(chain, places, at_least)
    ends = (0, *cuts, len(chain.entries))
    return Layers(tuple(_layer(parts, chain, *pair) for pair in itertools.pairwise(ends)))


def _layer(parts: Anatomy, chain: _Chain, first: int, last: int) -> Layer:
    """The layer of these entries of the chain."""
    eqns = parts.body.eqns
    runs: dict[int, list[Entry]] = {}
    for entry in chain.entries[first:last]:
        runs.setdefault(entry[0], []).append(entry)
    iterations = []  # of the scans of which these entries are a part only
    part: dict[Var, float] = {}  # of the stacks that they read
    for index, entries in runs.items():
        start, stop = min(e[1] for e in entries), max(e[2] for e in entries)
        if stop and stop - start < eqns[index].params["length"]:
            iterations.append((index, start, stop))
            stacks = ScanParts.of(eqns[index]).operands(eqns[index].invars)[2]
            share = (stop - start) / eqns[index].params["length"]
            part.update(dict.fromkeys(variables(stacks), share))
    heaviest = max(range(first, last), key=chain.flops)
    read = readers_of([eqns[index] for index in runs])
    return Layer(
        equations=tuple(runs),
        forward_flops=sum(chain.forward[first:last]),
        backward_flops=sum(chain.backward[first:last]),
        cut_bytes=chain.bytes_at(last),
        digest=_digest(parts, list(runs), [stop - start for _, start, stop in iterations]),
        source=user_source(eqns[chain.entries[heaviest][0]]),
        iterations=tuple(iterations),
        inside=chain.again[last - 1] > 0,
        weight_bytes=round(sum(part.get(v, 1) * bytes_of(v) for v in read if v in parts.leaves)),
    )


def _chain(parts: Anatomy, rules: Rules) -> _Chain:
    eqns = parts.body.eqns
    scans = {index: scan.length for index, scan in find_layer_scans(parts).items()}
    entries: list[Entry] = []
    for index in parts.trunk():
        if index in scans:  # iterations one by one; if there are many, in runs
            count = min(scans[index], _MAX_LAYERS)
            ends = [scans[index] * place // count for place in range(count + 1)]
            runs = [(index, start, stop) for start, stop in itertools.pairwise(ends)]
            entries += runs[::-1] if eqns[index].params["reverse"] else runs
        else:
            entries.append((index, 0, 0))
    own = {index: flops_of(eqns[index], parts.body, rules) for index, *_ in entries}
    dual: Counter[int] = Counter()  # FLOPs of the backward equations that belong to each
    for index, primal in find_primals(parts).items():
        dual[primal] += flops_of(eqns[index], parts.body, rules)

    def share(total: int, entry: Entry) -> int:
        index, start, stop = entry
        return total * stop // scans[index] - total * start // scans[index] if stop else total

    forward = [share(own[entry[0]], entry) for entry in entries]
    backward = [share(dual[entry[0]], entry) for entry in entries]
    both = (f + b for f, b in zip(forward, backward, strict=True))
    until = list(itertools.accumulate(both, initial=0))
    alive, again = _alive(eqns, entries, _made_again(parts))
    return _Chain(entries, forward, backward, alive, again, until)


def _made_again(parts: Anatomy) -> frozenset[Var]:
    """What the backward pass computes again, and does not keep as well: in `jax.checkpoint`."""
    eqns, backward = parts.body.eqns, parts.backward
    barriers = {index for index in backward if is_barrier(eqns[index])}
    if not barriers:
        return frozenset()
    numbers = parts.value_numbers
    made = (var for index in backward - barriers for var in eqns[index].outvars)
    again = {numbers[var] for var in made}
    kept = {var for index in backward for var in variables(eqns[index].invars)}
    forward = (v for i, eqn in enumerate(eqns) if i not in backward for v in eqn.outvars)
    return frozenset(var for var in forward if numbers[var] in again and var not in kept)


def _alive(
    eqns: Sequence[JaxprEqn], entries: Sequence[Entry], made_again: frozenset[Var]
) -> tuple[list[int], list[int]]:
    """For every entry, the bytes that it and earlier ones made, and later ones read.

    And those of them that are `made_again`.
    """
    made, until = dict[Var, int](), dict[Var, int]()
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
    change = np.zeros((2, len(entries) + 1), np.int64)
    for var, last in until.items():
        for row in change[: 1 + (var in made_again)]:
            row[made[var]] += bytes_of(var)
            row[last] -= bytes_of(var)
    total, again = np.cumsum(change[:, :-1], axis=1)
    return [int(x) for x in alive + total], [int(x) for x in again]


def _places(parts: Anatomy, chain: _Chain) -> tuple[list[int], list[int]]:
    """Where the chain may be cut, ascending: before the equations of these places.

    Apart from these, the places that leave nearly no work in front: a cut there is of no use, but
    places next to it compare with it.
    """
    total, count = chain.until[-1], len(chain.entries)
    names = [parts.body.eqns[index].primitive.name for index, *_ in chain.entries]
    heavy = [place for place in range(count) if names[place] in HEAVY]
    if len(heavy) < 2:
        heavy = [place for place in range(count) if chain.flops(place) >= total / _MAX_LAYERS]
    best = [
        min(range(one + 1, other + 1), key=lambda place: (chain.cost_at(place), -place))
        for one, other in itertools.pairwise((0, *heavy))
        if one < other
    ]
    least = total / (2 * _MAX_LAYERS)
    return (
        [place for place in best if least <= chain.until[place] <= total - least],
        [place for place in best if chain.until[place] < least],
    )


def _cheap_places(chain: _Chain, places: Sequence[int], front: Sequence[int]) -> list[int]:
    """Without those that lie next to a clearly cheaper one.

    But for the ends of blocks, and of iterations: what layers of a scan are given crosses each of
    them, and is no reason to keep some together.
    """
    until, has_blocks = chain.until, any(chain.again)
    kept: list[int] = []
    for place in sorted((*places, *front), key=lambda place: (chain.bytes_at(place), place)):
        is_end = has_blocks and not chain.again[place - 1]
        is_end = is_end or chain.entries[place - 1][0] == chain.entries[place][0]
        if is_end or not any(
            abs(until[other] - until[place]) < _NEAR * until[-1]
            and chain.bytes_at(other) * _FEWER < chain.bytes_at(place)
            for other in kept
        ):
            kept.append(place)
    return sorted(set(kept).difference(front))


def _choose(chain: _Chain, places: Sequence[int]) -> list[int]:
    """The places that minimise sum(share of FLOPs squared) + weight * sum(relative bytes)."""
    if not places:
        return []
    unit = float(np.median([chain.cost_at(place) for place in places])) or 1.0
    weight = 1 / (2 * _MAX_LAYERS**2)
    ends = [0, *places, len(chain.entries)]
    at = np.array([chain.until[end] / (chain.until[-1] or 1) for end in ends])
    cost, before = np.zeros(len(ends)), np.zeros(len(ends), int)
    for end in range(1, len(ends)):
        options = cost[:end] + (at[end] - at[:end]) ** 2
        before[end] = int(np.argmin(options))
        crossing = chain.cost_at(ends[end]) / unit if end < len(ends) - 1 else 0.0
        cost[end] = options[before[end]] + weight * crossing
    cuts, end = [], int(before[-1])
    while end:
        cuts.append(ends[end])
        end = int(before[end])
    return cuts[::-1]


def _anywhere(chain: _Chain, cuts: Sequence[int], count: int) -> list[int]:
    """At least `count` layers, or as many as equations: further cuts where few bytes are alive.

    For programs with fewer heavy equations than stages are asked for.
    """
    others = [place for place in range(1, len(chain.entries)) if place not in cuts]
    others.sort(key=lambda place: (chain.cost_at(place), place))
    return sorted((*cuts, *others[: max(count - 1 - len(cuts), 0)]))


def _digest(parts: Anatomy, numbers: Sequence[int], lengths: Sequence[int]) -> str:
    """The content hash of a layer, with the free equations that it reads left outside."""
    eqns = [parts.body.eqns[index] for index in numbers]
    made = makers_of(eqns)
    read = [v for v in readers_of(eqns) if v not in made]
    jaxpr = jax_compat.replace_jaxpr(parts.body, eqns=eqns, invars=read, outvars=[])
    return "-".join([fingerprint(jaxpr), *map(str, lengths)])


def number_of_stages(stages: Boundaries) -> int:
    """How many stages these are."""
    if isinstance(stages, StageParts):
        return len(stages.parts)
    return stages if isinstance(stages, int) else len(stages) + 1


def boundaries_of(found: Layers, stages: Boundaries) -> tuple[int, ...]:
    """Where stages begin, in layers, the first one left out.

    Args:
      found: the program's layers.
      stages: how many stages, which then have about the same FLOPs, forward plus backward; or the
        boundaries themselves; or what each stage has.

    Raises:
      OptionError: more stages than layers, or boundaries that are out of order or out of range, or
        numbers of layers that are not all of them.
    """
    count, shares = len(found.layers), [1.0]
    if isinstance(stages, StageParts):
        if stages.are_counts:
            return _counted(found, stages)
        shares = list(stages.parts)
    elif isinstance(stages, int):
        shares = [1.0 / max(stages, 1)] * stages
    else:
        given = tuple(int(boundary) for boundary in stages)
        if list(given) != sorted(set(given).intersection(range(1, count))):
            raise OptionError(
                f"stages={list(given)} are not boundaries between layers.",
                why=f"the program has {count} layers; boundaries are numbers from 1 to {count - 1}"
                " in ascending order, and each is the first layer of a stage.",
            )
        return given
    if not shares:
        raise OptionError(f"stages={stages} is not a number of stages.", why="at least 1 is.")
    if len(shares) > count:
        at_most = f"use at most stages={count}." if count > 1 else "use stages=1: one mesh."
        raise OptionError(
            f"{len(shares)} stages are more than the program has layers.",
            why=f"it has {count} {'layer' if count == 1 else 'layers'}, even if it is cut between"
            " any two equations that are not recomputed everywhere.",
            hint=f"{at_most} A loop over parts of the batch, which accumulates gradients, is one "
            "layer: leave it to microbatches=.",
        )
    return _balanced(found.layers, shares)


def _counted(found: Layers, stages: StageParts) -> tuple[int, ...]:
    """Where stages of so many layers begin."""
    count, ends = len(found.layers), [int(end) for end in itertools.accumulate(stages.parts)]
    if ends[-1] != count:
        flops = sum(layer.flops for layer in found.layers) or 1
        raise OptionError(
            f"The stages have {ends[-1]} layers, and the program has {count}.",
            where=f"layers={', '.join(map(str, stages.parts))}",
            why="of the FLOPs these layers have, in percent: "
            + ", ".join(f"{100 * layer.flops / flops:.2g}" for layer in found.layers)
            + ".",
            hint="give away all layers, or say shares of the FLOPs, such as layers=0.25.",
        )
    return tuple(ends[:-1])


def _balanced(found: Sequence[Layer], shares: Sequence[float]) -> tuple[int, ...]:
    """Of the partitions whose slowest stage is nearly the best possible, the one that sends least.

    A stage's time is its FLOPs over its share of them.

    Two dynamic programs over (stages, layers): the least bottleneck, then the least bytes under it.
    """
    count, stages = len(found), len(shares)
    until = list(itertools.accumulate((layer.flops for layer in found), initial=0))
    bottleneck = np.full((stages + 1, count + 1), np.inf)
    bottleneck[0, 0] = 0
    for number in range(1, stages + 1):
        for end in range(number, count + 1):
            bottleneck[number, end] = min(
                max(bottleneck[number - 1, start], (until[end] - until[start]) / shares[number - 1])
                for start in range(number - 1, end)
            )
    limit = bottleneck[stages, count] * _SLACK
    crossing = [0, *(layer.cut_bytes for layer in found)]
    # For each number of first layers: bytes sent, the slowest stage's FLOPs, where stages begin.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for share in shares:
        options: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {}
        for start, (sent, slowest, cuts) in best.items():
            for end in range(start + 1, count + 1):
                work = (until[end] - until[start]) / share
                if work <= limit:
                    starts = (*cuts, start) if start else cuts
                    option = (sent + crossing[start], max(slowest, work), starts)
                    options.setdefault(end, []).append(option)
        best = {end: min(ways) for end, ways in options.items()}
    return best[count][2]
