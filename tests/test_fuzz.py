"""A few random programs; `make fuzz` runs as many as one likes."""

import pytest
from fuzz.comparison import MODES, compare
from fuzz.generator import generate
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("mode", MODES)
@settings(
    max_examples=2,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 10_000))
def test_random_programs_are_as_under_jit(mode: str, seed: int) -> None:
    verdict = compare(generate(seed), mode)
    assert verdict.kind in ("equal", "refused"), f"make fuzz ARGS='--seed {seed} --show'\n{verdict}"


def test_the_same_seed_gives_the_same_program() -> None:
    assert generate(7) == generate(7)
    assert generate(7) != generate(8)
