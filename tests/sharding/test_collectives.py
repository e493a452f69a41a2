"""A plan lists exactly the collectives that XLA's compiled program contains."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from programs import PROGRAMS

import autopar
from autopar.runtime.verification import hlo_collectives as hlo
from sharding.piece_collectives import assert_pieces_contain_what_is_listed

METHODS = ("data", "zero1", "zero2", "zero3", "shard")


def planned(plan: autopar.Plan) -> hlo.Canonical:
    found: hlo.Canonical = Counter()
    for item in plan.stages[0].collectives:
        found[item.kind, item.axes, item.times] += item.bytes
    return found


def combinations() -> Iterator[Any]:
    """All of them for the smallest program; of the larger ones, each method meets one by default.

    In one microbatch it meets the convolutions, in four the transformer, whose layers are a scan;
    that of written layers is for the stages below.
    """
    names = ("mlp", "linen_gpt", "scan_layers", "cnn")
    for name, (turn, method), count in itertools.product(names, enumerate(METHODS), (1, 4)):
        turns = {
            "linen_gpt": False,
            "scan_layers": turn % 2 == 0 and count == 4,
            "cnn": turn % 2 == 1 and count == 1,
        }
        chosen = turns.get(name, True)
        marks = () if chosen else pytest.mark.full
        yield pytest.param(name, method, count, id=f"{name}-{method}-{count}", marks=marks)


@pytest.mark.parametrize(("name", "method", "microbatches"), list(combinations()))
def test_plan_lists_what_the_program_contains(name: str, method: str, microbatches: int) -> None:
    case = PROGRAMS[name].build()
    step = autopar.compile(
        case.step,
        *case.arguments(case.state, case.batch),
        method=method,
        microbatches=microbatches,
        **case.options,
    )
    stage = step.plan.stages[0]
    compiled = hlo.collectives(step.as_text(), stage.logical_mesh, stage.axis_names)
    assert compiled == planned(step.plan)
    if method == "data":
        gradients = [c for c in stage.collectives if c.purpose == "gradient"]
        assert gradients and {c.times for c in gradients} == {1}


@pytest.mark.parametrize("mesh", [(4, 2), (2, 2, 2)])
def test_meshes_of_several_axes(mesh: tuple[int, ...]) -> None:
    case = PROGRAMS["mlp"].build()
    step = autopar.compile(
        case.step, *case.arguments(case.state, case.batch), method="shard", logical_mesh=mesh,
        microbatches=1, pins={"*/w": (None, "y")}, **case.options,
    )  # fmt: skip
    stage = step.plan.stages[0]
    compiled = hlo.collectives(step.as_text(), stage.logical_mesh, stage.axis_names)
    assert compiled == planned(step.plan)
    assert sum(compiled.values()) > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("linen_gpt", {"method": "zero2", "schedule": "1f1b"}, marks=pytest.mark.full),
        pytest.param("linen_gpt", {"schedule": "zb_h1"}, marks=pytest.mark.full),
        ("scan_layers", {"remat": "full", "schedule": "1f1b"}),
        pytest.param("scan_layers", {"schedule": "1f1b"}, marks=pytest.mark.full),
        ("token_weighted", {"method": "zero3", "schedule": "1f1b"}),
    ],
)
def test_stages_list_what_their_pieces_contain(name: str, options: dict[str, Any]) -> None:
    """By default others than `tests/test_pipelines.py` looks at beside their numbers."""
    case = PROGRAMS[name].build()
    arguments, count = case.arguments(case.state, case.batch), 4
    step = autopar.compile(
        case.step, *arguments, stages=2, microbatches=count, **case.options, **options
    )
    assert_pieces_contain_what_is_listed(step, count)
