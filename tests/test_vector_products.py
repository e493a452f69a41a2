"""Products of vectors as sums: the same numbers, and the memory and time of what XLA:GPU does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.passes.graph.graph import walk
from autopar.passes.graph.name_stacks import pass_of
from autopar.passes.graph.vector_products import with_sums_for_vectors
from autopar.passes.trace.trace import trace

SIZES = {"b": 2, "t": 3, "k": 4, "e": 5, "c": 6, "q": 1}
SPECS = [
    "btkec,btk->btec",  # the weights of a dispatch, and below their gradients
    "btec,btk->btkec",
    "btkec,btec->btk",
    "tk,k->t",
    "k,tk->t",
    "t,c->tc",
    "tbk,btkc->cbt",
    "bqk,bck->bqc",  # an own dimension of one element
    "kcb,bk->bc",
    "tk,tk->",
]


def operands(spec: str, dtype: Any) -> list[jax.Array]:
    random = np.random.default_rng(0)
    shapes = ([SIZES[name] for name in part] for part in spec.split("->")[0].split(","))
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_the_numbers_are_the_same(spec: str, dtype: Any) -> None:
    x, y = operands(spec, dtype)

    def step(state: Any, rows: Any) -> Any:
        def loss(x: Any) -> Any:
            return (jnp.einsum(spec, x, rows).astype(jnp.float32) ** 2).sum()

        return state - jax.grad(loss)(state), loss(state)

    graph = trace(step, (x, y), batch_axes=(None, None)).graph
    made = with_sums_for_vectors(graph)
    products = [eqn for eqn in walk(made.jaxpr) if eqn.primitive.name == "dot_general"]
    assert not products
    assert any(eqn.primitive.name == "dot_general" for eqn in walk(graph.jaxpr))
    plain = jax.core.eval_jaxpr(graph.jaxpr, (), x, y)
    found = jax.core.eval_jaxpr(made.jaxpr, (), x, y)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for one, other in zip(found, plain, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        one, other = (np.asarray(v, np.float32) for v in (one, other))
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_what_is_written_in_half_is_added_up_in_float32() -> None:
    rows = jnp.full((1, 4096), 1.001, jnp.bfloat16)
    arguments = jnp.ones(4096, jnp.bfloat16), rows
    graph = trace(lambda w, x: x @ w, arguments, batch_axes=(None, 0)).graph
    made = with_sums_for_vectors(graph)
    (sums,) = (eqn for eqn in walk(made.jaxpr) if eqn.primitive.name == "reduce_sum")
    assert sums.invars[0].aval.dtype == jnp.float32
    assert made.jaxpr.outvars[0].aval.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("bik,bkj->bij", [(2, 8, 6), (2, 6, 4)]),  # both have rows of their own
        ("tk,k->t", [(8192, 4096), (4096,)]),  # too large a matrix
    ],
)
def test_other_products_stay(spec: str, shapes: list[tuple[int, ...]]) -> None:
    arguments = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    axes = None, None
    graph = trace(lambda x, y: jnp.einsum(spec, x, y), arguments, batch_axes=axes).graph
    assert with_sums_for_vectors(graph) is graph


def test_products_in_a_scan_are_sums_too() -> None:
    def step(state: Any, rows: Any) -> Any:
        return jax.lax.scan(lambda h, w: (h * jnp.vdot(w, w), None), rows, state)[0]

    arguments = jax.ShapeDtypeStruct((3, 4), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32)
    made = with_sums_for_vectors(trace(step, arguments, batch_axes=(None, 0)).graph)
    assert not any(eqn.primitive.name == "dot_general" for eqn in walk(made.jaxpr))


def test_a_product_may_be_what_a_scan_carries_and_what_comes_out() -> None:
    def step(w: Any, rows: Any) -> Any:
        moved, sums = jax.lax.scan(lambda h, a: (a @ h, jnp.vdot(h, h)), rows, w)
        return moved, sums, rows @ rows

    random = np.random.default_rng(0)
    w, rows = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((5, 4, 4), (4,)))
    graph = trace(step, (w, rows), batch_axes=(None, None)).graph
    made = with_sums_for_vectors(graph)
    assert not any(eqn.primitive.name == "dot_general" for eqn in walk(made.jaxpr))
    plain = jax.core.eval_jaxpr(graph.jaxpr, (), w, rows)
    found = jax.core.eval_jaxpr(made.jaxpr, (), w, rows)
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_products_of_other_numbers_stay(dtype: Any) -> None:
    graph = trace(lambda x: x @ x, (jnp.ones(4, dtype),), batch_axes=(None,)).graph
    assert with_sums_for_vectors(graph) is graph


def test_of_a_product_with_an_algorithm_of_its_own_nothing_is_known() -> None:
    def step(x: Any) -> Any:
        return jax.lax.dot(x, x, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32)

    graph = trace(step, (jnp.ones(4),), batch_axes=(None,)).graph
    assert with_sums_for_vectors(graph) is graph


def test_marks_of_the_backward_pass_and_weak_types_stay() -> None:
    def step(w: Any, rows: Any) -> Any:
        weak = jax.lax.broadcast(2.0, (4,))
        beside = jax.lax.dot(weak, weak)
        return w - jax.grad(lambda w: jnp.sum((rows @ w) ** 2))(w), beside

    shapes = jnp.ones(4), jnp.ones((8, 4))
    graph = trace(step, shapes, batch_axes=(None, 0)).graph
    made = with_sums_for_vectors(graph)
    late = [pass_of(str(e.source_info.name_stack)) == "backward" for e in made.jaxpr.eqns]
    names = [eqn.primitive.name for eqn in made.jaxpr.eqns]
    sums = [is_late for name, is_late in zip(names, late, strict=True) if name == "reduce_sum"]
    assert sums.count(True) == 1 and False in sums
    types = [(v.aval.dtype, v.aval.weak_type) for v in graph.jaxpr.outvars]
    assert [(v.aval.dtype, v.aval.weak_type) for v in made.jaxpr.outvars] == types
    assert types[1][1], "weak"


def dispatched(is_product: bool) -> autopar.Plan:
    """A mixture's dispatch of two experts for each token, in the way of GShard."""
    rows, tokens, width, experts, places, chosen = 32, 1024, 512, 16, 128, 2

    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            weights, index = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), chosen)
            mask = jax.nn.one_hot(index, experts)
            order = jnp.cumsum(mask.reshape(rows, tokens * chosen, experts), 1).reshape(mask.shape)
            sent = mask[..., None] * jax.nn.one_hot(order.astype(jnp.int32) - 1, places)
            if is_product:
                combine = jnp.einsum("btkec,btk->btec", sent, weights)
            else:
                combine = (sent * weights[..., None, None]).sum(2)
            inside = jnp.einsum("btec,btd->ebcd", sent.sum(2), x)
            made = jnp.einsum("ebcd,edf->ebcf", inside, p["expert"])
            return jnp.einsum("ebcd,btec->btd", made, combine).mean()

        value, gradients = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradients), value

    struct = jax.ShapeDtypeStruct
    state = {
        "router": struct((width, experts), jnp.float32),
        "expert": struct((experts, width, width), jnp.float32),
    }
    rows_of = struct((rows, tokens, width), jnp.float32)
    return autopar.plan(step, state, rows_of, cluster="8xh100", method="expert", microbatches=1)


def test_a_mixture_that_meets_its_weights_in_a_product_is_planned_as_one_that_sums() -> None:
    product, summed = (dispatched(is_product).estimates for is_product in (True, False))
    assert product.peak_bytes_per_device == summed.peak_bytes_per_device
    assert product.step_seconds == pytest.approx(summed.step_seconds, rel=0.05)
