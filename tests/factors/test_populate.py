"""Rules of common equations in Shardy's notation, composition, caching and warnings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from autopar.base.errors import UnknownPrimitiveWarning
from autopar.passes.primitives import populate as populate_module
from autopar.passes.primitives.factor_rule import Factor, FactorRule
from autopar.passes.primitives.populate import populate
from autopar.passes.primitives.shardy import parse

from .slices import check_rule, trace


def rule(function: Callable[..., Any], *shapes: Any) -> str:
    """The rule of the last equation of a function of float32 arrays (or of given values)."""
    arguments = [jnp.ones(s, np.float32) if isinstance(s, tuple) else s for s in shapes]
    jaxpr = trace(function, *arguments)
    return str(populate(jaxpr)[jaxpr.eqns[-1]])


def einsum(text: str) -> Callable[..., Any]:
    return lambda *arrays: jnp.einsum(text, *arrays)


def conv(**params: Any) -> Callable[..., Any]:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, k: lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=numbers, **params
    )


def concatenate(x: Any, y: Any) -> Any:
    return lax.concatenate([x, y], 0)


KEY = jax.random.key(0)
INDEX = jnp.zeros((4, 2), int)

GOLDEN: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (lax.add, ((4, 8), (4, 8)), "([i,j],[i,j])->([i,j])"),
    (lambda x: x * 2, ((4, 8),), "([i,j],[])->([i,j])"),
    (lax.mul, ((4, 8), (4, 1)), "([i,j],[i,1])->([i,j])"),
    (lax.logistic, ((4, 8),), "([i,j])->([i,j])"),
    (lax.erf_inv, ((4, 8),), "([i,j])->([i,j])"),
    (lambda x: lax.clamp(0.0, x, 1.0), ((4, 8),), "([],[i,j],[])->([i,j])"),
    (lax.select_n, (jnp.array(True), (4, 8), (4, 8)), "([],[i,j],[i,j])->([i,j])"),
    (jnp.matmul, ((4, 8), (8, 2)), "([i,k],[k,j])->([i,j]) reduction={k}"),
    (lambda x: x @ x.T, (jnp.ones((4, 8), bool),), "([i,k],[k,j])->([i,j]) replicated={k}"),
    (
        einsum("bqhd,bkhd->bhqk"),
        ((2, 4, 3, 8), (2, 6, 3, 8)),
        "([i,k,j,m],[i,l,j,m])->([i,j,k,l]) reduction={m}",
    ),
    (lambda x: jnp.sum(x, 1), ((4, 8),), "([i,j])->([i]) reduction={j}"),
    (lambda x: jnp.max(x, 1), ((4, 8),), "([i,j])->([i]) max={j}"),
    (lambda x: jnp.prod(x, 1), ((4, 8),), "([i,j])->([i]) prod={j}"),
    (lambda x: jnp.all(x, 1), (jnp.ones((4, 8), bool),), "([i,j])->([i]) and={j}"),
    (lambda x: jnp.argmax(x, 1), ((4, 8),), "([i,j])->([i]) replicated={j}"),
    (lambda x: lax.cumsum(x, 1), ((4, 8),), "([i,j])->([i,j]) replicated={j}"),
    (lambda x: lax.sort(x, dimension=1), ((4, 8),), "([i,j])->([i,j]) replicated={j}"),
    (lambda x: lax.top_k(x, 2), ((4, 8),), "([i,k])->([i,j],[i,j]) replicated={j,k}"),
    (lambda x: lax.approx_max_k(x, 2), ((4, 8),), "([i,k])->([i,j],[i,j]) replicated={j,k}"),
    (lambda x: lax.rev(x, (0,)), ((4, 8),), "([i,j])->([i,j]) replicated={i}"),
    (lambda x: x.T, ((4, 8),), "([j,i])->([i,j])"),
    (lambda x: x.reshape(32), ((4, 8),), "([i,j])->([ij])"),
    (lambda x: x.reshape(4, 2, 4), ((4, 8),), "([i,jk])->([i,j,k])"),
    (lambda x: x.reshape(1, 4, 8), ((4, 8),), "([i,j])->([1,i,j])"),
    (lambda x: lax.broadcast_in_dim(x, (2, 4, 8), (1,)), ((4,),), "([j])->([i,j,k])"),
    (lambda x: jnp.tile(x, (3, 1)), ((4, 8),), "([j,k])->([ij,k])"),
    (concatenate, ((4, 8), (4, 8)), "([j,k],[j,k])->([ij,k]) replicated={i}"),
    (concatenate, ((4, 8), (2, 8)), "([lj,k],[j,k])->([ij,k]) replicated={i,l}"),
    (lambda x: jnp.split(x, 2), ((4, 8),), "([ki,j])->([i,j],[i,j]) replicated={k}"),
    (lambda x: x[:2], ((4, 8),), "([ki,j])->([i,j]) replicated={k}"),
    (lambda x: x[1:], ((4, 8),), "([k,j])->([i,j]) replicated={i,k}"),
    (
        lambda x: lax.pad(x, 0.0, ((4, 0, 0), (0, 1, 0))),
        ((4, 8),),
        "([j,l],[])->([ij,k]) replicated={i,k,l}",
    ),
    (lambda: lax.broadcasted_iota(np.int32, (4, 8), 1), (), "()->([i,j])"),
    (
        lambda x: lax.dynamic_slice(x, (1, 0), (2, 8)),
        ((4, 8),),
        "([k,j],[],[])->([i,j]) replicated={i,k}",
    ),
    (lambda x: lax.optimization_barrier((x, x[0])), ((4, 8),), "([i,j],[k])->([i,j],[k])"),
    (lambda k: jax.random.bits(k, (4, 8)), (KEY,), "([])->([i,j])"),
    (jax.vmap(lambda k: jax.random.bits(k, (8,))), (jax.random.split(KEY, 4),), "([i])->([i,j])"),
    (lambda k: jax.random.split(k, 4), (KEY,), "([])->([i]) replicated={i}"),
    (
        lambda x, i: x.at[i].get(mode="clip"),
        ((8, 6), INDEX),
        "([l,k],[i,j,1])->([i,j,k]) reduction={l}",
    ),
    (
        lambda x: x.at[INDEX].add(1.0, mode="drop"),
        ((8, 6),),
        "([i,j],[k,l,1],[k,l,j])->([i,j]) replicated={k,l}",
    ),
    (
        lambda u: jnp.zeros((8, 6)).at[INDEX].add(u, mode="drop"),
        ((4, 2, 6),),
        "([i,j],[k,l,1],[k,l,j])->([i,j]) reduction={k,l}",
    ),
    (
        conv(),
        ((2, 8, 8, 4), (3, 3, 4, 6)),
        "([i,j,k,m],[n,o,m,l])->([i,j,k,l]) reduction={m} replicated={j,k,n,o}",
    ),
    (
        conv(feature_group_count=2),
        ((2, 8, 8, 4), (3, 3, 2, 6)),
        "([i,j,k,ln],[o,p,n,lm])->([i,j,k,lm]) reduction={n} replicated={j,k,o,p}",
    ),
    (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID"),
        ((4, 8),),
        "([i,k])->([i,j]) replicated={j,k}",
    ),
    (
        lambda x: lax.linalg.qr(x, full_matrices=False),
        ((5, 4, 4),),
        "([i,n,o])->([i,j,k],[i,l,m]) replicated={j,k,l,m,n,o}"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "shapes", "expected"), GOLDEN, ids=[g[2] for g in GOLDEN])
def test_golden(function: Callable[..., Any], shapes: tuple[Any, ...], expected: str) -> None:
    assert rule(function, *shapes) == expected


def test_where_factors_are() -> None:
    """Heads are the outermost loop of the features that they are in; sizes of one are no loop."""
    merged = FactorRule(
        factors=tuple(Factor(size, "pass") for size in (8, 64, 1)),
        operands=(((0, 1),), ((2,), (0,))),
        results=(((2,), (0,), (1,)),),
    )
    assert merged.dims_of_factors == (((0, 0), (1, 1), (2, 1)), ((0, 0), (2, 2)), ((1, 0), (2, 0)))
    assert [merged.outermost(dim) for dim in ((0, 1), (2, 0), (2,), ())] == [0, 0, None, None]
    assert merged.nested == {1, 2}


def test_a_scatter_into_what_is_not_zero_cannot_cut_its_updates() -> None:
    def scatter(x: Any, u: Any) -> Any:
        return x.at[INDEX].add(u, mode="drop")

    shapes = (8, 6), (4, 2, 6)
    assert "reduction" not in rule(scatter, *shapes)
    assert "reduction={k,l}" in rule(lambda u: scatter(jnp.zeros((8, 6)), u), shapes[1])
    assert "reduction={k,l}" in rule(lambda u: scatter(-jnp.zeros((6, 8)).T, u), shapes[1])
    assert "reduction" not in rule(lambda u: scatter(jnp.ones((8, 6)), u), shapes[1])
    # A maximum may count its operand many times.
    assert "max={k,l}" in rule(lambda x, u: x.at[INDEX].max(u, mode="drop"), *shapes)


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.randoms())
@settings(max_examples=60, deadline=None)
def test_reshape_cuts_exactly_what_is_aligned(factors: list[int], random: Any) -> None:
    """A loop passes if and only if both shapes have a dimension boundary at both of its ends."""
    size = int(np.prod(factors))
    random.shuffle(factors)
    old = tuple(factors)
    new: list[int] = []
    rest = size
    while rest > 1:
        part = random.choice([d for d in range(2, rest + 1) if rest % d == 0])
        new.append(part)
        rest //= part
    jaxpr = jax.make_jaxpr(lambda x: lax.reshape(x, tuple(new)))(np.zeros(old)).jaxpr
    if not jaxpr.eqns:
        return
    (found,) = populate(jaxpr).values()
    check_rule(found, (old,), (tuple(new),))

    def spans(value: Any) -> dict[int, tuple[int, int]]:
        """The strides in the flat order at which each loop begins and ends."""
        place, strides = 1, {}
        for dim in reversed(value):
            for factor in reversed(dim):
                strides[factor] = (place, place := place * found.factors[factor].size)
        return strides

    left, right = spans(found.operands[0]), spans(found.results[0])
    for factor, description in enumerate(found.factors):
        same = left.get(factor) == right.get(factor)
        assert same or description.kind == "replicated", str(found)
        assert description.kind in ("pass", "replicated")
    if all(size % d == 0 for d in _boundaries(old) | _boundaries(tuple(new))) and _chain(
        _boundaries(old) | _boundaries(tuple(new))
    ):
        assert all(factor.kind == "pass" for factor in found.factors), str(found)


def _boundaries(shape: tuple[int, ...]) -> set[int]:
    return {int(np.prod(shape[i:])) for i in range(len(shape))}


def _chain(numbers: set[int]) -> bool:
    ordered = sorted(numbers)
    return all(b % a == 0 for a, b in itertools.pairwise(ordered))


def test_inner_bodies_have_rules_and_control_flow_has_none() -> None:
    def function(x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            return lax.cond(row[0] > 0, jnp.sin, jnp.cos, carry), jnp.exp(row)

        return lax.while_loop(lambda c: c[0] < 3.0, lambda c: c * 2.0, lax.scan(body, x[0], x)[0])

    jaxpr = trace(function, jnp.ones((4, 8)))
    rules = populate(jaxpr)
    names = {eqn.primitive.name for eqn in rules}
    assert {"sin", "cos", "exp", "mul", "lt", "gt"} <= names
    assert not {"scan", "cond", "while"} & names
    with pytest.raises(KeyError, match="no rule was populated"):
        rules[next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")]
    assert len(rules) == len(list(rules))
    assert "sin: ([i])->([i])" in str(rules)


def test_zeros_are_known_inside_bodies() -> None:
    def function(updates: Any) -> Any:
        zeros = jnp.zeros((8, 6))

        def body(carry: Any, u: Any) -> Any:
            return carry, zeros.at[INDEX].add(u, mode="drop")

        def branch(zeros: Any, u: Any) -> Any:
            return zeros.at[INDEX].add(u, mode="drop")

        chosen = lax.cond(updates[0, 0, 0, 0] > 0, branch, branch, zeros, updates[0])
        carried = lax.scan(lambda c, u: (branch(c, u), None), zeros, updates)[0]
        return lax.scan(body, 0, updates)[1], chosen, carried

    rules = populate(trace(function, jnp.ones((3, 4, 2, 6))))
    found = [str(rule) for eqn, rule in rules.items() if eqn.primitive.name == "scatter-add"]
    assert len(found) == 4
    # The carry of a scan is zero only at first.
    assert sum("reduction={k,l}" in text for text in found) == 3


def test_rules_do_not_depend_on_the_users_mesh() -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    jaxpr = trace(lambda x, y: jnp.tanh(x @ y), jnp.ones((4, 40)), jnp.ones((40, 2)))
    with jax.set_mesh(mesh):
        texts = [str(found) for found in populate(jaxpr).values()]
    assert texts == ["([i,k],[k,j])->([i,j]) reduction={k}", "([i,j])->([i,j])"]


def test_rules_are_kept_for_equal_equations() -> None:
    jaxpr = trace(lambda x: jnp.tanh(jnp.tanh(x)), jnp.ones((4, 24)))
    first, second = populate(jaxpr).values()
    assert first is second
    before = len(populate_module._CACHE)
    again = populate([trace(lambda x: jnp.tanh(x), jnp.ones((4, 24)))])
    assert len(populate_module._CACHE) == before
    assert next(iter(again.values())) is first


@pytest.mark.parametrize(
    ("precision", "dtypes"),
    [
        (lax.DotAlgorithmPreset.F16_F16_F32, (jnp.float16, jnp.float16)),
        (lax.DotAlgorithmPreset.F16_F16_F32, (jnp.float32, jnp.float16)),
        (lax.DotAlgorithmPreset.BF16_BF16_F32_X9, (jnp.float32, jnp.float32)),
    ],
)
def test_products_by_algorithms_that_cpus_do_not_have(
    precision: Any, dtypes: tuple[Any, Any]
) -> None:
    """`jax.nn.dot_product_attention` asks for one in float16."""

    def product(a: jax.Array, b: jax.Array, precision: Any) -> jax.Array:
        numbers = (((2,), (1,)), ((0,), (0,)))
        return lax.dot_general(a, b, numbers, precision, preferred_element_type=jnp.float32)

    arrays = jnp.ones((2, 3, 4), dtypes[0]), jnp.ones((2, 4, 5), dtypes[1])
    usual, found = (rule(lambda a, b, p=p: product(a, b, p), *arrays) for p in (None, precision))
    assert found == usual
    assert "reduction" in found


def test_an_unknown_primitive_is_replicated_with_one_warning() -> None:
    def function(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = jax.pure_callback(np.sin, shape, x)
        return jax.pure_callback(np.cos, shape, x)

    jaxpr = trace(function, jnp.ones((4, 8)))
    with pytest.warns(UnknownPrimitiveWarning, match="pure_callback at .*test_populate") as caught:
        rules = populate(jaxpr)
    assert len(caught) == 1
    assert {str(found) for found in rules.values()} == {"([k,l])->([i,j]) replicated={i,j,k,l}"}


def test_what_has_only_scalars_is_cut_nowhere_and_warns_of_nothing() -> None:
    jaxpr = trace(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), x.dtype), x), 1.0)
    assert {str(found) for found in populate(jaxpr).values()} == {"([])->([])"}


def test_an_unknown_primitive_is_told_at_the_users_line() -> None:
    jaxpr = trace(lambda x: jax.pure_callback(np.sin, x, x), jnp.ones((4, 8)))
    with pytest.warns(UnknownPrimitiveWarning) as caught:
        populate(jaxpr)
    assert [Path(w.filename).name for w in caught] == ["test_populate.py"]


def test_empty_and_scalar_values() -> None:
    nothing = "([])->([i,j]) replicated={i,j}"  # what has no elements is made of a number
    assert rule(lambda x: x + 1.0, (0, 4)) == nothing
    assert rule(lambda x: x[:, :0], (4, 8)) == nothing
    assert rule(lambda x, y: x + y, (), ()) == "([],[])->([])"


def test_a_value_whose_two_dimensions_are_one_loop_is_replicated() -> None:
    text = rule(lambda x: lax.dot_general(x, x, (((1,), (1,)), ((), ()))), (4, 8))
    assert text == "([i,k],[j,k])->([i,j]) reduction={k}"


def test_parse_reads_shardys_text() -> None:
    text = (
        "#sdy.op_sharding_rule<([i, jk], [z_1, l])->([i, jz_1]) {i=2, j=3, k=4, z_1=5, l=6}"
        " reduction={k, l} need_replication={j} permutation={i}>"
    )
    found = parse(text)
    assert found.sizes == (2, 3, 4, 5, 6)
    assert found.operands == (((0,), (1, 2)), ((3,), (4,)))
    assert found.results == (((0,), (1, 3)),)
    assert found.reduced == (2, 4)
    assert sorted(found.blocked) == [0, 1]
    assert parse("#sdy.op_sharding_rule<([])->([])>").operands == ((),)
    assert re.search("z_1", text)
