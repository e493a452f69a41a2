"""`RayExecutable`: a step whose stages run in Ray actors, called like the plain function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from autopar.arrays.buffers import copy_to, own_copy
from autopar.arrays.ray_array import LeafPlace, RayArray, RaySharding
from autopar.arrays.split_array import SplitArray
from autopar.base.errors import TraceError
from autopar.base.progress import Progress
from autopar.base.ray_options import Ray
from autopar.executable import Executable
from autopar.initialize import initialize
from autopar.passes.planner.compiler import Compiled
from autopar.passes.trace.trace import Traced
from autopar.plans.plan import Plan
from autopar.requests import name_of
from autopar.runtime.ray.recovery.lineage import apart

if TYPE_CHECKING:
    from autopar.profile import Profile
    from autopar.runtime.ray.driver.ray_pipeline import RayPipeline
    from autopar.runtime.ray.driver.ray_step import RayProgram, RayStep
    from autopar.runtime.ray.driver.restarts import Recovery


MOST_SOURCE_BYTES = 1 << 16
"""A source that is larger holds arrays rather than their files; the driver reads it."""


class RayExecutable(Executable):
    """A planned step on Ray actors; `autopar.compile(..., runtime="ray")` makes it.

    It is called as an `Executable` is. The leaves that it returns live on the actors: they are
    `RayArray`s, which `numpy.asarray` and `jax.device_get` fetch. A call returns while the actors
    are told what to do, and an error in a stage is raised by a later call, or by what reads a
    result.

    The actors end with `shutdown()`, at the end of a `with` block, when nothing refers to the step
    and its arrays any more, and with the driver's process.
    """

    _compiled: RayStep

    def __init__(
        self,
        fn: Callable[..., Any],
        traced: Traced,
        compiled: Compiled,
        progress: Progress,
        runtime: Ray,
        replan: Callable[[Traced, Compiled, int], Compiled],
    ):
        self._runtime, self._replan = runtime, replan
        self._again = functools.partial(replan, traced, compiled)
        labels = traced.graph.inputs
        donated = (i for i, x in enumerate(labels) if x.donated)
        self._aliases = {i: alias for i in donated if (alias := labels[i].alias) is not None}
        super().__init__(fn, traced, compiled, progress)

    def another(self, traced: Traced, compiled: Compiled, progress: Progress) -> Executable:
        """The same function for other shapes, on actors of its own; the state moves between both.

        Raises:
          ClusterError: there is no room for them beside the first ones.
        """
        asked = self._runtime, self._replan
        return RayExecutable(self._fn, traced, compiled, progress, *asked)

    def _load(self, fn: Callable[..., Any], compiled: Compiled) -> Any:
        program = _on_actors(compiled, self._aliases, self._runtime, name_of(fn), self._again)
        self._pipeline: RayPipeline = program
        return program

    @property
    def plan(self) -> Plan:
        """What was decided, the last time that it was."""
        self._follow()
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, strict: bool) -> Any:
        """See `Executable.run`."""
        self._follow()
        result = super().run(args, kwargs, strict=strict)
        self._follow()
        return result

    def _follow(self) -> None:
        """Take over the plan that runs now, if it was planned again."""
        if not hasattr(self, "_compiled"):
            return  # the first one is not there yet
        pipeline = self._compiled.running.pipeline
        if pipeline is not self._pipeline:
            self._pipeline, self.plan = pipeline, pipeline.plan
            self._in_shardings = pipeline.in_shardings[: self._traced.num_arrays]
            self._out_shardings = pipeline.out_shardings
            self._plan_calls()
            self._compiled.order(self._donated, self._kept)

    def _constant(self, value: Any, sharding: Any) -> Any:
        return own_copy(value)

    def _is_stray(self, leaf: Any, index: int) -> bool:
        return False  # the step places every leaf itself

    def _without_aliases(self, donated: list[Any], kept: list[Any]) -> list[Any]:
        """A copy for each donated leaf on an actor that another leaf uses as well."""
        leaves = dict(zip(self._donated, donated, strict=True))
        return list(apart(leaves, kept, self._compiled.place).values())

    def place_leaf(self, index: int, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
        """See `Executable.place_leaf`; the driver reads the leaf whole and sends it."""
        self._follow()
        shape = self._traced.signature.shapes[index].shape
        whole = read(tuple(slice(0, size) for size in shape))
        return self._compiled.place(whole, LeafPlace("argument", index))

    def source_bytes(self, source: Any) -> bytes | None:
        """See `Executable.source_bytes`."""
        from autopar.runtime.ray.transport.pickling import dumps

        try:
            data = dumps(source, "The source")
        except TraceError:  # the driver reads it
            return None
        return data if len(data) <= MOST_SOURCE_BYTES else None

    # Trees of arrays on actors

    def initialize(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a state on the actors; the driver traces `init_fn` and never holds its result.

        Arguments and errors are those of `Executable.initialize`.

        Raises:
          StageError: it fails on an actor.
        """
        self._follow()
        return initialize(self._traced, self._in_shardings, init_fn, args, kwargs, self._make)

    def _make(
        self,
        on_arrays: Callable[..., list[Any]],
        wanted: Sequence[RaySharding],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> list[Any]:
        tree: Any
        arrays, tree = jax.tree.flatten((args, dict(kwargs)))

        def flat(*arrays: Any) -> list[Any]:
            args, kwargs = tree.unflatten(arrays)
            return on_arrays(*args, **kwargs)

        closed = jax.make_jaxpr(flat)(*arrays)
        indices = {id(sharding): index for index, sharding in enumerate(self._in_shardings)}
        return self._compiled.make(closed, arrays, [indices[id(sharding)] for sharding in wanted])

    def gather(self, tree: Any) -> Any:
        """A tree with every array that lives on actors brought to the driver's default device.

        Args:
          tree: such as a state that the step returned. Other arrays are copied where they are, for
            the next step consumes them as well; leaves that are no arrays stay.
        """
        return super().gather(tree)

    def _gather(self, tree: Any) -> Any:
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, RayArray):
                leaf.copy_to_host_async()

        def fetched(leaf: Any) -> Any:
            if isinstance(leaf, RayArray):
                return leaf.__jax_array__()
            is_here = isinstance(leaf, jax.Array | SplitArray)
            return copy_to(leaf, leaf.sharding) if is_here else leaf

        return jax.tree.map(fetched, tree)

    def apply(self, fn: Callable[..., Any], state: Any, *args: Any) -> Any:
        """`fn(state, *args)`, computed in the driver's process on its default device.

        The arguments are those of `Executable.apply`, but that `fn` is not compiled.

        Returns:
          What `fn` returns. If that has the structure of `state`, leaves of the same shape are put
          where those of `state` are, ready for the next step.
        """
        return super().apply(fn, state, *args)

    def _apply(self, fn: Callable[..., Any], state: Any, *args: Any) -> Any:
        result = fn(self._gather(state), *self._gather(args))
        old: Any
        new: Any
        olds, old = jax.tree.flatten(state)
        news, new = jax.tree.flatten(result)
        if new != old:
            return result
        return old.unflatten([self._back(*pair) for pair in zip(olds, news, strict=True)])

    def _back(self, old: Any, new: Any) -> Any:
        """A new array in the place of an old one, if that has a place."""
        self._follow()
        if not isinstance(old, RayArray) or getattr(new, "shape", None) != old.shape:
            return new
        for index, sharding in enumerate(self._in_shardings):
            shape = self._traced.signature.shapes[index]
            if sharding == old.sharding and (shape.shape, shape.dtype) == (old.shape, new.dtype):
                return self._compiled.place(new, LeafPlace("argument", index))
        return new

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Run the step on these arguments with every instruction timed; the state is kept.

        It is as `Executable.profile`, on the actors. For the seconds of each instruction alone they
        take turns. Those of a `Send` are spent until the bytes have left, those of a `Recv` until
        the arrays are in place. Where actors are on several machines, their clocks are compared by
        asking for the time, to about half of the quickest round trip.

        Raises:
          StageError: the step fails; other errors are those of `Executable.profile`.
        """
        from autopar.profile import profile_of

        self._follow()
        found = self._compiled.profile(*self._profiled_leaves(args, kwargs))
        return profile_of(
            found.program, found.seconds, found.times, line=(), is_received=True, **found.machine
        )

    # The actors

    @property
    def actors(self) -> RayStep:
        """What the driver knows of them."""
        return self._compiled

    @property
    def actor_pids(self) -> tuple[int, ...]:
        """The process ids of the actors, those of one mesh side by side."""
        return self._compiled.running.pool.pids

    @property
    def compile_seconds(self) -> tuple[float, ...]:
        """What compiling its pieces took each actor."""
        return self._compiled.running.pool.compile_seconds

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """What was lost and made again so far, with seconds (`autopar.Ray(max_restarts=...)`)."""
        return self._compiled.recoveries

    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes that each actor has sent to others so far."""
        return tuple(self._compiled.describe("sent"))

    def finish(self) -> None:
        """Wait until the actors have done all steps.

        Raises:
          StageError: one failed.
        """
        self._compiled.finish()
        self._follow()

    def shutdown(self) -> None:
        """End the actors; all arrays on them are gone. It can be called again."""
        self._compiled.close()

    def __enter__(self) -> RayExecutable:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _on_actors(
    compiled: Compiled,
    aliases: Mapping[int, int],
    runtime: Ray,
    name: str,
    replan: Callable[[int], Compiled],
) -> RayProgram:
    """A plan for Ray actors. It is no method, for nothing of theirs may refer to the step."""
    from autopar.runtime.ray.driver.ray_step import RayProgram

    def again(num_actors: int) -> RayProgram:
        return _on_actors(replan(num_actors), aliases, runtime, name, replan)

    return RayProgram(
        compiled.runnable,
        aliases,
        compiled.plan.cluster["devices_per_node"],
        runtime,
        name,
        compiled.plan,
        replan=again if runtime.on_loss == "replan" else None,
    )
