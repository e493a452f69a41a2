"""Train steps of a few small products, for tests of what is said and planned about a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TABLE = np.arange(64, dtype=np.float32).reshape(8, 8)


def perceptron(state: dict[str, Any], x: jax.Array) -> Any:
    """A step of plain gradient descent; as many layers as the state has."""

    def loss(state: dict[str, Any]) -> jax.Array:
        y = x
        for name in sorted(state):
            y = jnp.tanh(y @ state[name])
        return jnp.mean(y * y)

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def with_a_table(state: dict[str, Any], rows: Any) -> Any:
    """The same on rows that are multiplied with a constant of the program."""
    return perceptron(state, rows @ jnp.asarray(TABLE))
