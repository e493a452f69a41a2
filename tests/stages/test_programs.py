"""Every real program, cut into 2 and into 4 stages, computes what its uncut graph computes."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from programs import PROGRAMS, Program
from stages.stage_programs import (
    assert_equal_to_whole,
    check_links,
    crossing,
    microbatched,
    one_each_way,
)

from autopar.errors import OptionError
from autopar.passes.stages import slice_stages

FEW_LAYERS = {
    "graph_network": 2,
    "lstm": 2,
    "lstm_linen": 2,
    "scan_layers": 2,
    "scan_layers_linen": 2,
}
"""Programs with fewer than four places to cut, and how many layers they have."""

ONE_EACH_WAY = ("cnn", "linen_gpt", "nnx_transformer", "hf_gpt2", "hf_bert", "hf_vit")
"""Programs whose stages pass one activation and one gradient per boundary and microbatch."""

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
        assert all("F" in stage.tasks for stage in stages.graphs)
        check_links(stages)
        assert_equal_to_whole(whole, stages, program.tolerance.relative)
    if program.name in ONE_EACH_WAY:
        assert crossing(stages) == one_each_way(number)
