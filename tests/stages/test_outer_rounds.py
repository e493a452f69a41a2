"""What is around a stage's loop: sums first and in place, updates in place, nothing too early."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.passes.pieces.piece_costs import temporary_bytes
from autopar.passes.pieces.pieces import Pieces, StagePiece
from autopar.passes.planner import candidates
from autopar.passes.sharding.run_order import ties
from autopar.passes.sharding.spmd_program import Compute, Relayout, is_literal, local_bytes

WIDTH, WORDS, DEPTH = 64, 256, 4
CLUSTER = autopar.Cluster.preset("p3.16xlarge")


def train_step(state: Any, x: Any) -> Any:
    """Adam, for a table that the first and the last stage read."""
    params, first, second = state

    def loss_fn(params: Any) -> Any:
        y = x @ params["table"]
        for w in params["layers"]:
            y = y + jnp.tanh(y @ w["up"]) @ w["down"]
        return jnp.mean(jnp.square(y @ params["table"].T - x))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)

    def updated(p: Any, m: Any, v: Any) -> Any:
        return 0.999 * p - 0.1 * m / (jnp.sqrt(v) + 1e-8)

    return (jax.tree.map(updated, params, first, second), first, second), loss


@cache
def pieces() -> Pieces:
    made: list[candidates.PlannedStep] = []
    layer = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    sizes = {"table": (WORDS, WIDTH), "layers": [layer] * DEPTH}
    params = jax.tree.map(
        lambda size: jax.ShapeDtypeStruct(size, "float32"),
        sizes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    with pytest.MonkeyPatch.context() as patch:
        original = candidates.assemble

        def assemble(*values: Any) -> candidates.PlannedStep:
            made.append(original(*values))
            return made[-1]

        patch.setattr(candidates, "assemble", assemble)
        autopar.plan(
            train_step,
            (params, params, params),
            jax.ShapeDtypeStruct((64, WORDS), "float32"),
            cluster=CLUSTER,
            stages=2,
            microbatches=4,
            schedule="1f1b",
            method="data",
            donate_argnums=(0,),
        )
    return made[-1].pieces


def epilogues(stage: int) -> list[StagePiece]:
    return [x for x in pieces().pieces if x.stage == stage and x.kind == "epilogue"]


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_are_added_over_devices_first_and_in_place(stage: int) -> None:
    sums, *others = epilogues(stage)
    assert others and all(isinstance(x, Relayout) for x in sums.instructions)
    assert sums.donates == tuple(sorted(port.value for port in sums.inputs))
    for given, made in zip(sums.inputs, sums.outputs, strict=True):
        assert given.version.atom is made.version.atom
    program = pieces().programs[stage]
    combined = sum(local_bytes(port.version, program.mesh) for port in sums.outputs)
    assert temporary_bytes(sums, program) == combined  # all are small
    rules = dataclasses.replace(program.rules, combined_bytes=0)
    assert temporary_bytes(sums, dataclasses.replace(program, rules=rules)) == 0


@pytest.mark.parametrize("stage", [0, 1])
def test_nothing_but_sums_waits_for_a_later_round(stage: int) -> None:
    _, *others = epilogues(stage)
    later = {port.value for piece in others for port in piece.outputs}
    waiting = [p for piece in others for p in piece.inputs if p.value in later]
    assert all(not p.version.atom.aval.shape for p in waiting)


@pytest.mark.parametrize("stage", [0, 1])
def test_state_is_updated_in_its_own_place(stage: int) -> None:
    leaves = {n: leaf for leaf, numbers in enumerate(pieces().inputs) for n in numbers}
    results = {number: leaf for leaf, number in enumerate(pieces().outputs)}
    found = 0
    for piece in epilogues(stage)[1:]:
        made = defaultdict[Any, list[int]](list)
        for port in piece.outputs:
            made[port.version.atom.aval.shape].append(port.value)
        for port in piece.inputs:
            if port.value in piece.donates:
                number = made[port.version.atom.aval.shape].pop(0)  # as JAX pairs them
                if port.value in leaves and number in results:
                    assert leaves[port.value] == results[number]
                    found += 1
    assert found == 3 * 2 * DEPTH // 2 + (3 if stage == 0 else 0)


def test_products_of_microbatches_are_let_go_when_they_are_added() -> None:
    (piece,) = (x for x in pieces().pieces if x.name == "B0")
    block = piece.block
    outputs = {v for v in block.outputs if not is_literal(v)}
    found = ties(block, pieces().programs[0].mesh)
    waited = {v for tie in found.values() for v in tie.results}
    added = {
        v
        for x in block.instructions
        if isinstance(x, Compute) and x.eqn.primitive.name in ("add", "add_any")
        for v in x.results
        if v in outputs and len(v.atom.aval.shape) == 2
    }
    products = {v for v in waited if len(v.atom.aval.shape) == 2} - added
    assert len(waited & added) >= len(added) - 2  # no two products come after the last ones
    assert all(v.atom.aval.shape[0] != WIDTH for v in products), "activations, not gradients"
