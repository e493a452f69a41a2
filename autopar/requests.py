"""What was asked for: options, cluster and plan beside a function and its own arguments."""

from __future__ import annotations

import abc
import inspect
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autopar.base import hardware
from autopar.base.cluster import Cluster
from autopar.base.errors import AutoparWarning, DeviceError, OptionError, did_you_mean
from autopar.base.options import Options
from autopar.base.ray_options import Ray
from autopar.base.run_flags import missing_flags
from autopar.base.units import format_bytes, format_seconds
from autopar.base.user_code import warn, warn_at_call
from autopar.passes.trace.signature import describe
from autopar.plans.plan import Plan

PlanOrPath = Plan | str | os.PathLike[str]
ClusterOrName = Cluster | str | os.PathLike[str]
"""A cluster, a name that `Cluster.named` takes, or the path of its file."""


class Requested(abc.ABC):
    """A function that something was asked for already: one that is decorated."""

    @abc.abstractmethod
    def with_request(
        self, options: Mapping[str, Any], cluster: ClusterOrName | None, plan: PlanOrPath | None
    ) -> tuple[Callable[..., Any], PlanRequest]:
        """The plain function, and what was asked for with changes."""


@dataclass(frozen=True)
class PlanRequest:
    """What was asked for besides the function and its arguments; `given`: options, unchecked.

    The `devices` are those to compile for; None: all that JAX sees.
    """

    options: Options
    given: Mapping[str, Any]
    cluster: Cluster | None
    plan: PlanOrPath | None
    devices: tuple[jax.Device, ...] | None = None

    @property
    def progress(self) -> bool | None:
        """Whether to show progress; None: as `Progress` does by default."""
        progress: bool | None = self.given.get("progress")
        return progress

    def load(self) -> tuple[Cluster, Plan | None]:
        """The cluster and the plan to follow."""
        made = self.plan
        if made is not None and not isinstance(made, Plan):
            made = Plan.load(made)
        if self.cluster is not None:
            return self.cluster, made
        return (
            Cluster.local(self.devices) if made is None else Cluster.from_dict(made.cluster)
        ), made

    def on(self, devices: Sequence[jax.Device]) -> PlanRequest:
        """The same for these devices.

        Raises:
          OptionError: they are no devices, or the step shall run on Ray actors.
        """
        given = tuple(devices) if isinstance(devices, Iterable) else ()
        if not given or not all(isinstance(device, jax.Device) for device in given):
            raise OptionError(
                f"devices={devices!r} is not possible.",
                why="it must be a sequence of jax.Devices, one at least.",
                hint="devices=jax.devices()[:4], or those of a topology of "
                "jax.experimental.topologies.",
            )
        counts = Counter(given)
        one_mesh = self.plan is None and self.options.stages in (None, 1, "auto")
        if len(set(counts.values())) > 1 or (one_mesh and max(counts.values()) > 1):
            twice = counts.most_common(1)[0][0]
            raise OptionError(
                f"devices={devices!r} is not possible.",
                why=f"{twice} is there {counts[twice]} times.",
                hint="stages of a pipeline may share devices: stages=2 and the same devices twice.",
            )
        if isinstance(self.options.runtime, Ray):
            raise OptionError(
                "devices= is not possible with runtime='ray'.",
                why="every actor has devices of its own.",
                hint="see the options of autopar.Ray.",
            )
        return replace(self, devices=given)


def make_request(
    options: Mapping[str, Any], cluster: ClusterOrName | None, plan: PlanOrPath | None
) -> PlanRequest:
    """Check what was asked for.

    Raises:
      OptionError: the cluster or the plan is none, or an option is impossible.
    """
    if isinstance(cluster, (str, os.PathLike)):
        cluster = Cluster.named(cluster)
    if cluster is not None and not isinstance(cluster, Cluster):
        raise OptionError(
            f"cluster={cluster!r} is not possible.",
            why="it must be an autopar.Cluster, the name of one, or None for the devices that JAX "
            "sees.",
            hint="use a name such as '8x8 h100', Cluster.preset(name) or Cluster.local(devices).",
        )
    if plan is not None and not isinstance(plan, (Plan, str, os.PathLike)):
        raise OptionError(
            f"plan={plan!r} is not possible.", why="it must be a Plan or the path of its file."
        )
    given = dict(options)
    if given.get("progress", False) is None:
        del given["progress"]
    return PlanRequest(Options.from_kwargs(**given), given, cluster, plan)


def read_arguments(
    fn: Any,
    cluster: ClusterOrName | None,
    plan: PlanOrPath | None,
    options_and_kwargs: Mapping[str, Any],
    caller: str,
) -> tuple[Callable[..., Any], PlanRequest, dict[str, Any]]:
    """The plain function, our options, and the step's own arguments by keyword."""
    names = Options.names()
    options = {k: v for k, v in options_and_kwargs.items() if k in names}
    kwargs = {k: v for k, v in options_and_kwargs.items() if k not in names}
    if isinstance(fn, Requested):  # what is asked for now goes before what it was given
        fn, request = fn.with_request(options, cluster, plan)
    elif callable(fn):
        request = make_request(options, cluster, plan)
    else:
        raise OptionError(
            f"autopar.{caller} takes a function first, and got {describe(fn)}.",
            hint=f"autopar.{caller}(train_step, state, batch).",
        )
    parameters, takes_any = _keywords(fn)
    for name in options:
        if name in parameters:
            warnings.warn(
                f"{name}={options[name]!r} is taken as autopar's option, and {name_of(fn)} has a "
                f"parameter {name!r} of its own. To give the function one by keyword, use "
                f"functools.partial({name_of(fn)}, {name}=...).",
                AutoparWarning,
                stacklevel=3,
            )
    unknown = [name for name in kwargs if name not in parameters]
    if unknown and not takes_any:
        known = [*_BESIDE_OPTIONS.get(caller, ("cluster", "plan")), *names]
        raise OptionError(
            f"There is no option {unknown[0]!r}, and {name_of(fn)} has no such parameter.",
            where=f"autopar.{caller}",
            why=f"the options are {', '.join(known)}.",
            hint=_ELSEWHERE.get((caller, unknown[0]))
            or did_you_mean(unknown[0], [*known, *parameters]),
        )
    return fn, request, kwargs


