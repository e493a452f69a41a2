"""Stages evaluated one task after the other compute what the whole program computes."""

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend import core as jex_core
from stages.stage_programs import microbatched, plain
from stages.stage_reference import evaluate

from autopar.errors import OptionError
from autopar.passes import graph as graphs
from autopar.passes.stages import Stages, layers, slice_stages


def crossing(stages: Stages) -> Counter[Any]:
    """How many values cross per microbatch, by source, target and label."""
    return Counter((k.source, k.target, k.label) for k in stages.links if k.per_microbatch)


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_multilayer_perceptron(number: int, split_backward: bool) -> None:
    """One activation up and one gradient down per boundary, and the same numbers."""
    whole = microbatched("mlp")
    stages = slice_stages(whole.graph, whole.rules, number, split_backward=split_backward)
    expected = {(s, s + 1, "activation"): 1 for s in range(number - 1)}
    expected |= {(s + 1, s, "gradient"): 1 for s in range(number - 1)}
    assert crossing(stages) == expected
    for stage in stages.graphs:
        graphs.check(stage.graph)
        assert ("W" in stage.tasks) == split_backward
    run = jax.jit(jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(whole.graph.jaxpr, ())))
    for one, other in zip(run(*whole.inputs), evaluate(stages, whole.inputs), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(plain(one), plain(other), rtol=1e-5, atol=1e-7)


def test_says_how_many_layers_there_are() -> None:
    """More stages than layers, and boundaries that are none."""
    whole = microbatched("mlp")
    assert len(layers(whole.graph, whole.rules)) == 3
    with pytest.raises(OptionError, match="it has 3 layers"):
        slice_stages(whole.graph, whole.rules, 4)
    for boundaries in ([2, 1], [0], [3], [1, 1]):
        with pytest.raises(OptionError, match="not boundaries between layers"):
            slice_stages(whole.graph, whole.rules, boundaries)
    given = slice_stages(whole.graph, whole.rules, [2])
    assert given.boundaries == (2,)
