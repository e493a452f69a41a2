"""What compilers think that kernels take, beside the plan."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.base.compiled_records import EstimatedTime
from autopar.base.verification_records import TimeCheck
from autopar.runtime.verification.estimated_times import estimated_times


def cost(**models: float) -> str:
    told = (
        f'{{"end_to_end_cycles":1,"exec_time_us":{time},"compute_time_us":0,"name":"{name}"}}'
        for name, time in (("" if name == "own" else name, time) for name, time in models.items())
    )
    return f'backend_config={{"reification_cost":[{",".join(told)}]}}'


TEXT = f"""
%body (p: f32[8]) -> f32[8] {{
  %add.1 = f32[8]{{0}} fusion(%p), kind=kLoop, calls=%f, {cost(own=2.5, sol=2)}
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %gemm_fusion_dot.1 = f32[8]{{0}} fusion(%a), kind=kCustom, calls=%gemm, {cost(own=900, sol=1e2)}
  %w = f32[8]{{0}} while(%a), condition=%c, body=%body, {'"known_trip_count":{"n":"4"}'}
  %ag = (f32[8]{{0}}, f32[64]{{0}}) all-gather-start(%w), {cost(sol=50)}
  %done = f32[64]{{0}} all-gather-done(%ag), {cost()}
  ROOT %rs = f32[8]{{0}} reduce-scatter-start(%done), {cost()}
}}
"""


def test_gpu_kernels_by_kind() -> None:
    told = {x.kind: (x.kernels, x.unknown) for x in estimated_times(TEXT, {}, "gpu")}
    assert told == {"collectives": (2, 1), "products": (1, 0), "rest": (4, 0)}
    seconds = [x.seconds for x in estimated_times(TEXT, {}, "gpu")]
    assert seconds == pytest.approx([50e-6, 100e-6, 10e-6])
    assert estimated_times(TEXT, {}, "cpu") == ()


def test_a_tpu_has_one_number() -> None:
    (told,) = estimated_times("", {"optimal_seconds": 0.25}, "tpu")
    assert told == EstimatedTime("computation", 0.25)
    (told,) = estimated_times("", {"optimal_seconds": -3.75}, "tpu")
    assert told == EstimatedTime("computation", 0.25, unknown=4)
    assert estimated_times("", {}, "tpu") == ()


def test_estimates_far_apart_are_told() -> None:
    check = TimeCheck("products", 1.4e-3, 1e-3, 5)
    assert check.ratio == pytest.approx(1.4)
    assert check.verdict == ""
    far = dataclasses.replace(check, planned_seconds=1.6e-3)
    assert far.verdict == "planned 1.6 times as long"
    far = dataclasses.replace(check, planned_seconds=0.5e-3)
    assert far.verdict == "planned 2.0 times as short"
    assert dataclasses.replace(check, unknown=2).verdict == "no estimate of 2"
