"""Every real program, cut into 2 and into 4 stages, computes what its uncut graph computes."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from programs import ONE_LAYER, PROGRAMS, Program
from stages.stage_programs import (
    assert_equal_to_whole,
    check_links,
    crossing,
    microbatched,
    one_each_way,
)

from autopar.base.errors import OptionError
from autopar.passes.slicing.slice_stages import slice_stages

ONE_EACH_WAY = (
    "cnn",
    "equinox_transformer",
    "linen_gpt",
    "nnx_transformer",
    "hf_gpt2",
    "hf_bert",
    "hf_vit",
)
"""Programs whose stages pass one activation and one gradient per boundary and microbatch."""

QUICK = {
    "adversarial": 4,
    "debug_print": 2,
    "key_rbg": 2,
    "linen_gpt": 4,
    "loss_scale_cond": 2,
    "mlp_multi_steps": 2,
    "scan_layers": 4,
}
"""`make test` runs these, with that many stages; all others are for the full run."""


def combinations() -> Iterator[Any]:
    """Every program that splits into microbatches, with 2 and with 4 stages."""
    for program, number in itertools.product(PROGRAMS.values(), (2, 4)):
        if program.splits:
            marks = () if QUICK.get(program.name) == number else pytest.mark.full
            yield pytest.param(program, number, id=f"{program}-{number}", marks=marks)


@pytest.mark.parametrize(("program", "number"), list(combinations()))
def test_equals_the_uncut_graph(program: Program, number: int) -> None:
    """F, B and W of several microbatches in flight, links as the only way between stages.

    Four microbatches in two stages, and two in four: compiling so many tasks takes long.
    """
    with program.context():
        whole = microbatched(program, 8 // number)
        if program.name in ONE_LAYER:
            with pytest.raises(OptionError, match="it has 1 layer"):
                slice_stages(whole.step, whole.rules, number)
            return
        stages = slice_stages(whole.step, whole.rules, number, split_backward=True)
        assert len(stages.graphs) == number
        assert all("F" in stage.tasks for stage in stages.graphs)
        check_links(stages)
        effects = [e for stage in stages.graphs for e in stage.graph.jaxpr.eqns if e.effects]
        assert len(effects) == sum(bool(e.effects) for e in whole.graph.jaxpr.eqns)
        assert_equal_to_whole(whole, stages, program.tolerance.relative)
    if program.name in ONE_EACH_WAY:
        assert crossing(stages) == one_each_way(number)
