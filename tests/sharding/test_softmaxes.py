"""What softmaxes write on TPUs: attention in the ways in which people write it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from autopar.passes.sharding.compiler_rules import KERNEL_ROW_ELEMENTS, RULES, TPU
from autopar.passes.sharding.peak_memory import peak
from sharding.steps import compiled, graph_of, shaped, sharded

DEVICES, BATCH, HEADS, WIDTH, GROUP = 8, 2, 4, 16, 2
LENGTH = 512


def rotated(x: jax.Array) -> jax.Array:
    """Halves turned by positions, and put together."""
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[None, :, None, None]
    one, other = jnp.split(x.astype(jnp.float32), 2, -1)
    halves = one * jnp.cos(angle) - other * jnp.sin(angle), other + one * jnp.sin(angle)
    return jnp.concatenate(halves, -1).astype(x.dtype)


def probabilities(scores: jax.Array, masked: bool) -> jax.Array:
    wide = scores.astype(jnp.float32) * 0.25
    if masked:
        length = scores.shape[-1]
        wide = jnp.where(jnp.tril(jnp.ones((length, length), bool)), wide, -1e9)
    return jax.nn.softmax(wide).astype(scores.dtype)


def plain(q: Any, k: Any, v: Any, masked: bool) -> Any:
    p = probabilities(jnp.einsum("bqhd,bkhd->bhqk", q, k), masked)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def crossed(q: Any, k: Any, v: Any, masked: bool) -> Any:
    """Its result is `bhtd`, as its turned operands are."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    p = probabilities(jnp.einsum("bhqd,bhkd->bhqk", q, k), masked)
    return jnp.einsum("bhqk,bhkd->bhqd", p, v)


def turned_back(q: Any, k: Any, v: Any, masked: bool) -> Any:
    return crossed(q, k, v, masked).swapaxes(1, 2)


def torn(q: Any, k: Any, v: Any, masked: bool) -> Any:
    """Rows of queries and keys are columns in between, as einsums into `bhtd` make them."""
    q, k, v = (jax.lax.optimization_barrier(x.transpose(0, 2, 3, 1)) for x in (q, k, v))
    q, k, v = (x.swapaxes(2, 3) for x in (q, k, v))
    p = probabilities(jnp.einsum("bhqd,bhkd->bhqk", q, k), masked)
    return jnp.einsum("bhqk,bhkd->bhqd", p, v).swapaxes(1, 2)


def grouped(q: Any, k: Any, v: Any, masked: bool) -> Any:
    q = q.reshape(*q.shape[:2], HEADS // GROUP, GROUP, WIDTH)
    k, v = k[:, :, : HEADS // GROUP], v[:, :, : HEADS // GROUP]
    p = probabilities(jnp.einsum("btkgd,bskd->bkgts", q, k), masked)
    made = jnp.einsum("bkgts,bskd->btkgd", p, v)
    return made.reshape(*made.shape[:2], HEADS, WIDTH)


def library(q: Any, k: Any, v: Any, masked: bool) -> Any:
    k, v = k[:, :, : HEADS // GROUP], v[:, :, : HEADS // GROUP]
    return jax.nn.dot_product_attention(q, k, v, is_causal=masked)


Attention = Callable[[Any, Any, Any, bool], Any]


def squares(
    attention: Attention,
    masked: bool = True,
    rotary: bool = False,
    length: int = LENGTH,
    remat: Callable[..., Any] = jax.checkpoint,
) -> list[str]:
    """The dtypes of what is there of a row's length times its length, when most memory is used."""

    def layer(weights: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btm,mhd->bthd", x, w) for w in weights[:3])
        if rotary:
            q, k = rotated(q), rotated(k)
        order = "bhtd" if attention is crossed else "bthd"
        return x + jnp.einsum(f"{order},hdm->btm", attention(q, k, v, masked), weights[3])

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean(remat(layer)(weights, x).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    bf16, model = jnp.bfloat16, HEADS * WIDTH
    weights = [shaped(model, HEADS, WIDTH, dtype=bf16)] * 3
    weights.append(shaped(HEADS, WIDTH, model, dtype=bf16))
    graph = graph_of(
        step, weights, shaped(DEVICES * BATCH, length, model, dtype=bf16), batch_argnums=(1,)
    )
    made = sharded(compiled(graph, method="data", microbatches=1))
    donated = [label.donated for label in graph.inputs]
    found = peak(dataclasses.replace(made, rules=RULES[TPU]), {}, donated)
    least = BATCH * HEADS * length * length * 2
    return sorted(label.split("[")[0] for label, size in found.alive if size >= least)


EXPONENTIALS, SHORT = "float32", "bfloat16"


def test_masked_softmaxes_write_their_exponentials() -> None:
    """And there are the gradients of probabilities and of scores."""
    assert squares(plain) == [SHORT, SHORT, EXPONENTIALS]


@pytest.mark.parametrize("attention", [plain, grouped])
def test_without_a_mask_nothing_is_written_but_scores(attention: Attention) -> None:
    assert squares(attention, masked=False) == [SHORT, SHORT]


def test_of_long_rows_scores_are_written_too() -> None:
    """Sooner, where halves are put together for the product."""
    row = KERNEL_ROW_ELEMENTS
    assert squares(plain, length=row).count("float32") == 1
    assert squares(plain, length=2 * row).count("float32") == 2
    assert squares(plain, rotary=True, length=row // 2).count("float32") == 1
    assert squares(plain, rotary=True, length=row).count("float32") == 2


def test_of_grouped_attention_the_scores_are_there_as_the_product_wrote_them() -> None:
    assert squares(grouped) == [SHORT, SHORT]
    assert squares(library) == [SHORT, "float32"]
    assert EXPONENTIALS in squares(grouped, rotary=True)


def test_operands_in_another_order_part_the_product_from_the_softmax() -> None:
    """There are scores, exponentials, probabilities, their gradients, and the scores' gradients."""
    assert squares(crossed) == [SHORT] * 4 + [EXPONENTIALS]
    assert squares(turned_back) == squares(plain)
    assert squares(torn) == squares(crossed)


def test_gradients_alone_know_which_way_results_went() -> None:
    """Where attention's result is kept, its probabilities are computed again without it."""
    names = functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("attention")
    )

    def named(attention: Attention) -> Attention:
        return lambda *args: checkpoint_name(attention(*args), "attention")

    assert squares(named(turned_back), remat=names) == squares(named(plain), remat=names)


def test_what_is_known_passes_barriers() -> None:
    """Where products are kept, what is made of them runs again behind one."""
    dots = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    assert EXPONENTIALS not in squares(plain, masked=False, remat=dots)
    assert EXPONENTIALS in squares(plain, remat=dots)


def test_a_gate_is_no_gradient() -> None:
    def gated(q: Any, k: Any, v: Any, masked: bool) -> Any:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        gate = jax.nn.sigmoid(jnp.einsum("bhqd,bhkd->bhqk", k, q).astype(jnp.float32))
        p = probabilities(jnp.einsum("bhqd,bhkd->bhqk", q, k), masked).astype(jnp.float32)
        return jnp.einsum("bhqk,bhkd->bhqd", (p * gate).astype(v.dtype), v).swapaxes(1, 2)

    assert squares(gated).count("float32") >= 1
