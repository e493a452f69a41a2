"""The nested minimum cuts against the best of all assignments."""

import itertools

import numpy as np
import pytest

from autopar.passes.slicing import mincut
from autopar.passes.slicing.mincut import CutValue, Node, place


def cost(values: list[CutValue], stage: dict[Node, int], num_stages: int) -> float:
    """Bytes over all boundaries, counted once per value and boundary and direction."""
    total = 0.0
    for value in values:
        readers = [stage[reader] for reader in value.readers]
        have = [stage[value.maker]] if value.maker is not None else list(value.stages)
        if value.tied and any(r != have[0] for r in readers):
            return np.inf
        if value.downward and any(r > have[0] for r in readers):
            return np.inf
        for boundary in range(1, num_stages):
            low, high = min(have) < boundary, max(have) >= boundary
            total += value.bytes * (high and not low and any(r < boundary for r in readers))
            total += value.bytes * (low and not high and any(r >= boundary for r in readers))
    return total


@pytest.mark.parametrize("seed", range(20))
def test_is_the_best_of_all_assignments(seed: int) -> None:
    """Random programs of seven nodes on three stages."""
    rng = np.random.default_rng(seed)
    nodes: list[Node] = [("node", number) for number in range(7)]
    num_stages = 3
    fixed = {nodes[0]: 2, nodes[6]: int(rng.integers(0, 2))}
    values = []
    for number, node in enumerate(nodes[:-1]):
        later = nodes[number + 1 :]
        picked = rng.choice(len(later), size=int(rng.integers(1, min(3, len(later)) + 1)))
        readers = tuple(dict.fromkeys(later[int(place)] for place in picked))
        downward = bool(rng.integers(0, 2)) and nodes[0] not in readers
        values.append(CutValue(int(rng.integers(1, 9)), readers, node, downward=downward))
    for _ in range(3):
        readers = (nodes[int(rng.integers(1, 6))],)
        stages = tuple(sorted({int(s) for s in rng.integers(0, num_stages, 2)}))
        values.append(CutValue(int(rng.integers(1, 9)), readers, stages=stages))
    values.append(CutValue(0, (nodes[4],), nodes[3], tied=True))
    found = place(nodes, values, fixed, {}, num_stages)
    assert all(found[node] == stage for node, stage in fixed.items())
    best = min(
        cost(values, dict(zip(nodes, stages, strict=True)), num_stages)
        for stages in itertools.product(range(num_stages), repeat=len(nodes))
        if all(stages[nodes.index(node)] == stage for node, stage in fixed.items())
    )
    assert cost(values, found, num_stages) == best


def test_a_preference_yields_to_the_direction_of_flow() -> None:
    """A gradient cannot be read above its maker, whatever is preferred."""
    one, other = ("a",), ("b",)
    values = [CutValue(1, (other,), one, downward=True)]
    found = place([one, other], values, {one: 0}, {other: 1}, 2)
    assert found == {one: 0, other: 0}


def test_what_is_below_a_boundary_is_settled_for_all_above() -> None:
    nodes: list[Node] = [(i,) for i in range(16)]
    values = [CutValue(1, (nodes[i + 1],), nodes[i]) for i in range(15)]
    fixed = {nodes[i]: i // 2 for i in range(0, 16, 2)}
    cuts = mincut._Cuts(nodes, values, fixed, {})
    cuts.between(1, 8, np.ones(len(values), bool))
    assert [int(cuts.low[i]) for i in range(0, 16, 2)] == list(range(8))
    below = cuts.low < 7
    np.testing.assert_array_equal(cuts.low[below], cuts.high[below])
