"""Which arguments of a piece its results are written over, and that JAX pairs them so."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.passes.pieces.pieces import Port
from autopar.passes.pieces.taking_over import in_pairs, taken_over
from autopar.passes.sharding.layout import Layout
from autopar.passes.sharding.spmd_program import Compute, ShardedValue

WHOLE, CUT = Layout(((), ())), Layout(((0,), ()))  # over a mesh of two


def pairs_of(function: Callable[..., Any], kept: Sequence[int] = ()) -> dict[int, int]:
    """Which of two matrices, 0 and 1, each result of a function of them is written over."""
    matrix = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    jaxpr = jax.make_jaxpr(function)(matrix, matrix).jaxpr

    def values(atoms: Sequence[Any]) -> tuple[ShardedValue, ...]:
        return tuple(ShardedValue(atom, Layout(((),) * len(atom.aval.shape))) for atom in atoms)

    assert not any(isinstance(atom, Literal) for atom in jaxpr.outvars)
    inputs = [Port(number, value) for number, value in enumerate(values(jaxpr.invars))]
    outputs = [Port(9 + number, value) for number, value in enumerate(values(jaxpr.outvars))]
    run = [Compute(eqn, values(eqn.invars), values(eqn.outvars)) for eqn in jaxpr.eqns]
    return taken_over(inputs, outputs, run, kept)


def test_what_is_updated_element_by_element_is_written_over() -> None:
    assert pairs_of(lambda a, b: (b - a @ a, a @ b)) == {1: 0}
    assert pairs_of(lambda a, b: (b - a @ a, a * 2)) == {0: 1, 1: 0}
    assert pairs_of(lambda a, b: (b - a @ a, a * 2), kept=[1]) == {0: 1}


def test_what_is_read_later_is_not() -> None:
    """A product may be written over what nobody reads any more, not over what it reads itself."""
    assert pairs_of(lambda a, b: a @ b) == {}
    assert pairs_of(lambda a, b: jnp.sin(a @ b) @ a) == {1: 0}

    def late(a: Any, b: Any) -> Any:
        first = b @ b
        return first, a @ first

    assert pairs_of(late) == {1: 1}, "the second product comes after the last read of b"


def aliases(inputs: Sequence[Port], outputs: Sequence[Port], donated: set[int]) -> dict[int, int]:
    """Which results JAX writes over donated arguments of these shapes and shardings."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def sharding(port: Port) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec("x" if port.version.layout == CUT else None))

    def function(*arrays: Any) -> list[Any]:
        total = sum(array.sum() for array in arrays)
        return [jnp.full(port.version.atom.aval.shape, total) for port in outputs]

    lowered = jax.jit(
        function,
        in_shardings=[*map(sharding, inputs)],
        out_shardings=[*map(sharding, outputs)],
        donate_argnums=[n for n, port in enumerate(inputs) if port.value in donated],
    ).lower(*(port.version.atom.aval for port in inputs))
    (main,) = re.findall(r"func\.func public @main\((.*?)\) ->", lowered.as_text(), re.DOTALL)
    found = {}
    for number, text in enumerate(re.split(r"%arg\d+: ", main)[1:]):
        if match := re.search(r"tf\.aliasing_output = (\d+)", text):
            found[inputs[number].value] = outputs[int(match[1])].value
    return found


def test_jax_pairs_them_as_planned() -> None:
    """A device holds the same of 4 rows and of 8 that are cut; not all results take something."""
    args = [jax.ShapeDtypeStruct((rows, 4), jnp.float32) for rows in (8, 4)]
    cut, whole = jax.make_jaxpr(lambda a, b: (a, b))(*args).jaxpr.invars
    inputs = [
        Port(0, ShardedValue(whole, WHOLE)),
        Port(1, ShardedValue(cut, CUT)),
        Port(2, ShardedValue(whole, WHOLE)),
        Port(3, ShardedValue(cut, WHOLE)),
    ]
    outputs = [
        Port(10, ShardedValue(whole, WHOLE)),
        Port(11, ShardedValue(cut, CUT)),
        Port(12, ShardedValue(cut, WHOLE)),
        Port(13, ShardedValue(whole, WHOLE)),
    ]
    pairs = {1: 1, 2: 3, 3: 2}
    ordered = in_pairs(inputs, outputs, pairs, (2,))
    assert ({*ordered[0]}, {*ordered[1]}) == ({*inputs}, {*outputs})
    wanted = {number: outputs[place].value for number, place in pairs.items()}
    assert aliases(*ordered, {*pairs}) == wanted
    assert aliases(inputs, outputs, {*pairs}) != wanted, "they are not by themselves"
