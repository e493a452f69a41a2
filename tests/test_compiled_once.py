"""Programs that are the same are compiled once; those that only look so are not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.runtime.compiled_pieces import CompileOnce

SHAPE = jax.ShapeDtypeStruct((64,), jnp.float32)


def compiled(once: CompileOnce, name: str, function: Any, device: int = 0) -> Any:
    def step(x: Any) -> Any:
        return function(x)

    step.__name__ = name
    place = NamedSharding(
        Mesh(np.asarray(jax.devices()[device : device + 1]), "x"), PartitionSpec()
    )
    return once(step, SHAPE, in_shardings=place, out_shardings=place)


def test_the_same_program_under_another_name_is_compiled_once_for_a_device() -> None:
    once = CompileOnce()
    first = compiled(once, "F0", lambda x: x + 1)
    assert compiled(once, "F1", lambda x: x + 1) is first
    other = compiled(once, "F1", lambda x: x + 1, device=1)
    assert other is not first
    there = jax.device_put(np.ones(64, np.float32), jax.devices()[1])
    assert other(there).devices() == {jax.devices()[1]}


def test_programs_with_other_constants_or_callbacks_are_compiled_each() -> None:
    once = CompileOnce()
    numbers = np.arange(64, dtype=np.float32)
    for constant in (numbers, numbers[::-1].copy()):
        made = compiled(once, "F", lambda x, c=constant: x + c)
        np.testing.assert_array_equal(made(np.zeros(64, np.float32)), constant)
    for add in (1.0, 2.0):

        def called(x: Any, add: float = add) -> Any:
            return jax.pure_callback(lambda y: np.asarray(y) + np.float32(add), SHAPE, x)

        made = compiled(once, "F", called)
        np.testing.assert_array_equal(made(numbers), numbers + np.float32(add))
