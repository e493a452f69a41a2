"""What compilers say of a program comes with the user's lines."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.base.compiled_records import CompiledBuffer
from autopar.runtime.verification.buffer_sources import BufferSources
from autopar.runtime.verification.failed_donations import donation_warnings, not_taken

SHAPES = {name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for name in ("now", "before")}
ROWS = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def keeps_the_last(state: dict[str, Any], rows: Any) -> dict[str, Any]:
    gradient = jax.grad(lambda w: ((rows @ w) ** 2).mean())(state["now"])
    return {"now": state["now"] - gradient, "before": state["now"]}


def test_memory_that_no_result_takes_is_named() -> None:
    def step(first: list[Any], second: list[Any]) -> list[Any]:
        before, now = first
        new = keeps_the_last({"now": now, "before": before}, second[0])
        return [new["before"], new["now"]]

    shapes = [SHAPES["before"], SHAPES["now"]]
    text = jax.jit(step, donate_argnums=0).lower(shapes, [ROWS]).compile().as_text() or ""
    assert not_taken(text, (0, 1)) == (0,)
    assert not_taken(text.replace("first", "arrays"), (0, 1)) == (), "XLA names no leaf"

    plan = autopar.plan(keeps_the_last, SHAPES, ROWS, cluster="8xh100", method="data")
    verifier: Any = vars(plan)["_verifier"]
    graph = verifier.traced.graph
    paths = [label.path for label in graph.inputs]
    (warning,) = donation_warnings(graph, [paths.index("state['before']")])
    assert "state['before']" in warning and "does not read it" in warning
    (warning,) = donation_warnings(graph, [paths.index("state['now']")])
    assert "test_verified_lines.py:" in warning and "elsewhere" in warning


def test_warnings_name_the_line() -> None:
    sources = BufferSources([])
    sources.lines["jvp(gpt)/dot_general"].add("gpt.py:71 (GPT.__call__)")
    big = CompiledBuffer(1 << 30, "f32[16384,16384]", "dot_general", 2, "gpt.py:18 (attend)")
    words = (
        "[spmd] Involuntary full rematerialization. The compiler cannot go from {a} to {b} "
        'efficiently for HLO operation %dot.1 = f32[8]{0} dot(%a, %b), metadata={op_name="'
        'jit(step)/shard_map/jvp(gpt)/dot_general" stack_frame_id=3}.'
    )
    assert sources.located(words, [big]).endswith("That is gpt.py:71 (GPT.__call__).")
    words = "Can't reduce memory use below 60GiB by rematerialization; only reduced to 75GiB."
    told = sources.located(words, [big])
    assert "2 GiB of f32[16384,16384], by dot_general of gpt.py:18 (attend)" in told
    assert sources.located("Something else.", [big]) == "Something else."
