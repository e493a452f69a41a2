"""What a call checks of its arguments, and the errors for those that do not fit."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from autopar.arrays.operators import WholeArray
from autopar.base.errors import DeviceError, DonatedBufferError, TraceError
from autopar.base.units import format_bytes
from autopar.base.user_code import callers, calling_place, place, warn
from autopar.mismatch import differences
from autopar.passes.graph import jax_compat
from autopar.passes.trace.signature import Key, Signature
from autopar.passes.trace.trace import Traced


def picker(positions: Sequence[int]) -> Callable[[list[Any]], list[Any]]:
    """A function that takes the values at these positions out of a list."""
    if not positions:
        return lambda values: []
    first, last = positions[0], positions[-1]
    if list(positions) == list(range(first, last + 1)):
        return operator.itemgetter(slice(first, last + 1))
    pick = operator.itemgetter(*positions)
    return lambda values: list(pick(values))


def is_weak(leaf: Any) -> bool:
    """Whether JAX gives a leaf a weak type."""
    if isinstance(leaf, (int, float, complex)):
        # A numpy.float64 is a float, and a bool an int, but neither is weak.
        return not hasattr(leaf, "dtype") and not isinstance(leaf, bool)
    return bool(getattr(leaf, "weak_type", False))


def same_static_arguments(static: Mapping[Key, Any], signature: Signature) -> bool:
    """Whether static arguments are those of a signature, types included."""
    return signature.static_arguments == tuple((k, type(v), v) for k, v in static.items())


def same_statics(leaves: Sequence[Any], signature: Signature) -> bool:
    """Whether static leaves are those of a signature."""
    return all(
        leaves[position] is value or (type(leaves[position]) is kind and leaves[position] == value)
        for position, kind, value in signature.statics
    )


def same_signature(left: Signature, right: Signature, strict: bool) -> bool:
    """Whether two signatures are equal; if not strict, weak types do not count."""
    if strict:
        return left == right
    plain = [(s.tree, s.statics, s.static_arguments) for s in (left, right)]
    shapes = [[(x.shape, x.dtype) for x in s.shapes] for s in (left, right)]
    return plain[0] == plain[1] and shapes[0] == shapes[1]


def tell_notebook(name: str, arguments: Iterable[str]) -> None:
    """Once, where people run cells twice: the step of this name consumes these arguments."""
    global _notebook_was_told
    names = ", ".join(arguments)
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if not names or _notebook_was_told or get_ipython is None or get_ipython() is None:
        return
    _notebook_was_told = True
    print(
        f"autopar: {name} reuses the memory of {names}: what you pass in is "
        "consumed, so running a cell again needs the state that the call returned. "
        "donate_argnums=() keeps the old one alive."
    )


_notebook_was_told = False


def tell_transformed(name: str) -> bool:
    """A step of this name is called while a JAX transformation traces: its plan is not used.

    `jax.eval_shape` and `jax.make_jaxpr` trace in the same way, and need no plan.

    Returns:
      Whether it was told.
    """
    jax_files = os.path.join(os.path.dirname(jax.__file__), "")
    codes = [frame.f_code for frame in callers()]
    if any(
        ("eval_shape" in code.co_name or "make_jaxpr" in code.co_name)
        and code.co_filename.startswith(jax_files)
        for code in codes
    ):
        return False
    where = calling_place()
    warn(
        f"{name} is parallelized, and is called inside another transformation (jit, grad, vmap, "
        "scan): there it is the plain function, and its plan is not used.",
        None if where is None else place(*where),
        "autopar compiles whole steps; inside a jax.jit or nnx.jit it is JAX that compiles.",
        f"call {name} directly, without a jit around it; transform the plain function, and "
        "parallelize the outermost: autopar.parallelize(step), not jax.jit(parallelized_step).",
    )
    return True


def run_plain(
    fn: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """What a step gives under `jax.disable_jit()`: the plain function, operation by operation.

    Nothing is donated.

    Raises:
      DeviceError: arrays lie on the devices of several stages, which JAX cannot mix.
    """
    leaves = jax.tree.leaves((args, kwargs))
    apart = any(isinstance(leaf, WholeArray) for leaf in leaves)
    held = {frozenset(x.devices()) for x in leaves if isinstance(x, jax.Array) and x.committed}
    if apart or len(held) > 1:
        raise DeviceError(
            f"{name} is called under jax.disable_jit() with arrays of different devices.",
            why="there it is the plain function, which JAX runs one operation after the other, and "
            "no operation takes arrays of different devices.",
            hint="bring the state of several stages together first: state = step.gather(state); or "
            "other arrays to the state's devices: jax.device_put(x, w.sharding).",
        )
    return fn(*args, **kwargs)


def explained(error: Exception, name: str, is_gone: bool) -> Exception:
    """What a failed call raises, in terms of the step: from what the compiled program raised.

    `is_gone` says whether the donated leaves are gone.
    """
    if type(error).__name__ == "InternalFloatingPointError":  # not meant for users' eyes
        what = error.args[-1]
        error = FloatingPointError(
            f"{what} in the results of {name}, and jax_debug_{what}s is set."
        )
    if is_gone:
        error.add_note(
            f"autopar: {name} failed after it had taken over donated buffers, so the state that "
            "was passed in is gone. Restore it from a checkpoint, or pass donate_argnums=() while "
            "you look for the cause."
        )
    return error


def tell_of_memory(error: Exception, name: str, peak_bytes: int) -> None:
    """Let the error of a device that ran out of memory say what it was planned with.

    `peak_bytes` are those of the device that needs most.
    """
    if "RESOURCE_EXHAUSTED" not in str(error):
        return
    error.add_note(
        f"autopar: {name} is planned to take {format_bytes(peak_bytes)} of a device. Arrays of "
        "yours and other programs lie beside that. memory_limit='...' plans within less, and "
        "confirm=True takes a plan only if the compiler fits it into the device's memory."
    )


def donated_earlier(name: str, paths: Sequence[str], *, was_donated: bool) -> DonatedBufferError:
    """The error of a step for leaves, at these paths, whose values are gone.

    `was_donated` says whether this step donates the first of them; else somebody else deleted it.
    """
    count = f"{len(paths)} leaves, {paths[0]} first, were" if len(paths) > 1 else f"{paths[0]} was"
    if was_donated:
        why = (
            f"{name} writes the new state into the memory of the old one, as jax.jit "
            "with donate_argnums does, so what is passed in can be used once."
        )
        hint = (
            f"go on with the state that was returned (state = {name}(state, ...)), or "
            "pass donate_argnums=(), or the numbers of what may be used up, to keep the old one, "
            "at the price of its memory."
        )
    else:
        why = "another computation took over its memory, or its delete() was called."
        hint = "pass an array that is alive."
    what = f"{count} donated by an earlier call: the values are gone."
    return DonatedBufferError(what, where=paths[0], why=why, hint=hint)


def wrong_arguments(
    name: str, traced: Traced, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TraceError:
    """The error for arguments that a step was not compiled for."""
    lines = differences(traced, args, kwargs)
    more = [f"- ... {len(lines)} differences in all"] if len(lines) > 6 else []
    hint = (
        "compile it for these arguments too, or use autopar.parallelize, which plans again when "
        "shapes change."
    )
    if any("another " in line for line in lines):
        hint = (
            "build the state once, with one optimizer and one model, and pass on what the step "
            "returns: another function object is another program."
        )
    return TraceError(
        f"{name} was compiled for other arguments.",
        where=name,
        why="what it was compiled for, and what it was called with:\n"
        + "\n".join([*lines[:6], *more]),
        hint=hint,
    )


def not_for_jax(array: WholeArray) -> NoReturn:
    """What JAX's own functions say of an array that lies on several meshes or on actors.

    Raises:
      DeviceError: always.
    """
    kind = type(array).__name__
    place = "on several meshes" if kind == "SplitArray" else "on Ray actors"
    raise DeviceError(
        f"A {kind} lies {place}, and JAX's functions take arrays that it knows.",
        where=f"{array.dtype.name}[{', '.join(map(str, array.shape))}]",
        hint="step.apply(fn, state) runs a function such as optax.global_norm on a distributed "
        "state; step.gather(tree) brings a tree together, jax.numpy.asarray(array) one array.",
    )


def tell_of_donation() -> None:
    """Let JAX's error for a deleted array say how a step may have come to its memory."""
    jax_compat.when_deleted(
        "autopar: a parallelized step writes its new state into the memory of the old one. If this "
        "array was part of what was passed to one, go on with what the step returned, or pass "
        "donate_argnums=() to keep the old state, at the price of its memory."
    )