_BESIDE_OPTIONS = {
    "compile": ("cluster", "plan", "devices"),
    "plan": ("cluster",),
    "scaling": ("clusters",),
}
"""What is taken by keyword beside `Options`, where that is not a cluster and a plan."""

_ELSEWHERE = {
    ("plan", "plan"): "autopar.compile(..., plan=...) follows a plan.",
    ("plan", "devices"): "plan for cluster=autopar.Cluster.local(devices), or compile with them.",
    ("plan", "clusters"): "autopar.scaling plans for several.",
}
"""Of names that another function takes: which one."""


def _keywords(fn: Callable[..., Any]) -> tuple[set[str], bool]:
    """The names that a function takes by keyword, and whether it takes any name."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return set(), True
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return {p.name for p in parameters if p.kind in named}, takes_any


def name_of(fn: Callable[..., Any]) -> str:
    """What people call a function."""
    return getattr(fn, "__name__", None) or type(fn).__name__


def in_brief(made: Plan) -> str:
    """What comes of planning, for the line that stays of its progress."""
    from autopar.report.summaries import memory_limit

    estimates, limit = made.estimates, memory_limit(made)
    of = f" of {format_bytes(limit)}" if limit else ""
    memory = f"{format_bytes(estimates.peak_bytes_per_device)}{of} a device"
    return f"{format_seconds(estimates.step_seconds)} a step expected, {memory}"


def for_processes(request: PlanRequest, made: Plan | None, name: str) -> PlanRequest:
    """What can run on the devices of several processes that compute together: one mesh.

    On devices that are absent nothing runs, whatever process they would belong to.

    Raises:
      DeviceError: stages were asked for.
    """
    from autopar.runtime.compiled_pieces import is_absent

    devices = jax.devices() if request.devices is None else request.devices
    if any(map(is_absent, devices)):
        return request
    count = len({device.process_index for device in devices})
    if count == 1:
        return request
    stages = request.options.stages
    if stages not in ("auto", 1) or (made is not None and made.is_pipeline):
        raise DeviceError(
            f"{name} cannot have stages here: its devices are those of {count} processes.",
            where="jax.distributed.initialize()",
            why="each of these processes runs the whole step on one mesh of all devices; what one "
            "stage sends to the next would have to go from process to process.",
            hint="runtime='ray' runs stages on several hosts: start this script once, without "
            "jax.distributed. Here, stages=1 plans one mesh.",
        )
    return replace(request, options=replace(request.options, stages=1))


def check_devices(
    cluster: Cluster, made: Plan | None, devices: Sequence[jax.Device] | None
) -> None:
    """Refuse early, before the minutes that planning may take; `devices` are those given.

    Raises:
      DeviceError: there are fewer devices than the plan needs.

    Warns of a plan for other devices than those that will run it.
    """
    needed = cluster.num_devices if made is None else max(s.num_devices for s in made.stages)
    present = jax.devices() if devices is None else devices
    visible = len(present)
    if needed > visible:
        what = f"The cluster {cluster.name!r} has" if made is None else "The plan needs"
        raise DeviceError(
            f"{what} {needed} devices, and "
            f"{f'JAX sees {visible}' if devices is None else f'{visible} are given'}.",
            where=f"jax.devices() on {jax.default_backend()!r}" if devices is None else "devices=",
            why="compiling a step needs the devices that it will run on.",
            hint="autopar.plan needs no devices; on a CPU, "
            f'jax.config.update("jax_num_cpu_devices", {needed}) before JAX is first used makes '
            "virtual ones.",
        )
    planned = cluster.device.name if made is None else made.cluster["device"]["name"]
    kind = present[0].device_kind
    preset = "cpu" if present[0].platform == "cpu" else hardware.preset_of(kind)
    known = hardware.device_names()
    if preset is not None and planned in known.values() and planned != known[preset]:
        warn_at_call(
            f"The plan is for {planned}, and {kind!r} devices will run it: the results are the "
            "same, but it was chosen for others, and its seconds and bytes are theirs. Without "
            "cluster= and plan=, autopar plans for the devices that are here.",
            AutoparWarning,
        )


def warn_of_flags(plan: Plan, devices: Sequence[jax.Device] | None) -> None:
    """Warn where this process's GPUs will not have what the plan counts on; `devices` are given."""
    present = jax.devices() if devices is None else devices
    if present[0].platform not in ("gpu", "cuda", "rocm"):
        return
    for flag in missing_flags(plan, os.environ):
        warn(
            f"The plan needs {flag.name}={flag.value}.",
            where="the environment",
            why=f"{flag.why}.",
            hint=f"set it before JAX is first used ({flag.source}).",
        )
