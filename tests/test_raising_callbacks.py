"""What a user's callback raises is raised, and no device waits for the one that ran it."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import jax
import jax.numpy as jnp
import numpy as np

import autopar

BAD = []


def check(value):
    if BAD:
        raise ValueError(f"bad batch, {value.dtype}")


def step(params, batch, is_scanned):
    def called(x, w):
        jax.debug.callback(check, x.mean())
        return jnp.tanh(x @ w), None

    def loss_fn(params):
        x = jnp.tanh(batch["x"] @ params["in"])
        if is_scanned:
            x, _ = jax.lax.scan(called, x, params["layers"])
        return jnp.mean((x @ params["out"] - batch["y"]) ** 2)

    if not is_scanned:
        jax.debug.callback(check, batch["x"].sum())
    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


params = {"in": jnp.ones((16, 32)), "layers": jnp.ones((2, 32, 32)), "out": jnp.ones((32, 8))}
batch = {"x": np.ones((16, 16), np.float32), "y": np.zeros((16, 8), np.float32)}
for is_scanned, options in (
    (False, {}),
    (False, {"method": "zero3", "microbatches": 2}),
    (False, {"stages": 2, "microbatches": 4}),
    (True, {"method": "data"}),
):
    asked = {"donate_argnums": (), "static_argnums": 2}
    ours = autopar.compile(step, params, batch, is_scanned, **asked, **options)
    want = jax.tree.leaves(jax.jit(step, static_argnums=2)(params, batch, is_scanned))
    for number in range(3):
        BAD[:] = [number] * (number == 1)
        try:
            found = jax.block_until_ready(ours(params, batch, is_scanned))
            jax.effects_barrier()
        except Exception as error:
            assert "bad batch, float32" in str(error), error
            print("raised", number)
        else:
            for a, b in zip(jax.tree.leaves(found), want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5)
            print("returned", number)
"""


def test_what_a_callback_raises_is_raised() -> None:
    """In another process, which XLA ends where devices wait for each other for long."""
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == 4 * ["returned 0", "raised 1", "returned 2"]
