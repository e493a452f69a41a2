"""Which task the instructions of a loop's body belong to."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.passes.graph.microbatched import Task
from autopar.passes.pieces.stage_pieces import body_tasks
from autopar.passes.sharding.layout import Layout, replicated
from autopar.passes.sharding.spmd_program import (
    Compute,
    Instruction,
    Relayout,
    ShardedValue,
    writes,
)

ROWS = Layout(((0,), ()))


def body_of(fn: Callable[..., Any], *shapes: Any) -> list[Instruction]:
    """A function's equations, each on whole values."""

    def versions(atoms: Sequence[Any]) -> tuple[ShardedValue, ...]:
        return tuple(ShardedValue(atom, replicated(len(atom.aval.shape))) for atom in atoms)

    jaxpr = jax.make_jaxpr(fn)(*shapes).jaxpr
    return [Compute(eqn, versions(eqn.invars), versions(eqn.outvars)) for eqn in jaxpr.eqns]


def tasks_of(
    body: Sequence[Instruction],
    equations: Sequence[Task],
    recomputed: Sequence[int] = (),
    **kept: Any,
) -> str:
    """The instructions' tasks; `equations` are those of the equations, in order."""
    left = iter(enumerate(equations))
    placed: list[Instruction] = []
    for x in body:
        if isinstance(x, Compute):
            number, task = next(left)
            x = dataclasses.replace(x, task=task, movable=number in recomputed)
        placed.append(x)
    return "".join(body_tasks(placed, kept.get("outputs", ())))


WIDE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def test_what_reads_a_later_task_is_not_sooner() -> None:
    body = body_of(lambda x: jnp.tanh(x @ x) * 2, WIDE)
    assert tasks_of(body, ("F", "B", "F")) == "FBB"


def test_a_change_of_layout_waits_for_its_first_reader() -> None:
    product, tanh = body_of(lambda x: jnp.tanh(x @ x), WIDE)
    (made,) = writes(product)
    moved = ShardedValue(made.atom, ROWS)
    change = Relayout(made, moved, (), "activation", "")
    assert isinstance(tanh, Compute)
    reader = Compute(tanh.eqn, (moved,), tanh.results)
    assert tasks_of([product, change, reader], ("F", "B")) == "FBB"
    assert tasks_of([product, change, reader], ("F", "W")) == "FWW"
    assert tasks_of([product, change, reader], ("F", "F")) == "FFF"
    assert tasks_of([product, change, reader], ("F", "B"), outputs={moved}) == "FFB"
    assert tasks_of([product, change], ("B",)) == "BB"  # nothing reads it


def test_an_equation_that_is_computed_where_it_is_read_waits_too() -> None:
    body = body_of(lambda x: jnp.zeros((8, 8)) + x @ x, WIDE)
    assert tasks_of(body, ("F", "F", "W")) == "FFW"
    assert tasks_of(body, ("F", "F", "W"), recomputed=[0]) == "WFW"


def test_flexible_equations_with_effects_stay() -> None:
    def noisy(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x * 2

    body = body_of(noisy, WIDE)
    assert tasks_of(body, ("F", "B"), recomputed=[0, 1]) == "FB"
