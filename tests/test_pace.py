"""A loop that never looks at its results may run as long as it likes."""

import subprocess
import sys

LOOP = """
import autopar, jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)

@autopar.parallelize(method="data")
def step(w, x):
    for _ in range(4):
        w = w - 1e-6 * (x.T @ jax.numpy.tanh(x @ w))
    return w

w, x = np.ones((128, 128), np.float32), np.ones((256, 128), np.float32)
for _ in range(400):
    w = step(w, x)
assert step.plan.stages[0].collectives
print(float(w.sum()))
"""


def test_four_hundred_steps_that_nobody_waits_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOP], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 128 * 128
