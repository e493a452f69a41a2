"""Jaxprs as bytes: what comes back computes the same."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import autopar
from autopar.base.errors import TraceError
from autopar.runtime.ray.transport import pickling


def function(key: Any, x: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return carry + jnp.where(row > 0, row, 0.5).sum(), jnp.sort(row)

    total, rows = jax.lax.scan(body, jnp.float32(0), x)
    noise = jax.random.normal(key, (3,)) * np.array([1, 2, 3], np.float32)
    return total, rows, noise, jax.lax.cond(total > 0, lambda: 1.0, lambda: 2.0)


def test_a_jaxpr_computes_the_same() -> None:
    arguments = jax.random.key(3), jnp.arange(12.0).reshape(3, 4) - 5
    closed = jax.make_jaxpr(function)(*arguments)
    again = pickling.loads(pickling.dumps(closed, "it"))
    assert str(again.jaxpr) == str(closed.jaxpr)
    for a, b in zip(jaxpr_as_fun(again)(*arguments), jaxpr_as_fun(closed)(*arguments), strict=True):
        np.testing.assert_array_equal(a, b)


def test_keys() -> None:
    keys = jax.random.split(jax.random.key(5, impl="rbg"), 3)
    again = pickling.loads(pickling.dumps(keys, "keys"))
    assert again.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(again), jax.random.key_data(keys))


def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def call(x: Any) -> Any:
        def host(value: Any) -> None:
            with lock:
                del value

        jax.debug.callback(host, x)
        return x

    closed = jax.make_jaxpr(call)(1.0)
    with pytest.raises(TraceError, match=r"train_step cannot be sent.*lock"):
        pickling.dumps(closed, "train_step")


def test_functions_with_rules_of_their_own_keep_them() -> None:
    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return 2.0 * x

    doubled.defvjp(lambda x: (2.0 * x, None), lambda _, g: (5.0 * g,))
    local = autopar.local(doubled, "b -> b", cut="b")
    gradient = jax.grad(lambda x: jnp.sum(local(x)))
    closed = jax.make_jaxpr(gradient)(jnp.ones(4))
    again = pickling.loads(pickling.dumps(closed, "it"))
    assert jaxpr_as_fun(again)(jnp.ones(4))[0].tolist() == [5.0] * 4
