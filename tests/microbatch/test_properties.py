"""Random small programs: whatever the analysis accepts computes what the plain program does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from microbatch.helpers import check_split

ROWS, WIDTH = 8, 4

# Each operation maps an array of rows [ROWS, WIDTH] to another one. Those that look at other rows
# are there too: the analysis has to notice. `w` is [WIDTH, WIDTH], `c` the batch's labels [ROWS].
Operation = Callable[[Any, Any, Any], Any]
OPERATIONS: dict[str, Operation] = {
    "dense": lambda x, w, c: jnp.tanh(x @ w),
    "residual": lambda x, w, c: x + jnp.sin(x @ w),
    "layer norm": lambda x, w, c: (x - x.mean(1, keepdims=True)) / (1 + x.std(1, keepdims=True)),
    "softmax": lambda x, w, c: jax.nn.softmax(x, axis=1),
    "lookup": lambda x, w, c: x * w[c % WIDTH],
    "mask": lambda x, w, c: jnp.where(c[:, None] > 1, x, 0.5),
    "positions": lambda x, w, c: x + jnp.arange(ROWS)[:, None] * w[0],
    "pairs": lambda x, w, c: jnp.cos(x.reshape(ROWS // 2, 2, WIDTH)).reshape(ROWS, WIDTH),
    "halves": lambda x, w, c: jnp.concatenate([x[: ROWS // 2], 2 * x[ROWS // 2 :]]),
    "views": lambda x, w, c: sum(jnp.split(jnp.concatenate([x, x @ w]), 2)),
    "merge": lambda x, w, c: jnp.exp(-jnp.abs(x.reshape(-1))).reshape(x.shape),
    "transposed": lambda x, w, c: (w @ x.T).T,
    "noise": lambda x, w, c: x + jax.random.normal(jax.random.key(3), x.shape),
    "scan": lambda x, w, c: lax.scan(lambda h, v: (jnp.tanh(h @ w + v), None), x, w)[0],
    "map": lambda x, w, c: lax.map(lambda row: jnp.tanh(row @ w), x),
    "checkpoint": lambda x, w, c: jax.checkpoint(lambda x: jnp.sin(x @ w) * x)(x),
    "branch": lambda x, w, c: lax.switch(
        jnp.int32(w[0, 0] > 0), [jnp.sin, lambda x: x * w[0], jnp.cos], x
    ),
    "batch mean": lambda x, w, c: x - x.mean(0),
    "batch weight": lambda x, w, c: x / jnp.sum(c + 1),
    "scale by sum": lambda x, w, c: x * jnp.tanh(jnp.sum(x)),
    "reversed": lambda x, w, c: x + x[::-1],
    "rolled": lambda x, w, c: jnp.roll(x, 1, axis=0),
    "running sum": lambda x, w, c: jnp.cumsum(x, axis=0) / ROWS,
    "sorted": lambda x, w, c: jnp.sort(x, axis=0),
    "shuffled": lambda x, w, c: x[jax.random.permutation(jax.random.key(1), ROWS)],
    "segments": lambda x, w, c: jax.ops.segment_sum(x, c, 4)[c],
    "attention": lambda x, w, c: jax.nn.softmax(x @ x.T) @ x,
    "recurrence": lambda x, w, c: lax.scan(lambda h, v: (jnp.tanh(h + v), h), x[0], x)[1],
}
LOSSES: dict[str, Operation] = {
    "mean": lambda x, w, c: jnp.mean(x**2),
    "weighted": lambda x, w, c: jnp.sum(x[:, 0] * c) / jnp.sum(c + 1),
    "two": lambda x, w, c: jnp.sum(x) * 0.1 + jnp.mean(jnp.abs(x @ w)),
    "root": lambda x, w, c: jnp.sqrt(1 + jnp.mean(x**2)),
    "regularised": lambda x, w, c: jnp.mean(x) + jnp.sum(w**2),
    "maximum": lambda x, w, c: jnp.max(x),
    "product of means": lambda x, w, c: jnp.mean(x) * jnp.mean(x**2),
}


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=4),
    loss=st.sampled_from(sorted(LOSSES)),
    microbatches=st.sampled_from([2, 4, 8]),
)
def test_random_programs(names: list[str], loss: str, microbatches: int) -> None:
    def step(w: Any, batch: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            x = batch["x"]
            for name in names:
                x = OPERATIONS[name](x, w, batch["c"])
            return LOSSES[loss](x, w, batch["c"]), x

        (value, x), gradient = jax.value_and_grad(loss_fn, has_aux=True)(w)
        return w - 0.1 * gradient, value, x

    rng = np.random.default_rng(len(names))
    batch = {"x": rng.normal(size=(ROWS, WIDTH)), "c": rng.integers(0, 4, ROWS)}
    with jax.enable_x64(True):
        # Accept any price: what is batch-wide must be exact as well.
        check_split(
            step,
            (rng.normal(size=(WIDTH, WIDTH)), batch),
            microbatches,
            tolerance=1e-10,
            floor=1e-2,  # a mean of normalised values is zero but for rounding
            max_flops_share=1e9,
            max_bytes_share=1e9,
        )
