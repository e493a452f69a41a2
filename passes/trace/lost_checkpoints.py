"""A warning of `jax.checkpoint(prevent_cse=False)` where nothing is computed again for it.

In a scan over layers the backward pass is another scan, so that what it computes again is apart.
Elsewhere nothing keeps the two copies apart, and XLA takes them for one, as autopar does ("prevent
CSE", documentation of `jax.checkpoint`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from autopar.base.errors import AutoparWarning
from autopar.base.user_code import warn_at_call
from autopar.passes.graph.graph import flatten, inner_jaxprs, map_inner_jaxprs, user_source
from autopar.passes.graph.name_stacks import pass_of
from autopar.passes.graph.primitives import CONTROL_FLOW, HEAVY, KERNELS, REMATS, TRANSCENDENTAL

_TOLD = 3  # lines


def warn_of_lost_checkpoints(closed: ClosedJaxpr, flat: ClosedJaxpr) -> None:
    """One warning, if a step keeps products or functions that such a checkpoint is to make again.

    Args:
      closed: the step as JAX traced it, with its calls.
      flat: the same without them, as it is planned.
    """
    if not any(_may_be_lost(eqn) for eqn in _all(closed.jaxpr)):
        return
    apart = flatten(ClosedJaxpr(_kept_apart(closed.jaxpr), closed.consts))
    lost = _made_again(apart.jaxpr) - _made_again(flat.jaxpr)
    if not lost:
        return
    lines = [f"- {source}" for source in lost][:_TOLD]
    if len(lost) > _TOLD:
        lines.append(f"- and {len(lost) - _TOLD} more")
    warn_at_call(
        "jax.checkpoint saves no memory for these lines, because prevent_cse=False lets XLA take "
        "what is computed again for what was computed before:\n"
        + "\n".join(lines)
        + "\nInside of a scan over layers it does save; elsewhere leave prevent_cse out. autopar "
        "plans these lines as if there were no checkpoint.",
        AutoparWarning,
    )


def _may_be_lost(eqn: JaxprEqn) -> bool:
    params = eqn.params
    is_derived = eqn.primitive.name in REMATS and params.get("differentiated")
    return bool(is_derived) and not params.get("prevent_cse")


def _all(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for body in inner_jaxprs(eqn):
            yield from _all(body)


def _kept_apart(jaxpr: Jaxpr) -> Jaxpr:
    """The same whose checkpoints all compute again."""
    eqns = []
    for eqn in jaxpr.eqns:
        params = eqn.params
        if eqn.primitive.name not in KERNELS:
            params = map_inner_jaxprs(params, _kept_apart)
        if _may_be_lost(eqn):
            params = {**params, "prevent_cse": True}
        eqns.append(eqn if params is eqn.params else eqn.replace(params=params))
    return jaxpr.replace(eqns=eqns)


def _is_again(eqn: JaxprEqn) -> bool:
    return pass_of(str(eqn.source_info.name_stack)) == "checkpoint"


def _made_again(jaxpr: Jaxpr) -> Counter[str]:
    """How often lines of the user's are computed again for the program's own checkpoints."""
    found = Counter[str]()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in CONTROL_FLOW:
            for body in inner_jaxprs(eqn):
                found += _made_again(body)
        elif (name in HEAVY or name in TRANSCENDENTAL) and _is_again(eqn):
            found[user_source(eqn)] += 1
    return found
