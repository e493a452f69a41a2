"""What resharding and computing cost on one logical mesh of one cluster."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import JaxprEqn

from autopar.base.cluster import Cluster
from autopar.base.costs import alpha_beta, compute_seconds
from autopar.passes.graph.primitives import CONSTRAIN, KERNELS, PRODUCTS, UNFUSED
from autopar.passes.primitives.factor_rule import FactorRule
from autopar.passes.primitives.flops import flops
from autopar.passes.sharding.layout import Layout
from autopar.passes.sharding.reshard import COLLECTIVES, ReshardStep, adding, reshard_steps
from autopar.passes.sharding.scopes import value_bytes


class Pricing:
    """Prices of one mesh; `reduce_scatter=False` completes partial sums by all-reduces only."""

    def __init__(self, cluster: Cluster, mesh: tuple[int, ...], reduce_scatter: bool = True):
        self.cluster, self.mesh, self.reduce_scatter = cluster, mesh, reduce_scatter
        self._alpha_beta: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}
        self._linear: dict[tuple[Layout, Layout, float], tuple[float, float]] = {}
        self._compute: dict[Any, float] = {}

    def reshard(
        self,
        source: Layout,
        target: Layout,
        shape: tuple[int, ...],
        size: int,
        sum_ratio: float = 1.0,
    ) -> float:
        """Seconds of turning one layout of a value into another, once."""
        fixed, per_byte = self.linear(source, target, sum_ratio)
        return fixed + per_byte * math.prod(shape) * size

    def linear(self, source: Layout, target: Layout, sum_ratio: float = 1.0) -> tuple[float, float]:
        """Seconds of a resharding as (a, b): a + b x the whole value's bytes, for any shape.

        Where devices add, an element has `sum_ratio` times the bytes that it has in the value.
        """
        key = (source, target, sum_ratio)
        known = self._linear.get(key)
        if known is None:
            fixed = per_byte = 0.0
            if source != target:
                steps = reshard_steps(source, target, self.mesh, self.reduce_scatter)
                inside = adding(steps)
                for place, step in enumerate(steps):
                    alpha, beta = self.step(step)
                    ratio = sum_ratio if place in inside else 1.0
                    fixed += alpha
                    per_byte += ratio * beta / min(step.parts_in, step.parts_out)
            known = self._linear[key] = (fixed, per_byte)
        return known

    def step(self, step: ReshardStep) -> tuple[float, float]:
        """Seconds of one step as (a, b): a + b x the bytes of a device's larger buffer."""
        key = (step.kind, step.axes)
        if key not in self._alpha_beta:
            self._alpha_beta[key] = (
                alpha_beta(step.kind, self.cluster, self.mesh, step.axes)
                if step.kind in COLLECTIVES
                else (0.0, 1 / self.cluster.device.memory_bandwidth)
            )
        return self._alpha_beta[key]

    def compute(self, eqn: JaxprEqn, rule: FactorRule) -> float:
        """Seconds of one equation on one device, undivided."""
        key = (id(rule), eqn.primitive)
        if key not in self._compute:
            self._compute[key] = self._compute_seconds(eqn, rule)
        return self._compute[key]

    def _compute_seconds(self, eqn: JaxprEqn, rule: FactorRule) -> float:
        if eqn.primitive.name == CONSTRAIN:
            return 0.0
        moved = sum(map(value_bytes, eqn.outvars))
        if eqn.primitive.name in UNFUSED:  # a fused elementwise chain reads its operands once
            moved += sum(map(value_bytes, eqn.invars))
        return compute_seconds(
            flops(eqn, rule),
            moved,
            str(eqn.outvars[0].aval.dtype),
            self.cluster,
            is_matmul=eqn.primitive.name in PRODUCTS | KERNELS,
        )
