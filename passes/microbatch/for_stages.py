"""The analysis of a step from which stages are cut: they have one loop."""

from __future__ import annotations

from typing import Any

from autopar.passes.graph.graph import Graph
from autopar.passes.microbatch.analysis import Analysis, analyze, refusal
from autopar.passes.primitives.factor_rule import Rules


def analyze_one_loop(graph: Graph, rules: Rules, num_microbatches: int, **limits: Any) -> Analysis:
    """What `analyze` finds for one loop.

    Raises:
      InexactMicrobatchError: several loops do not do either. So one mesh, which may have them, is
        named by the error of one loop only where the step is not refused there.
    """
    analysis = analyze(graph, rules, num_microbatches, max_loops=1, **limits)
    if analysis.culprits:
        several = analyze(graph, rules, num_microbatches, **limits)
        if several.culprits:
            raise refusal(several)
    return analysis
