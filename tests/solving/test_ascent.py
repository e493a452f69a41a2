"""How prices of memory move."""

from __future__ import annotations

import numpy as np

from autopar.passes.solver.ascent import STEP, _grown

EXPONENTS = np.linspace(-0.9 * STEP, 3.0 * STEP, 1001)


def test_prices_grow_exponentially() -> None:
    np.testing.assert_allclose(_grown(EXPONENTS), np.exp(EXPONENTS), rtol=2e-5)


def test_prices_have_the_same_bits_on_every_processor() -> None:
    """NumPy rounds after every operation, as Python does, however wide its vectors are."""

    def grown(x: float) -> float:
        square = x * x
        even, odd = 120 + 12 * square, x * (60 + square)
        return (even + odd) / (even - odd)

    assert _grown(EXPONENTS).tolist() == [grown(x) for x in EXPONENTS.tolist()]
