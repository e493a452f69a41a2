"""The split of every real program, evaluated by plain `jax.jit` on one device, changes nothing."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.extend import core as jex_core
from microbatch.helpers import check_phases
from programs import PROGRAMS, Program, compare, is_variant

from autopar.base.errors import InexactMicrobatchError
from autopar.passes.graph import graph as graphs
from autopar.passes.microbatch import analyze, split
from autopar.passes.primitives.populate import populate
from autopar.passes.trace.trace import Traced, trace

SPLITTING = [program for program in PROGRAMS.values() if program.loops]
REFUSED = [program for program in PROGRAMS.values() if not program.loops]


def combinations() -> Iterator[Any]:
    """Every program with 2 and with 4 microbatches; those beyond the subset are marked `full`.

    The subset has every program of several loops and a seventh of the others, with one number each.
    `tests/test_programs.py` runs all of them in 4 microbatches on eight devices.
    """
    for (index, program), count in itertools.product(enumerate(SPLITTING), (2, 4)):
        chosen = (index % 2 == 0) == (count == 4) and not is_variant(program)
        chosen &= program.loops > 1 or index % 7 == 0
        marks = () if chosen else pytest.mark.full
        yield pytest.param(program, count, id=f"{program}-{count}", marks=marks)


def traced(program: Program, case: Any) -> Traced:
    """The program's graph for its first batch."""
    reason = program.missing()
    if reason:
        pytest.skip(reason)
    options = {
        k: v
        for k, v in case.options.items()
        if k in ("batch_axes", "batch_argnums", "static_argnums")
    }
    return trace(case.step, case.arguments(case.state, case.batch), case.keywords[0], **options)


@pytest.mark.parametrize(("program", "count"), list(combinations()))
def test_equals_the_plain_step(program: Program, count: int) -> None:
    """Three steps of the split graph give the plain run's outputs and states."""
    if program.missing():
        pytest.skip(str(program.missing()))
    case = program.build()
    with program.context():
        step = traced(program, case)
        analysis = analyze(step.graph, populate(step.graph.jaxpr), count)
        new = split(step.graph, analysis)
        check_phases(new)
        assert len(new.loops) == program.loops
        graph = new.graph
        graphs.check(graph)
        evaluate = jax.jit(jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(graph.jaxpr, ())))

        def parallel(*args: Any, **kwargs: Any) -> Any:
            leaves = jax.tree.leaves((args, kwargs))
            arrays = [leaves[i] for i in step.signature.array_positions]
            return step.result(evaluate(*arrays, *graph.constants))

        compare.assert_steps_equal(case.plain, parallel, case, program.tolerance)
    assert analysis.costs.loop_share > 0.5, analysis
    assert len(analysis.certificate) == len(graph.outputs)


@pytest.mark.parametrize("program", REFUSED, ids=str)
def test_refuses_what_has_no_exact_split(program: Program) -> None:
    """The error names a line of the program."""
    if program.missing():
        pytest.skip(str(program.missing()))
    case = program.build()
    with program.context():
        step = traced(program, case)
        analysis = analyze(step.graph, populate(step.graph.jaxpr), 4)
        with pytest.raises(InexactMicrobatchError) as error:
            split(step.graph, analysis)
    assert str(program.file) in str(error.value.where), error.value
