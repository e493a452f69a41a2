"""A plan lists exactly the collectives that XLA's compiled program contains."""

from __future__ import annotations

from collections import Counter

import pytest
from programs import PROGRAMS

import autopar
from sharding import hlo

METHODS = ("data", "zero1", "zero2", "zero3", "shard")


def planned(plan: autopar.Plan) -> hlo.Canonical:
    found: hlo.Canonical = Counter()
    for item in plan.stages[0].collectives:
        found[item.kind, item.axes, item.times] += item.bytes
    return found


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["mlp", "linen_gpt", "cnn"])
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
