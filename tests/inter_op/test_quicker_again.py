"""With how many microbatches computing again is looked at."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from inter_op.chained_layers import step

import autopar
from autopar.base.options import Options
from autopar.passes.planner.layout_search import LayoutSearch
from autopar.passes.planner.quicker_again import QuickerAgain
from autopar.passes.trace.trace import trace

CLUSTER = autopar.Cluster.preset("p3.16xlarge", nodes=1, devices_per_node=1)
ROWS, WIDTH, LAYERS = 512, 64, 6


@pytest.mark.parametrize(("room", "looked_at"), [(0.01, [1]), (0.3, [1, 4]), (2.0, [1, 2])])
def test_what_cannot_keep_its_rows_is_told_by_fewer_microbatches(
    room: float, looked_at: list[int]
) -> None:
    """The room is a part of what passes between layers of the whole batch; twice that fits."""
    shapes = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * LAYERS
    graph = trace(step, (shapes, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"))).graph
    passing = (LAYERS - 1) * ROWS * WIDTH * 4
    limit = LAYERS * WIDTH * WIDTH * 4 + int(room * passing)
    options = Options(memory_limit=limit)
    search = LayoutSearch.of(graph, options, CLUSTER, lambda message: None)
    asked = list[int]()

    def split(count: int, one_loop: bool) -> Any:
        asked.append(count)
        return search.split(count, one_loop)

    again = QuickerAgain(
        graph, split, options, CLUSTER, lambda message: None, lambda found: None, []
    )
    again.look_at([1, 2, 4], [(1,)])
    assert asked == looked_at
