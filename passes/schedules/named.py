"""The schedules that have names in the literature, as plain lists of tasks.

With p meshes, m microbatches, v chunks per mesh, and forward and backward times f and b, all equal:

| name | makespan | microbatches in flight at stage s |
|---|---|---|
| gpipe | (m + p - 1)(f + b) | m |
| 1f1b | (m + p - 1)(f + b) | min(p - s, m) |
| eager_1f1b | (m + p - 1)(f + b) | min(2(p - s) - 1, m) |
| interleaved_1f1b | m(f + b) + (p - 1)(f + b)/v | |
| zb_h1 | bubble (p - 1)(F + B - W) per mesh | min(p - s, m) |
| zb_h2 | bubble (p - 1)(F + B - 2W) per mesh | min(2(p - s) - 1, m) |

The zero-bubble rows are the longest span of a mesh less its work, for m >= 2p - 1, F + B >= 2W and
F >= W, where B is only the part of the backward pass that the previous stage waits for. With W > F
the first mesh waits longer for its first B: the bubbles are (p - 1)B and (p - 1)(B - F).
`eager_1f1b` is no faster than 1F1B, but starts early what slow transfers delay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from autopar.passes.schedules.schedule import Task, TaskKind

TaskLists = list[list[Task]]


def gpipe(num_meshes: int, num_microbatches: int) -> TaskLists:
    """All forward passes, then all backward passes (Huang et al., arXiv:1811.06965)."""
    return _alternating(num_meshes, num_microbatches, lambda mesh: num_microbatches)


def inference(num_meshes: int, num_microbatches: int, num_chunks: int = 1) -> TaskLists:
    """Forward passes only; groups of p microbatches pass one chunk after the other."""
    return [
        [
            Task("F", chunk * num_meshes + mesh, i)
            for first in range(0, num_microbatches, num_meshes)
            for chunk in range(num_chunks)
            for i in range(first, min(first + num_meshes, num_microbatches))
        ]
        for mesh in range(num_meshes)
    ]


def one_forward_one_backward(num_meshes: int, num_microbatches: int) -> TaskLists:
    """One backward pass after each forward pass, as soon as there is one (arXiv:2104.04473)."""
    return _alternating(num_meshes, num_microbatches, lambda mesh: num_meshes - mesh)


def eager_one_forward_one_backward(num_meshes: int, num_microbatches: int) -> TaskLists:
    """1F1B with more forward passes first, to overlap slow transfers (arXiv:2211.05322)."""
    return _alternating(num_meshes, num_microbatches, lambda mesh: 2 * (num_meshes - mesh) - 1)


def interleaved(num_meshes: int, num_microbatches: int, num_chunks: int = 1) -> TaskLists:
    """1F1B over several chunks of the model on each mesh (Narayanan et al., arXiv:2104.04473).

    Stage `chunk * num_meshes + mesh` is that chunk on that mesh. Groups of `num_meshes`
    microbatches pass one chunk after the other, so the microbatches must divide into such groups.
    """
    total = num_microbatches * num_chunks

    def nth(kind: TaskKind, mesh: int, n: int) -> Task:
        group, within = divmod(n, num_meshes * num_chunks)
        chunk, i = divmod(within, num_meshes)
        if kind == "B":
            chunk = num_chunks - 1 - chunk
        return Task(kind, chunk * num_meshes + mesh, group * num_meshes + i)

    lists = []
    for mesh in range(num_meshes):
        warmup = min(2 * (num_meshes - 1 - mesh) + (num_chunks - 1) * num_meshes, total)
        if num_microbatches == num_meshes:
            warmup = total  # as in Megatron-LM: a single group has nothing to alternate with
        tasks = [nth("F", mesh, n) for n in range(warmup)]
        for n in range(total - warmup):
            tasks += [nth("F", mesh, warmup + n), nth("B", mesh, n)]
        tasks += [nth("B", mesh, n) for n in range(total - warmup, total)]
        lists.append(tasks)
    return lists


def zero_bubble_h1(num_meshes: int, num_microbatches: int) -> TaskLists:
    """1F1B's memory and a third of its bubble (Qi et al., arXiv:2401.10241, section 2.3, H1).

    Mesh s starts with p - s forward passes and computes weight gradients s backward passes late.
    """
    p, m = num_meshes, num_microbatches
    return _alternating(p, m, lambda mesh: p - mesh, lambda mesh: mesh)


def zero_bubble_h2(num_meshes: int, num_microbatches: int) -> TaskLists:
    """No bubble when F = B = W, for twice the memory of 1F1B (Qi et al., arXiv:2401.10241, H2).

    Mesh s starts with 2(p - s) - 1 forward passes and computes weight gradients 2s backward passes
    late.
    """
    p, m = num_meshes, num_microbatches
    return _alternating(p, m, lambda mesh: 2 * (p - mesh) - 1, lambda mesh: 2 * mesh)


SCHEDULES: Mapping[str, Callable[..., TaskLists]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_forward_one_backward,
        "eager_1f1b": eager_one_forward_one_backward,
        "interleaved_1f1b": interleaved,
        "zb_h1": zero_bubble_h1,
        "zb_h2": zero_bubble_h2,
        "inference": inference,
    }
)
"""The functions of the names that `make_schedule` knows."""

CHUNKED: frozenset[str] = frozenset({"interleaved_1f1b", "inference"})
"""The schedules that can run several chunks per mesh."""


def _alternating(
    num_meshes: int,
    num_microbatches: int,
    ahead: Callable[[int], int],
    delay: Callable[[int], int] | None = None,
) -> TaskLists:
    """`ahead(mesh)` microbatches in flight, then one backward and one forward pass in turn.

    With `delay`, weight gradients are tasks of their own, `delay(mesh)` backward passes late.
    """
    lists = []
    for mesh in range(num_meshes):
        first = min(ahead(mesh), num_microbatches)
        late = num_microbatches if delay is None else delay(mesh)
        tasks = [Task("F", mesh, i) for i in range(first)]
        for i in range(num_microbatches):
            tasks.append(Task("B", mesh, i))
            if i >= late:
                tasks.append(Task("W", mesh, i - late))
            if first + i < num_microbatches:
                tasks.append(Task("F", mesh, first + i))
        if delay is not None:
            left = range(max(num_microbatches - late, 0), num_microbatches)
            tasks += [Task("W", mesh, i) for i in left]
        lists.append(tasks)
    return lists
