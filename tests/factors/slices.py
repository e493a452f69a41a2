"""The numeric meaning of a factor rule: slices computed apart, put together, are the whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from autopar.passes.graph.graph import flatten
from autopar.passes.primitives.cuts import Cuts, DimCut, NotLocalError
from autopar.passes.primitives.factor_rule import DimFactors, FactorRule
from autopar.passes.primitives.localize import bind_local

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}


def trace(function: Callable[..., Any], *arguments: Any) -> Jaxpr:
    """A function's flat jaxpr."""
    return flatten(jax.make_jaxpr(function)(*arguments)).jaxpr


def is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def random_value(aval: Any, rng: np.random.Generator) -> Any:
    """Floats between 1/2 and 3/2, small non-negative integers, keys of the dtype's generator."""
    if is_key(aval):
        implementation = aval.dtype._impl.name
        seed = int(rng.integers(1000))
        keys = [
            jax.random.key(seed + i, impl=implementation) for i in range(int(np.prod(aval.shape)))
        ]
        return jnp.stack(keys).reshape(aval.shape) if aval.shape else keys[0]
    if aval.dtype == bool:
        return np.asarray(rng.random(aval.shape) < 0.5)
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return np.asarray(rng.integers(0, 4, aval.shape), aval.dtype)
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        values = rng.random(aval.shape) + 1j * rng.random(aval.shape)
        return np.asarray(values, aval.dtype)
    return np.asarray(rng.random(aval.shape) + 0.5, aval.dtype)


Evaluated = list[tuple[JaxprEqn, list[Any], list[Any]]]


