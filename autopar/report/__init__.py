"""Views for people: Rich tables (`print_plan`) and pictures (`plot_plan`, `plot_timeline`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from .gantt import plot_timeline, save_timeline
    from .plots import plot_plan, save_plot
    from .text import plan_tables, print_plan
else:
    __getattr__, __dir__ = _lazy.exports(
        __name__,
        {
            "plan_tables": ".text",
            "plot_plan": ".plots",
            "plot_timeline": ".gantt",
            "print_plan": ".text",
            "save_plot": ".plots",
            "save_timeline": ".gantt",
        },
    )

__all__ = [
    "plan_tables",
    "plot_plan",
    "plot_timeline",
    "print_plan",
    "save_plot",
    "save_timeline",
]
