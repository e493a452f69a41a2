"""Rows that are sent to the blocks of experts that they belong to, and back: one equation each way.

A *block* holds the rows of some experts one after another, in as many places as there could be
rows, so that any routing fits. `exchange` moves rows between an array of them and an array of
blocks, by a list of pairs (source, target). Where devices cut both, rows travel by all-to-alls in
rounds: in each round every device sends every other one the same number of rows, and there are as
many rounds as the fullest pair of devices needs. An even routing takes about what it must; if all
rows go to one device they arrive as well, in more rounds. (JAX's `ragged_all_to_all` sends exactly
what there is, but XLA does not have it on CPU.)
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import mlir

from autopar.passes.graph.primitives import EXCHANGE
from autopar.passes.primitives.cuts import DimCut, LocalCall, NotLocalError
from autopar.passes.primitives.factor_rule import DimFactors, FactorRule
from autopar.passes.primitives.own_rules import Loops
from autopar.passes.primitives.shardings import shape_of

ROUND_SHARE = 0.5
"""What a pair of devices sends in a round, of what it sends if rows are spread evenly."""

EXPECTED_ROUNDS = 3
"""How many rounds are priced: no pair of devices sends more than one and a half times its share."""

exchange_p = Primitive(EXCHANGE)


def to_blocks(rows: Any, source: Any, target: Any, *, blocks: int, places: int) -> Any:
    """Rows at their places in blocks: [rows, ...] -> [blocks, places, ...].

    Row `source[i]` is added to what is at place `target[i]` of all `blocks * places`; places that
    nothing is sent to are zero, and a target beyond the last is none.
    """
    return _exchanged(rows, source, target, to_blocks=True, shape=(blocks, places))


def from_blocks(blocks: Any, source: Any, target: Any, *, rows: int) -> Any:
    """The way back: [blocks, places, ...] -> [rows, ...]."""
    return _exchanged(blocks, source, target, to_blocks=False, shape=(rows,))


def _exchanged(values: Any, source: Any, target: Any, **params: Any) -> Any:
    """The exchange; of booleans, which are not added, as integers."""
    if values.dtype == bool:
        return exchange_p.bind(values.astype(jnp.int8), source, target, **params).astype(bool)
    return exchange_p.bind(values, source, target, **params)


@exchange_p.def_abstract_eval
def _abstract(values: Any, source: Any, target: Any, *, to_blocks: bool, shape: Any) -> Any:
    return ShapedArray((*shape, *values.shape[1 if to_blocks else 2 :]), values.dtype)


def _moved(values: Any, source: Any, target: Any, *, to_blocks: bool, shape: Any) -> Any:
    flat = values if to_blocks else values.reshape(-1, *values.shape[2:])
    made = _placed(flat[source], target, math.prod(shape))
    return made.reshape(*shape, *flat.shape[1:])


def _placed(rows: Any, target: Any, count: int) -> Any:
    """Rows added at their places; those beyond are dropped."""
    return jnp.zeros((count, *rows.shape[1:]), rows.dtype).at[target].add(rows, mode="drop")


exchange_p.def_impl(jax.jit(_moved, static_argnames=("to_blocks", "shape")))
mlir.register_lowering(exchange_p, mlir.lower_fun(_moved, multiple_results=False))


def _features(eqn: JaxprEqn) -> tuple[int, int]:
    """The first dimension of a row in the operand and in the result."""
    return (1, 2) if eqn.params["to_blocks"] else (2, 1)


def exchange_rule(eqn: JaxprEqn, _: frozenset[int]) -> FactorRule:
    """Blocks and the devices' shares of the rows are one loop, along which devices exchange.

    If the rows do not divide into such shares they are whole on every device, which keeps what
    goes to its blocks, or has a part of what comes from them all.
    """
    loops, first = Loops(), _features(eqn)[0]
    given, made = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    rows, (blocks, places) = (
        (given[0], made[:2]) if eqn.params["to_blocks"] else (made[0], given[:2])
    )
    divides = rows % blocks == 0
    shared = loops.new(blocks, "pass" if divides or eqn.params["to_blocks"] else "sum")
    in_rows: list[DimFactors] = [
        (*shared, *loops.new(rows // blocks, "replicated"))
        if divides
        else loops.new(rows, "replicated")
    ]
    in_blocks = [shared, loops.new(places, "replicated")]
    before, after = (in_rows, in_blocks) if eqn.params["to_blocks"] else (in_blocks, in_rows)
    features = [loops.new(size) for size in given[first:]]
    pairs = loops.new(shape_of(eqn.invars[1])[0], "replicated")
    return loops.rule([[*before, *features], [pairs], [pairs]], [[*after, *features]])


def exchange_on_slices(call: LocalCall) -> list[Any]:
    """An exchange by one device: of its share of the rows, of its blocks, or of both."""
    eqn = call.eqn
    values, source, target = call.operands
    first, last = _features(eqn)
    given, made = call.operand_cuts[0][0], call.result_cuts[0][0]
    shape = shape_of(eqn.outvars[0])[:last]
    count, parts = math.prod(shape), made.parts if made else 1
    flat = values.reshape(-1, *values.shape[first:])
    own = count // parts
    if given is None and made is None:
        result = _placed(flat[source], target, count)
    elif given is None and made is not None:
        start = own * made.index
        mine = (start <= target) & (target < start + own)
        result = _placed(flat[source], jnp.where(mine, target - start, own), own)
    elif given is not None and made is None:
        start = given.index * flat.shape[0]
        mine = (start <= source) & (source < start + flat.shape[0])
        taken = flat[jnp.where(mine, source - start, 0)]
        result = _placed(taken, jnp.where(mine, target, count), count)
    else:
        assert made is not None
        result = _in_rounds(flat, source, target, made, own)
    local = (shape[0] // parts, *shape[1:])
    return [result.reshape(*local, *flat.shape[1:])]


def round_rows(pairs: int, parts: int) -> int:
    """How many rows each device sends each other one in a round."""
    return max(1, math.ceil(pairs * ROUND_SHARE / parts**2))


def _in_rounds(rows: Any, source: Any, target: Any, cut: DimCut, own: int) -> Any:
    """This device's rows sent to where they belong, and those received at their places."""
    if not cut.axes:
        raise NotLocalError("rows are exchanged by devices, not by microbatches")
    parts, me, held = cut.parts, cut.index, rows.shape[0]
    count = source.shape[0]
    # All pairs, ordered by who sends to whom; each device finds the same order.
    who = jnp.where(target < own * parts, source // held * parts + target // own, parts**2)
    order = jnp.argsort(who)
    lengths = jnp.bincount(who, length=parts**2 + 1)[:-1]
    starts = (jnp.cumsum(lengths) - lengths).reshape(parts, parts)
    lengths = lengths.reshape(parts, parts)
    size = round_rows(count, parts)
    rounds = (jnp.max(lengths) + size - 1) // size

    def picked(starts: Any, lengths: Any, number: Any) -> tuple[Any, Any]:
        places = number * size + jnp.arange(size)
        at = jnp.minimum(starts[:, None] + places, count - 1)
        return order[at], places < lengths[:, None]

    def one(state: tuple[Any, Any]) -> tuple[Any, Any]:
        number, made = state
        sent, _ = picked(starts[me], lengths[me], number)
        taken = rows[jnp.clip(source[sent] - me * held, 0, held - 1)]
        received = lax.all_to_all(taken, cut.axes, 0, 0, tiled=True)
        came, is_row = picked(starts[:, me], lengths[:, me], number)
        places = jnp.where(is_row, target[came] - me * own, own)
        return number + 1, made.at[places].add(received, mode="drop")

    nothing = jnp.zeros((own, *rows.shape[1:]), rows.dtype)
    return lax.while_loop(lambda state: state[0] < rounds, one, (0 * rounds, nothing))[1]
