"""Which of a piece's arguments its results are written in the place of, and how JAX is told."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.pieces.pieces import Port, StagePiece
from autopar.passes.sharding.layout import local_shape
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
) -> dict[int, int]:
    """The outputs that are written in the place of inputs of the same shape, dtype and layout.

    Each takes the nearest of what it is computed from element by element, as the compiler updates
    in place; what has none takes any that nothing reads any more when it is made, for else the
    compiler would copy it. Sums over devices alone may be written in the place of what they add up.

    Args:
      inputs: of a piece.
      outputs: of it.
      instructions: what it runs.
      kept: numbers of values that the caller keeps.

    Returns:
      The places of the outputs, by the inputs' numbers.
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
    made = {v: time for time, x in enumerate(instructions) for v in writes(x)}
    maker = {v: instructions[time] for v, time in made.items()}
    last_read = {v: time for time, x in enumerate(instructions) for v in reads(x)}
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
    for place, candidates in wanting.items():
        version = outputs[place].version
        since = len(instructions) if is_literal(version) else made.get(version, len(instructions))
        left = (n for v, n in candidates.items() if n not in pairs and last_read.get(v, -1) < since)
        pairs |= dict.fromkeys(itertools.islice(left, 1), place)
    return pairs


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


def in_pairs(
    inputs: Sequence[Port], outputs: Sequence[Port], pairs: Mapping[int, int], mesh: Sequence[int]
) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """The inputs and outputs in an order in which JAX pairs them as planned.

    It gives the donated arguments of which a device holds a shape and dtype to the results of the
    same, each in their order. So of the outputs of a kind those that take something over come
    first, and the inputs that they take stand in their order; otherwise nothing changes places.
    """

    def kind(port: Port) -> Hashable:
        aval, layout = port.version.atom.aval, port.version.layout
        shape = local_shape(aval.shape, layout, mesh)
        return shape, str(aval.dtype), bool(layout.partial), layout.in_host

    taking = {*pairs.values()}
    order = _in_turn([*map(kind, outputs)], lambda place: place not in taking)
    turn = {place: turn for turn, place in enumerate(order)}
    taken = [port for port in inputs if port.value in pairs]
    numbers = _in_turn([*map(kind, taken)], lambda number: turn[pairs[taken[number].value]])
    moved = iter(taken[number] for number in numbers)
    ordered = tuple(next(moved) if port.value in pairs else port for port in inputs)
    return ordered, tuple(outputs[place] for place in order)


def _in_turn(kinds: Sequence[Hashable], turn: Callable[[int], int]) -> list[int]:
    """What comes at each place, if those of a kind change places among them to be in their turns.

    >>> _in_turn("abaa", [3, 9, 1, 2].__getitem__)
    [2, 1, 3, 0]
    """
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for place, kind in enumerate(kinds):
        alike[kind].append(place)
    found = [0] * len(kinds)
    for places in alike.values():
        for place, source in zip(places, sorted(places, key=turn), strict=True):
            found[place] = source
    return found


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
