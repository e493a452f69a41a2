"""A choice of stages promises, by their seconds, what the simulator says of its plan."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
from programs import PROGRAMS
from stages.stage_programs import SplitProgram, microbatched

from autopar.base.cluster import Cluster
from autopar.base.options import Options
from autopar.passes.planner.candidates import plan_layout
from autopar.passes.planner.layouts import StageLayout
from autopar.passes.planner.promised_time import (
    StageTime,
    UnitLinks,
    own_times,
    promised_seconds,
)
from autopar.passes.planner.stage_shardings import SplitStep
from autopar.passes.slicing.slice_stages import slice_stages

V100 = Cluster.preset("p3.16xlarge", nodes=2, devices_per_node=2)
SLOW = dataclasses.replace(V100, inter_node=dataclasses.replace(V100.inter_node, bandwidth=2e7))


@cache
def split_program(name: str) -> SplitProgram:
    with PROGRAMS[name].context():
        return microbatched(name)


@pytest.mark.parametrize("cluster", [V100, SLOW], ids=["quick", "slow"])
@pytest.mark.parametrize(
    ("name", "devices"),
    [("linen_gpt", (1, 1, 2)), ("mlp", (2, 2)), ("scan_layers", (2, 2))],
)
def test_the_promise_is_within_two_percent_of_the_simulated_step(
    name: str, devices: tuple[int, ...], cluster: Cluster
) -> None:
    program = split_program(name)
    units = slice_stages(program.step, program.rules, 4)
    starts = (0, 1, 2)[: len(devices)]
    layers = (0, *units.boundaries)
    boundaries = tuple(layers[start] for start in starts[1:])
    split = SplitStep(program.step, program.rules, (), 4)
    options = Options(method="data", schedule="1f1b", stages=len(devices))
    layout = StageLayout(boundaries, devices)
    (planned,) = plan_layout(split, layout, options, cluster, lambda message: None)
    crossing = UnitLinks.of(units).crossing(starts)
    times = own_times(planned, cluster)
    promise = promised_seconds(times, crossing, devices, cluster, 4)
    print(f"{name} on {devices}: {promise / planned.step_seconds:.4f}")
    assert promise == pytest.approx(planned.step_seconds, rel=0.02)


def test_further_microbatches_take_what_they_took_before() -> None:
    times = [StageTime(1.0, 2.0, 0.5, 0.1), StageTime(1.5, 2.5), StageTime(1.0, 1.0)]
    crossing: dict[Any, int] = {}

    def promise(count: int) -> float:
        return promised_seconds(times, crossing, (1, 1, 1), V100, count)

    each = promise(65) - promise(64)
    assert each == pytest.approx(4.0)
    assert promise(1024) == pytest.approx(promise(64) + 960 * each)
    assert promise(64) == pytest.approx(promise(12) + 52 * each)
