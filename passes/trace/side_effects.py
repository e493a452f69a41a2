"""What a step does in Python beside computing, which happens once, when it is traced.

Values of the trace that something keeps (a list that they were appended to) and such that are
printed are no numbers, and new values of a state that are not returned are lost. JAX lets all of
it pass; here each is told once, with the line.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import CellType
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from autopar.base.user_code import calling_place, place, warn
from autopar.passes.graph import graph as graphs
from autopar.passes.graph import jax_compat, source_infos
from autopar.passes.graph.graph import Input
from autopar.passes.graph.primitives import UPDATES
from autopar.passes.trace.arguments import Argument
from autopar.passes.trace.returned import Flows


class TraceWatch:
    """What is noticed while a function is traced."""

    def __init__(self) -> None:
        self.printed: list[tuple[str, int, str]] = []
        self._trace: Any = None

    def begin(self) -> None:
        """Note which trace it is; called by what is traced."""
        self._trace = jax_compat.current_trace()

    def _kept(self) -> list[Any]:
        trace = None if self._trace is None else self._trace()
        return [] if trace is None else jax_compat.kept_values(trace)

    def tell(self, name: str) -> None:
        """Warn of what was printed and of what is kept, after the trace."""
        for file, line, function in dict.fromkeys(self.printed):
            warn(
                f"{name} prints a value of the step, which has no number yet.",
                place(file, line, function),
                "a step's Python code runs once, when it is planned, and never again.",
                'jax.debug.print("{x}", x=x) prints each time that the step runs.',
            )
        if self._kept():
            # They may be in a cycle that nothing holds. To search for those takes long where there
            # is much in memory, and mostly it is the program that keeps the trace, not a value.
            gc.collect()
            if values := self._kept():
                frame = source_infos.value_frame(values[0])
                warn(
                    f"{name} keeps a value of the step ({values[0]}) outside of it.",
                    None if frame is None else f"computed at {place(*frame)}",
                    f"it is held by {_holder(values)}; a step's Python code runs once, when it is "
                    "planned, and what is kept then never gets a number.",
                    "return the value, and append what the call returns.",
                )


@contextlib.contextmanager
def watched() -> Iterator[TraceWatch]:
    """Watch what is printed meanwhile."""
    watch, stdout = TraceWatch(), sys.stdout
    proxy: Any = _Output(stdout, watch)
    sys.stdout = proxy
    try:
        yield watch
    finally:
        if sys.stdout is proxy:
            sys.stdout = stdout


class _Output:
    """Standard output that notes who writes values of a trace."""

    def __init__(self, stdout: Any, watch: TraceWatch):
        self._stdout, self._watch = stdout, watch

    def write(self, text: str) -> Any:
        if _TRACER.search(text) and (where := calling_place()):
            self._watch.printed.append(where)
        return self._stdout.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)


_TRACER = re.compile(r"\w*Tracer[<(]|Traced<")


def _holder(values: list[Any]) -> str:
    """What refers to the first of these values, beside the list that they are in here."""
    for holder in gc.get_referrers(values[0]):
        if isinstance(holder, (list, set)) and holder is not values:
            return f"a {type(holder).__name__} of {len(holder)}"
        if isinstance(holder, dict):
            keys, items = list(holder), list(map(id, holder.values()))
            return f"{keys[items.index(id(values[0]))]!r} of a dictionary, a module or an object"
        if isinstance(holder, CellType):
            return "a variable of an enclosing function"
    return "something outside"


def unreturned(closed: ClosedJaxpr, arguments: Sequence[Argument]) -> dict[int, str]:
    """Leaves of arguments whose new values the step computes and does not return.

    Args:
      closed: the program as it was traced, dead code included.
      arguments: of the step.

    Returns:
      For all leaves of an argument of which many are lost, the line that computes one.
    """
    arrays = [x for argument in arguments for x in argument.arrays()]
    kinds = {i: (tuple(x.shape), x.dtype) for i, _, x in arrays if x.shape and _is_number(x)}

    def unused(jaxpr: Jaxpr) -> list[tuple[Var, JaxprEqn]]:
        used, types = graphs.used_vars(jaxpr), set(kinds.values())
        results = ((var, eqn) for eqn in jaxpr.eqns for var in eqn.outvars if var not in used)
        return [(v, eqn) for v, eqn in results if _kind(v) in types]

    if not unused(closed.jaxpr) and len(closed.jaxpr.eqns) > 1:  # one: a jitted function
        return {}
    jaxpr = graphs.inlined(closed).jaxpr
    lost = unused(jaxpr)
    ends = [var for var, _ in lost]
    flows = Flows(jax_compat.replace_jaxpr(jaxpr, outvars=[*ends, *jaxpr.outvars]))
    updates: dict[int, list[int]] = {}  # for each leaf, its updates
    for end, var in enumerate(flows.jaxpr.outvars if ends else ()):
        for index in flows.origins(flows.jaxpr, {end}, UPDATES):
            if kinds.get(index) == _kind(var):
                updates.setdefault(index, []).append(end)
    # One that is returned as well is not lost.
    firsts = {i: found[0] for i, found in updates.items() if max(found) < len(ends)}
    result: dict[int, str] = {}
    for argument in arguments:
        leaves = [i for i, *_ in argument.arrays() if i in kinds]
        gone = [i for i in leaves if i in firsts]
        if gone and 4 * len(gone) >= len(leaves):  # an optimizer's state has more than parameters
            line = graphs.user_source(lost[firsts[gone[0]]][1])
            result |= dict.fromkeys(leaves, line)
    return result


def tell_unreturned(
    lost: Mapping[int, str], arguments: Sequence[Argument], inputs: Sequence[Input], name: str
) -> None:
    """Warn of state that a step computes and does not return."""
    for argument in arguments:
        indices = [index for index, *_ in argument.arrays()]
        lines = [lost[index] for index in indices if index in lost]
        if lines and not any(inputs[index].role == "batch" for index in indices):
            warn(
                f"{name} computes new values of {argument.name} and does not return them.",
                lines[0],
                "a step is a function: what it does not return is lost, and the next call starts "
                f"from the same {argument.name}.",
                f"return the new {argument.name} beside the metrics, and pass it to the next call.",
            )


def _is_number(leaf: Any) -> bool:
    return bool(jax.dtypes.issubdtype(leaf.dtype, np.inexact))


def _kind(var: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(getattr(var.aval, "shape", ())), getattr(var.aval, "dtype", None)
