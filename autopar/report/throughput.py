"""How much of a batch a plan's step gets through, what share of the devices it uses, its cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.base.cluster import Cluster
from autopar.base.errors import OptionError
from autopar.base.plan_records import PlanRecord, TensorPlan
from autopar.base.units import format_count

_SECONDS_PER_HOUR = 3600
_MILLION = 1e6


@dataclass(frozen=True)
class Throughput:
    """What a step gets done.

    Args:
      step_seconds: that the plan expects.
      num_devices: of the cluster, whether the plan uses all of them or not.
      examples: rows of the batch, or None where the step has none.
      tokens: elements of the largest batch leaf that has integers, two dimensions and the batch
        along one of them, which are token ids in a language model; or None where there is no such
        leaf.
      model_flops: those of matrix products, convolutions and kernels in the step as it was written,
        once each, whatever is computed again, padded or replicated.
      peak_seconds: that these would take if all devices ran at the peak for the dtypes of the
        operands.
      price_per_device_hour: of the cluster, in any currency; 0 where it is not known.
    """

    step_seconds: float
    num_devices: int
    examples: int | None
    tokens: int | None
    model_flops: float
    peak_seconds: float
    price_per_device_hour: float

    @property
    def examples_per_second(self) -> float | None:
        """Rows of the batch a second."""
        return self._rate(self.examples)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second."""
        return self._rate(self.tokens)

    @property
    def model_flops_utilization(self) -> float:
        """MFU: `peak_seconds` over `step_seconds`."""
        return self.peak_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def model_flops_per_device_second(self) -> float:
        """Model FLOP/s of a device."""
        return self._rate(self.model_flops / self.num_devices) or 0.0

    def cost_per_million(self, price_per_device_hour: float | None = None) -> float | None:
        """What a million tokens cost (of a step without tokens: a million examples).

        Args:
          price_per_device_hour: None: that of the cluster.

        Returns:
          The cost in the price's currency; None where no price is known, or nothing to count.

        Raises:
          OptionError: the price is negative.
        """
        price = price_per_device_hour
        price = self.price_per_device_hour if price is None else price
        if not 0 <= price < math.inf:
            raise OptionError(f"price_per_device_hour={price!r} is not possible.")
        count = self.tokens or self.examples
        if not price or not count:
            return None
        per_step = self.num_devices * price * self.step_seconds / _SECONDS_PER_HOUR
        return _MILLION * per_step / count

    def __str__(self) -> str:
        parts = []
        for rate, unit in (
            (self.tokens_per_second, "tokens/s"),
            (self.examples_per_second, "examples/s"),
        ):
            parts += [] if rate is None else [f"{format_count(rate)} {unit}"]
        if self.model_flops:
            parts.append(f"{self.model_flops_utilization:.1%} MFU")
        if cost := self.cost_per_million():
            unit = "tokens" if self.tokens else "examples"
            parts.append(f"{cost:.3g} per million {unit}")
        return ", ".join(parts)

    def _rate(self, count: float | None) -> float | None:
        return count / self.step_seconds if count and self.step_seconds else None


def throughput(plan: PlanRecord, step_seconds: float | None = None) -> Throughput:
    """The throughput of a plan, with its own expected step or another one."""
    cluster = Cluster.from_dict(plan.cluster)
    flops = plan.estimates.model_flops
    rows = plan.pipeline.model.batch_rows if plan.pipeline.model else ()
    examples = max(rows, default=None)
    return Throughput(
        step_seconds=plan.estimates.step_seconds if step_seconds is None else step_seconds,
        num_devices=cluster.num_devices,
        examples=examples,
        tokens=_tokens(plan, examples),
        model_flops=sum(flops.values()),
        peak_seconds=_peak_seconds(flops, cluster),
        price_per_device_hour=cluster.price_per_device_hour,
    )


def _peak_seconds(flops: Mapping[str, float], cluster: Cluster) -> float:
    rates = {dtype: cluster.device.peak_flops_for(dtype) for dtype in flops}
    return sum(count / rates[dtype] for dtype, count in flops.items()) / cluster.num_devices


def _tokens(plan: PlanRecord, examples: int | None) -> int | None:
    def are_ids(tensor: TensorPlan) -> bool:
        is_table = len(tensor.shape) == 2 and examples in tensor.shape
        is_column = 1 in tensor.shape and examples != 1
        is_whole = tensor.dtype.lstrip("u").startswith("int")
        return tensor.role == "batch" and is_table and not is_column and is_whole

    return max((math.prod(x.shape) for x in plan.inputs if are_ids(x)), default=None)
