"""Microbatched graphs of the real programs, and the inputs for them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend import core as jex_core
from microbatch.helpers import check_phases
from programs import PROGRAMS, Program
from stages.stage_reference import evaluate

from autopar.passes.graph import graph as graphs
from autopar.passes.graph.graph import Graph
from autopar.passes.graph.microbatched import Microbatched
from autopar.passes.microbatch import analyze, split
from autopar.passes.primitives.populate import populate
from autopar.passes.slicing.stage_graphs import LeafRows, Stages
from autopar.passes.trace.trace import trace

MICROBATCHES = 2
"""All tasks of all microbatches are one program, so few are compiled sooner."""


@dataclass(frozen=True)
class SplitProgram:
    """A program in microbatches, its rules, and its graph's inputs for the first batch."""

    step: Microbatched
    rules: Any
    inputs: list[Any]

    @property
    def graph(self) -> Graph:
        """All of the program."""
        return self.step.graph

    @cached_property
    def expected(self) -> list[Any]:
        """What the uncut graph computes."""
        run = jax.jit(jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(self.graph.jaxpr, ())))
        return list(run(*self.inputs))


def microbatched(program: Program | str, microbatches: int = 4) -> SplitProgram:
    """Trace and split a program of the registry; enter `program.context()` around it."""
    program = PROGRAMS[program] if isinstance(program, str) else program
    if program.missing():
        pytest.skip(str(program.missing()))
    case = program.build()
    known = ("batch_axes", "batch_argnums", "static_argnums")
    options = {key: value for key, value in case.options.items() if key in known}
    arguments = case.arguments(case.state, case.batch)
    return microbatched_step(case.step, arguments, case.keywords[0], microbatches, **options)


def microbatched_step(
    step: Callable[..., Any],
    arguments: Any,
    keywords: Any = None,
    microbatches: int = MICROBATCHES,
    **options: Any,
) -> SplitProgram:
    """Trace and split a step."""
    keywords = keywords or {}
    traced = trace(step, arguments, keywords, **options)
    new = split(traced.graph, analyze(traced.graph, populate(traced.graph.jaxpr), microbatches))
    leaves = jax.tree.leaves((arguments, keywords))
    arrays = [leaves[i] for i in traced.signature.array_positions]
    return SplitProgram(new, populate(new.graph.jaxpr), [*arrays, *new.graph.constants])


def assert_equal_to_whole(
    whole: SplitProgram, stages: Stages, relative: float | None = None
) -> None:
    """The stages, one task after the other, compute what the uncut graph computes."""
    expected = whole.expected
    found = joined(stages.results, evaluate(stages, in_rows(stages.leaves, whole.inputs)))
    for label, one, other in zip(whole.graph.outputs, expected, found, strict=True):
        assert_close(label.path, one, other, relative)


def in_rows(leaves: Sequence[Sequence[LeafRows]], values: Sequence[Any]) -> list[Any]:
    """Values as the cut program takes them."""
    return [
        value
        if rows.stop is None
        else jax.lax.slice_in_dim(value, rows.start, rows.stop, axis=rows.axis)
        for group, value in zip(leaves, values, strict=True)
        for rows in group
    ]


def joined(results: Sequence[Sequence[LeafRows]], values: Sequence[Any]) -> list[Any]:
    """The inverse."""
    return [
        values[group[0].number]
        if group[0].stop is None
        else np.concatenate([values[rows.number] for rows in group], axis=group[0].axis)
        for group in results
    ]


def check_links(stages: Stages) -> None:
    """Links agree with the graphs at both ends, and activations flow up and gradients down."""
    check_phases(stages.whole)
    fed = {(link.target, link.target_input) for link in stages.links}
    assert len(fed) == len(stages.links)
    for number, stage in enumerate(stages.graphs):
        graphs.check(stage.graph)
        check_phases(stage.step)
        for place, leaf in enumerate(stage.inputs):
            assert (leaf is None) == ((number, place) in fed)
    for link in stages.links:
        source, target = stages.graphs[link.source], stages.graphs[link.target]
        shape = link.shape
        if link.per_microbatch:
            assert source.loop is not None
            shape = (source.loop.num_microbatches, *shape)
        assert source.outputs[link.source_output] is None
        assert source.graph.jaxpr.outvars[link.source_output].aval.shape == shape
        assert target.graph.jaxpr.invars[link.target_input].aval.shape == shape
        if link.label == "activation":
            assert link.source < link.target
        if link.label == "gradient":
            assert link.source > link.target
    states = Counter(
        number
        for stage in stages.graphs
        for number, label in zip(stage.inputs, stage.graph.inputs, strict=True)
        if number is not None and label.role == "state"
    )
    assert all(times == 1 for times in states.values()), "a state leaf is on two stages"
    for stage in stages.graphs:  # a leaf is replaced where it is
        for label in stage.graph.inputs:
            assert label.role != "state" or label.alias is not None or not label.donated


def crossing(stages: Stages) -> Counter[Any]:
    """How many values cross per microbatch, by source, target and label."""
    return Counter((k.source, k.target, k.label) for k in stages.links if k.per_microbatch)


def one_each_way(number: int) -> dict[Any, int]:
    """One activation up and one gradient down over every boundary, and nothing else."""
    up = {(stage, stage + 1, "activation"): 1 for stage in range(number - 1)}
    return up | {(stage + 1, stage, "gradient"): 1 for stage in range(number - 1)}


def assert_close(path: str, one: Any, other: Any, relative: float | None = None) -> None:
    """Equal up to the order of sums; integers, booleans and keys exactly."""
    assert one.dtype == other.dtype, path
    expected, found = plain(one), plain(other)
    assert expected.shape == found.shape, path
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(expected, found, err_msg=path)
        return
    allowed = relative or (1e-12 if expected.dtype.itemsize == 8 else 1e-5)
    expected, found = expected.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(finite, np.isfinite(found), err_msg=path)
    scale = np.max(np.abs(expected[finite]), initial=1e-6)
    error = np.max(np.abs(expected - found)[finite], initial=0.0)
    assert error <= allowed * scale, (path, error, scale)


def plain(value: Any) -> np.ndarray:
    """An array or a key's data on the host."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)
