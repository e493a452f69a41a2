"""What JAX says of a step that cannot be traced, said for the step's author.

A traced step runs once, with values that have a shape and a dtype but no numbers yet. What asks for
a number there fails in JAX, far from the line that asked.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import errors

from autopar.base.errors import TraceError
from autopar.base.user_code import innermost
from autopar.passes.trace.arguments import Argument

_WHEN = "the step is planned from its shapes, before there are numbers"


def in_our_words(
    error: Exception, name: str, arguments: Sequence[Argument], place: str | None
) -> TraceError | None:
    """An error that came out of the traced function, for who wrote it; None: it speaks for itself.

    Args:
      error: what the function raised.
      name: what the function is called.
      arguments: those that it was traced with.
      place: where the function is defined, in case the error came through none of its lines.
    """
    text = str(error)
    reason = _reason(error, text)
    if reason is None:
        return None
    what, why, hint = reason
    origins = _origins(text)
    if origins:
        why += f"; here it depends on {', '.join(origins)}"
    return TraceError(
        what.format(name=name),
        where=innermost(error) or place,
        why=why + ".",
        hint=_static_hint(origins, arguments) or hint,
    )


def check_kind(fn: Callable[..., Any], name: str, place: str | None) -> None:
    """See that a call of a function runs it.

    Raises:
      TraceError: a call gives a coroutine or a generator.
    """
    called: Any = fn
    while isinstance(called, functools.partial):
        called = called.func
    if not inspect.isroutine(called):
        called = type(called).__call__
    is_coroutine = inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)
    if is_coroutine or inspect.isgeneratorfunction(called):
        kind, does = ("a coroutine", "awaits") if is_coroutine else ("a generator", "iterates over")
        raise TraceError(
            f"A call of {name} gives {kind}, and runs nothing of it.",
            where=place,
            why=f"what it computes is only known to who {does} the result.",
            hint="write the step as a plain function (def, with return), and call that from there.",
        )


def check_constants(constants: Sequence[Any], name: str, place: str | None) -> None:
    """See that no value of another trace is among the arrays that a function closes over.

    Raises:
      TraceError: there is one.
    """
    if any(isinstance(value, jax.core.Tracer) for value in constants):
        what, why, hint = _KEPT
        raise TraceError(what.format(name=name), where=place, why=why + ".", hint=hint)


_KEPT = (
    "{name} uses a value that was kept from an earlier trace.",
    "it was appended to a list, or stored in a global or an attribute, while a function was "
    "traced; it never gets a number",
    "pass it as an argument, and return what the next step needs.",
)


def _reason(error: Exception, text: str) -> tuple[str, str, str] | None:
    """What is wrong, why, and what to try."""
    if isinstance(error, errors.TracerBoolConversionError):
        return (
            "{name} decides in Python (`if`, `while`, `and`, `bool`) by a value of the step.",
            f"{_WHEN} to decide by",
            "choose when the step runs: jnp.where(condition, a, b), jax.lax.cond, "
            "jax.lax.while_loop.",
        )
    if isinstance(error, errors.NonConcreteBooleanIndexError) or (
        isinstance(error, errors.ConcretizationTypeError) and "size argument of" in text
    ):
        return (
            "{name} makes an array whose size depends on the step's values, as x[mask] does.",
            f"{_WHEN} that could give a size",
            "keep the shape: jnp.where(mask, x, 0), jnp.sum(x, where=mask); or give the size: "
            "jnp.nonzero(mask, size=n), jnp.unique(x, size=n).",
        )
    if isinstance(error, errors.TracerArrayConversionError):
        return (
            "{name} calls NumPy on a value of the step.",
            f"NumPy computes at once, and {_WHEN}",
            "use jax.numpy (jnp.sin for np.sin), or jax.pure_callback for code that only NumPy "
            "has.",
        )
    if isinstance(error, errors.TracerIntegerConversionError) or _IS_SHAPE in text:
        return (
            "{name} needs a Python integer (for a shape, `range`, an index of a list), and gets a "
            "value of the step.",
            f"{_WHEN} for it",
            "take it from a shape or a constant, name its argument in static_argnums, or use "
            "jax.lax.fori_loop and jnp.take.",
        )
    if isinstance(error, IndexError) and _IS_SLICE.search(text):
        return (
            "{name} cuts a slice whose bounds are values of the step.",
            f"{_WHEN} that could give a size",
            "keep the size: jax.lax.dynamic_slice_in_dim(x, start, size), or a mask, "
            "jnp.where(jnp.arange(len(x)) < n, x, 0); or name the bound's argument in "
            "static_argnums.",
        )
    if isinstance(error, TypeError | ValueError) and _IS_HASHED.search(text):
        return (
            "{name} hashes a value of the step (as a dictionary's key, in a set, or as a static "
            "argument of jax.jit).",
            _WHEN,
            "name its argument in static_argnums; or choose when the step runs: jnp.take, "
            "jax.lax.switch.",
        )
    if isinstance(error, errors.ConcretizationTypeError):
        return (
            "{name} asks for the number of a value of the step (`float`, `int`, `.item()`).",
            _WHEN,
            "return the value and read it after the call, or use jax.debug.print and "
            "jax.debug.callback inside.",
        )
    if isinstance(error, TypeError) and "Tracer.__format__" in text:
        return (
            "{name} formats a value of the step as a number.",
            _WHEN,
            'jax.debug.print("loss {x:.3f}", x=loss) prints each time that the step runs; or print '
            "what the step returns.",
        )
    if isinstance(error, RuntimeError) and "cuDNN is not detected" in text:
        return (
            '{name} asks for implementation="cudnn" of attention, for devices that have none.',
            "cuDNN has it for NVIDIA's GPUs from compute capability 8.0 (A100) on; the cluster has "
            "no such GPUs, nor has this machine",
            'use implementation=None or "xla" there, or plan for a cluster that has them.',
        )
    if isinstance(error, NotImplementedError) and _IS_SIZE_OF_CUDNN.search(text):
        return (
            '{name} asks for implementation="cudnn" of attention, which does not take these sizes.',
            f"cuDNN's kernel says: {text.rstrip('.')}",
            (
                "pad heads to a multiple of 8, if that is not too wide"
                if "head dim must" in text
                else "pad sequences to a multiple of 2, with key_value_seq_lengths= for the padding"
            )
            + '; or use implementation=None or "xla", which take any.',
        )
    if isinstance(error, errors.UnexpectedTracerError):
        return _KEPT
    if _is_of_another_trace(error, text):
        return (
            "{name} changes an object that is not among its arguments.",
            "what a step changes comes in as an argument, so that the change can be put back",
            "pass the module, optimizer or metric as an argument of the step.",
        )
    return None


def _is_of_another_trace(error: Exception, text: str) -> bool:
    """Whether Flax says that a step writes to an object from outside of it, in either way."""
    kind = getattr(sys.modules.get("flax.errors"), "TraceContextError", None)
    return type(error) is kind or (
        type(error) is ValueError and "Cannot extract graph node from different trace" in text
    )


_IS_SLICE = re.compile(r"must be static integers|must have static start/stop/step")
_IS_SIZE_OF_CUDNN = re.compile(
    r"^Unsupported sequence length Q \d+, KV \d+\.$|^The head dim must be <="
)
_IS_HASHED = re.compile(r"unhashable type: '\w*Tracer'")
_IS_SHAPE = "Shapes must be 1D sequences of concrete values"


def _origins(text: str) -> list[str]:
    """The arguments on which the value depends, where JAX says so."""
    match = re.search(r"depends on the values? of the arguments? (.+?)\.\s", text + " ")
    return [] if match is None else re.split(r", and |, | and ", match[1])


def _static_hint(origins: Sequence[str], arguments: Sequence[Argument]) -> str | None:
    """For a Python flag or number among the arguments, how to make it a constant of the program."""
    for argument in arguments:
        for path, leaf in zip(argument.paths, jax.tree.leaves(argument.value), strict=True):
            if path not in origins or type(leaf) not in (bool, int, float):
                continue
            number = argument.position
            if path == argument.name and number is not None:
                return (
                    f"static_argnums=({number},) makes {path}, a Python {type(leaf).__name__}, a "
                    "constant of the program; the step is planned once for each of its values."
                )
            return (
                f"make {path}, a Python {type(leaf).__name__}, an argument of its own and name "
                "its number in static_argnums: the step is then planned once for each value."
            )
    return None
