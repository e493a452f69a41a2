"""Split a function and compare it with the function itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from autopar.passes.graph import graph as graphs
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Graph, Input, Output
from autopar.passes.graph.microbatched import LoopPhase, Microbatched, WholePhase
from autopar.passes.microbatch import Analysis, analyze, split
from autopar.passes.primitives.populate import populate


def trace(
    function: Callable[..., Any], args: Sequence[Any], batch_argnums: Sequence[int] = (-1,)
) -> Graph:
    """The flat graph of `function`; leaves of the batch arguments hold examples in dimension 0."""
    numbers = {number % len(args) for number in batch_argnums}
    inputs = []
    for number, arg in enumerate(args):
        for path, _ in jax.tree_util.tree_flatten_with_path(arg)[0]:
            name = f"args[{number}]{jax.tree_util.keystr(path)}"
            batch = number in numbers
            inputs.append(Input(name, "batch" if batch else "state", 0 if batch else None))
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    outputs = [
        Output(f"out{jax.tree_util.keystr(path)}")
        for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]
    ]
    graph = graphs.from_closed_jaxpr(closed, inputs, outputs)
    graphs.check(graph)
    return graph


def analyzed(
    function: Callable[..., Any], args: Sequence[Any], microbatches: int, **options: Any
) -> tuple[Graph, Analysis]:
    """The traced graph and its analysis."""
    graph = trace(function, args, options.pop("batch_argnums", (-1,)))
    return graph, analyze(graph, populate(graph.jaxpr), microbatches, **options)


def run(graph: Graph, args: Sequence[Any]) -> list[np.ndarray]:
    """The outputs of a graph, evaluated by plain `jax.jit` on one device."""
    function = jax.jit(jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(graph.jaxpr, ())))
    results = function(*jax.tree.leaves(args), *graph.constants)
    return [_plain(result) for result in results]


def check_phases(step: Microbatched) -> None:
    """Assert that the phases are the program's equations in order, and that loops are their scans.

    What once a step and what once a microbatch runs takes turns, and a body's variables are either
    the same in every microbatch, carried, or a slice.
    """
    eqns: list[jex_core.JaxprEqn] = []
    for number, phase in enumerate(step.phases):
        assert isinstance(phase, (WholePhase, LoopPhase)[number % 2])
        eqns += [phase.scan] if isinstance(phase, LoopPhase) else phase.eqns
    assert len(step.phases) % 2 == 1
    assert list(map(id, eqns)) == list(map(id, step.graph.jaxpr.eqns))
    if step.loop is None:
        assert step.prologue == tuple(eqns)
        assert step.epilogue == ()
        return
    middle, last = eqns.index(step.loop.scan), eqns.index(step.loops[-1].scan)
    assert (step.prologue, step.epilogue) == (tuple(eqns[:middle]), tuple(eqns[last + 1 :]))
    for loop in step.loops:
        _check_loop(loop)


def _check_loop(loop: LoopPhase) -> None:
    scan = loop.scan
    assert loop.num_microbatches == scan.params["length"]
    num_consts, num_carry = jax_compat.scan_counts(scan.params)
    carries = {item.carry: item.start for item in loop.accumulators}
    entering = {**loop.consts, **carries, **loop.slices}
    assert list(entering) == loop.body.invars
    assert list(entering.values()) == scan.invars
    assert (len(loop.consts), len(loop.accumulators)) == (num_consts, num_carry)
    leaving = [(item.result, item.total) for item in loop.accumulators] + list(loop.stacks)
    assert [inner for inner, _ in leaving] == loop.body.outvars
    assert [outer for _, outer in leaving] == scan.outvars
    for inner, outer in loop.slices.items():
        assert outer.aval.shape == (loop.num_microbatches, *inner.aval.shape)
    for result, stack in loop.stacks:
        assert stack.aval.shape == (loop.num_microbatches, *result.aval.shape)
    for item in loop.accumulators:
        read: set[Any] = {item.carry}
        for index, eqn in enumerate(loop.body.eqns):
            reads = any(not isinstance(v, jex_core.Literal) and v in read for v in eqn.invars)
            assert reads == (index in item.combine)
            if reads:
                read.update(eqn.outvars)
        assert item.result in read or not item.combine
    assert loop.combining == {index for item in loop.accumulators for index in item.combine}


def _plain(value: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def check_split(
    function: Callable[..., Any],
    args: Sequence[Any],
    microbatches: int,
    *,
    tolerance: float | None = None,
    floor: float = 1e-30,
    **options: Any,
) -> Analysis:
    """Assert that the split program computes what the function does, and return its analysis.

    Differences are relative to the largest magnitude in an output, or to `floor` if that is more.
    """
    graph, analysis = analyzed(function, args, microbatches, **options)
    new = split(graph, analysis)
    graphs.check(new.graph)
    assert new.loop or microbatches == 1 or not analysis.phases.loop, new.graph
    assert all(loop.num_microbatches == microbatches for loop in new.loops)
    assert 0 < len(new.loops) <= len(analysis.parts) or not analysis.parts
    check_phases(new)
    expected, found = run(graph, args), run(new.graph, args)
    for label, one, other in zip(graph.outputs, expected, found, strict=True):
        assert one.dtype == other.dtype, label
        assert one.shape == other.shape, label
        if one.dtype.kind in "fc" or one.dtype.name == "bfloat16":
            scale = np.max(np.abs(one.astype(np.complex128)), initial=floor)
            error = np.max(
                np.abs(one.astype(np.complex128) - other.astype(np.complex128)), initial=0
            )
            limit = tolerance or (1e-12 if one.dtype.itemsize >= 8 else 1e-5)
            assert error <= limit * scale, (label, float(error / scale))
        else:
            np.testing.assert_array_equal(one, other, err_msg=label.path)
    return analysis
