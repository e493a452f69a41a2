"""What a step in stages lists as its collectives, beside what XLA's compiled pieces contain."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import autopar
from autopar.runtime.verification import hlo_collectives as hlo


def pieces_of(text: str) -> dict[str, str]:
    """The compiled text of every piece, by its name; another one of a name donates other values."""
    parts = (part.split("\n", 1) for part in text.split("// piece ")[1:])
    return {name: module for name, module in parts}  # noqa: C416


def assert_pieces_contain_what_is_listed(step: autopar.Executable, microbatches: int) -> None:
    """Every stage lists, task by task, the bytes that its pieces send, and prices all of them."""
    plan, modules = step.plan, pieces_of(step.as_text())
    listed: Counter[tuple[object, ...]] = Counter()
    seconds: defaultdict[tuple[object, ...], float] = defaultdict(float)
    for number, stage in enumerate(plan.stages):
        for c in stage.collectives:
            listed[number, c.task, c.kind, c.axes] += c.bytes * c.times
            seconds[number, c.task] += c.seconds * c.times
        gradients = [c.times for c in stage.collectives if c.purpose == "gradient"]
        assert {*gradients} <= {1}
    assert plan.pipeline is not None and plan.pipeline.model is not None
    compiled: Counter[tuple[object, ...]] = Counter()
    priced: defaultdict[tuple[object, ...], float] = defaultdict(float)
    for piece in plan.pipeline.model.pieces:
        stage, runs = plan.stages[piece.stage], microbatches if piece.when in "FBW" else 1
        found = hlo.collectives(modules[piece.name], stage.logical_mesh, stage.axis_names)
        for (kind, axes, times), size in found.items():
            compiled[piece.stage, piece.when, kind, axes] += size * times * runs
        moving = piece.latency_seconds + piece.activation_seconds + piece.other_seconds
        priced[piece.stage, piece.when] += moving * runs
    assert listed == compiled
    assert all(math.isclose(priced[key], seconds[key], rel_tol=1e-6) for key in priced)
