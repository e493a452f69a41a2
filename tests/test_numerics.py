"""`autopar.verify_numerics`: plans against plain functions, and where a planted defect is found."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.errors import OptionError
from autopar.runtime.verification.first_difference import largest_error


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def half_step(weights: Any, x: Any) -> Any:
    """A scan over layers in bfloat16."""

    def loss_fn(weights: Any) -> Any:
        def body(y: Any, w: Any) -> Any:
            return jnp.tanh(y @ w.astype(jnp.bfloat16)), None

        y, _ = jax.lax.scan(body, x.astype(jnp.bfloat16), weights["layers"])
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), {"loss": loss}


def centered(x: Any) -> Any:
    """Sees all rows."""
    return x - x.mean(0)


wrongly_cut = autopar.local(centered, "b d -> b d", cut="b d")


def planted_step(weights: Any, x: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        y = wrongly_cut(jnp.tanh(x @ weights))  # the planted defect
        return jnp.mean(jnp.square(y @ weights))

    loss, gradient = jax.value_and_grad(loss_fn)(weights)
    return weights - 0.1 * gradient, loss


def planted_scan(weights: Any, x: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        def body(y: Any, w: Any) -> Any:
            return wrongly_cut(jnp.tanh(y @ w)), None  # the planted defect

        return jnp.mean(jnp.square(jax.lax.scan(body, x, weights)[0] + 1.0))

    return weights - 0.1 * jax.grad(loss_fn)(weights)


def line_of_defect(function: Any) -> str:
    import inspect

    lines, start = inspect.getsourcelines(function)
    (place,) = (i for i, line in enumerate(lines) if "planted defect" in line)
    return f"{__file__}:{start + place}"


def test_a_plan_computes_what_the_function_does() -> None:
    weights = {"layers": normal(3, 16, 16)}
    found = autopar.verify_numerics(
        half_step, weights, normal(32, 16, seed=1), method="zero3", microbatches=2
    )
    assert found.agrees, str(found)
    assert [x.path for x in found.float64] == ["result[0]['layers']", "result[1]['loss']"]
    assert max(x.error for x in found.float64) < 1e-12
    assert max(x.error for x in found.own) > 1e-8, "nothing was rounded"
    assert "computes what the function does" in str(found)
    rows = [line.split()[0] for line in str(found).splitlines() if line.startswith("  result")]
    assert sorted(rows) == ["result/0/layers", "result/1/loss"]  # as in tables of plans
    np.testing.assert_array_equal(weights["layers"], normal(3, 16, 16))  # nothing was donated


def test_a_planted_defect_is_found_with_its_line() -> None:
    found = autopar.verify_numerics(
        planted_step, normal(16, 16), normal(32, 16, seed=1), method="data", microbatches=1
    )
    assert not found.agrees
    assert found.differing == ("result[0]", "result[1]")
    first = found.first_difference
    assert first is not None and first.operation == "local_call"
    assert first.source.startswith(line_of_defect(planted_step))
    assert "differ" in str(found) and first.source.partition(":")[2].split()[0] in str(found)


def test_a_defect_inside_a_loop_is_found() -> None:
    found = autopar.verify_numerics(
        planted_scan, normal(3, 16, 16), normal(32, 16, seed=1), method="data", microbatches=1
    )
    first = found.first_difference
    assert first is not None and first.operation == "local_call"
    assert first.source.startswith(line_of_defect(planted_scan))


def test_shapes_have_no_numbers() -> None:
    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    with pytest.raises(OptionError, match="needs numbers"):
        autopar.verify_numerics(planted_step, shape, shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "bool"])
def test_errors_are_told_in_every_dtype(dtype: str) -> None:
    one, other = (jnp.array(x).astype(dtype) for x in ([0.0, 0.25, 1.0], [1.0, 0.25, 0.0]))
    assert largest_error(one, other) == 1.0 and largest_error(one, one) == 0.0
    if dtype in ("bfloat16", "float16"):
        assert largest_error(other * 0.5, other) == 0.5
        assert largest_error(other * jnp.nan, other) == np.inf


def test_a_defect_below_the_rounding_of_bfloat16_is_found() -> None:
    def step(weights: Any, x: Any) -> Any:
        def loss_fn(weights: Any) -> Any:
            y = wrongly_cut(jnp.tanh(x @ weights))
            return jnp.mean(jnp.square(y @ weights).astype(jnp.float32))

        return weights - (0.1 * jax.grad(loss_fn)(weights)).astype(weights.dtype)

    weights, x = (x.astype(jnp.bfloat16) for x in (normal(16, 16), normal(32, 16, seed=1)))
    found = autopar.verify_numerics(step, weights, x, method="data", microbatches=1)
    assert found.own[0].agrees and not found.float64[0].agrees
    assert found.first_difference is not None, str(found)
    assert found.first_difference.operation == "local_call"
