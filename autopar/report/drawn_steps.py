"""The timelines that pictures, pages and the terminal draw of a plan's step."""

from __future__ import annotations

from autopar.base.errors import AutoparError
from autopar.base.plan_records import PlanRecord
from autopar.passes.pipeline.timeline import Timeline
from autopar.passes.pipeline.what_if import Simulation, what_if

_DRAWN_TASKS = 1024
"""Stages times microbatches; the passes of more are thinner than a line."""


def simulated(plan: PlanRecord) -> Timeline | str:
    """The timeline of a pipelined plan's step; text if there is none or it is too long to draw."""
    try:
        return drawn(what_if(plan))
    except AutoparError as error:
        return str(error).splitlines()[0]


def drawn(simulation: Simulation) -> Timeline | str:
    """The timeline of a simulated step; text if it is too long to draw."""
    schedule = simulation.schedule
    tasks = schedule.num_stages * schedule.num_microbatches
    if tasks > _DRAWN_TASKS:
        return f"{str(simulation).splitlines()[0]} ({tasks:,} passes are too many to draw)"
    return simulation.timeline
