"""Rules of `custom_partitioning` and of attention by cuDNN, and both on slices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.custom_partitioning import (
    BATCHING,
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.interpreters import mlir

import autopar
from autopar.errors import AutoparWarning, TraceError, UnknownPrimitiveWarning
from autopar.passes.primitives.factor_rule import Factor, FactorRule
from autopar.passes.primitives.flops import flops
from autopar.passes.primitives.populate import populate
from autopar.passes.sharding import strategies

from .equations import f32
from .slices import check_slices, evaluate, trace


def partitioned(
    function: Any, rule: Any, complete: Any = None, ask: Any = None, **kinds: Any
) -> Any:
    """A function with a partitioning that keeps its arguments' shardings."""
    made = custom_partitioning(function)

    def partition(mesh: Any, given: Any, result: Any) -> Any:
        def local(*arrays: Any) -> Any:
            axis = given[0].sharding.spec[1] if complete else None
            value = function(*arrays)
            return complete(value, axis) if axis else value

        shardings = tuple(x.sharding for x in given)
        return mesh, local, result.sharding, ask(shardings) if ask else shardings

    made.def_partition(partition, sharding_rule=rule, **kinds)
    return made


def centered(x: Any) -> Any:
    return x - x.mean(-1, keepdims=True)


def product(x: Any, y: Any) -> Any:
    return x @ y


def placed(value: Any, axis: str) -> Any:
    return value + lax.axis_index(axis)