def evaluate(jaxpr: Jaxpr, arguments: Sequence[Any]) -> Evaluated:
    """Every equation of a jaxpr without control flow, with its real operands and results."""

    def run(arguments: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
        env = dict(zip(jaxpr.invars, arguments, strict=True))
        found = []
        for eqn in jaxpr.eqns:
            operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            results = whole_results(eqn, operands)
            env.update(zip(eqn.outvars, results, strict=True))
            found.append(([jnp.asarray(v) for v in operands], results))
        return found

    values = jax.jit(run)(list(arguments))
    return [(eqn, *value) for eqn, value in zip(jaxpr.eqns, values, strict=True)]


def no_cuts(values: Iterable[Any]) -> list[tuple[None, ...]]:
    return [(None,) * len(v.aval.shape) for v in values]


def whole_results(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    return bind_local(eqn, operands, no_cuts(eqn.invars), no_cuts(eqn.outvars))


Way = dict[int, tuple[int, int]]  # factor -> (parts, major within the factor)


def ways_to_cut(rule: FactorRule) -> list[Way]:
    """Each cuttable factor in 4 contiguous parts or 2 strided ones, and every two factors in 2."""
    ways: list[Way] = []
    cuttable = [i for i, factor in enumerate(rule.factors) if factor.kind != "replicated"]
    for i in cuttable:
        size = rule.factors[i].size
        ways += [{i: (parts, 1)} for parts in (4, 2) if size % parts == 0][:1]
        if size % 2 == 0 and size > 2:
            ways.append({i: (2, size // 2)})
    for i in cuttable:
        for j in cuttable:
            sizes = rule.factors[i].size, rule.factors[j].size
            if i < j and sizes[0] % 2 == 0 and sizes[1] % 2 == 0 and not _share_dim(rule, i, j):
                ways.append({i: (2, 1), j: (2, 1)})
    return ways


def ways_with_one_pair(rule: FactorRule) -> list[Way]:
    """Those of `ways_to_cut`, but only one pair of factors."""
    ways = ways_to_cut(rule)
    return [way for way in ways if len(way) == 1] + [way for way in ways if len(way) == 2][-1:]


def in_halves(rule: FactorRule) -> list[Way]:
    """Each cuttable factor of even size, or of size 3, alone."""
    return [
        {i: (2 if factor.size % 2 == 0 else 3, 1)}
        for i, factor in enumerate(rule.factors)
        if factor.kind != "replicated" and (factor.size % 2 == 0 or factor.size % 3 == 0)
    ]


def _share_dim(rule: FactorRule, i: int, j: int) -> bool:
    return any(i in d and j in d for value in (*rule.operands, *rule.results) for d in value)


def check_rule(
    rule: FactorRule,
    operand_shapes: tuple[tuple[int, ...], ...],
    result_shapes: tuple[tuple[int, ...], ...],
) -> None:
    """Assert that every dimension is the product of its factors and every index exists."""
    assert len(rule.operands) == len(operand_shapes), (rule, operand_shapes)
    assert len(rule.results) == len(result_shapes), (rule, result_shapes)
    for dims, shape in zip(
        (*rule.operands, *rule.results), (*operand_shapes, *result_shapes), strict=True
    ):
        assert len(dims) == len(shape), (str(rule), dims, shape)
        for dim, size in zip(dims, shape, strict=True):
            product = 1
            for factor in dim:
                product *= rule.factors[factor].size
            assert product == size, (str(rule), dims, shape)


def check_whole(eqn: JaxprEqn, rule: FactorRule) -> None:
    check_rule(
        rule,
        tuple(v.aval.shape for v in eqn.invars),
        tuple(v.aval.shape for v in eqn.outvars),
    )


def rule_cuts(
    rule: FactorRule, factors: Mapping[int, DimCut]
) -> tuple[tuple[Cuts, ...], tuple[Cuts, ...]]:
    """How operands and results are cut when some factors of a rule are.

    Args:
      rule: an equation's rule.
      factors: the cut factors; a cut's `major` counts within the factor (1: contiguous pieces).

    Returns:
      The cuts of the operands and of the results, as `bind_local` takes them.

    Raises:
      NotLocalError: two of the factors are in one dimension, which one `DimCut` cannot express.
    """

    def dim_cut(dim: DimFactors) -> DimCut | None:
        inside = [place for place, factor in enumerate(dim) if factor in factors]
        if not inside:
            return None
        if len(inside) > 1:
            raise NotLocalError(f"factors {dim} of one dimension are cut together in {rule}")
        outer = math.prod(rule.factors[factor].size for factor in dim[: inside[0]])
        return replace(cut := factors[dim[inside[0]]], major=outer * cut.major)

    operands, results = (
        tuple(tuple(map(dim_cut, dims)) for dims in values)
        for values in (rule.operands, rule.results)
    )
    return operands, results


def check_slices(
    evaluated: Evaluated,
    rules: Mapping[JaxprEqn, FactorRule],
    ways_of: Callable[[FactorRule], list[Way]] = ways_to_cut,
) -> int:
    """Assert, for every equation and every way to cut it, that its slices make up the whole.

    Returns how many ways there were.
    """
    ways = [ways_of(rules[eqn]) for eqn, _, _ in evaluated]
    cut = [(eqn, rules[eqn], each) for (eqn, _, _), each in zip(evaluated, ways, strict=True)]
    found = _results_of_slices(cut, [operands for _, operands, _ in evaluated])
    for (eqn, rule, each), results, (_, _, wholes) in zip(cut, found, evaluated, strict=True):
        for index, way in enumerate(each):
            check_way(eqn, rule, way, wholes, [results[i][index] for i in range(places(way))])
    return sum(map(len, ways))


Cut = tuple[JaxprEqn, FactorRule, list[Way]]


def _results_of_slices(equations: list[Cut], operands: list[list[Any]]) -> list[list[list[Any]]]:
    """For every equation and place, the results of each way, from slices taken on the host.

    Equations with equally many places are one program, which is told its place: compiling many
    small ones takes long, and so does one that has all places.
    """

    def slices(number: int, place: int) -> list[list[Any]]:
        _, rule, ways = equations[number]
        return [
            [
                like(host_take(operand, cuts), operand)
                for operand, cuts in zip(
                    operands[number], way_cuts(rule, way, place)[0], strict=True
                )
            ]
            for way in ways
        ]

    def local(number: int, slices: list[list[Any]], place: Any) -> list[list[Any]]:
        eqn, rule, ways = equations[number]
        return [
            bind_local(eqn, part, *way_cuts(rule, way, place))
            for part, way in zip(slices, ways, strict=True)
        ]

    def run(numbers: list[int], slices: list[list[list[Any]]], place: Any) -> list[Any]:
        return list(map(local, numbers, slices, [place] * len(numbers)))

    found: list[list[list[Any]]] = [[] for _ in equations]
    ends = [max(map(places, ways), default=0) for _, _, ways in equations]
    for end in sorted(set(ends)):
        numbers = [number for number, each in enumerate(ends) if each == end]
        program = jax.jit(functools.partial(run, numbers))
        for place in range(end):
            made = program([slices(number, place) for number in numbers], jnp.int32(place))
            for number, results in zip(numbers, made, strict=True):
                found[number].append(results)
    return found


def places(way: Way) -> int:
    return math.prod(parts for parts, _ in way.values())


def way_cuts(rule: FactorRule, way: Way, place: Any) -> tuple[tuple[Cuts, ...], tuple[Cuts, ...]]:
    """The cuts of one place, counted over all combinations of the cut factors' indices."""
    factors = {}
    for factor, (number, major) in way.items():
        factors[factor] = DimCut(number, place % number, major)  # fewer places repeat
        place = place // number
    return rule_cuts(rule, factors)


def check_way(
    eqn: JaxprEqn,
    rule: FactorRule,
    way: Way,
    wholes: Sequence[Any],
    found: Sequence[Sequence[Any]],
) -> None:
    """Assert that the results of all places make up the whole results."""
    kinds = {rule.factors[factor].kind for factor in way} - {"pass"}
    assert len(kinds) < 2, "partial results of different kinds do not combine"
    combine = _COMBINE[kinds.pop()] if kinds else None
    for number, whole in enumerate(wholes):
        together: dict[str, list[int]] = {}  # places whose results have the same place in the whole
        for place in range(places(way)):
            cuts, passed = way_cuts(rule, way, place)[1][number], _passed(rule, way, place)
            together.setdefault(str((cuts, passed)), []).append(place)
        for group in together.values():
            cuts = way_cuts(rule, way, group[0])[1][number]
            assert combine or len(group) == 1
            values = [found[place][number] for place in group]
            value = functools.reduce(combine, values) if combine else values[0]
            check_equal(value, host_take(whole, cuts), f"{eqn} cut {way} of {rule}")


def _passed(rule: FactorRule, way: Way, place: int) -> list[int]:
    """The indices of the factors that no result is a part over."""
    indices = []
    for factor, (number, _) in way.items():
        if rule.factors[factor].kind == "pass":
            indices.append(place % number)
        place //= number
    return indices


def host_take(whole: Any, cuts: Cuts) -> np.ndarray:
    """`take` in NumPy, written for itself, of an array (a key array as its data)."""
    value = host(whole)
    for dim, cut in enumerate(cuts):
        if cut is not None:
            pieces = np.split(value, cut.major * cut.parts, axis=dim)
            value = np.concatenate(pieces[cut.index :: cut.parts], axis=dim)
    return value


def like(value: np.ndarray, operand: Any) -> Any:
    if is_key(operand):
        return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(operand))
    return value


def host(value: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(value) if is_key(value) else value)


def check_equal(actual: Any, expected: np.ndarray, message: str) -> None:
    actual = host(actual)
    assert actual.dtype == expected.dtype, message
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        np.testing.assert_array_equal(actual, expected, err_msg=message)
        return
    tolerance = 2e-5
    if jnp.finfo(expected.dtype).bits < 32:
        actual, expected = actual.astype(np.float32), expected.astype(np.float32)
        tolerance = 3e-2  # bfloat16 has 8 bits, and partial sums are rounded
    finite = expected[np.isfinite(expected)]
    scale = max(1.0, float(np.max(np.abs(finite), initial=0.0)))
    np.testing.assert_allclose(
        actual, expected, rtol=tolerance, atol=tolerance * scale, err_msg=message
    )
