"""Prices of bytes, however high."""

from __future__ import annotations

import numpy as np

from autopar.passes.sharding.integer_program import to_problem
from autopar.passes.sharding.memory_price import solve_at_price
from autopar.passes.sharding.memory_rows import memory_rows
from autopar.passes.solver import solve
from autopar.passes.solver.flat import Flat
from sharding.steps import Passes, graph_of, momentum_shapes, momentum_step


def test_the_least_bytes_are_found_at_any_price() -> None:
    """Also where seconds for all bytes are more than the solver's integers hold."""
    built = Passes(graph_of(momentum_step, *momentum_shapes()), (4,)).build()
    rows, free = memory_rows(built), Flat(to_problem(built, None))

    def bytes_at(price: float) -> int:
        found = solve_at_price(built, rows, price, solve)
        assert found.cost == free.cost(np.array(found.assignment))
        at = found.assignment
        return sum(row.bytes_in(row.value.layouts[at[row.value.node]], built.mesh) for row in rows)

    least = bytes_at(1e-3)
    assert least < bytes_at(0.0)
    assert bytes_at(1e3) == bytes_at(1e12) == least
