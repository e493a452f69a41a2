"""What one trip takes of a loop that runs as long as something is true: nothing says how often."""

from __future__ import annotations

from jax.extend.core import Jaxpr, JaxprEqn

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import inner_jaxprs
from autopar.passes.graph.primitives import CONTROL_FLOW
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.sharding.pricing import Pricing


def trip_seconds(eqn: JaxprEqn, rules: Rules, pricing: Pricing) -> float:
    """Seconds of one trip of a `while`, its condition included, whole on every device.

    Loops inside run all their trips if that number is known, else one; of branches the longest.
    """
    return sum(_seconds(body, rules, pricing) for body in inner_jaxprs(eqn))


def _seconds(jaxpr: Jaxpr, rules: Rules, pricing: Pricing) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in CONTROL_FLOW:
            bodies = [_seconds(body, rules, pricing) for body in inner_jaxprs(eqn)]
            each = max(bodies, default=0.0) if name == "cond" else sum(bodies)
            total += each * (eqn.params["length"] if name == "scan" else 1)
        elif eqn.outvars and not is_barrier(eqn):
            total += pricing.start(eqn) + pricing.compute(eqn, rules[eqn])
    return total
