"""Views of a plan for people: Rich tables (`print_plan`) and pictures (`plot_plan`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from .plots import plot_plan, save_plot
    from .text import plan_tables, print_plan
else:
    __getattr__, __dir__ = _lazy.exports(
        __name__,
        {
            "plan_tables": ".text",
            "plot_plan": ".plots",
            "print_plan": ".text",
            "save_plot": ".plots",
        },
    )

__all__ = ["plan_tables", "plot_plan", "print_plan", "save_plot"]
