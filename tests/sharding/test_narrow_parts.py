"""Casts that are done before what they cast is put together."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from autopar.passes.sharding.narrow_parts import narrow_parts
from sharding.steps import compiled, graph_of, shaped, sharded

HALF, NARROW = 64, 2


def halves(x: Any, w: Any) -> list[Any]:
    one, other = jnp.split((x @ w).astype(jnp.float32), 2, -1)
    return [jnp.cos(one), jnp.sin(other)]


def test_parts_of_what_is_cast_are_narrow() -> None:
    assert narrow_sizes(lambda x, w: jnp.concatenate(halves(x, w), -1).astype(x.dtype)) == [2, 2]


@pytest.mark.parametrize(
    "others",
    [
        lambda parts, whole: whole.astype(jnp.float32) * 2,  # the whole is read as it is too
        lambda parts, whole: whole[:, :1],
        lambda parts, whole: whole,
    ],
)
def test_what_others_read_is_whole(others: Any) -> None:
    def step(x: Any, w: Any) -> Any:
        parts = halves(x, w)
        whole = jnp.concatenate(parts, -1)
        return whole.astype(x.dtype), others(parts, whole)

    assert narrow_sizes(step) == []


def test_a_part_that_others_read_is_wide() -> None:
    def step(x: Any, w: Any) -> Any:
        one, other = halves(x, w)
        return jnp.concatenate([one, other], -1).astype(x.dtype), one

    assert narrow_sizes(step) == [NARROW]


def test_arguments_are_as_wide_as_they_are() -> None:
    def step(x: Any, w: Any) -> Any:
        return x @ jnp.concatenate([w, w[:, :HALF] * 2], -1).astype(jnp.float8_e4m3fn).astype(
            x.dtype
        )

    assert narrow_sizes(step) == [1], "the product of the second, not the first"


def test_wider_casts_stay() -> None:
    def step(x: Any, w: Any) -> Any:
        parts = [part.astype(x.dtype) for part in halves(x, w)]
        return jnp.concatenate(parts, -1).astype(jnp.float32)

    assert narrow_sizes(step) == []


def narrow_sizes(step: Any) -> list[int]:
    batch, model = shaped(8, HALF, dtype=jnp.bfloat16), shaped(HALF, 2 * HALF, dtype=jnp.bfloat16)
    graph = graph_of(step, batch, model, batch_argnums=(0,))
    made = sharded(compiled(graph, method="data", microbatches=1))
    return list(narrow_parts(made.block).values())
