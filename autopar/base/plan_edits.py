"""What of a plan was edited in its file after it was written, and whether that can be followed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from autopar.base.errors import PlanMismatchError
from autopar.base.plan_records import PlanRecord, Spec, StagePlan, TensorPlan
from autopar.base.records import dump_json

FIXED = {
    "leaves": "plan again for these arguments",
    "stages": "plan again with stages=[autopar.Stage(layers=..., ...), ...], remat= or "
    "logical_mesh=",
    "microbatches": "plan again with microbatches=",
    "cluster": "plan again with cluster=",
    "recomputation": "plan again with remat= or memory_limit=",
}
"""The parts that all else in a plan follows from, and what to do instead of editing them."""


def digests(plan: PlanRecord) -> dict[str, str]:
    """A short digest of each part of a plan whose edits are followed, or refused (`FIXED`).

    `Plan.written` has those of a plan as it was made.
    """

    def specs(tensors: Iterable[TensorPlan]) -> object:
        return [
            [tensor.path, tensor.spec, *(["host"] if tensor.memory == "host" else [])]
            for tensor in tensors
        ]

    def choices(stage: StagePlan) -> object:
        return [[item.node, item.choice] for item in stage.strategies]

    tensors = (*plan.inputs, *plan.outputs)
    parts = {
        "stages": [
            [[x.layers, x.mesh, x.num_devices, x.logical_mesh, x.remat] for x in plan.stages],
            [x.stages for x in tensors],
            None if plan.pipeline is None else plan.pipeline.boundaries,
        ],
        "microbatches": plan.num_microbatches,
        "leaves": [[x.path, x.shape, x.dtype] for x in tensors],
        "cluster": [plan.cluster.get(name) for name in ("num_nodes", "devices_per_node")],
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


def check_edits(plan: PlanRecord) -> None:
    """Raises a `PlanMismatchError` where a part was edited that all else follows from."""
    edited = edited_parts(plan)
    for name, instead in FIXED.items():
        if name in edited:
            raise PlanMismatchError(
                f"What a plan's file says of its {name} was edited.",
                why="all else in the plan was chosen for that, and is not chosen anew.",
                hint=f"{instead}; pins, specs and strategies may be edited.",
            )


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
