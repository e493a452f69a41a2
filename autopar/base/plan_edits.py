"""What of a plan was edited after it was written: the parts that people may change in its file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from autopar.base.plan_records import PlanRecord, Spec, StagePlan, TensorPlan
from autopar.base.records import dump_json


def digests(plan: PlanRecord) -> dict[str, str]:
    """A short digest of each part that an edited plan is followed by; `Plan.written` keeps them."""

    def specs(tensors: Iterable[TensorPlan]) -> object:
        return [
            [tensor.path, tensor.spec, *(["host"] if tensor.memory == "host" else [])]
            for tensor in tensors
        ]

    def choices(stage: StagePlan) -> object:
        return [[item.node, item.choice] for item in stage.strategies]

    parts = {
        "pins": plan.options.get("pins", {}),
        "inputs": specs(plan.inputs),
        "outputs": specs(plan.outputs),
        "strategies": [choices(stage) for stage in plan.stages],
        "recomputation": [
            None if again is None else again.to_dict()
            for again in (plan.recomputation, *(stage.recomputation for stage in plan.stages))
        ],
    }
    return {name: hashlib.sha256(_text(part)).hexdigest()[:12] for name, part in parts.items()}


def edited_parts(plan: PlanRecord) -> frozenset[str]:
    """The names of the parts that are not as they were written; none of a plan without digests."""
    now = digests(plan)
    return frozenset(name for name, digest in plan.written.items() if now.get(name) != digest)


def layout_of(spec: Spec, memory: str = "device") -> str:
    """A spec, and where it lies, as strategies write layouts.

    >>> layout_of(((), ("x", "y"))), layout_of(((),), "host")
    ('[-|xy]', '[-] host')
    """
    cuts = f"[{'|'.join(''.join(axes) or '-' for axes in spec)}]"
    return f"{cuts} host" if memory == "host" else cuts


def chosen_layouts(plan: PlanRecord) -> dict[tuple[int, str], str]:
    """By stage and path, the layout that the strategies choose for leaves and computations."""
    found: dict[tuple[int, str], str] = {}
    for number, stage in enumerate(plan.stages):
        for item in stage.strategies:
            label = item.node.partition(": ")[2]
            found.setdefault((number, label), item.choice.partition(" ")[2])
    return found


def _text(part: object) -> bytes:
    return dump_json(_plain(part)).encode()


def _plain(part: object) -> object:
    if isinstance(part, dict):
        return {str(key): _plain(value) for key, value in part.items()}
    return [_plain(item) for item in part] if isinstance(part, (list, tuple)) else part
