"""Programs compiled ahead of their first call.

A compiled program of `jax.jit` compares the layouts of its arguments with its own, and for elements
of fewer than eight bits (int4) says that they differ although they are the same (JAX 0.10). Such a
program is called through `jax.jit`, which does not ask.
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.base.errors import AutoparWarning
from autopar.base.run_flags import MEMORY_SCHEDULER
from autopar.passes.graph.graph import Input


class AroundCompiled(abc.ABC):
    """A compiled program that is called in another way."""

    def __init__(self, compiled: jax.stages.Compiled | AroundCompiled):
        self._compiled = compiled

    @abc.abstractmethod
    def __call__(self, *args: Any) -> Any:
        """The program's results."""

    def as_text(self) -> str | None:
        """As that of `jax.stages.Compiled`."""
        return self._compiled.as_text()

    def memory_analysis(self) -> Any:
        """As that of `jax.stages.Compiled`."""
        return self._compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """As that of `jax.stages.Compiled`."""
        return self._compiled.cost_analysis()


class CalledByJit(AroundCompiled):
    """It is called through the jitted function that it was compiled from."""

    def __init__(self, compiled: jax.stages.Compiled, jitted: Any):
        super().__init__(compiled)
        self._jitted = jitted

    def __call__(self, *args: Any) -> Any:
        return self._jitted(*args)


def leaves_to_donate(
    inputs: Sequence[Input],
    shapes: Sequence[jax.ShapeDtypeStruct],
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
) -> list[int]:
    """The numbers of the leaves whose memory a step may take: the next ones lie where they lie.

    Args:
      inputs: the labels of a call's leaves.
      shapes: those that it was compiled for.
      in_shardings: where they are.
      out_shardings: where the results are.
    """
    return [
        i
        for i, label in enumerate(inputs)
        if label.donated
        and in_shardings[i].is_equivalent_to(out_shardings[twin(label)], len(shapes[i].shape))
    ]


def twin(label: Input) -> int:
    """The result that the next call takes in place of a leaf."""
    assert label.alias is not None, label
    return label.alias


def compile_ahead(
    function: Any,
    *shapes: Any,
    compiler_options: dict[str, str | bool] | None = None,
    **settings: Any,
) -> Any:
    """`jax.jit` of a function, compiled for these shapes; `settings` are those of `jax.jit`."""
    lowered = jax.jit(function, **settings).lower(*shapes)
    return compile_lowered(lowered, function, shapes, compiler_options, settings)


def compile_lowered(
    lowered: jax.stages.Lowered,
    function: Any,
    shapes: Sequence[Any],
    compiler_options: dict[str, str | bool] | None,
    settings: Mapping[str, Any],
) -> Any:
    """What `compile_ahead` gives, of what was lowered with these settings."""
    compiled, taken = compile_with(lowered, compiler_options)
    leaves = (*jax.tree.leaves(shapes), *jax.tree.leaves(lowered.out_info))
    if not any(map(_is_small, leaves)):
        return compiled
    return CalledByJit(compiled, jax.jit(function, compiler_options=taken, **settings))


def compile_with(
    lowered: jax.stages.Lowered, options: Mapping[str, str | bool] | None
) -> tuple[jax.stages.Compiled, dict[str, str | bool] | None]:
    """What was lowered, compiled with these options, and those that the compiler took.

    That of another release may not know of orders (`ordered_options`): a warning says so.
    """
    taken = dict(options or {})
    try:
        return lowered.compile(compiler_options=taken or None), taken or None
    except jax.errors.JaxRuntimeError as error:
        unknown = f"'{MEMORY_SCHEDULER}'" in str(error) and "option" in str(error)
        if taken.pop(MEMORY_SCHEDULER, None) is None or not unknown:
            raise
        what = f"this compiler has no {MEMORY_SCHEDULER}: the step may need more than was planned"
        warnings.warn(what, AutoparWarning, stacklevel=2)
    return lowered.compile(compiler_options=taken or None), taken or None


def _is_small(leaf: Any) -> bool:
    """Whether an array's elements have fewer than eight bits."""
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return bool(jnp.iinfo(leaf.dtype).bits < 8)
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating)) and jnp.finfo(leaf.dtype).bits < 8
