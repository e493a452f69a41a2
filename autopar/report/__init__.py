"""Views for people: Rich tables (`print_plan`) and pictures (`plot_plan`, `plot_timeline`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.base import lazy as _lazy

if TYPE_CHECKING:
    from .gantt import plot_timeline, save_timeline
    from .plan_plots import plot_plan, save_plot
    from .plan_tables import plan_tables, print_plan
else:
    __getattr__, __dir__ = _lazy.exports(
        __name__,
        {
            "plan_tables": ".plan_tables",
            "plot_plan": ".plan_plots",
            "plot_timeline": ".gantt",
            "print_plan": ".plan_tables",
            "save_plot": ".plan_plots",
            "save_timeline": ".gantt",
        },
    )

__all__ = ["plan_tables", "plot_plan", "plot_timeline", "print_plan", "save_plot", "save_timeline"]
