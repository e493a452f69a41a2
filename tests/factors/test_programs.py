"""Rules and slices of the equations of real programs, on random operands of the right shapes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import JaxprEqn
from programs import PROGRAMS, Program

from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.primitives.factor_rule import FactorRule
from autopar.passes.primitives.populate import populate
from autopar.passes.primitives.shardings import is_known
from autopar.passes.trace.trace import trace

from .slices import check_slices, check_whole, in_halves, random_value, whole_results

QUICK = ("mlp", "moe_sort", "graph_network", "cnn_batch_norm")
MOST_ELEMENTS = 1 << 14


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, marks=() if name in QUICK else pytest.mark.full, id=name)
        for name, program in PROGRAMS.items()
    ],
)
def test_slices_of_a_program(program: Program) -> None:
    for package in program.requires:
        pytest.importorskip(package)
    with program.context():
        check_program(program)
    jax.clear_caches()  # thousands of small programs


def check_program(program: Program) -> None:
    case = program.build()
    names = ("static_argnums", "batch_argnums", "batch_axes")
    options = {name: case.options[name] for name in names if name in case.options}
    traced = trace(case.step, case.arguments(case.state, case.batch), case.keywords[0], **options)
    rules = populate(traced.graph.jaxpr)
    rng = np.random.default_rng(0)
    seen: dict[Any, tuple[JaxprEqn, list[Any]]] = {}
    for eqn, rule in rules.items():
        check_whole(eqn, rule)
        assert is_known(eqn.primitive.name), eqn
        signature = _signature(eqn, rule)
        if eqn.primitive.name in ELEMENTWISE or signature in seen or eqn.effects:
            continue
        if max(_sizes(eqn), default=0) > MOST_ELEMENTS:
            continue
        operands = [random_value(var.aval, rng) for var in eqn.invars]
        if eqn.primitive.name.startswith("scatter"):
            operands[0] = operands[0] * 0  # its rule may count on that
        seen[signature] = eqn, operands
    assert seen
    equations = [eqn for eqn, _ in seen.values()]
    values = [operands for _, operands in seen.values()]
    results = jax.jit(lambda values: list(map(whole_results, equations, values)))(values)
    check_slices(list(zip(equations, values, results, strict=True)), rules, in_halves)


def _signature(eqn: JaxprEqn, rule: FactorRule) -> Any:
    """Equations that differ only in sizes are tried once."""
    dtypes = tuple(str(var.aval.dtype) for var in (*eqn.invars, *eqn.outvars))
    return eqn.primitive.name, str(rule), dtypes


def _sizes(eqn: JaxprEqn) -> list[int]:
    return [int(np.prod(var.aval.shape)) for var in (*eqn.invars, *eqn.outvars)]
