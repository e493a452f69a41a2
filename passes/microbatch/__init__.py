"""The exact split of a batch into microbatches: splitting the batch in time is sharding it in time.

In the order in which a program passes through them:

- `batch_states`: how a value depends on the batch;
- `equations`: what an equation does to that;
- `propagate`: the forward sweep that finds every value's state, through control flow too;
- `liveness`, `phases`: the backward sweep that finds what runs before, in and after the loop;
- `whole_batch`: what has to run on the whole batch, and whether that is refused;
- `run_steps`, `new_program`, `rewrite`: the program with the loop;
- `several_loops`: steps that are cut where their first loop ends, and put together again;
- `batch_scales`: factors of the whole batch, multiplied after the loop;
- `one_microbatch`: the loop of a pipeline that is not split;
- `analysis`: the two functions that do all this;
- `for_stages`: the analysis for a pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.base import lazy as _lazy

if TYPE_CHECKING:
    from .analysis import Analysis, analyze, split
    from .for_stages import analyze_one_loop
    from .one_microbatch import in_one_microbatch
else:
    __getattr__, __dir__ = _lazy.exports(
        __name__,
        {
            "Analysis": ".analysis",
            "analyze": ".analysis",
            "analyze_one_loop": ".for_stages",
            "in_one_microbatch": ".one_microbatch",
            "split": ".analysis",
        },
    )

__all__ = ["Analysis", "analyze", "analyze_one_loop", "in_one_microbatch", "split"]
