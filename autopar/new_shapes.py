"""Calls with other shapes: which known plan they can follow, and what people are told of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax

from autopar.base.errors import AutoparWarning
from autopar.base.progress import Progress
from autopar.executable import Executable
from autopar.passes.graph.logical import no_mesh
from autopar.passes.planner.compiler import compile_like
from autopar.passes.trace.signature import Signature
from autopar.passes.trace.trace import Traced
from autopar.plans.plan import Plan
from autopar.requests import PlanRequest


def changed_leaves(traced: Traced, signature: Signature) -> list[int] | None:
    """The array leaves whose shapes or dtypes are not those of a trace; None: more differs."""
    before = traced.signature
    if (before.tree, before.statics, before.static_arguments) != (
        signature.tree,
        signature.statics,
        signature.static_arguments,
    ):
        return None
    pairs = enumerate(zip(before.shapes, signature.shapes, strict=True))
    return [i for i, (old, new) in pairs if old != new]


def can_follow(traced: Traced, signature: Signature) -> bool:
    """Whether arguments are those of a trace, but for weak types and fewer or shorter examples.

    Where they are the same, settings of JAX are not.
    """
    changed = changed_leaves(traced, signature)
    if changed is None:
        return False
    for i in changed:
        old, new = traced.signature.shapes[i], signature.shapes[i]
        if old.dtype != new.dtype:
            return False
        if old.shape == new.shape:
            continue
        if traced.graph.inputs[i].role != "batch" or len(old.shape) != len(new.shape):
            return False
        if not all(0 < n <= o for n, o in zip(new.shape, old.shape, strict=True)):
            return False
    return True


def is_retyped(traced: Traced, signature: Signature) -> bool:
    """Whether arguments differ from those of a trace in weak types alone."""
    pairs = zip(traced.signature.shapes, signature.shapes, strict=True)
    return all((old.shape, old.dtype) == (new.shape, new.dtype) for old, new in pairs)


def nearest(known: Iterable[Executable], signature: Signature) -> Executable | None:
    """Of executables whose plan may be followed, that for the fewest elements."""

    def size(executable: Executable) -> int:
        return sum(math.prod(x.shape) for x in executable.traced.signature.shapes)

    return min((x for x in known if can_follow(x.traced, signature)), key=size, default=None)


def follow(
    guide: Executable, name: str, request: PlanRequest, trace: Callable[..., Traced]
) -> Executable | None:
    """An executable that follows the plan of another one, if it can.

    Weak types may change what is computed in which dtype: then it is another program.
    """
    rows = guide.traced.batch_size
    cluster, _ = request.load()
    with Progress(f"compiling {name} as planned", request.progress) as progress:
        traced = trace(cluster, progress, is_smaller=True)
        if traced.graph.inputs != guide.traced.graph.inputs:
            return None  # they are taken for something else now
        if _result_dtypes(traced) != _result_dtypes(guide.traced):
            return None
        with no_mesh():
            like = guide.plan, rows, progress.report
            compiled = compile_like(traced.graph, request.options, cluster, *like)
        return None if compiled is None else guide.another(traced, compiled, progress)


def _result_dtypes(traced: Traced) -> list[Any]:
    return [var.aval.dtype for var in traced.graph.jaxpr.outvars]


def is_cut_alike(guide: Executable, executable: Executable) -> bool:
    """Whether a batch is cut among the devices wherever the larger one is."""

    def cut(plan: Plan) -> set[str]:
        return {leaf.path for leaf in plan.inputs if leaf.role == "batch" and any(leaf.spec)}

    return cut(guide.plan) <= cut(executable.plan)


def tell_following(name: str, guide: Executable, executable: Executable, is_cut: bool) -> None:
    """Warn that a plan is followed; `is_cut`: the batch is, among the devices as there."""
    old, new = guide.traced.batch_size, executable.traced.batch_size
    what = f"for {old} examples with {new}" if old != new else "with other shapes"
    changed = changes(guide.traced, executable.traced.signature)
    if not changed:
        what = "under other settings of JAX"
    elif is_retyped(guide.traced, executable.traced.signature):
        what = "with other weak types"
    text = (
        f"{name} follows its plan {what}{': ' if changed else ''}{changed}. It is compiled once "
        "for that, and not planned again."
    )
    if not is_cut:
        text += (
            f" A batch of {new} does not divide among the devices, which compute some of it "
            "several times. To leave such a batch out (drop_last), or to pad it with examples of "
            "weight zero, is quicker."
        )
    warnings.warn(text, AutoparWarning, stacklevel=6)


def leave_out(name: str, guide: Executable) -> str:
    """What to do where a smaller batch can neither follow a plan nor have one of its own."""
    return (
        f"autopar: {name} has a plan for {guide.traced.batch_size} examples, which this smaller "
        "batch cannot follow. Leave it out (drop_last), or pad it with examples of weight zero."
    )


def tell_planning(name: str, known: Iterable[Executable], signature: Signature) -> None:
    """Warn that a step is planned again, where that is for other shapes, dtypes or settings."""
    changed = [text for x in known if (text := changes(x.traced, signature))]
    if any(x.traced.signature == signature for x in known):
        warnings.warn(
            f"{name} is planned again: settings of JAX under which it is called have changed, such "
            "as those of jax.enable_x64 or jax.default_matmul_precision. Each is planned once.",
            AutoparWarning,
            stacklevel=6,
        )
    elif changed:
        warnings.warn(
            f"{name} is planned again: {min(changed, key=len)}. A batch of fewer examples follows "
            "the plan of a larger one, where that was planned first; other shapes and dtypes are "
            "each planned once.",
            AutoparWarning,
            stacklevel=6,
        )


def changes(traced: Traced, signature: Signature) -> str:
    """What changed since a trace, in words; empty where more than shapes and dtypes did."""
    lines = [
        f"{traced.graph.inputs[i].path} is {_text(signature.shapes[i])}, and was "
        f"{_text(traced.signature.shapes[i])}"
        for i in changed_leaves(traced, signature) or ()
    ]
    more = [f"and {len(lines) - 3} more leaves"] if len(lines) > 3 else []
    return "; ".join([*lines[:3], *more])


def _text(shape: jax.ShapeDtypeStruct) -> str:
    weak = "weak " if shape.weak_type else ""
    return f"{weak}{shape.dtype}[{','.join(map(str, shape.shape))}]"
