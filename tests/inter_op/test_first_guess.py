"""One mesh before stages: what it is guessed to take, by the layers that compute most."""

from __future__ import annotations

from typing import cast

import pytest

from autopar.passes.planner import one_mesh
from autopar.passes.planner.one_mesh import OneMeshCosts
from autopar.passes.planner.stage_costs import UnitCost
from autopar.passes.planner.unit_costs import UnitCosts

MESH, OTHER = (2, 4), (8,)
TOTAL = UnitCost(8.4, 2.0, 1.0, 0.5, 20, 32, 40, 8)


class Priced:
    """All layers: in one way on a mesh; of another mesh there is a guess."""

    def least_totals(self, size: int) -> list[UnitCost]:
        """On one device, and on all eight, which together take a tenth longer than one by one."""
        return [TOTAL._replace(seconds=x) for x in (100.0, 64.0 if size == 1 else 8.4)]

    def seconds_by_mesh(self, size: int, longest: float) -> dict[tuple[int, ...], float]:
        return {MESH: 8.9, OTHER: 9.9}

    def totals(self, size: int) -> list[tuple[tuple[int, ...], UnitCost]]:
        return [(MESH, TOTAL)]


@pytest.mark.parametrize(
    ("limit", "slower", "is_guessed"),
    [
        (92, 1.15, True),
        (91, 1.15, False),  # it does not fit
        (92, 1.05, False),  # devices wait for each other
    ],
)
def test_one_mesh_is_guessed_where_devices_hardly_wait(
    limit: int, slower: float, is_guessed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_mesh, "HARDLY_SLOWER", slower)
    found = OneMeshCosts(cast(UnitCosts, Priced()), 8).first_guess(1, limit)
    assert (found is not None) == is_guessed
    if found is not None:
        assert found.fewest == 1
        assert found.expected == pytest.approx({MESH: 8.9, OTHER: 9.9})
