"""A program with some dimensions padded, whose results are exactly those of the program.

Inputs and outputs keep their shapes: a parameter is padded where the program begins, and what
replaces it is cut back where it ends. In between, padding may hold anything, infinities and NaN
too, and reaches no element that is real: sums and products over a padded dimension see zeros there,
a maximum the least number, indices that are out of bounds stay so, and an equation of another kind
is given its operands cut back. Where padding is known to be zero, no mask is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from autopar.arrays.typed_keys import is_key
from autopar.passes.graph import jax_compat, source_infos
from autopar.passes.graph.graph import Atom, Graph, flatten
from autopar.passes.graph.primitives import CONTROL_FLOW, DRAWS, KEEPS_ZERO, SCATTERS
from autopar.passes.graph.scans import ScanParts
from autopar.passes.padding.uneven import PaddedDims, kept_factors
from autopar.passes.primitives.cuts import bind_with
from autopar.passes.primitives.factor_rule import FactorRule, Rules, ValueFactors
from autopar.passes.primitives.shardings import gather_picks, scatter_picks

Sizes = Mapping[int, int]
"""Padded dimensions of a value, with their sizes."""

BEYOND = 0.0  # what values are padded with; a test takes NaN
# Beside `KEEPS_ZERO`: zero where all operands are zero.
_ZERO_OF_ZEROS = KEEPS_ZERO | {"abs", "integer_pow", "max", "min", "mul", "sqrt", "square", "tanh"}


@dataclass(frozen=True)
class PaddedValue:
    """A value at its padded size. `zero`: what is beyond its true size is zero."""

    array: Any
    zero: bool = False


def padded_graph(graph: Graph, rules: Rules, padded: PaddedDims) -> Graph:
    """The same step, in which these dimensions are padded."""
    rewrite, jaxpr = _Rewrite(rules, padded), graph.jaxpr

    def program(*arrays: Any) -> list[Any]:
        values = [
            PaddedValue(_resized(x, var, {}, rewrite.sizes(var)), zero=BEYOND == 0)
            for x, var in zip(arrays, jaxpr.invars, strict=True)
        ]
        results = zip(rewrite.run(jaxpr, values), jaxpr.outvars, strict=True)
        return [_typed(_resized(x.array, a, rewrite.sizes(a), {}), a) for x, a in results]

    return dataclasses.replace(graph, jaxpr=flatten(_traced(program, jaxpr.invars)).jaxpr)


class _Rewrite:
    """Evaluates a program's equations on padded values, while JAX traces that."""

    def __init__(self, rules: Rules, padded: PaddedDims) -> None:
        self.rules, self.padded = rules, padded

    def sizes(self, atom: Atom) -> Sizes:
        """The padded dimensions of a variable."""
        if isinstance(atom, Literal):
            return {}
        places = ((d, self.padded.get((atom, d))) for d in range(len(atom.aval.shape)))
        return {d: size for d, size in places if size is not None}

    def run(self, jaxpr: Jaxpr, values: Sequence[PaddedValue]) -> list[PaddedValue]:
        """A program's results."""
        env: dict[Var, PaddedValue] = dict(zip(jaxpr.invars, values, strict=True))

        def read(atom: Atom) -> PaddedValue:
            return PaddedValue(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            evaluate = self.scan if eqn.primitive.name == "scan" else self.equation
            with source_infos.source_context(eqn):
                env.update(zip(eqn.outvars, evaluate(eqn, operands), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, operands: Sequence[PaddedValue]) -> list[PaddedValue]:
        """An equation: at the padded size over loops that it knows, at the true one over others."""
        rule, kept = _NO_RULE, frozenset[int]()
        if eqn.primitive.name not in CONTROL_FLOW:
            rule = self.rules[eqn]
            kept = kept_factors(eqn, rule, self.padded)

        def known(values: Sequence[ValueFactors], place: int, atom: Atom) -> Sizes:
            """The padded dimensions that the equation takes or makes so."""
            if not kept:
                return {}
            factors = values[place]
            return {d: n for d, n in self.sizes(atom).items() if rule.outermost(factors[d]) in kept}

        taken = [known(rule.operands, i, atom) for i, atom in enumerate(eqn.invars)]
        made = [known(rule.results, i, var) for i, var in enumerate(eqn.outvars)]
        fitted = [
            PaddedValue(_resized(x.array, atom, self.sizes(atom), sizes), x.zero)
            for x, atom, sizes in zip(operands, eqn.invars, taken, strict=True)
        ]
        zero = [False] * len(made)
        arrays, changes = [x.array for x in fitted], dict[str, Any]()
        if kept:
            zero = _zero_results(eqn, rule, kept, fitted)
            arrays = [
                _neutral(eqn.invars[i], rule, kept, rule.operands[i], x)
                for i, x in enumerate(fitted)
            ]
            arrays = _indices_in_bounds(eqn, arrays, taken[0] if taken else {})
            changes = _changed_params(eqn, taken, made)
        return [
            PaddedValue(_resized(x, var, sizes, self.sizes(var)), is_zero if sizes else BEYOND == 0)
            for x, var, sizes, is_zero in zip(
                _bind(eqn, arrays, changes), eqn.outvars, made, zero, strict=True
            )
        ]

    def scan(self, eqn: JaxprEqn, operands: Sequence[PaddedValue]) -> list[PaddedValue]:
        """A loop: what enters and leaves its body is padded there as it is outside."""
        scan = ScanParts.of(eqn)
        consts, carries, slices = scan.operands([x.zero for x in operands])
        arrays = [
            _typed(_resized(x.array, atom, self.sizes(atom), sizes), atom)
            for x, atom, sizes in zip(
                operands, eqn.invars, self.scanned(scan.operands(scan.body.invars)), strict=True
            )
        ]
        while True:  # until carries that begin with zero padding are known to keep it
            closed, zeros = self.body(scan.body, (*consts, *carries, *slices))
            kept = [a and b for a, b in zip(carries, zeros, strict=False)]
            if kept == list(carries):
                break
            carries = kept
        params = jax_compat.scan_params(eqn.params, closed, scan.num_consts, scan.num_carry)
        carried, rows = scan.results(scan.body.outvars)
        return [
            PaddedValue(_resized(x, var, sizes, self.sizes(var)), zero and BEYOND == 0)
            for x, var, sizes, zero in zip(
                eqn.primitive.bind(*arrays, **params),
                eqn.outvars,
                self.scanned(([], carried, rows)),
                (*carries, *scan.results(zeros)[1]),
                strict=True,
            )
        ]

    def scanned(self, inside: Sequence[Sequence[Atom]]) -> list[Sizes]:
        """Sizes outside of a loop of its (constants, carries, slices); none along the loop."""
        consts, carries, slices = inside
        outside = [*map(self.sizes, (*consts, *carries))]
        return outside + [{d + 1: n for d, n in self.sizes(var).items()} for var in slices]

    def body(self, jaxpr: Jaxpr, given: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
        """A loop's body on padded values, and which of its results have zero padding."""
        zeros: list[bool] = []

        def program(*arrays: Any) -> list[Any]:
            results = self.run(jaxpr, [*map(PaddedValue, arrays, given)])
            zeros.extend(x.zero for x in results)
            return [_typed(x.array, v) for x, v in zip(results, jaxpr.outvars, strict=True)]

        return _traced(program, jaxpr.invars, [*map(self.sizes, jaxpr.invars)]), zeros


_NO_RULE = FactorRule((), (), ())


def _traced(
    function: Any, variables: Sequence[Var], sizes: Sequence[Sizes] | None = None
) -> ClosedJaxpr:
    """The program of a function of values of these types, some padded."""
    structs = [
        jax.ShapeDtypeStruct(
            _padded_shape(var, known),
            var.aval.dtype,
            weak_type=getattr(var.aval, "weak_type", False),
        )
        for var, known in zip(variables, sizes or [{}] * len(variables), strict=True)
    ]
    closed = jax.make_jaxpr(function)(*structs)
    assert not closed.consts, "a program's arrays are its inputs"
    return closed


def _bind(eqn: JaxprEqn, arrays: Sequence[Any], changes: Mapping[str, Any]) -> list[Any]:
    if eqn.primitive.name in DRAWS:
        return bind_with(eqn, arrays, changes)
    return jax_compat.bind(eqn, arrays, **changes)


def _typed(array: Any, atom: Atom) -> Any:
    """An array with the dtype and weak type that an atom has."""
    if is_key(atom.aval.dtype):
        return array
    return jax_compat.with_type_of(jnp.asarray(array, atom.aval.dtype), atom.aval)


def _padded_shape(atom: Atom, sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes.get(d, size) for d, size in enumerate(atom.aval.shape))


def _resized(array: Any, atom: Atom, have: Sizes, wanted: Sizes) -> Any:
    """A value with other dimensions padded: first cut back, then padded with zeros."""
    shape = atom.aval.shape
    if any(d not in wanted for d in have):
        limits = [have[d] if d in have and d in wanted else n for d, n in enumerate(shape)]
        array = lax.slice(array, [0] * len(shape), limits)
    if any(d not in have for d in wanted):
        more = [wanted[d] - n if d in wanted and d not in have else 0 for d, n in enumerate(shape)]
        beyond = np.array(
            BEYOND if jnp.issubdtype(atom.aval.dtype, np.floating) else 0, atom.aval.dtype
        )
        array = lax.pad(array, beyond, [(0, high, 0) for high in more])
    return array


def _neutral(
    atom: Atom, rule: FactorRule, kept: frozenset[int], dims: ValueFactors, value: PaddedValue
) -> Any:
    """An operand, with what changes nothing where dimensions that are combined are padded."""
    array = value.array
    for dim, factors in enumerate(dims):
        factor = rule.outermost(factors)
        if factor not in kept or rule.factors[factor].kind == "pass":
            continue
        kind = rule.factors[factor].kind
        if kind == "sum" and value.zero:
            continue
        fill = np.array(_NEUTRAL[kind](atom.aval.dtype), atom.aval.dtype)
        real = lax.broadcasted_iota(np.int32, array.shape, dim) < atom.aval.shape[dim]
        array = lax.select(real, array, lax.broadcast(fill, array.shape))
    return array


def _extreme(dtype: Any, sign: int) -> Any:
    """The least (-1) or the largest (1) number of a dtype: infinite, where it has such."""
    if dtype == np.bool_:
        return sign > 0
    if not jnp.issubdtype(dtype, np.floating):
        return jnp.iinfo(dtype).max if sign > 0 else jnp.iinfo(dtype).min
    is_bounded = np.isnan(np.array(np.inf, dtype).astype(np.float32))
    return sign * (float(jnp.finfo(dtype).max) if is_bounded else np.inf)


_NEUTRAL: Mapping[str, Any] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": lambda dtype: _extreme(dtype, -1),
    "min": lambda dtype: _extreme(dtype, 1),
    "and": lambda dtype: True if dtype == np.bool_ else np.invert(np.zeros((), np.dtype(dtype))),
    "or": lambda dtype: 0,
}


def _zero_results(
    eqn: JaxprEqn, rule: FactorRule, kept: frozenset[int], operands: Sequence[PaddedValue]
) -> list[bool]:
    """Whether the padding of each result is zero because that of operands is."""
    name = eqn.primitive.name
    padded = {rule.outermost(dim) for value in rule.results for dim in value} & kept

    def is_zero(place: int) -> bool:
        """Whether an operand is zero wherever the results are padded."""
        atom = eqn.invars[place]
        if isinstance(atom, Literal):
            return not np.any(np.asarray(atom.val))
        held = {rule.outermost(dim) for dim in rule.operands[place]}
        return operands[place].zero and padded <= held

    def is_finite(place: int) -> bool:
        atom = eqn.invars[place]
        return isinstance(atom, Literal) and bool(np.all(np.isfinite(np.asarray(atom.val))))

    places = range(len(operands))
    if name == "optimization_barrier":
        return [x.zero for x in operands]
    if name == "mul":
        found = any(map(is_zero, places)) and all(is_zero(i) or is_finite(i) for i in places)
    elif name == "integer_pow":
        found = eqn.params["y"] > 0 and is_zero(0)
    elif name == "select_n":
        found = all(map(is_zero, places[1:]))
    elif name == "scatter-add":
        held = {rule.outermost(dim) for dim in rule.operands[2]} & kept
        found = is_zero(0) and (not held or is_zero(2))
    elif name == "gather":  # what is out of bounds may be filled
        found = False
    else:
        found = name in _ZERO_OF_ZEROS and all(map(is_zero, places))
    return [found] * len(eqn.outvars)


def _indices_in_bounds(eqn: JaxprEqn, arrays: Sequence[Any], sizes: Sizes) -> list[Any]:
    """Indices of padded dimensions: what was out of bounds of the true size is so again."""
    name, arrays = eqn.primitive.name, list(arrays)
    if name == "gather":
        picks, numbers = gather_picks(eqn), eqn.params["dimension_numbers"].start_index_map
    elif name in SCATTERS:
        numbers = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
        picks = scatter_picks(eqn)
    else:
        return arrays
    mode, shape, indices = eqn.params["mode"], eqn.invars[0].aval.shape, arrays[1]
    clips = {lax.GatherScatterMode.CLIP}
    if name == "gather":  # XLA clips what was promised to be in bounds and is not
        clips.add(lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    if max(sizes.values(), default=0) > jnp.iinfo(indices.dtype).max:
        indices = lax.convert_element_type(indices, np.int32)
    for column, dim in enumerate(numbers):
        if dim not in sizes or dim not in picks:
            continue
        instead = np.array(shape[dim] - 1 if mode in clips else sizes[dim], indices.dtype)
        beyond = indices >= np.array(shape[dim], indices.dtype)
        if len(numbers) > 1:
            own = lax.broadcasted_iota(np.int32, indices.shape, indices.ndim - 1) == column
            beyond &= own
        indices = lax.select(beyond, lax.broadcast(instead, indices.shape), indices)
    arrays[1] = indices
    return arrays


def _changed_params(eqn: JaxprEqn, taken: Sequence[Sizes], made: Sequence[Sizes]) -> dict[str, Any]:
    """Params that hold sizes of padded dimensions."""
    name, params = eqn.primitive.name, eqn.params
    shape = _padded_shape(eqn.outvars[0], made[0])
    if name in ("broadcast_in_dim", "iota"):
        return {"shape": shape, "sharding": None}
    if name == "reshape":
        return {"new_sizes": shape, "sharding": None}
    if name == "slice":
        limits = (taken[0].get(d, limit) for d, limit in enumerate(params["limit_indices"]))
        return {"limit_indices": tuple(limits)}
    if name == "dynamic_slice":
        return {"slice_sizes": shape}
    if name == "split":  # into one part, where that dimension is padded
        axis = params["axis"]
        return {
            "sizes": tuple(
                _padded_shape(v, m)[axis] for v, m in zip(eqn.outvars, made, strict=True)
            )
        }
    if name == "gather":
        whole, sizes = eqn.invars[0].aval.shape, params["slice_sizes"]
        windows = (
            taken[0].get(d, size) if size == whole[d] and d not in gather_picks(eqn) else size
            for d, size in enumerate(sizes)
        )
        batching = params["dimension_numbers"].operand_batching_dims
        return {"slice_sizes": tuple(1 if d in batching else n for d, n in enumerate(windows))}
    return {}
