"""Which of a piece's arguments its results are written in the place of, and how JAX is told."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.pieces.pieces import Port, StagePiece
from autopar.passes.sharding.spmd_program import (
    Compute,
    Instruction,
    Relayout,
    ShardedValue,
    is_literal,
    reads,
    writes,
)


def taken_over(
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    instructions: Sequence[Instruction],
    kept: Collection[int],
) -> list[Port]:
    """The inputs in whose place an output of the same shape, dtype and layout is written.

    They are in the order of their outputs: each takes the nearest of what it is computed from
    element by element, as the compiler updates in place; what has none takes any that is left. Sums
    over devices alone may be written in the place of what they add up.

    Args:
      inputs: of a piece.
      outputs: of it.
      instructions: what it runs.
      kept: numbers of values that the caller keeps.
    """
    is_sum = all(isinstance(x, Relayout) for x in instructions)

    def form(port: Port) -> Hashable:
        return port.form if is_sum else (port.form, port.version.layout.partial)

    updated = {port.value for port in inputs} & {port.value for port in outputs}
    pairs = {p.value: place for place, p in enumerate(outputs) if p.value in updated}
    free: dict[Hashable, dict[ShardedValue, int]] = defaultdict(dict)
    for port in inputs:
        if not port.stacked and port.value not in updated and port.value not in kept:
            free[form(port)][port.version] = port.value
    wanting = {
        place: free[form(port)]
        for place, port in enumerate(outputs)
        if not port.stacked and port.value not in updated and form(port) in free
    }
    maker = {v: x for x in instructions for v in writes(x)}
    near = [
        (distance, place, value)
        for place, candidates in wanting.items()
        if not is_literal(outputs[place].version)
        for value, distance in _distances(outputs[place], candidates, maker)
    ]
    for _, place, value in sorted(near):
        if place in wanting and value not in pairs:
            pairs[value] = place
            del wanting[place]
    left = {
        id(candidates): iter([value for value in candidates.values() if value not in pairs])
        for candidates in free.values()
    }
    for place, candidates in wanting.items():
        pairs |= dict.fromkeys(itertools.islice(left[id(candidates)], 1), place)
    return sorted((p for p in inputs if p.value in pairs), key=lambda p: pairs[p.value])


def _distances(
    output: Port, candidates: Mapping[ShardedValue, int], maker: Mapping[ShardedValue, Instruction]
) -> Iterator[tuple[int, int]]:
    """The inputs from which an output is computed element by element, and by how many equations."""
    seen, distance, front = {output.version}, 0, [output.version]
    while front:
        yield from ((candidates[v], distance) for v in front if v in candidates)
        distance, following = distance + 1, dict[ShardedValue, None]()
        for v in front:
            x = maker.get(v)
            is_compute = isinstance(x, Compute) and x.eqn.primitive.name in ELEMENTWISE
            if x is not None and (is_compute or isinstance(x, Relayout)):
                following.update((r, None) for r in reads(x) if _is_alike(r, output.version))
        front = [v for v in following if v not in seen]
        seen.update(front)


def _is_alike(version: ShardedValue, other: ShardedValue) -> bool:
    """Whether two values are cut alike, whatever their dtypes."""
    same = version.atom.aval.shape == other.atom.aval.shape
    return same and version.layout._replace(partial=()) == other.layout._replace(partial=())


def in_pairs(inputs: Sequence[Port], taken: Sequence[Port]) -> tuple[Port, ...]:
    """The inputs, those that are taken over in the order of their outputs: so JAX pairs them.

    It pairs the donated arguments of a shape and dtype with its results, in their order.
    """

    def kind(port: Port) -> Hashable:
        return port.version.atom.aval.shape, str(port.version.atom.aval.dtype)

    in_turn: dict[Hashable, list[Port]] = defaultdict(list)
    for port in reversed(taken):
        in_turn[kind(port)].append(port)
    numbers = {port.value for port in taken}
    return tuple(in_turn[kind(port)].pop() if port.value in numbers else port for port in inputs)


def fresh_outputs(piece: StagePiece) -> list[ShardedValue]:
    """What a piece writes, but not in the place of something that it is given."""
    taken = Counter(port.form for port in piece.inputs if port.value in piece.donates)
    found = []
    for port in piece.outputs:
        if is_literal(port.version) or port.stacked:
            continue
        if taken[port.form]:
            taken[port.form] -= 1
        else:
            found.append(port.version)
    return found
