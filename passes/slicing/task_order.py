"""The task of each equation of a stage's loop body: forward, backward, weight gradients."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Var

from autopar.passes.graph.graph import variables
from autopar.passes.graph.microbatched import Task
from autopar.passes.graph.primitives import HEAVY
from autopar.passes.slicing.placed import PlacedProgram
from autopar.passes.slicing.transfers import Needs


def order_tasks(
    program: PlacedProgram, needs: Needs, sent: Sequence[Var], *, split_backward: bool
) -> tuple[list[int], tuple[Task, ...]]:
    """The body's equations of one stage in the order F, B, W, and their tasks.

    A copied equation belongs to the first task that reads it. With `split_backward`, B is what a
    gradient that is sent is made from; on a stage that sends none, what a later heavy equation of
    the backward pass is made from. The rest of the backward pass is W.
    """
    task = _forward_or_backward(program, needs, sent)
    if split_backward:
        task.update(dict.fromkeys(_weight_gradients(program, task, sent), "W"))
    order = sorted(task, key=lambda index: ("FBW".index(task[index]), index))
    return order, tuple(task[index] for index in order)


def _forward_or_backward(
    program: PlacedProgram, needs: Needs, sent: Sequence[Var]
) -> dict[int, Task]:
    collected = (program.parts.loop.stacks[number][0] for number in needs.stacked)
    forward = set(variables([*sent, *collected]))  # what F reads or leaves
    read = set(forward)
    task: dict[int, Task] = {}
    for index in sorted(needs.body, reverse=True):
        item = program.body[index]
        late = item.backward
        if item.stage is None:
            late = forward.isdisjoint(item.eqn.outvars) and not read.isdisjoint(item.eqn.outvars)
        task[index] = "B" if late else "F"
        read.update(variables(item.eqn.invars))
        forward.update(() if late else variables(item.eqn.invars))
    return task


def _weight_gradients(
    program: PlacedProgram, task: dict[int, Task], sent: Sequence[Var]
) -> set[int]:
    backward = [index for index in sorted(task, reverse=True) if task[index] == "B"]
    made = {var for index in backward for var in program.body[index].eqn.outvars}
    wanted = made.intersection(sent)
    every = not wanted
    awaited: set[int] = set()
    for index in backward:
        eqn = program.body[index].eqn
        if not wanted.isdisjoint(eqn.outvars):
            awaited.add(index)
        elif not (every and eqn.primitive.name in HEAVY):
            continue
        wanted.update(made.intersection(variables(eqn.invars)))
    return set(backward) - awaited
