"""The programs of the textbook methods, as text; and that planning is deterministic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sharding.algebra import check_program
from sharding.steps import (
    compiled,
    graph_of,
    linear_shapes,
    linear_step,
    momentum_shapes,
    momentum_step,
    sharded,
)

# The forward pass and the error are the same in all: rows of the batch against a whole matrix.
FORWARD = """\
v4:float32[16,8][x|-] = dot_general v2:float32[16,8][x|-] v0:float32[8,8][-|-]
v5:float32[16,8][x|-] = sub v4:float32[16,8][x|-] v3:float32[16,8][x|-]
v6:float32[16,8][x|-] = mul 2.0:float32[][] v5:float32[16,8][x|-]
v7:float32[16,8][x|-] = broadcast_in_dim 1.0:float32[][]
v8:float32[16,8][x|-] = mul v7:float32[16,8][x|-] v6:float32[16,8][x|-]
v9:float32[8,8][-|-] +sum(x) = dot_general v8:float32[16,8][x|-] v2:float32[16,8][x|-]
"""

# The gradient is summed over the devices, and every device updates everything.
DATA = f"""\
in  v0:float32[8,8][-|-] v1:float32[8,8][-|-] v2:float32[16,8][x|-] v3:float32[16,8][x|-]
{FORWARD}\
v10:float32[8,8][-|-] +sum(x) = transpose v9:float32[8,8][-|-] +sum(x)
v10:float32[8,8][-|-] = all-reduce(x) v10:float32[8,8][-|-] +sum(x)  # gradient
v11:float32[8,8][-|-] = add v1:float32[8,8][-|-] v10:float32[8,8][-|-]
v12:float32[8,8][-|-] = sub v0:float32[8,8][-|-] v11:float32[8,8][-|-]
out v12:float32[8,8][-|-] v11:float32[8,8][-|-]"""

# Every device keeps a slice of the optimizer's state, and makes one of the parameter.
ZERO1 = f"""\
in  v0:float32[8,8][-|-] v1:float32[8,8][x|-] v2:float32[16,8][x|-] v3:float32[16,8][x|-]
{FORWARD}\
v10:float32[8,8][-|-] +sum(x) = transpose v9:float32[8,8][-|-] +sum(x)
v10:float32[8,8][x|-] = all-reduce(x), slice(x) v10:float32[8,8][-|-] +sum(x)  # gradient
v11:float32[8,8][x|-] = add v1:float32[8,8][x|-] v10:float32[8,8][x|-]
v0:float32[8,8][x|-] = slice(x) v0:float32[8,8][-|-]  # parameter
v12:float32[8,8][x|-] = sub v0:float32[8,8][x|-] v11:float32[8,8][x|-]
v12:float32[8,8][-|-] = all-gather(x) v12:float32[8,8][x|-]  # state
out v12:float32[8,8][-|-] v11:float32[8,8][x|-]"""

# The sum is made where its slice is needed.
ZERO2 = f"""\
in  v0:float32[8,8][-|-] v1:float32[8,8][x|-] v2:float32[16,8][x|-] v3:float32[16,8][x|-]
{FORWARD}\
v9:float32[8,8][-|x] = reduce-scatter(x) v9:float32[8,8][-|-] +sum(x)  # gradient
v10:float32[8,8][x|-] = transpose v9:float32[8,8][-|x]
v11:float32[8,8][x|-] = add v1:float32[8,8][x|-] v10:float32[8,8][x|-]
v0:float32[8,8][x|-] = slice(x) v0:float32[8,8][-|-]  # parameter
v12:float32[8,8][x|-] = sub v0:float32[8,8][x|-] v11:float32[8,8][x|-]
v12:float32[8,8][-|-] = all-gather(x) v12:float32[8,8][x|-]  # state
out v12:float32[8,8][-|-] v11:float32[8,8][x|-]"""

# Parameters are slices too: gathered before they are used, updated as slices.
ZERO3 = f"""\
in  v0:float32[8,8][x|-] v1:float32[8,8][x|-] v2:float32[16,8][x|-] v3:float32[16,8][x|-]
v0:float32[8,8][-|-] = all-gather(x) v0:float32[8,8][x|-]  # parameter
{FORWARD}\
v9:float32[8,8][-|x] = reduce-scatter(x) v9:float32[8,8][-|-] +sum(x)  # gradient
v10:float32[8,8][x|-] = transpose v9:float32[8,8][-|x]
v11:float32[8,8][x|-] = add v1:float32[8,8][x|-] v10:float32[8,8][x|-]
v12:float32[8,8][x|-] = sub v0:float32[8,8][x|-] v11:float32[8,8][x|-]
out v12:float32[8,8][x|-] v11:float32[8,8][x|-]"""


@pytest.mark.parametrize(
    ("method", "expected"), [("data", DATA), ("zero1", ZERO1), ("zero2", ZERO2), ("zero3", ZERO3)]
)
def test_textbook_methods(method: str, expected: str) -> None:
    graph = graph_of(linear_step, *linear_shapes())
    program = sharded(compiled(graph, method=method, microbatches=1))
    check_program(program)
    assert str(program).splitlines() == expected.splitlines()


def test_microbatches_synchronise_once_a_step() -> None:
    graph = graph_of(linear_step, *linear_shapes())
    program = sharded(compiled(graph, method="data", microbatches=2))
    check_program(program)
    lines = str(program).splitlines()
    inside = [line for line in lines if line.startswith(" ")]
    assert inside[0].split()[0] == "in" and inside[-1].split()[0] == "out"
    assert inside[-1].endswith("[8,8][-|-] +sum(x)")  # the accumulator is an unreduced sum
    assert not any("all-reduce" in line for line in inside)
    assert sum("all-reduce" in line for line in lines) == 1


# Planning is a function of the program, the options and the cluster.


def plan_text() -> str:
    """The plan of a step on the mesh of 4 x 2 devices."""
    graph = graph_of(momentum_step, *momentum_shapes())
    return compiled(graph, method="shard", microbatches=2, logical_mesh=(4, 2)).plan.to_json()


def test_equal_requests_have_equal_plans() -> None:
    here = plan_text()
    assert plan_text() == here
    # In another process, strings and sets have other hashes.
    other = subprocess.run(
        [sys.executable, "-c", "from sharding.test_program import plan_text; print(plan_text())"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == here.strip()
