"""What backward passes compute again: the cheapest choice of all, and nothing that has changed."""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.passes.pieces.residuals import before_readers, computed_again
from autopar.passes.sharding.layout import replicated
from autopar.passes.sharding.spmd_program import Compute, Instruction, ShardedValue, reads, writes

KEPT = 16  # eighths of a byte: written once, and read once
PRICES = {
    "add": 1,
    "broadcast_in_dim": 1,
    "mul": 1,
    "convert_element_type": 1,
    "div": 16,
    "tanh": 80,
}


def instructions_of(
    fn: Callable[..., Any], *shapes: Any
) -> tuple[list[Compute], list[ShardedValue]]:
    """A function's equations on one device, and its arguments."""
    jaxpr = jax.make_jaxpr(fn)(*shapes).jaxpr

    def versions(atoms: Sequence[Any]) -> tuple[ShardedValue, ...]:
        return tuple(ShardedValue(atom, replicated(len(atom.aval.shape))) for atom in atoms)

    made = [Compute(eqn, versions(eqn.invars), versions(eqn.outvars)) for eqn in jaxpr.eqns]
    return made, list(versions(jaxpr.invars))


def size(version: ShardedValue) -> int:
    aval = version.atom.aval
    return int(aval.size * aval.dtype.itemsize)


def names(found: Sequence[Any]) -> list[str]:
    return [x.eqn.primitive.name for x in found]


def cost(
    forward: Sequence[Instruction],
    again: Collection[Instruction],
    wanted: Collection[ShardedValue],
    held: Collection[ShardedValue],
) -> float:
    """Of keeping what is read and not computed again, and of computing."""
    made = {v for x in again for v in writes(x)}
    read = {v for x in again for v in reads(x)} | set(wanted)
    total = sum(KEPT * size(v) for v in read - made - set(held))
    for x in again:
        assert isinstance(x, Compute)
        price = PRICES.get(x.eqn.primitive.name)
        if price is None:
            return np.inf
        total += price * sum(int(v.atom.aval.size) for v in x.results)
    return total


@pytest.mark.parametrize("seed", range(30))
def test_is_the_best_of_all_choices(seed: int) -> None:
    """Random programs of some ten equations, of values of several sizes."""
    rng = np.random.default_rng(seed)

    def program(x: Any, weights: Any, narrow: Any) -> Any:
        kinds: list[Callable[[Any, Any], Any]] = [
            lambda one, other: jnp.tanh(one),
            lambda one, other: one / other,
            lambda one, other: one.astype(jnp.float16),
            lambda one, other: jnp.sum(one, axis=0, keepdims=True),
            lambda one, other: one + other,
            lambda one, other: one * other,
        ]
        values = [x, narrow, x @ weights]
        for _ in range(6):
            one, other = (values[int(i)] for i in rng.integers(0, len(values), 2))
            values.append(kinds[int(rng.integers(0, len(kinds)))](one, other))
        return values

    forward, (_, weights, _) = instructions_of(
        program,
        jax.ShapeDtypeStruct((3, 4), jnp.float32),
        jax.ShapeDtypeStruct((4, 4), jnp.float32),
        jax.ShapeDtypeStruct((1, 4), jnp.float32),
    )
    results = [v for x in forward for v in writes(x)]
    wanted = {results[int(i)] for i in rng.integers(0, len(results), 3)}
    held = {weights, results[int(rng.integers(0, len(results)))]}
    found = computed_again(forward, wanted, size, held, changing=())
    best = min(
        cost(forward, again, wanted, held)
        for count in range(len(forward) + 1)
        for again in itertools.combinations(forward, count)
    )
    assert cost(forward, found, wanted, held) == best


def test_an_activation_is_kept_once() -> None:
    """Of GELU's derivative, the argument and the tanh; the rest is additions away."""

    def gelu(x: Any, weights: Any) -> Any:
        h = x @ weights
        inner = 0.8 * (h + 0.04 * h * h * h)
        tanh = jnp.tanh(inner)
        return h, inner, tanh, 0.5 * h * (1 + tanh), 1 - tanh * tanh

    wide = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    forward, (_, weights) = instructions_of(gelu, wide, wide)
    wanted = {v for x in forward for v in writes(x)}
    found = computed_again(forward, wanted, size, {weights}, ())
    assert "dot_general" not in names(found) and "tanh" not in names(found)
    local = {v for x in found for v in writes(x)}
    kept = {v for x in found for v in reads(x)} - local
    assert len(kept | (wanted - local)) == 2