BY_OBJECT = SdyShardingRule((ArrayMapping(BATCHING, "i"),), (ArrayMapping(BATCHING, "j"),))
CASES = {
    "sum": (
        partitioned(product, "i k, k j -> i j", lax.psum, reduction_factors=("k",)),
        "([i,k],[k,j])->([i,j]) reduction={k}",
    ),
    "max": (
        partitioned(lambda x, y: (x * y.T[:1]).max(1), "i k, k j -> i", lax.pmax,
                    reduction_factors=("k",)),
        "([i,j],[j,k])->([i]) max={j} replicated={k}",
    ),
    "ellipsis": (
        partitioned(lambda x, y: centered(x), "... k, k j -> ... k",
                    need_replication_factors=("k",)),
        "([i,j],[j,k])->([i,j]) replicated={j,k}",
    ),
    "object": (
        partitioned(lambda x, y: centered(x), SdyShardingRule(
            (ArrayMapping(BATCHING, "i"), ArrayMapping("j", "k")), (ArrayMapping(BATCHING, "l"),))),
        "([i,k],[l,m])->([i,j]) replicated={j,k,l,m}",
    ),
    "callable": (
        partitioned(product, lambda mesh, operands, results: ("i k, k j -> i j", {})),
        "([i,k],[k,j])->([i,j]) replicated={k}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_sharding_rule_is_a_factor_rule(name: str) -> None:
    function, expected = CASES[name]
    arguments = f32(4, 8), f32(8, 6)
    jaxpr = trace(function, *arguments)
    rules = populate(jaxpr)
    ((eqn, rule),) = rules.items()
    assert str(rule) == expected
    assert check_slices(evaluate(jaxpr, arguments), rules) > 0
    assert flops(eqn, rule) > 0


@pytest.mark.parametrize(
    "function",
    [
        partitioned(product, "i k, l j -> i j", ask=lambda given: (given[1], given[1])),
        partitioned(product, "l k, k m -> i j", placed, reduction_factors=("k",)),
        partitioned(product, None),
    ],
    ids=["other shardings", "a place on the mesh", "no rule"],
)
def test_what_the_partitioning_refuses_stays_whole(function: Any) -> None:
    jaxpr = trace(function, f32(4, 8), f32(8, 6))
    with pytest.warns(UnknownPrimitiveWarning, match="custom_partitioning at .*autopar.local"):
        (rule,) = populate(jaxpr).values()
    assert all(factor.kind == "replicated" for factor in rule.factors)


def test_an_error_in_the_partitioning_is_told() -> None:
    def rows_only(given: Any) -> Any:
        if given[0].spec[0] is None:
            raise ValueError("only rows, please")
        return given

    function = partitioned(product, "i k, k j -> i j", ask=rows_only)
    jaxpr = trace(function, f32(4, 8), f32(8, 6))
    with pytest.warns(AutoparWarning) as caught:
        (rule,) = populate(jaxpr).values()
    assert str(rule) == "([i,k],[k,j])->([i,j]) replicated={j,k}"
    (text,) = (str(warning.message) for warning in caught)
    for part in ("`partitioned.<locals>.partition`", "argument 1 is cut along dimension 1",
                 "(rows_only)", "ValueError: only rows, please"):  # fmt: skip
        assert part in text


def test_a_sharding_rule_that_cannot_be_read_is_told() -> None:
    jaxpr = trace(partitioned(product, "i k l, k j -> i j"), f32(4, 8), f32(8, 6))
    with pytest.raises(TraceError, match="sharding rule of a custom_partitioning") as caught:
        populate(jaxpr)
    assert "operand has rank 3" in str(caught.value.why)


# Attention by cuDNN, whose kernels the CPU gets from JAX's other implementation.


def _attention(query: Any, key: Any, value: Any, bias: Any, **params: Any) -> Any:
    scores = jnp.einsum("btngh,bsnh->bngts", *_grouped(query, key)) * np.float32(params["scale"])
    batch, heads, group, rows, columns = scores.shape
    if params["variadic_args"][0]:
        wide = jnp.broadcast_to(bias, (*bias.shape[:1], heads * group, rows, columns))
        scores += wide.reshape(-1, heads, group, rows, columns)
    if params["mask_type"] == cudnn.MaskType.CAUSAL:
        scores = jnp.where(jnp.tril(jnp.ones((rows, columns), bool)), scores, -1e9)
    out = jnp.einsum("bngts,bsnh->btngh", jax.nn.softmax(scores), value)
    statistics = jax.nn.logsumexp(scores, -1).reshape(batch, heads * group, rows)
    out = out.reshape(*query.shape[:3], -1).astype(query.dtype)
    return out, statistics.astype(jnp.float32)


def _grouped(query: Any, key: Any) -> Any:
    batch, rows, heads, size = query.shape
    return query.reshape(batch, rows, key.shape[2], heads // key.shape[2], size), key


def _forward(q: Any, k: Any, v: Any, bias: Any, *_: Any, **params: Any) -> Any:
    return list(_attention(q, k, v, bias, **params))[: 1 + params["is_training"]]


def _backward(q: Any, k: Any, v: Any, bias: Any, *others: Any, **params: Any) -> Any:
    _, pullback = jax.vjp(lambda *xs: _attention(*xs, **params)[0], q, k, v, bias)
    return list(pullback(others[-1]))[: 4 if params["variadic_args"][1] else 3]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_is_flash_attention", lambda *a, **k: None)
    for primitive, function in (
        (cudnn._dot_product_attention_fwd_p, _forward),
        (cudnn._dot_product_attention_bwd_p, _backward),
    ):
        lowering = mlir.lower_fun(function, multiple_results=True)
        mlir.register_lowering(primitive, lowering, platform="cpu")
    yield
    jax.clear_caches()


def half(*shape: int) -> Any:
    return f32(*shape).astype(jnp.bfloat16)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("bias_shape", [None, (4, 4, 8, 8), (1, 4, 8, 8)])
def test_cudnn_attention_is_cut_over_batch_and_heads(bias_shape: Any) -> None:
    arguments = [half(4, 8, 4, 2), half(4, 8, 2, 2), half(4, 8, 2, 2)]
    if bias_shape:
        arguments.append(half(*bias_shape))

    def gradients(*xs: Any) -> Any:
        def loss(*xs: Any) -> Any:
            out = jax.nn.dot_product_attention(
                *xs, is_causal=not bias_shape, implementation="cudnn"
            )
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.grad(loss, argnums=tuple(range(len(xs))))(*xs)

    jaxpr = trace(gradients, *arguments)
    rules = populate(jaxpr)
    evaluated = [e for e in evaluate(jaxpr, arguments) if "attention" in e[0].primitive.name]
    assert len(evaluated) == 2
    for eqn, _, _ in evaluated:
        kinds = [rules[eqn].factors[i].kind for i in (*rules[eqn].operands[1][0],
                                                     *rules[eqn].operands[1][2])]  # fmt: skip
        shared = bias_shape == (1, 4, 8, 8) and eqn is evaluated[1][0]
        assert kinds == ["sum" if shared else "pass", "pass"]
    assert check_slices(evaluated, rules) > 0
    products = 2 * math.prod((4, 4, 8, 8, 2))
    assert [flops(e, rules[e]) for e, _, _ in evaluated] == [2 * products, 5 * products]


@pytest.mark.usefixtures("on_cpu")
def test_a_step_with_cudnn_attention_gathers_nothing() -> None:
    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            q, k, v = jnp.einsum("btm,imnh->ibtnh", x, weights).astype(jnp.bfloat16)
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
            return jnp.mean(out.astype(jnp.float32) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - gradient, value

    weights, x = f32(3, 8, 2, 4), f32(16, 8, 8)
    expected = jax.jit(step)(weights, x)
    for count in (1, 2):
        compiled = autopar.compile(
            step, weights, x, donate_argnums=(), method="data", microbatches=count
        )
        for one, other in zip(compiled(weights, x), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-2, atol=1e-2)
        (stage,) = compiled.plan.stages
        assert {c.kind for c in stage.collectives} == {"all-reduce"}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("kv_heads", "mesh"), [(2, (2, 4)), (4, (4, 2)), (1, (1, 8)), (1, (2, 4))])
@pytest.mark.parametrize("has_bias", [False, True])
def test_queries_that_share_a_head_of_keys_are_on_several_devices(
    kv_heads: int, mesh: tuple[int, int], has_bias: bool
) -> None:
    """Where each has one head of keys; the gradients of keys and values are added up."""
    heads, rows, width = 8, 256, 32

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            query, key, value, bias = weights
            arrays = (jnp.einsum("btm,mnh->btnh", x, w) for w in (query, key, value))
            q, k, v = (array.astype(jnp.bfloat16) for array in arrays)
            more = {"bias": bias.astype(jnp.bfloat16)} if has_bias else {"is_causal": True}
            out = jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **more)
            return jnp.mean(out.astype(jnp.float32) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 10 * g, weights, gradient), value

    weights = [f32(8, n, width) for n in (heads, kv_heads, kv_heads)] + [f32(1, heads, rows, rows)]
    x = f32(1, rows, 8)
    expected = jax.jit(step)(weights, x)
    options: dict[str, Any] = {"microbatches": 1, "logical_mesh": mesh, "stages": 1}
    compiled = autopar.compile(
        step, weights, x, donate_argnums=(), batch_argnums=1, method="shard", **options
    )
    nodes = compiled.plan.stages[0].strategies
    choices = [node.choice for node in nodes if "attention" in node.node]
    assert len(choices) == 2 and all(("xy" if mesh[0] > 1 else "y") in c for c in choices), choices
    (found, loss), (wanted, wanted_loss) = compiled(weights, x), expected
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-2)
    for one, other, before in zip(found, wanted, weights, strict=True):
        # Gradients of a few steps' size, which devices add in 16 bits.
        assert np.abs(one - other).max() <= 2e-2 * np.abs(other - before).max() + 1e-6


def test_heads_of_queries_are_cut_inside_of_heads_of_keys_alone() -> None:
    """A device never has parts of several heads' queries."""
    factors = Factor(4, "pass"), Factor(6, "pass")
    shape = strategies.shape_of(FactorRule(factors, (((0, 1),), ((0,),)), (((0, 1),),), (1,)), ())

    def found(*mesh: int) -> set[tuple[int, ...]]:
        return set(strategies.choices(shape, mesh, linear=False))

    kept = replace(shape.rule, factors=(factors[0], Factor(6, "replicated")))
    assert strategies.shape_of(kept, ()).inside == ()
    assert found(2, 2) == {(-1, -1), (0, -1), (-1, 0), (0, 0)}
    assert found(4, 2) == {(-1, -1), (0, -1), (-1, 0), (0, 1)}
    assert found(2, 4) == {(-1, -1), (0, -1), (-1, 0)}
    assert found(4, 3) == {(-1, -1), (0, -1), (0, 1)}
