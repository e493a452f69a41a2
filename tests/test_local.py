"""`autopar.local`: rules that users write, forward and backward, on slices of every kind."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_jit import equals_plain_jit

import autopar
from autopar.errors import OptionError

HEADS = "b t h d, b s h d, b s h d -> b t h d"


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@jax.custom_vjp
def kernel(q: Any, k: Any, v: Any) -> Any:
    """Attention whose code autopar cannot look into, and which saves its weights."""
    return _forward(q, k, v)[0]


def _forward(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    return jnp.einsum("bhts,bshd->bthd", weights, v), (q, k, v, weights)


def _backward(saved: Any, g: Any) -> Any:
    q, k, v, weights = saved
    by_weight = jnp.einsum("bthd,bshd->bhts", g, v)
    scores = weights * (by_weight - (weights * by_weight).sum(-1, keepdims=True))
    return (
        jnp.einsum("bhts,bshd->bthd", scores, k),
        jnp.einsum("bhts,bthd->bshd", scores, q),
        jnp.einsum("bhts,bthd->bshd", weights, g),
    )


kernel.defvjp(_forward, _backward)
attention = autopar.local(kernel, HEADS, cut="b h")


@autopar.local("b t d, d -> b t d", cut="b t")
def scaled(x: Any, scale: Any) -> Any:
    return x * scale / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def test_it_computes_and_differentiates_like_the_function() -> None:
    arrays = normal(2, 4, 2, 3), normal(2, 5, 2, 3, seed=1), normal(2, 5, 2, 3, seed=2)

    def loss(function: Any, *arrays: Any) -> Any:
        return jnp.sum(jnp.sin(function(*arrays)))

    for transform in (lambda f: f, jax.jit):
        grad = transform(jax.grad(functools.partial(loss, attention), argnums=(0, 1, 2)))
        found, expected = (
            grad(*arrays),
            jax.grad(functools.partial(loss, kernel), (0, 1, 2))(*arrays),
        )
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    names = [e.params["body"] for e in jax.make_jaxpr(grad)(*arrays).jaxpr.eqns[0].params[
        "jaxpr"].jaxpr.eqns if e.primitive.name == "local_call"]  # fmt: skip
    # The weights are saved, cut along what they have of the loops, and what is an argument is not.
    assert str(names[0].loops).split(",  ")[0].startswith(f"{HEADS}, b h _ _, cut=")


def test_vmap_adds_a_loop() -> None:
    x, scale = normal(3, 2, 4, 5), normal(5)
    grad = jax.grad(lambda x, s: jnp.sum(jnp.sin(scaled(x, s))), argnums=(0, 1))
    plain = jax.grad(lambda x, s: jnp.sum(jnp.sin(scaled.__wrapped__(x, s))), argnums=(0, 1))
    for axes in ((0, None), (1, None), (0, 0)):
        s = scale if axes[1] is None else normal(3, 5, seed=1)
        found = jax.vmap(grad, axes)(x if axes[0] == 0 else x.swapaxes(0, 1), s)
        expected = jax.vmap(plain, axes)(x if axes[0] == 0 else x.swapaxes(0, 1), s)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_pytrees_and_several_results() -> None:
    @autopar.local("b d, d e -> b e, e", cut="e", sum="b")
    def both(batch: Any, w: Any, power: int = 1) -> Any:
        y = batch["x"] @ w**power
        return y, (y + batch["y"] @ w).sum(0)

    batch = {"x": normal(4, 2), "y": normal(4, 2, seed=1)}
    y, total = both(batch, normal(2, 6), power=2)
    assert y.shape == (4, 6)
    np.testing.assert_allclose(total, both.__wrapped__(batch, normal(2, 6), power=2)[1], rtol=1e-5)
    autopar.check_rule(
        both.__wrapped__, "b d, d e -> b e, e", batch, normal(2, 6), cut="e", sum="b"
    )


def loss(params: Any, x: Any) -> Any:
    x = scaled(x, params["scale"])
    q, k, v = jnp.einsum("btm,nmhd->nbthd", x, params["qkv"])
    return jnp.mean((jnp.einsum("bthd,hdm->btm", attention(q, k, v), params["out"]) - x) ** 2)


def step(params: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


PARAMS = {"scale": normal(8), "qkv": normal(3, 8, 4, 2, seed=1), "out": normal(4, 2, 8, seed=2)}
X = normal(16, 4, 8, seed=3)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "data"},
        {"method": "shard", "logical_mesh": (2, 4), "pins": {"*qkv": (None, None, "y")}},
        {"microbatches": 2},
        {"microbatches": 2, "stages": 2, "method": "data"},
    ],
    ids=str,
)
def test_a_step_is_cut_over_batch_and_heads(options: dict[str, Any]) -> None:
    compiled = equals_plain_jit(step, PARAMS, X, **options)
    for stage in compiled.plan.stages if "pins" not in options else ():
        assert all(c.kind != "all-gather" for c in stage.collectives), compiled.plan


@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_over_layers_with_local_calls_is_microbatched(remat: bool) -> None:
    def layer(x: Any, params: Any) -> Any:
        q, k, v = jnp.einsum("btm,nmhd->nbthd", scaled(x, params["scale"]), params["qkv"])
        return x + jnp.einsum("bthd,hdm->btm", attention(q, k, v), params["out"]), None

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params)[0])

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = jax.tree.map(lambda p: jnp.stack([p, p * 0.5]), PARAMS)
    equals_plain_jit(step, params, X, method="data", microbatches=2)


@pytest.mark.parametrize(
    ("function", "rule", "cut", "message"),
    [
        (lambda x: x - x.mean(0), "b d -> b d", "b", "forward, 2 slices along"),
        (lambda x: x.reshape(4, 2), "b d -> b d", "b", "fails on slices"),
        (jnp.cumsum, "b -> b", "b", "cannot be cut along"),
    ],
)
def test_check_rule_names_the_loop_that_fails(
    function: Any, rule: str, cut: str, message: str
) -> None:
    x = normal(4, 2) if "d" in rule else normal(4)
    with pytest.raises(OptionError, match=message):
        autopar.check_rule(function, rule, x, cut=cut)


def test_check_rule_knows_what_is_true() -> None:
    arrays = normal(2, 4, 2, 3), normal(2, 5, 2, 3, seed=1), normal(2, 5, 2, 3, seed=2)
    autopar.check_rule(kernel, HEADS, *arrays, cut="b h")
    with pytest.raises(OptionError, match="along"):
        autopar.check_rule(kernel, HEADS, *arrays, cut="b h", sum="s")
    autopar.check_rule(
        jnp.matmul, "b k, k n -> b n", normal(4, 6), normal(6, 2), cut="b n", sum="k"
    )
    autopar.check_rule(lambda x: x.max(0), "b d -> d", normal(4, 2), cut="d", max="b")


@pytest.mark.parametrize(
    ("rule", "kinds", "message"),
    [
        ("b d", {"cut": "b"}, "one arrow"),
        ("b d -> b d", {}, "no loop may be cut"),
        ("b d -> d", {"cut": "b"}, "write sum='b'"),
        ("b d -> b d", {"cut": "x"}, "no argument has"),
        ("b d -> b d", {"cut": "b", "sum": "b"}, "named in"),
        ("b d -> b d", {"sum": "b"}, "every result has"),
        ("b b -> b", {"cut": "b"}, "twice"),
        ("b, -> b -", {"cut": "b"}, "cannot be read"),
    ],
)
def test_rules_that_cannot_be_meant(rule: str, kinds: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        autopar.local(jnp.sin, rule, **kinds)


def test_rules_that_do_not_fit_their_arrays() -> None:
    with pytest.raises(OptionError, match="2 terms for its arguments"):
        autopar.local(jnp.sin, "b, b -> b", cut="b")(normal(4))
    with pytest.raises(OptionError, match="names 1 dimensions of argument 0"):
        autopar.local(jnp.sin, "b -> b", cut="b")(normal(4, 2))
    with pytest.raises(OptionError, match="does not fit its arrays"):
        autopar.local(jnp.matmul, "b k, b n -> b n", cut="b")(normal(4, 2), normal(2, 3))
    with pytest.raises(OptionError, match="arrays by position"):
        scaled(normal(2, 2, 3), scale=normal(3))


def test_values_of_the_step_are_arguments() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(autopar.local(lambda x: x @ w, "b k -> b n", cut="b")(x))

    for function in (jax.jit(loss), jax.grad(loss)):
        with pytest.raises(OptionError, match=r"closes over one, float32\[2,3\]"):
            function(normal(2, 3), normal(4, 2))
    autopar.local(lambda x: x @ np.ones((2, 3)), "b k -> b n", cut="b")(normal(4, 2))


@autopar.local("b t d, d e -> b t e", cut="b t")
def squared(x: Any, w: Any) -> Any:
    return jnp.square(x @ w)  # `@` drops dimensions of size 1, also of what is saved


def product_step(function: Any) -> Any:
    def step(w: Any, x: Any) -> Any:
        value, grad = jax.value_and_grad(lambda w: jnp.mean(function(x, w)))(w)
        return w - 0.1 * grad, value

    return step


@pytest.mark.parametrize("options", [{"microbatches": 16}, {"stages": 2, "microbatches": 4}])
def test_slices_of_one_row(options: dict[str, Any]) -> None:
    def two(x: Any, w: Any) -> Any:
        return squared(jnp.sin(squared(x, w)), w)

    step, w, x = product_step(two), normal(8, 8, seed=1), normal(16, 4, 8)
    expected = jax.jit(step)(w, x)
    found = autopar.compile(step, w, x, donate_argnums=(), **options)(w, x)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_function_that_cannot_be_cut_as_its_rule_says() -> None:
    def fixed(x: Any, w: Any) -> Any:
        return (x.reshape(64, 8) @ w).reshape(16, 4, 8)

    step = product_step(autopar.local(fixed, "b t d, d e -> b t e", cut="b"))
    with pytest.raises(OptionError, match=r"autopar.local was given for fixed") as caught:
        autopar.compile(step, normal(8, 8), normal(16, 4, 8), microbatches=4)
    assert "b of 4 instead of 16, it raises TypeError" in re.sub(r"\s+", " ", str(caught.value))
    assert "test_local.py" in str(caught.value)
