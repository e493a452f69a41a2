"""Processes that compute together see that they are about to run the same program.

Each process of a run plans for itself. Were their programs or plans different, their collectives
would wait for each other without end; so each tells the others the hashes of what it has, through
the key-value store of `jax.distributed`, before the first program is compiled.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import jax

from autopar.base.errors import PlanMismatchError
from autopar.passes.graph import jax_compat
from autopar.plans.plan import Plan

DEADLINE_SECONDS = 900.0
"""For processes that have not come as far, because they are still planning."""

_numbers: dict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


def compare_processes(name: str, plan: Plan, devices: Sequence[jax.Device] | None = None) -> None:
    """See that all processes that have devices of a plan are about to run the same.

    Args:
      name: of the step.
      plan: that this process has made or loaded.
      devices: that it is for; by default all that JAX sees.

    Raises:
      PlanMismatchError: they are not, or another process does not come as far.
    """
    if jax.process_count() == 1:
        return
    meshes = {stage.mesh: stage.num_devices for stage in plan.stages}
    visible, own = jax.devices() if devices is None else devices, jax.process_index()
    devices = visible[: sum(meshes.values())]
    members = tuple(sorted({device.process_index for device in devices}))
    if len(members) == 1 or own not in members:
        return
    facts = {
        "step": name,
        "version": f"autopar {plan.autopar_version}, jax {plan.jax_version}",
        **{f"option {option}": repr(value) for option, value in plan.options.items()},
        "program": f"the content hash {plan.program_hash[:12]}",
        "plan": f"{plan!r} with the content hash {plan.decisions_hash[:12]}",
    }
    group = f"{'-'.join(map(str, members))}/{next(_numbers[members])}"
    compare(group, facts, members, own, DEADLINE_SECONDS)


def compare(
    key: str, facts: Mapping[str, str], members: Sequence[int], own: int, deadline: float
) -> None:
    """Tell the members of a group the facts of this one, and see that theirs are the same.

    Raises:
      PlanMismatchError: see `compare_processes`.
    """
    client = jax_compat.distributed_client()
    assert client is not None, "processes that share devices have joined"
    end = time.monotonic() + deadline
    client.key_value_set(f"autopar/{key}/{own}", json.dumps(dict(facts)))
    for member in members:
        if member == own:
            continue
        left = max(end - time.monotonic(), 0.1)
        try:
            text = client.blocking_key_value_get(f"autopar/{key}/{member}", int(left * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise PlanMismatchError(
                f"Process {member} has not come to where process {own} is.",
                where=facts.get("step"),
                why=f"it has not planned this step within {deadline:.0f} seconds, or is gone "
                f"({str(error).splitlines()[0]}).",
                hint="compile the same steps in the same order in all processes.",
            ) from None
        _check_same(own, facts, member, json.loads(text))


def _check_same(own: int, facts: Mapping[str, str], other: int, others: Mapping[str, str]) -> None:
    for what, value in facts.items():
        theirs = others.get(what, "unknown")
        if theirs != value:
            raise PlanMismatchError(
                f"Processes {own} and {other} are not about to run the same: another {what}.",
                where=facts.get("step"),
                why=f"process {own} has {value}, process {other} has {theirs}. Their collectives "
                "would wait for each other without end.",
                hint="give all processes the same code, shapes, options and versions; where their "
                "machines differ, the same cluster=... or plan=...",
            )
