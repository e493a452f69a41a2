"""How long a compiler thinks that the kernels of a program take, by kind.

XLA:GPU writes the estimates of its models beside every instruction if it is asked to
(`COLLECT_ESTIMATES`). That of its performance model does not know tensor cores and is taken for
what is no product; products and collectives have one of the speed of light ("sol"). A TPU's
compiler has one number for a program, in `cost_analysis`, in which a loop runs once.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from autopar.base.compiled_records import EstimatedTime
from autopar.base.plan_records import COLLECTIVE_KINDS
from autopar.runtime.verification.hlo_collectives import computations, trips

COLLECT_ESTIMATES: dict[str, bool] = {"xla_gpu_collect_cost_model_stats": True}

_OPERATION = re.compile(r"^(?:ROOT )?%?\S+ = .*? (?P<kind>[a-z][a-z\-]*)\(")
_COSTS = re.compile(r'"reification_cost":\[(.*?)\]')
_COST = re.compile(r'"exec_time_us":([\d.e+\-]+).*?"name":"([^"]*)"')
_PRODUCT = re.compile(r"kind=kCustom.*(?:gemm|triton)|__cublas|__cudnn\$conv|__cudnn\$fmha")


def estimated_times(text: str, analysis: Mapping[str, Any], platform: str) -> tuple[Any, ...]:
    """What the compiler of a platform says.

    Args:
      text: of the compiled module.
      analysis: its `cost_analysis()`.
      platform: "cpu", "gpu" or "tpu".
    """
    if platform == "tpu":
        seconds = float(analysis.get("optimal_seconds", 0.0))
        # What it cannot estimate (products with what is fused to them) counts a second less than
        # nothing each: of programs of less than a second one can tell how many these are.
        unknown = max(math.ceil(-seconds), 0)
        known = seconds + unknown
        return (EstimatedTime("computation", known, unknown=unknown),) if seconds else ()
    return _by_kernel(text) if platform == "gpu" else ()


def _by_kernel(text: str) -> tuple[EstimatedTime, ...]:
    lines = computations(text)
    times = trips(lines)
    seconds: defaultdict[str, float] = defaultdict(float)
    kernels: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for name, body in lines.items():
        for line in body:
            costs, operation = _COSTS.search(line), _OPERATION.search(line)
            if costs is None or operation is None or operation["kind"].endswith("-done"):
                continue
            own = {model: float(time) for time, model in _COST.findall(costs[1])}
            kind = _kind(operation["kind"], line)
            best = own.get("") if kind == "rest" else own.get("sol")
            kernels[kind] += times.get(name, 1)
            if best:
                seconds[kind] += times.get(name, 1) * best * 1e-6
            else:
                unknown[kind] += times.get(name, 1)
    return tuple(EstimatedTime(k, seconds[k], kernels[k], unknown[k]) for k in sorted(kernels))


def _kind(operation: str, line: str) -> str:
    if operation.removesuffix("-start") in COLLECTIVE_KINDS:
        return "collectives"
    return "products" if _PRODUCT.search(line) else "rest"
