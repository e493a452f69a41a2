"""What functions of matrices are expected to take."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar


@pytest.mark.parametrize(("function", "share"), [(jnp.linalg.eigh, 0.03), (jnp.linalg.cholesky, 1)])
def test_functions_of_matrices_have_no_matrix_units(function: Any, share: float) -> None:
    """On GPUs; and eigenvalues are found column by column, a matrix of a stack on each device."""

    def step(w: Any, x: Any) -> Any:
        return w, jax.tree.map(jnp.sum, function(x))

    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((1,), (64, 2048, 2048)))
    seconds = [
        autopar.plan(step, w, x, cluster=cluster, batch_argnums=1).estimates.step_seconds
        for cluster in ("1x1 h100", "1x8 h100")
    ]
    operations = {jnp.linalg.eigh: 9, jnp.linalg.cholesky: 1 / 3}[function] * 64 * 2048**3
    assert operations / (share * 67e12) < seconds[0] < 1.2 * operations / (share * 67e12) + 0.01
    assert seconds[1] == pytest.approx(seconds[0] / 8, rel=0.05)
