"""The lines of attention that a step writes by hand, for which its devices have a kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from autopar.base.cluster import Cluster
from autopar.base.hardware import known_capability
from autopar.base.line_times import WrittenAttention
from autopar.passes.graph.graph import Graph
from autopar.passes.pieces.piece_costs import PieceCosts
from autopar.passes.planner.timed_lines import Timed, UserLine, place_of
from autopar.passes.primitives.written_attention import WrittenSoftmax, written_attention
from autopar.passes.sharding.compiler_rules import GPU, TPU, backend_of
from autopar.passes.sharding.spmd_program import Compute, Relayout

AMPERE, HOPPER = 8, 9
"""Compute capabilities: from which on cuDNN has flash attention, and for deeper heads."""
DEEPEST, DEEPEST_BEFORE_HOPPER = 256, 128
NARROW = ("bfloat16", "float16")
PALLAS_TILE = 128
"""Of which rows, and deeper heads, are multiples in JAX's flash attention for TPUs."""


def attention_lines(
    graph: Graph,
    cluster: Cluster,
    times: Sequence[Timed],
    costs: Mapping[int, PieceCosts],
    scale: float,
) -> Iterator[WrittenAttention]:
    """Attention written by hand, for which the devices have a kernel; the longest first.

    The plan's seconds are those of instructions times the `scale`.
    """
    kernel = partial(_kernel, cluster.device.name)
    found: dict[UserLine, list[WrittenSoftmax]] = defaultdict(list)
    for softmax in written_attention(graph.jaxpr):
        if kernel(softmax) and softmax.exponentials is not None:
            found[place_of(softmax.exponentials)].append(softmax)
    made = []
    for place, softmaxes in found.items():
        places = {place_of(eqn) for softmax in softmaxes for eqn in softmax.equations}
        sizes = {softmax.elements for softmax in softmaxes}
        seconds = bound = 0.0
        for x in times:
            if x.place not in places or not _touches(x.instruction, sizes):
                continue
            assert isinstance(x.instruction, Compute)
            own = scale * (x.seconds - x.moving)
            if x.is_product:
                bound += own * costs[x.stage].memory_share(x.instruction)
            else:
                seconds, bound = seconds + own, bound + own
        name = kernel(softmaxes[0])
        made.append(WrittenAttention(place.source, place.function, seconds, bound, name))
    return iter(sorted(made, key=lambda x: (-x.seconds, x.source)))


def _touches(instruction: Compute | Relayout, sizes: Collection[int]) -> bool:
    if not isinstance(instruction, Compute):
        return False
    atoms = (*instruction.eqn.invars, *instruction.eqn.outvars)
    return any(getattr(atom.aval, "size", 0) in sizes for atom in atoms)


def _kernel(device: str, softmax: WrittenSoftmax) -> str:
    """The kernel of a kind of devices for some attention, or ""."""
    if softmax.values != softmax.depth:
        return ""
    if backend_of(device) == TPU:
        rows = softmax.row % PALLAS_TILE == 0 and softmax.queries % PALLAS_TILE == 0
        deep = softmax.depth > PALLAS_TILE and softmax.depth % PALLAS_TILE
        return "pallas" if rows and not deep and not softmax.is_grouped else ""
    capability = known_capability(device) if backend_of(device) == GPU else 0
    deepest = DEEPEST if capability >= HOPPER else DEEPEST_BEFORE_HOPPER
    fits = softmax.depth % 8 == 0 and softmax.depth <= deepest and softmax.dtype in NARROW
    if softmax.row % 2 or softmax.queries % 2:
        return ""  # JAX refuses to train odd lengths, also where nothing is masked
    return "cudnn" if capability >= AMPERE and fits else ""
