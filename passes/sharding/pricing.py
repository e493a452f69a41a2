"""What resharding and computing cost on one logical mesh of one cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from autopar.base.cluster import Cluster
from autopar.base.costs import alpha_beta, roofline_seconds
from autopar.passes.graph.primitives import KERNELS, MATRIX_FUNCTIONS, PRODUCTS
from autopar.passes.primitives.exchanges import EXPECTED_ROUNDS
from autopar.passes.primitives.factor_rule import FactorRule
from autopar.passes.primitives.flops import SPECTRAL, SPECTRAL_SHARE, flops
from autopar.passes.primitives.group_tiling import (
    GROUPED,
    Tiling,
    has_parts,
    row_dims,
    tiling_of,
)
from autopar.passes.sharding.compiler_rules import GPU, rules_of
from autopar.passes.sharding.exchange_rounds import exchange_round
from autopar.passes.sharding.layout import Layout, num_parts
from autopar.passes.sharding.reshard import (
    COLLECTIVES,
    HOST_COPIES,
    ReshardStep,
    adding,
    reshard_steps,
)
from autopar.passes.sharding.scopes import value_bytes
from autopar.passes.sharding.strategy_tables import MESHES_KEPT, tables_of
from autopar.passes.sharding.traffic import MemoryTraffic, alone


@cache
def _inexact_name(dtype: Any) -> str:
    """The name of a dtype of floats or complex numbers; of others none."""
    return str(dtype) if jnp.issubdtype(dtype, jnp.inexact) else ""


class _Prices(NamedTuple):
    """What resharding takes on a mesh of a cluster; found once in the process."""

    alpha_beta: dict[tuple[str, tuple[int, ...]], tuple[float, float]]
    linear: dict[tuple[Layout, Layout, float], tuple[float, float]]


@lru_cache(maxsize=MESHES_KEPT)
def _prices_of(cluster: Cluster, mesh: tuple[int, ...], reduce_scatter: bool) -> _Prices:
    return _Prices({}, {})


class Pricing:
    """Prices of one mesh; `reduce_scatter=False` completes partial sums by all-reduces only.

    The `traffic` says what equations move in memory; without it each is a kernel of its own.
    """

    def __init__(
        self,
        cluster: Cluster,
        mesh: tuple[int, ...],
        reduce_scatter: bool = True,
        traffic: MemoryTraffic | None = None,
    ):
        self.cluster, self.mesh, self.reduce_scatter = cluster, mesh, reduce_scatter
        self._traffic_of = alone if traffic is None else traffic.of
        self._known = _prices_of(cluster, mesh, reduce_scatter)
        self.tables = tables_of(mesh)
        # By the ids of lists of layouts, which the tables keep.
        self.resharding = self.tables.resharding.setdefault((cluster, reduce_scatter), {})
        self._compute: dict[Any, float] = {}
        rules = rules_of(cluster.device.name)
        self._grouped, self._fills_stacks = rules.grouped, rules.fills_stacks
        self._is_gpu = rules.backend == GPU

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
        known = self._known.linear.get(key)
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
            known = self._known.linear[key] = (fixed, per_byte)
        return known

    def step(self, step: ReshardStep) -> tuple[float, float]:
        """Seconds of one step as (a, b): a + b x the bytes of a device's larger buffer."""
        key = (step.kind, step.axes)
        if key not in self._known.alpha_beta:
            if step.kind in COLLECTIVES:
                found = alpha_beta(step.kind, self.cluster, self.mesh, step.axes)
            elif step.kind in HOST_COPIES:
                found = self.cluster.device.kernel_seconds, 1 / self.cluster.host_bandwidth
            else:
                found = 0.0, 1 / self.cluster.device.memory_bandwidth
            self._known.alpha_beta[key] = found
        return self._known.alpha_beta[key]

    def exchange(
        self, eqn: JaxprEqn, operands: Sequence[Layout], results: Sequence[Layout]
    ) -> tuple[float, float]:
        """Seconds of what devices exchange inside an equation: latency, and moving bytes."""
        found = exchange_round(eqn, operands, results, self.mesh)
        if found is None:
            return 0.0, 0.0
        alpha, beta = self.step(found[0])
        return EXPECTED_ROUNDS * alpha, EXPECTED_ROUNDS * beta * found[1]

    def compute(
        self, eqn: JaxprEqn, rule: FactorRule, row_parts: int = 1, *, stacking: bool = True
    ) -> float:
        """Seconds of one equation on one device, undivided, without starting its kernel.

        The rows of a grouped product are cut in `row_parts`. With `stacking`, what a loop stacks of
        it counts too.
        """
        traffic = self._traffic_of(eqn)
        device = self.cluster.device
        written = traffic.bytes / (device.row_share if traffic.has_rows else 1.0)
        moved = written + traffic.inner_bytes / device.fused_speedup
        moved += traffic.stack_bytes if stacking and self._fills_stacks else 0
        moved += traffic.added_bytes if self._is_gpu else 0
        key = (id(rule), eqn.primitive, moved, row_parts)
        if key not in self._compute:
            self._compute[key] = self._compute_seconds(eqn, rule, moved, row_parts)
        return self._compute[key]

    def arithmetic(self, eqn: JaxprEqn, rule: FactorRule) -> float:
        """Of `compute`, what it would take if memory took no time."""
        return self._compute_seconds(eqn, rule, 0.0, 1)

    def start(self, eqn: JaxprEqn, row_parts: int = 1) -> float:
        """Seconds of starting an equation's kernel, however its work is divided."""
        kernels = self._traffic_of(eqn).kernels
        tiling = self._tiling(eqn, row_parts)
        if tiling is not None:
            kernels += tiling.kernels
        return kernels * self.cluster.device.kernel_seconds

    def row_parts(self, eqn: JaxprEqn, left: Layout) -> int:
        """In how many parts the rows of a grouped product are cut, whose left operand lies so."""
        if eqn.primitive.name not in GROUPED:
            return 1
        return num_parts((axis for dim in row_dims(eqn) for axis in left.dims[dim]), self.mesh)

    def rowless(self, eqn: JaxprEqn, rule: FactorRule, row_parts: int) -> float:
        """Of `compute`, the seconds that a grouped product takes with fewer rows as well.

        Each group has a tile that is not full, and its matrix is read.
        """
        if self._tiling(eqn, row_parts) is None:
            return 0.0
        whole, half = (self.compute(eqn, rule, parts) for parts in (row_parts, 2 * row_parts))
        # Undivided, half of the rows are taken twice: what is read again is what stays.
        return min(max(half - whole, 0.0), whole)

    def _tiling(self, eqn: JaxprEqn, row_parts: int) -> Tiling | None:
        """How a grouped product is computed."""
        if eqn.primitive.name not in GROUPED:
            return None
        return tiling_of(eqn, self._grouped, parts=row_parts)

    def _compute_seconds(
        self, eqn: JaxprEqn, rule: FactorRule, moved: float, row_parts: int
    ) -> float:
        is_matmul = eqn.primitive.name in PRODUCTS | KERNELS
        # A product is as quick as its operands allow; what it adds up in is free.
        typed = eqn.invars if is_matmul else eqn.outvars
        dtypes = {_inexact_name(atom.aval.dtype) for atom in typed} - {""}
        dtypes = dtypes or {str(eqn.outvars[0].aval.dtype)}
        count: float = flops(eqn, rule)
        tiling = self._tiling(eqn, row_parts)
        if tiling is not None:
            count *= tiling.repeats
            moved += tiling.moved_bytes * row_parts
        elif self._grouped.has_kernel and eqn.primitive.name in GROUPED and has_parts(eqn):
            # Rows are put in the order of their groups, and back.
            moved += 2 * (value_bytes(eqn.invars[0]) + value_bytes(eqn.outvars[0]))
        if eqn.primitive.name in MATRIX_FUNCTIONS and self._is_gpu:
            share = SPECTRAL_SHARE if eqn.primitive.name in SPECTRAL else 1.0
            count, dtypes = count / share, {"float64"}
        return max(
            roofline_seconds(count, moved, dtype, self.cluster, is_matmul=is_matmul)
            for dtype in sorted(dtypes)
        )
