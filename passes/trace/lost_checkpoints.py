"""A warning of `jax.checkpoint(prevent_cse=False)` where nothing is computed again for it.

Inside of a scan's body the backward pass is another scan, so that what it computes again is apart.
Elsewhere nothing keeps the two copies apart, and XLA takes them for one, as autopar does ("prevent
CSE", documentation of `jax.checkpoint`).
"""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from autopar.base.errors import AutoparWarning
from autopar.base.user_code import warn_at_call
from autopar.passes.graph.graph import inner_jaxprs, user_source
from autopar.passes.graph.primitives import CONTROL_FLOW, KERNELS, REMATS

_TOLD = 3  # lines


def warn_of_lost_checkpoints(closed: ClosedJaxpr) -> None:
    """One warning, if a step has any: it keeps what they were to compute again.

    Args:
      closed: the step as JAX traced it, with its calls.
    """
    lost = dict.fromkeys(user_source(eqn) for eqn in _lost(closed.jaxpr))
    if not lost:
        return
    lines = [f"- {source}" for source in lost][:_TOLD]
    if len(lost) > _TOLD:
        lines.append(f"- and {len(lost) - _TOLD} more")
    warn_at_call(
        "jax.checkpoint saves no memory in these places, because prevent_cse=False lets XLA take "
        "what is computed again for what was computed before:\n"
        + "\n".join(lines)
        + "\nInside of a scan over layers it does save; elsewhere leave prevent_cse out. autopar "
        "plans the step as if there were no checkpoint.",
        AutoparWarning,
    )


def _lost(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in REMATS and params.get("differentiated") and not params.get("prevent_cse"):
            yield eqn
        elif name not in CONTROL_FLOW and name not in KERNELS:
            for body in inner_jaxprs(eqn):
                yield from _lost(body)
