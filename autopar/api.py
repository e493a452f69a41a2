"""`parallelize`, `compile` and `plan`: an ordinary train step runs on every device."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from autopar.around_step import AroundStep
from autopar.base.displayed import Displayed
from autopar.base.errors import AutoparError, OptionError
from autopar.base.progress import Progress
from autopar.base.user_code import shorten, shortens
from autopar.building import build, plan_traced, trace_step
from autopar.passes.graph import jax_compat
from autopar.passes.trace.graph_objects import signature_of_call
from autopar.passes.trace.signature import Convention, Signature
from autopar.plan_verification import Verifier
from autopar.plans.plan import Plan
from autopar.requests import (
    ClusterOrName,
    PlanOrPath,
    PlanRequest,
    Requested,
    in_brief,
    make_request,
    name_of,
    read_arguments,
)
from autopar.shown_options import shows_options

# What traces, plans and runs is imported when it is used: importing this module stays light.
if TYPE_CHECKING:
    import jax

    from autopar.executable import Executable
    from autopar.profile import Profile


Settings = tuple[Any, ...]
"""Those of JAX that `jax.jit` traces anew for."""


class Parallelized(Displayed, Requested, AroundStep):
    """A step that plans itself when it is called, as `jax.jit` compiles; `parallelize` makes it.

    It is planned once for every signature: the structure of the arguments, shapes, dtypes, and
    static leaves; but a smaller batch follows the plan of a larger one, and other weak types, or
    other settings of JAX (`jax.enable_x64` and the like), that which is known for the same shapes.
    Inside another JAX transformation it is the plain function, and under `jax.disable_jit()`.
    """

    page = ("small_pages", "parallelized_page")

    __name__: str
    __wrapped__: Callable[..., Any]

    def __init__(self, fn: Callable[..., Any], request: PlanRequest):
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._request = request
        self._convention = Convention.of(fn, request.options.static_argnums)
        self._executables: dict[tuple[Signature, Settings], Executable] = {}
        self._planned: list[Executable] = []  # those that follow no other one's plan
        # Of plans that were followed: whether for weak types, a batch cut as there, and settings.
        self._told: set[tuple[bool, bool, bool]] = set()
        self._last: tuple[Executable, Settings] | None = None
        self._lock = threading.RLock()
        self._was_transformed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, planning and compiling it first where these arguments are new.

        Raises:
          AutoparError: see `compile`.
          DonatedBufferError: a leaf was consumed by an earlier call.
        """
        if jax_compat.is_tracing():
            if not self._was_transformed:
                from autopar.call_checks import tell_transformed

                self._was_transformed = tell_transformed(name_of(self._fn))
            return self._fn(*args, **kwargs)
        if jax_compat.is_jit_disabled():
            from autopar.call_checks import run_plain

            return run_plain(self._fn, name_of(self._fn), args, kwargs)
        try:
            return self._run(args, kwargs)
        except Exception as error:
            shorten(error)
            raise

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        settings, last = jax_compat.trace_context(), self._last
        if last is not None and last[1] == settings:
            from autopar.executable import SignatureMismatch

            try:
                return last[0].run(args, kwargs, strict=True)
            except SignatureMismatch as mismatch:
                signature = mismatch.signature
        else:
            signature = signature_of_call(self._convention, args, kwargs)
        return self._find(signature, args, kwargs, settings).run(args, kwargs, strict=True)

    def _find(
        self,
        signature: Signature,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        settings: Settings,
    ) -> Executable:
        with self._lock:
            known = signature, settings
            executable = self._executables.get(known)
            if executable is None:
                with jax_compat.jitted():
                    executable = self._new(signature, args, kwargs)
                self._executables[known] = executable
                executable.watched_by(self._loop)
            self._last = executable, settings
            return executable

    def _new(
        self, signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Executable:
        """An executable for a new signature; people are told why it is needed."""
        from autopar import new_shapes

        name = name_of(self._fn)
        guide = new_shapes.nearest(self._planned, signature)
        try:
            if guide is not None:
                traced = functools.partial(trace_step, self._fn, args, kwargs, self._request)
                followed = new_shapes.follow(guide, name, self._request, traced)
                if followed is not None:
                    cuts = new_shapes.is_cut_alike(guide, followed)
                    is_same = guide.traced.signature == signature
                    kind = new_shapes.is_retyped(guide.traced, signature), cuts, is_same
                    if kind not in self._told:
                        self._told.add(kind)
                        new_shapes.tell_following(name, guide, followed, cuts)
                    return followed
            new_shapes.tell_planning(name, self._planned, signature)
            executable = build(self._fn, args, kwargs, self._request)
        except AutoparError as error:
            if guide is not None and not new_shapes.is_retyped(guide.traced, signature):
                error.add_note(new_shapes.leave_out(name, guide))
            raise
        self._planned.append(executable)
        return executable

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the instance is argument 0 and positions count it, as in `jax.jit`."""
        return self if instance is None else types.MethodType(self, instance)

    def with_request(
        self, options: Mapping[str, Any], cluster: ClusterOrName | None, plan: PlanOrPath | None
    ) -> tuple[Callable[..., Any], PlanRequest]:
        """The plain function, and what was asked for with changes."""
        made = self._request
        return self._fn, make_request(
            {**made.given, **options},
            made.cluster if cluster is None else cluster,
            made.plan if plan is None else plan,
        )

    @property
    @shortens
    def plan(self) -> Plan:
        """The plan that ran last.

        Raises:
          AutoparError: the step has not been called yet.
        """
        return self.executable.plan

    @property
    @shortens
    def executable(self) -> Executable:
        """What ran last: its shardings, its compiled program.

        Raises:
          AutoparError: the step has not been called yet.
        """
        if self._last is None:
            raise AutoparError(
                f"{name_of(self._fn)} has no plan yet.",
                why="it is planned when it is first called, for the shapes of its arguments.",
                hint="call it, or use autopar.compile or autopar.plan, which need shapes alone.",
            )
        return self._last[0]

    @shortens
    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """`Executable.profile` of these arguments, which are planned first if they are new."""
        signature = signature_of_call(self._convention, args, kwargs)
        settings = jax_compat.trace_context()
        return self._find(signature, args, kwargs, settings).profile(*args, **kwargs)

    def _compiled_steps(self) -> tuple[Executable, ...]:
        return tuple(self._executables.values())

    def _last_compiled(self) -> Executable:
        return self.executable

    def gather(self, tree: Any) -> Any:
        """`Executable.gather` of what ran last."""
        return self.executable.gather(tree)

    def apply(self, fn: Callable[..., Any], state: Any, *args: Any) -> Any:
        """`Executable.apply` of what ran last."""
        return self.executable.apply(fn, state, *args)

    def __repr__(self) -> str:
        count = len(self._executables)
        return f"<{name_of(self._fn)}, parallelized, {count} plan{'' if count == 1 else 's'}>"


@overload
def parallelize(
    fn: Callable[..., Any],
    *,
    cluster: ClusterOrName | None = None,
    plan: PlanOrPath | None = None,
    **options: Any,
) -> Parallelized: ...


@overload
def parallelize(
    fn: None = None,
    *,
    cluster: ClusterOrName | None = None,
    plan: PlanOrPath | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Parallelized]: ...


@shows_options
def parallelize(
    fn: Callable[..., Any] | None = None,
    *,
    cluster: ClusterOrName | None = None,
    plan: PlanOrPath | None = None,
    **options: Any,
) -> Parallelized | Callable[[Callable[..., Any]], Parallelized]:
    """Make a train step run on all devices; a decorator, with or without options.

    The step is planned and compiled when it is first called, and again for new shapes; a smaller
    batch, such as the last one of an epoch, follows the plan that is known. It returns
    what the plain function returns, as `jax.Array`s that lie where the next call wants them.
    The state that is passed in is consumed (donated), unless `donate_argnums=()`.

    Args:
      fn: an ordinary function of arrays in pytrees: state and batch to new state and metrics.
      cluster: the devices to plan for, also by name ("8x8 h100"); by default all that JAX sees.
      plan: a plan to follow, or the path of its file, instead of planning.
      **options: what is asked of the plan, as on the page Options.

    Raises:
      OptionError: an option does not exist or has an impossible value.

    >>> import jax, jax.numpy as jnp, autopar
    >>> @autopar.parallelize(method="data")
    ... def step(w, x):
    ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    >>> step(jnp.ones((4, 2)), jnp.ones((8, 4))).shape
    (4, 2)
    """
    if fn is None:
        return functools.partial(parallelize, cluster=cluster, plan=plan, **options)
    if isinstance(fn, Parallelized):
        return Parallelized(*fn.with_request(options, cluster, plan))
    if not callable(fn):
        raise OptionError(
            f"parallelize takes a function, and got {fn!r}.",
            hint="give options by keyword: @autopar.parallelize(method='data').",
        )
    return Parallelized(fn, make_request(options, cluster, plan))


@shows_options
def compile(
    fn: Callable[..., Any],
    *args: Any,
    cluster: ClusterOrName | None = None,
    plan: PlanOrPath | None = None,
    devices: Sequence[jax.Device] | None = None,
    **options_and_kwargs: Any,
) -> Executable:
    """Plan and compile a step ahead of time.

    Args:
      fn: as for `parallelize`.
      *args: the arguments it will be called with, or `jax.ShapeDtypeStruct`s in their place.
      cluster: the devices to plan for, also by name ("8x8 h100"); by default all that JAX sees.
      plan: a plan to follow, or the path of its file, instead of planning.
      devices: those to compile for, mesh by mesh; by default all that JAX sees. Stages may share
        them: `stages=2, devices=2 * jax.devices()`. Where they are not there
        (`jax.experimental.topologies`), what is returned cannot run, and has the compiler's
        `memory()`, `hlo()` and `cost()`.
      **options_and_kwargs: what is asked of the plan, as on the page Options; all other names are
        the step's own arguments by keyword.

    Raises:
      OptionError: an option does not exist or has an impossible value.
      TraceError: the function cannot be traced to a program with results.
      BatchArgumentError: the batch is missing, ambiguous, or does not divide.
      InexactMicrobatchError: no exact split into as many microbatches as asked exists.
      PinError: a pin matches nothing, does not divide, or conflicts with another.
      MemoryLimitError: nothing fits the memory of the devices.
      PlanMismatchError: `plan` is not for this program and these options.
      DeviceError: there are fewer devices than the plan needs.

    >>> import jax.numpy as jnp, autopar
    >>> step = autopar.compile(lambda w, x: (w + x.sum(0), x.mean()),
    ...                        jnp.ones(4), jnp.ones((8, 4)), method="data")
    >>> step.plan.method
    'data'
    """
    fn, request, kwargs = read_arguments(fn, cluster, plan, options_and_kwargs, "compile")
    if devices is not None:
        request = request.on(devices)
    return build(fn, args, kwargs, request)


@shows_options
def plan(
    fn: Callable[..., Any],
    *args: Any,
    cluster: ClusterOrName | None = None,
    **options_and_kwargs: Any,
) -> Plan:
    """Decide how a step would run on a cluster; no device of it is needed.

    Arguments and errors are those of `compile`, but for those of devices.

    >>> import jax, numpy as np, autopar
    >>> shape = jax.ShapeDtypeStruct((64, 32), np.float32)
    >>> plan = autopar.plan(lambda w, x: w + x.sum(0), jax.ShapeDtypeStruct((32,), np.float32),
    ...                     shape, cluster=autopar.Cluster.preset("dgx-h100"), method="data")
    >>> plan.stages[0].num_devices
    8
    """
    fn, request, kwargs = read_arguments(fn, cluster, None, options_and_kwargs, "plan")
    with Progress(f"planning {name_of(fn)}", request.progress) as progress:
        on, known = request.load()
        traced = trace_step(fn, args, kwargs, request, on, progress)
        made = plan_traced(traced, request, on, known, progress).plan
        progress.conclude(in_brief(made))
        return made.knowing(Verifier(traced, request, name_of(fn)))
