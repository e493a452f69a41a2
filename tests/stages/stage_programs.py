"""Microbatched graphs of the real programs, and the inputs for them."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from programs import PROGRAMS, Program

from autopar.passes.factors.populate import populate
from autopar.passes.graph import Graph
from autopar.passes.microbatch import analyze, split
from autopar.passes.trace import trace

MICROBATCHES = 4


@dataclass(frozen=True)
class Microbatched:
    """A program's split graph, its rules, and the graph's inputs for the first batch."""

    graph: Graph
    rules: Any
    inputs: list[Any]


def microbatched(program: Program | str) -> Microbatched:
    """Trace and split a program of the registry; enter `program.context()` around it."""
    program = PROGRAMS[program] if isinstance(program, str) else program
    if program.missing():
        pytest.skip(str(program.missing()))
    case = program.build()
    known = ("batch_axes", "batch_argnums", "static_argnums")
    options = {key: value for key, value in case.options.items() if key in known}
    arguments, keywords = case.arguments(case.state, case.batch), case.keywords[0]
    step = trace(case.step, arguments, keywords, **options)
    graph = split(step.graph, analyze(step.graph, populate(step.graph.jaxpr), MICROBATCHES))
    leaves = jax.tree.leaves((arguments, keywords))
    arrays = [leaves[i] for i in step.signature.array_positions]
    return Microbatched(graph, populate(graph.jaxpr), [*arrays, *graph.constants])


def plain(value: Any) -> np.ndarray:
    """An array or a key's data on the host."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)
