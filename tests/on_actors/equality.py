"""A program of the tests on actors, compared with plain `jax.jit`."""

from __future__ import annotations

from typing import Any

import pytest
from on_actors.clusters import wait_until_gone
from programs import Program, compare

import autopar
from autopar.ray_executable import RayExecutable


def check_program(program: Program, cluster: autopar.Cluster, **options: Any) -> None:
    """Three steps on two actors, and no process behind them."""
    reason = program.missing()
    if reason:
        pytest.skip(reason)
    with program.context():
        case = program.build()
        step = autopar.compile(
            case.step,
            *case.arguments(compare.copy_tree(case.state), case.batch),
            **case.keywords[0],
            **{**case.options, **options},
            cluster=cluster,
            runtime=autopar.Ray(deadline=60),
        )
        assert isinstance(step, RayExecutable)
        with step:
            assert len(step.actor_pids) == 2
            compare.assert_steps_equal(case.plain, step, case, program.tolerance)
        wait_until_gone(step.actor_pids)
