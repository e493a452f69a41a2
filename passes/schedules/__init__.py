"""Pipeline schedules as values: which mesh runs which task in which order.

- `schedule`: `Task` and `Schedule`;
- `named`: the orders that have names in the literature;
- `make`: `make_schedule`, which takes a name or a user's function;
- `checker`: the one checker that proves any of them complete, deadlock-free and inside memory;
- `times`: how long one takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.base import lazy as _lazy

if TYPE_CHECKING:
    from .checker import check, in_flight
    from .make import make_schedule
    from .named import SCHEDULES
    from .schedule import Schedule, Task, TaskKind
    from .times import ScheduleTimes, schedule_times
else:
    __getattr__, __dir__ = _lazy.exports(
        __name__,
        {
            "SCHEDULES": ".named",
            "Schedule": ".schedule",
            "Task": ".schedule",
            "TaskKind": ".schedule",
            "check": ".checker",
            "in_flight": ".checker",
            "make_schedule": ".make",
            "ScheduleTimes": ".times",
            "schedule_times": ".times",
        },
    )

__all__ = [
    "SCHEDULES",
    "Schedule",
    "ScheduleTimes",
    "Task",
    "TaskKind",
    "check",
    "in_flight",
    "make_schedule",
    "schedule_times",
]