def test_what_has_changed_is_kept() -> None:
    """A sum over microbatches is another one when B runs."""

    def counted(x: Any, total: Any) -> Any:
        return (total * 2) + x * 2

    wide = jax.ShapeDtypeStruct((8,), jnp.float32)
    forward, (x, total) = instructions_of(counted, wide, wide)
    wanted = {forward[-1].results[0]}
    both = computed_again(forward, wanted, size, {x, total}, ())
    assert names(both) == names(forward)
    careful = computed_again(forward, wanted, size, {x, total}, {total})
    assert forward[0] not in careful


def test_what_a_last_bit_decides_is_kept() -> None:
    """The derivative of a maximum asks which element equals it; F's own rounding must answer."""

    def largest(x: Any, scale: Any, weights: Any) -> Any:
        h = (x @ weights) * scale + scale
        at = h == jnp.max(h, axis=-1, keepdims=True)
        return at.astype(jnp.float32), (h > 0).astype(jnp.float32), h.astype(jnp.int32) * 2

    wide = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    forward, (_, scale, weights) = instructions_of(largest, wide, wide, wide)
    wanted = {v for x in forward for v in writes(x)}
    found = computed_again(forward, wanted, size, {scale, weights}, ())
    again = [x for x in found if isinstance(x, Compute)]
    assert not {"eq", "gt"} & set(names(again))
    casts = [x for x in again if x.eqn.primitive.name == "convert_element_type"]
    assert [str(x.operands[0].atom.aval.dtype) for x in casts] == ["bool", "bool"]

    def steps(rows: Any) -> Any:  # whole numbers have no last bit to lose
        return (rows * 2 > 3).astype(jnp.float32)

    forward, (rows,) = instructions_of(steps, jax.ShapeDtypeStruct((8,), jnp.int32))
    found = computed_again(forward, {forward[-1].results[0]}, size, {rows}, ())
    assert names(found) == ["mul", "gt", "convert_element_type"]


def test_effects_and_equations_of_one_device_are_not_repeated() -> None:
    def noisy(x: Any) -> Any:
        y = x * 2
        jax.debug.print("{}", y)
        return y + 1

    forward, (x,) = instructions_of(noisy, jax.ShapeDtypeStruct((8,), jnp.float32))
    wanted = {forward[-1].results[0]}
    assert names(computed_again(forward, wanted, size, {x}, ())) == ["mul", "add"]
    alone = [Compute(y.eqn, y.operands, y.results, once=True) for y in forward]
    assert computed_again(alone, wanted, size, {x}, ()) == []


def test_is_computed_just_before_it_is_read() -> None:
    def forward_pass(x: Any) -> Any:
        one = x * 2
        return one, one + 1, x * 3

    forward, (x,) = instructions_of(forward_pass, jax.ShapeDtypeStruct((8,), jnp.float32))
    plus = forward[1].results[0]
    triple = forward[2].results[0]
    late = [
        Compute(forward[2].eqn, (v,), (ShardedValue(object(), v.layout),))
        for v in (x, plus, triple)
    ]
    order = before_readers(forward, late)
    assert order == [late[0], forward[0], forward[1], late[1], forward[2], late[2]]


def test_a_pipeline_keeps_less_and_computes_the_same() -> None:
    """A GPT-like block: what crosses from F to B, and the numbers of a step."""

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch
        for layer in params:
            mean = x.mean(-1, keepdims=True)
            scale = jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
            h = ((x - mean) * scale) @ layer["up"]
            x = x + jax.nn.gelu(h) @ layer["down"]
        return jnp.mean(x**2)

    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    rng = np.random.default_rng(0)
    width, rows, count = 16, 32, 4

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) / 4

    params = [{"up": matrix(width, 64), "down": matrix(64, width)} for _ in range(4)]
    batch = matrix(rows, width)
    compiled = autopar.compile(
        step,
        params,
        batch,
        cluster=autopar.Cluster.preset("cpu", devices_per_node=2),
        stages=2,
        microbatches=count,
        schedule="1f1b",
        donate_argnums=(),
    )
    expected, expected_loss = jax.jit(step)(params, batch)
    found, loss = compiled(params, batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)
    pieces = compiled._compiled.pipeline.pieces
    wide = rows // count * 64 * 4
    for piece in pieces.pieces:
        if piece.kind in ("F", "B"):
            kept = [pieces.values[p.value] for p in piece.inputs]
            of_hidden = [x for x in kept if x.label == "residual" and x.bytes_per_device == wide]
            # Of each of two layers: GELU's argument, and its tanh. The last stage keeps none.
            assert len(of_hidden) == (2 * 2 if piece.name == "B0" else 0)
