"""What the steps of a loop take: seconds, examples and tokens a second, MFU, memory."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from autopar.base.errors import AutoparWarning, OptionError
from autopar.base.units import format_bytes, format_seconds
from autopar.base.user_code import warn_at_call
from autopar.plans.plan import Plan
from autopar.report.throughput import throughput

WINDOW = 100
"""So many calls are looked back on."""


@dataclass(frozen=True)
class StepMetrics:
    """What the last calls of a step took, as its loop ran them.

    Args:
      steps: calls so far, of all shapes.
      window: of how many calls this is, all of the shapes of the last two that were alike.
      step_seconds: from one call to the next, on average; what the loop does in between counts.
        None: there were no two calls with the same shapes, one after the other.
      examples_per_second: rows of the batch a second, or None.
      tokens_per_second: elements a second of the largest batch leaf that holds token ids, or None
        where there is no such leaf (`autopar.report.throughput`).
      mfu: the share of the devices' peak FLOP/s that the model's own FLOPs are, or None.
      bytes_in_use: of the fullest device of this process now, or None where it does not say (CPUs,
        Ray actors).
      peak_bytes: the most that it had in use so far, or None.
    """

    steps: int
    window: int
    step_seconds: float | None
    examples_per_second: float | None
    tokens_per_second: float | None
    mfu: float | None
    bytes_in_use: int | None
    peak_bytes: int | None

    def as_dict(self) -> dict[str, float]:
        """What is known, by name: what loggers (TensorBoard, W&B, MLflow) take."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if value is not None}

    def __str__(self) -> str:
        parts = [f"step {self.steps}"]
        if self.step_seconds is not None:
            parts.append(f"{format_seconds(self.step_seconds)} a step")
        rates = {"tokens/s": self.tokens_per_second, "examples/s": self.examples_per_second}
        parts += [f"{rate:,.0f} {unit}" for unit, rate in rates.items() if rate is not None]
        parts += [] if self.mfu is None else [f"{self.mfu:.1%} MFU"]
        if self.peak_bytes is not None:
            parts.append(f"{format_bytes(self.peak_bytes)} at most")
        return ", ".join(parts)


class _Watcher:
    """A callback, and how often it is called."""

    def __init__(self, callback: Callable[[StepMetrics], Any], every: int):
        self.callback, self.every = callback, every


@dataclass(frozen=True)
class _Window:
    """The seconds from call to call of one signature, without those in which another was called."""

    plan: Plan
    seconds: deque[float]


class HasPlan(Protocol):
    """Something that was planned."""

    @property
    def plan(self) -> Plan:
        """What was decided."""


class LoopWatch:
    """When the calls of a step were made; one for all that is compiled of it.

    A call costs a look at the clock. What its callbacks ask for waits for its results.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._windows: dict[int, _Window] = {}
        self._called: _Window | None = None
        self._shown: _Window | None = None
        self._time = 0.0
        self._watchers: list[_Watcher] = []

    def stepped(self, owner: HasPlan, results: Any) -> None:
        """A call was made of what was compiled for one signature, the `owner`."""
        self.steps += 1
        plan = owner.plan
        if (window := self._windows.get(id(plan))) is None:
            window = self._windows[id(plan)] = _Window(plan, deque(maxlen=WINDOW))
        due = [each for each in self._watchers if self.steps % each.every == 0]
        if due:
            jax.block_until_ready(results)
        now = time.perf_counter()
        if window is self._called:  # else it was planned and compiled, or others came in between
            window.seconds.append(now - self._time)
            self._shown = window
        self._called, self._time = window, now
        for each in due:
            try:
                each.callback(self.metrics())
            except Exception as error:  # raised, it would take the new state with it
                name = getattr(each.callback, "__name__", type(each.callback).__name__)
                warn_at_call(
                    f"{name}, which on_step calls, failed after step {self.steps}: "
                    f"{type(error).__name__}: {error}",
                    AutoparWarning,
                )

    def metrics(self) -> StepMetrics:
        """Of the calls so far; waits for nothing."""
        times = tuple(self._shown.seconds) if self._shown is not None else ()
        seconds = sum(times) / len(times) if times else None
        found = throughput(self._shown.plan, seconds) if self._shown and seconds else None
        in_use, peak = _memory()
        return StepMetrics(
            steps=self.steps,
            window=len(times),
            step_seconds=seconds,
            examples_per_second=found.examples_per_second if found else None,
            tokens_per_second=found.tokens_per_second if found else None,
            mfu=found.model_flops_utilization if found and found.model_flops else None,
            bytes_in_use=in_use,
            peak_bytes=peak,
        )

    def watch(self, callback: Callable[[StepMetrics], Any], every: int) -> Callable[[], None]:
        """See `AroundStep.on_step`."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise OptionError(
                f"every={every!r} is not possible.", where="on_step", why="it counts calls."
            )
        if not callable(callback):
            raise OptionError(f"on_step takes a function, and got {callback!r}.")
        watcher = _Watcher(callback, every)
        self._watchers.append(watcher)

        def end() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

        return end


def _memory() -> tuple[int | None, int | None]:
    """Bytes in use, now and at most, of the fullest device of this process."""
    found = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    now, most = (_most(found, name) for name in ("bytes_in_use", "peak_bytes_in_use"))
    return now, most


def _most(found: Sequence[dict[str, int]], name: str) -> int | None:
    return max((stats[name] for stats in found if name in stats), default=None)
