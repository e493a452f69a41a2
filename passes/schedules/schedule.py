"""What a schedule is: for every mesh, the order in which it runs its tasks.

A task is the forward pass (F), the backward pass (B) or the weight gradients (W) of one stage for
one microbatch. A schedule that splits the backward pass has W tasks: its B then computes only what
the previous stage waits for, and W the rest. Tasks wait for each other along the stages:

    F(s, i) for F(s-1, i);    B(s, i) for F(s, i) and B(s+1, i);    W(s, i) for B(s, i)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

TaskKind = Literal["F", "B", "W"]
T = TypeVar("T")


class Task(NamedTuple):
    """One stage's forward (F), backward (B) or weight-gradient (W) work for one microbatch.

    >>> print(Task("F", 0, 3))
    F(0,3)
    """

    kind: TaskKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}({self.stage},{self.microbatch})"


@dataclass(frozen=True)
class Schedule:
    """The order in which every mesh runs its tasks.

    Args:
      name: what people call it.
      num_stages: stages, counting every chunk: with v chunks on each of p meshes there are p * v.
      num_microbatches: microbatches of one step.
      mesh_of_stage: for every stage, the mesh that runs it.
      tasks: for every mesh, its tasks in order.

    >>> F, B = (lambda i: Task("F", 0, i)), (lambda i: Task("B", 0, i))
    >>> print(Schedule("gpipe", 1, 2, (0,), ((F(0), F(1), B(0), B(1)),)))
    gpipe: 1 stage on 1 mesh, 2 microbatches
    mesh 0: F0 F1 B0 B1
    """

    name: str
    num_stages: int
    num_microbatches: int
    mesh_of_stage: tuple[int, ...]
    tasks: tuple[tuple[Task, ...], ...]

    @property
    def num_meshes(self) -> int:
        return len(self.tasks)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients are tasks of their own."""
        return any(task.kind == "W" for tasks in self.tasks for task in tasks)

    @cached_property
    def forward_only(self) -> bool:
        """Whether there is no backward pass: inference."""
        return all(task.kind == "F" for tasks in self.tasks for task in tasks)

    @cached_property
    def kinds(self) -> tuple[TaskKind, ...]:
        """The kinds of tasks that every stage has for every microbatch, in their order."""
        if self.forward_only:
            return ("F",)
        return ("F", "B", "W") if self.splits_backward else ("F", "B")

    @cached_property
    def at_once(self) -> tuple[bool, ...]:
        """For every stage, whether it runs a microbatch forward and backward without a break.

        That is the last stage, which waits for nobody in between, where its mesh does not do
        something else first.

        >>> from autopar.passes.schedules.make import make_schedule
        >>> make_schedule("1f1b", 2, 4).at_once, make_schedule("gpipe", 2, 4).at_once
        ((False, True), (False, False))
        """
        last, count = self.num_stages - 1, self.num_microbatches
        tasks = self.tasks[self.mesh_of_stage[last]]
        pairs = set(itertools.pairwise(tasks))
        turns = ((Task("F", last, i), Task("B", last, i)) for i in range(count))
        return (*(False,) * last, pairs.issuperset(turns))

    def stages_of(self, mesh: int) -> tuple[int, ...]:
        """The stages (chunks) that `mesh` runs."""
        return tuple(stage for stage, home in enumerate(self.mesh_of_stage) if home == mesh)

    def waits_for(self, task: Task) -> tuple[Task, ...]:
        """The tasks whose results `task` needs, whichever mesh runs them."""
        kind, stage, microbatch = task
        if kind == "F":
            return (Task("F", stage - 1, microbatch),) if stage > 0 else ()
        if kind == "W":
            return (Task("B", stage, microbatch),)
        above = (Task("B", stage + 1, microbatch),) if stage + 1 < self.num_stages else ()
        return (Task("F", stage, microbatch), *above)

    def __str__(self) -> str:
        chunked = len(set(self.mesh_of_stage)) < self.num_stages
        stages = f"{self.num_stages} stage" + "s" * (self.num_stages != 1)
        meshes = f"{self.num_meshes} mesh" + "es" * (self.num_meshes != 1)
        batches = f"{self.num_microbatches} microbatch" + "es" * (self.num_microbatches != 1)
        lines = [f"{self.name}: {stages} on {meshes}, {batches}"]
        for mesh, tasks in enumerate(self.tasks):
            words = (str(t) if chunked else f"{t.kind}{t.microbatch}" for t in tasks)
            lines.append(f"mesh {mesh}: " + " ".join(words))
        return "\n".join(lines)


ONE_STAGE = Schedule("one stage", 1, 1, (0,), ((),))
"""That of a step which is one piece: there are no tasks."""


def in_turns(
    lists: Sequence[Sequence[T]], ready: Callable[[T], bool], position: list[int]
) -> Iterator[tuple[int, T]]:
    """(mesh, item) of every mesh's list in order, one mesh after the other, as far as they go.

    Args:
      lists: for every mesh, its tasks or instructions.
      ready: whether the next one of a mesh can go, after all that were given out before.
      position: for every mesh, how many went before; it is kept up to date. Where the lists do not
        come to their ends, it says where they are stuck.
    """
    progress = True
    while progress:
        progress = False
        for mesh, items in enumerate(lists):
            while position[mesh] < len(items) and ready(items[position[mesh]]):
                yield mesh, items[position[mesh]]
                position[mesh] += 1
                progress = True
