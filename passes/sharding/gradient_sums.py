"""Which sums over devices complete gradients, and in which dtype they are added if that is asked.

A gradient is told by where it goes: into new state, and into no activation. So the statistics of a
batch normalization are none, nor are arrays of metrics.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.extend.core import Jaxpr, Var

from autopar.base.options import AS_COMPUTED
from autopar.passes.graph.graph import Atom, Graph
from autopar.passes.graph.scans import ScanParts
from autopar.passes.sharding.batch_dims import BatchDims

_STATE, _ACTIVATION = 1, 2


def sum_dtypes(graph: Graph, dims: BatchDims, reduce_dtype: str) -> Mapping[Var, str]:
    """The gradients, of inner bodies too, that are added in another dtype than their own.

    float32 widens what is narrower, bfloat16 narrows what is wider. Of a step that returns no new
    state, whatever it returns counts as such.
    """
    if reduce_dtype == AS_COMPUTED:
        return {}
    goes = dict[Var, int]()
    pairs = list(zip(graph.jaxpr.outvars, graph.outputs, strict=True))
    state = [atom for atom, label in pairs if label.alias is not None or label.into_state]
    _mark(goes, state or graph.jaxpr.outvars, [_STATE] * len(pairs))
    _walk(graph.jaxpr, goes, dims)
    wanted = jnp.dtype(reduce_dtype).itemsize
    changes = operator.lt if reduce_dtype == "float32" else operator.gt
    return {
        var: reduce_dtype
        for var, where in goes.items()
        if where == _STATE
        and var.aval.shape
        and not dims.get(var)
        and jnp.issubdtype(var.aval.dtype, jnp.floating)
        and changes(var.aval.dtype.itemsize, wanted)
    }


def _mark(goes: dict[Var, int], atoms: Iterable[Atom], facts: Iterable[int]) -> None:
    for atom, fact in zip(atoms, facts, strict=False):
        if not isinstance(atom, jex_core.Literal):
            goes[atom] = goes.get(atom, 0) | fact


def _walk(jaxpr: Jaxpr, goes: dict[Var, int], dims: BatchDims) -> None:
    """Add to `goes` into what variables go, where that of the jaxpr's results is known."""
    for eqn in reversed(jaxpr.eqns):
        results = [goes.get(var, 0) for var in eqn.outvars]
        union = functools.reduce(operator.or_, results, 0)
        if eqn.primitive.name == "scan":
            operands = _into_scan(ScanParts.of(eqn), results, goes, dims)
        elif eqn.primitive.name == "cond":
            operands = [union] * len(eqn.invars)
            for branch in eqn.params["branches"]:
                _mark(goes, branch.jaxpr.outvars, results)
                _walk(branch.jaxpr, goes, dims)
        else:
            union |= _ACTIVATION if any(map(dims.get, eqn.outvars)) else 0
            operands = [union] * len(eqn.invars)
        _mark(goes, eqn.invars, operands)


def _into_scan(
    scan: ScanParts, results: Sequence[int], goes: dict[Var, int], dims: BatchDims
) -> list[int]:
    carried, rows = map(list, scan.results(results))
    while True:  # until one more iteration tells nothing new
        _mark(goes, scan.body.outvars, [*carried, *rows])
        _walk(scan.body, goes, dims)
        operands = [goes.get(var, 0) for var in scan.body.invars]
        joined = list(map(operator.or_, carried, scan.operands(operands)[1]))
        if joined == carried:
            return operands
        carried = joined
