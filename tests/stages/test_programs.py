"""Every real program, cut into 2 and into 4 stages, computes what its uncut graph computes."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend import core as jex_core
from programs import PROGRAMS, Program
from stages.stage_programs import microbatched, plain
from stages.stage_reference import evaluate

from autopar.errors import OptionError
from autopar.passes import graph as graphs
from autopar.passes.stages import Stages, slice_stages

FEW_LAYERS = {
    "graph_network": 2,
    "lstm": 2,
    "lstm_linen": 2,
    "scan_layers": 2,
    "scan_layers_linen": 2,
}
"""Programs with fewer than four places to cut, and how many layers they have."""

QUICK = ("mlp_multi_steps", "linen_gpt", "unet", "scan_layers", "loss_scale_cond", "key_rbg")
"""`make test` runs these; all others are for the full run."""


def combinations() -> Iterator[Any]:
    """Every program that splits into microbatches, with 2 and with 4 stages."""
    for program, number in itertools.product(PROGRAMS.values(), (2, 4)):
        if program.splits:
            quick = program.name in QUICK and (number == 4 or program.name == "unet")
            marks = () if quick else pytest.mark.full
            yield pytest.param(program, number, id=f"{program}-{number}", marks=marks)


@pytest.mark.parametrize(("program", "number"), list(combinations()))
def test_equals_the_uncut_graph(program: Program, number: int) -> None:
    """F, B and W of several microbatches in flight, links as the only way between stages."""
    with program.context():
        whole = microbatched(program)
        layers = next((n for name, n in FEW_LAYERS.items() if program.name.startswith(name)), None)
        if layers is not None and number > layers:
            with pytest.raises(OptionError, match="more than the program has layers"):
                slice_stages(whole.graph, whole.rules, number)
            return
        stages = slice_stages(whole.graph, whole.rules, number, split_backward=True)
        assert len(stages.graphs) == number
        for stage in stages.graphs:
            graphs.check(stage.graph)
            assert "F" in stage.tasks
        check_links(stages)
        run = jax.jit(jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(whole.graph.jaxpr, ())))
        expected, found = run(*whole.inputs), evaluate(stages, whole.inputs)
        for label, one, other in zip(whole.graph.outputs, expected, found, strict=True):
            assert_close(label.path, one, other, program.tolerance.relative)


def check_links(stages: Stages) -> None:
    """Links agree with the graphs at both ends, and activations flow up and gradients down."""
    fed = {(link.target, link.target_input) for link in stages.links}
    assert len(fed) == len(stages.links)
    for number, stage in enumerate(stages.graphs):
        for place, whole in enumerate(stage.inputs):
            assert (whole is None) == ((number, place) in fed)
    count = stages.graphs[0].graph.jaxpr.eqns[stages.graphs[0].loop].params["length"]
    for link in stages.links:
        shape = (count, *link.shape) if link.per_microbatch else link.shape
        source, target = stages.graphs[link.source], stages.graphs[link.target]
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


def assert_close(path: str, one: Any, other: Any, relative: float | None) -> None:
    """Equal up to the order of sums; integers, booleans and keys exactly."""
    assert one.dtype == other.dtype, path
    expected, found = plain(one), plain(other)
    assert expected.shape == found.shape, path
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(expected, found, err_msg=path)
        return
    allowed = relative or (1e-12 if expected.dtype.itemsize == 8 else 1e-5)
    expected, found = expected.astype(np.float64), found.astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(expected), np.isfinite(found), err_msg=path)
    finite = np.isfinite(expected)
    scale = np.max(np.abs(expected[finite]), initial=1e-6)
    error = np.max(np.abs(expected - found)[finite], initial=0.0)
    assert error <= allowed * scale, (path, error, scale)
