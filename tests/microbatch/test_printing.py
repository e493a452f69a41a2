"""What an analysis prints, for small programs."""

import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from microbatch.helpers import analyzed

from autopar.passes.microbatch import split


def training(params: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        hidden = jnp.sin(batch["x"] @ params["w"])
        losses = jnp.sum(jnp.square(hidden @ params["v"]), axis=1)
        mask = batch["length"] > 2
        return jnp.sum(losses * mask) / jnp.sum(mask), losses

    (loss, losses), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return new, {"loss": loss, "losses": losses, "hardest": losses.max(), "rate": 0.1}


def evaluation(params: Any, batch: Any) -> Any:
    return batch["x"] @ params["w"], jnp.sum(batch["length"])


EXPECTED = {
    training: """
        4 microbatches of 4 rows
          prologue      5 equations    0.6% of FLOPs
          loop         20 equations   97.0% of FLOPs
          epilogue      7 equations    2.4% of FLOPs
          into the loop, row by row: 2
          out of the loop: 1 x max, 3 x sum, 1 collected
          epilogue: out[0]['v'], out[0]['w']
          max: out[1]['hardest']
          sum: out[1]['loss']
          collected: out[1]['losses']
          invariant: out[1]['rate']
        """,
    evaluation: """
        4 microbatches of 4 rows
          prologue      0 equations    0.0% of FLOPs
          loop          2 equations  100.0% of FLOPs
          epilogue      0 equations    0.0% of FLOPs
          into the loop, row by row: 2
          out of the loop: 1 x sum, 1 collected
          collected: out[0]
          sum: out[1]
        """,
}


@pytest.mark.parametrize("function", EXPECTED, ids=lambda function: function.__name__)
def test_analysis_prints(function: Callable[..., Any]) -> None:
    params = {"w": np.ones((8, 8), np.float32), "v": np.ones((8, 4), np.float32)}
    batch = {"x": np.ones((16, 8), np.float32), "length": np.ones(16, np.int32)}
    graph, analysis = analyzed(function, (params, batch), 4)
    assert str(analysis) == textwrap.dedent(EXPECTED[function]).strip("\n")
    assert len(split(graph, analysis).graph.outputs) == len(analysis.certificate)
