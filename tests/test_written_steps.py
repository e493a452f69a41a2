"""`benchmarks/written_steps.py`: every way to write the step is planned, as small as it can be."""

import jax
import pytest
from benchmark_modules import written_steps


@pytest.mark.parametrize("name", written_steps.CASES)
def test_every_way_is_planned(name: str) -> None:
    row = written_steps.planned(name, layers=1, verify=False)
    _, state, _ = written_steps.step_of(written_steps.CASES[name], layers=1)
    size = sum(4 * leaf.size for leaf in jax.tree.leaves(state))
    # Devices share the state, at the most; one layer's activations are no larger than it.
    assert size / 8 < row["planned_bytes"] < 2 * size
    assert row["step_ms"] > 0
