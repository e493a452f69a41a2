"""Rules of Pallas kernels, read from their block specs, and kernels on slices."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_mask,
)

from autopar.base.errors import UnknownPrimitiveWarning
from autopar.passes.primitives.flops import flops
from autopar.passes.primitives.populate import populate

from . import pallas_kernels as kernels
from .equations import f32
from .slices import check_slices, check_whole, evaluate, trace

with warnings.catch_warnings():  # JAX 0.11 calls it deprecated, and has it
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention as gpu_attention


def kernel_rules(function: Callable[..., Any], *arguments: Any) -> list[tuple[Any, Any]]:
    rules = populate(trace(function, *arguments))
    return [(e, rule) for e, rule in rules.items() if e.primitive.name == "pallas_call"]


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *xs: jnp.sum(jnp.sin(function(*xs))), argnums=(0, 1, 2))


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (
            kernels.rows,
            (f32(4, 8, 3), f32(3)),
            "([i,jm,n],[1,o])->([i,jk,l]) replicated={k,l,m,n,o}",
        ),
        (kernels.in_place(blocked=True), (f32(4, 4),), "([i,k])->([i,j]) replicated={j,k}"),
        (kernels.refilled, (f32(2, 4, 3),), "([i,j,k])->([i,j]) replicated={i,k}"),
        (kernels.merged_rows, (f32(8, 3),), "([ij,l])->([ij,k]) replicated={j,k,l}"),
        (
            kernels.product,
            (f32(8, 4), f32(4, 8)),
            "([im,no],[np,kq])->([ij,kl]) replicated={j,l,m,n,o,p,q}",
        ),
        (
            kernels.attention,
            (f32(4, 4, 8, 2), f32(4, 2, 8, 2), f32(4, 2, 8, 2)),
            "([i,jk,lo,p],[i,j,q,r],[i,j,s,t])->([i,jk,lm,n])"
            " replicated={k,l,m,n,o,p,q,r,s,t}",
        ),
    ],
)  # fmt: skip
def test_slices_of_what_block_specs_prove(
    function: Any, arguments: tuple[Any, ...], expected: str
) -> None:
    jaxpr = trace(function, *arguments)
    rules = populate(jaxpr)
    evaluated = [item for item in evaluate(jaxpr, arguments) if "pallas" in str(item[0].primitive)]
    ((eqn, _, _),) = evaluated
    assert str(rules[eqn]) == expected
    check_whole(eqn, rules[eqn])
    assert check_slices(evaluated, rules) > 0


@pytest.mark.parametrize(
    "function",
    [
        kernels.elementwise(lambda i: (3 - i, 0)),
        kernels.elementwise(lambda i: (i ^ 1, 0)),
        kernels.elementwise(lambda i: (i, 0), lambda i: (3 - i, 0)),
        kernels.elementwise(lambda i: (0, 0)),
        kernels.elementwise(lambda i: (i, 0), body=lambda x: x + pl.program_id(0)),
        kernels.elementwise(lambda i: (i // 2, 0), grid=(8,)),
        kernels.elementwise(lambda i: (i, 0), grid=(3,)),
        kernels.restarted,
        kernels.overwriting,
        kernels.in_place(blocked=False),
    ],
    ids=[
        "reversed",
        "swapped",
        "crossed",
        "one block",
        "program_id",
        "twice",
        "some rows",
        "scratch that an operand restarts",
        "an operand written over",
        "an operand's array that is the result's",
    ],
)
def test_what_is_not_proven_is_kept_whole(function: Any) -> None:
    with pytest.warns(UnknownPrimitiveWarning, match=r"pallas_kernels.py:\d+ .*autopar.local"):
        ((_, rule),) = kernel_rules(function, f32(4, 4))
    assert all(factor.kind == "replicated" for factor in rule.factors)


def test_scratch_memory_ties_what_is_inside_of_an_axis_that_is_asked_for() -> None:
    with pytest.warns(UnknownPrimitiveWarning, match="pallas_call"):
        ((_, rule),) = kernel_rules(kernels.carried, f32(2, 4, 4))
    assert all(factor.kind == "replicated" for factor in rule.factors)
    ((_, rule),) = kernel_rules(
        kernels.elementwise(lambda i: (i, 0), body=jnp.cos, scratch=True), f32(4, 4)
    )
    assert rule.factors[0].kind == "pass"


def test_jaxs_own_kernels_are_cut_over_batch_and_heads() -> None:
    batch, heads, length, size = 4, 2, 256, 128
    heads_first = jax.ShapeDtypeStruct((batch, heads, length, size), jnp.float32)
    heads_last = jax.ShapeDtypeStruct((batch, length, heads, size), jnp.float32)
    mask = splash_mask.MultiHeadMask([splash_mask.CausalMask((length, length))] * heads)
    splash_attention = jax.vmap(splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1))
    products = 2 * batch * heads * length * length * size
    for function, shape, dims in (
        (lambda q, k, v: flash_attention(q, k, v, causal=True), heads_first, (0, 1)),
        (splash_attention, heads_first, (0, 1)),
        (lambda q, k, v: gpu_attention.mha(q, k, v, None, causal=True), heads_last, (0, 2)),
    ):
        found = kernel_rules(gradients(function), shape, shape, shape)
        assert len(found) == 3
        for eqn, rule in found:
            big = [v for var, v in zip(eqn.outvars, rule.results, strict=True)
                   if var.aval.shape == shape.shape]  # fmt: skip
            for value in big:
                assert all(rule.factors[value[dim][0]].kind == "pass" for dim in dims), str(rule)
        total = sum(flops(*pair) for pair in found)
        assert 4 * products < total < 20 * products  # two products forward, five to seven back
