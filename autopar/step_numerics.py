"""`autopar.verify_numerics`: whether a plan computes what the plain function says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.base.errors import OptionError
from autopar.base.numerics_records import LeafError
from autopar.base.progress import Progress
from autopar.building import plan_traced, trace_step
from autopar.executable import Executable
from autopar.passes.trace.trace import Traced
from autopar.requests import ClusterOrName, PlanOrPath, PlanRequest, name_of, read_arguments
from autopar.shown_options import shows_options

if TYPE_CHECKING:
    from autopar.passes.planner.compiler import Compiled
    from autopar.report.numerics_report import Numerics

_Run = tuple["Traced", "Compiled", tuple[Any, Mapping[str, Any]]]
"""A step's trace, its plan, and the arguments."""

ROUNDINGS = 100
"""Of the narrowest dtype of a program, by which its numbers may differ in their own dtypes."""

WIDE_TOLERANCE = 1e-8
"""In float64: above what sums in another order make, below what any formula does."""


@shows_options
def verify_numerics(
    fn: Callable[..., Any],
    *args: Any,
    plan: PlanOrPath | None = None,
    cluster: ClusterOrName | None = None,
    **options_and_kwargs: Any,
) -> Numerics:
    """Run a step as planned and as it is written, and compare the numbers.

    Both run on the devices that JAX sees; virtual CPU devices will do
    (`jax.config.update("jax_num_cpu_devices", 8)` before their first use), with a small model.
    First in the program's own dtypes; then with all its floats in float64, planned with the same
    options, where rounding does not hide a difference; kernels keep their dtypes. If numbers differ
    more than rounding explains, the first operation is looked for that differs when it is given
    the same numbers.

    Args:
      fn: as for `autopar.compile`.
      *args: arrays; nothing is donated.
      plan: the plan to follow, or the path of its file; by default one is made.
      cluster: the devices to plan for; by default all that JAX sees.
      **options_and_kwargs: what is asked of the plan, as on the page Options; other names are
        the step's own arguments by keyword.

    Returns:
      A `Numerics`: the largest error of each output leaf, `first_difference` with the line of the
      user's file, `agrees`. It prints.

    Raises:
      OptionError: an argument is no array, or holds objects that the step changes.
      DeviceError: there are fewer devices than the plan needs.

    >>> import jax, jax.numpy as jnp, autopar
    >>> def step(w, x):
    ...     return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    >>> autopar.verify_numerics(step, jnp.ones((4, 4)), jnp.ones((8, 4)), method="data").agrees
    True
    """
    from autopar.report.numerics_report import Numerics

    fn, request, kwargs = read_arguments(fn, cluster, plan, options_and_kwargs, "verify_numerics")
    leaves = jax.tree.leaves((args, kwargs))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise OptionError(
            "verify_numerics needs numbers.",
            why="an argument is a jax.ShapeDtypeStruct, which has none.",
            hint="pass arrays, of a small model if the real one is large.",
        )
    name = name_of(fn)
    with Progress(f"comparing {name}", request.progress) as progress:
        traced, compiled, found = _planned(fn, args, kwargs, request, progress)
        if traced.takes_objects:
            raise OptionError(
                "verify_numerics takes no objects that a step changes.",
                why="both runs would change them.",
                hint="pass nnx.split states, and merge them in the step.",
            )
        progress.report("the plain function")
        wanted = fn(*_copied(args), **_copied(kwargs))
        epsilon = _epsilon(traced)
        own = _errors(found, wanted, ROUNDINGS * epsilon)
        progress.report("in float64")
        wide, why, again = _in_float64(fn, traced, args, kwargs, request, progress)
        made = Numerics(
            repr(compiled.plan), _devices(compiled), tuple(own), tuple(wide), not_float64=why
        )
        if made.agrees:
            return made
        progress.report("looking for the first difference")
        if again is not None and not all(leaf.agrees for leaf in wide):
            with jax.enable_x64(True):  # where rounding hides nothing
                return _explained(made, *again, WIDE_TOLERANCE)
        return _explained(made, traced, compiled, (args, kwargs), ROUNDINGS * epsilon)


def _planned(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    request: PlanRequest,
    progress: Progress,
) -> tuple[Traced, Compiled, Any]:
    """The step's trace, its plan, and what that computes."""
    on, made = request.load()
    traced = trace_step(fn, args, kwargs, request, on, progress)
    compiled = plan_traced(traced, request, on, made, progress)
    step = Executable(fn, traced, compiled, progress)
    return traced, compiled, step(*_copied(args), **_copied(kwargs))


def _in_float64(
    fn: Callable[..., Any],
    traced: Traced,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    request: PlanRequest,
    progress: Progress,
) -> tuple[Sequence[LeafError], str, _Run | None]:
    """The same in float64, why not, and what was run."""
    from autopar.passes.graph.widened import evaluate_widened

    graph = traced.graph

    def widened(*args: Any, **kwargs: Any) -> Any:
        values = [*traced_arrays(traced, args, kwargs), *graph.constants]
        return traced.result(evaluate_widened(graph.jaxpr, values))

    widened.__name__ = widened.__qualname__ = name_of(fn)
    if request.plan is not None:
        return (), "a given plan is for the program in its own dtypes.", None
    try:
        with jax.enable_x64(True):
            wide_args, wide_kwargs = _widened((args, dict(kwargs)))
            wanted = widened(*wide_args, **wide_kwargs)
            again, compiled, found = _planned(widened, wide_args, wide_kwargs, request, progress)
            run = again, compiled, (wide_args, wide_kwargs)
            return _errors(found, wanted, WIDE_TOLERANCE), "", run
    except Exception as error:  # kernels are written for the dtypes that they have
        return (), f"{type(error).__name__}: {str(error).splitlines()[0]}", None


def traced_arrays(traced: Traced, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The array leaves of a call, as the graph's first inputs take them."""
    args, kwargs, _ = traced.convention.split(args, kwargs)
    leaves = jax.tree.leaves((args, dict(kwargs)))
    return [leaves[position] for position in traced.signature.array_positions]


def _explained(
    made: Numerics, traced: Traced, compiled: Compiled, call: Any, tolerance: float
) -> Numerics:
    """With the first difference, if it can be found."""
    import dataclasses

    from autopar.runtime.verification.first_difference import first_difference

    programs = compiled.runnable.pieces.programs
    if len(programs) > 1:
        note = "Stages are not searched: compare the same options with stages=1."
        return dataclasses.replace(made, note=note)
    inputs = [*traced_arrays(traced, *call), *traced.graph.constants]
    found = first_difference(programs[0], inputs, jax.devices(), tolerance)
    note = ""
    if found is None:
        note = (
            "No operation differs when it is given the same numbers: the difference comes from "
            "splitting into microbatches, or from what the compiler makes of the whole."
        )
    return dataclasses.replace(made, first_difference=found, note=note)


def _errors(found: Any, wanted: Any, tolerance: float) -> list[LeafError]:
    from autopar.runtime.verification.first_difference import largest_error

    with_paths, _ = jax.tree_util.tree_flatten_with_path(found)
    pairs = zip(with_paths, jax.tree.leaves(wanted), strict=True)
    return [
        LeafError(f"result{jax.tree_util.keystr(path)}", largest_error(one, other), tolerance)
        for (path, one), other in pairs
        if hasattr(other, "dtype") or isinstance(other, (int, float))
    ]


def _epsilon(traced: Traced) -> float:
    """Of the narrowest float that the program computes with."""
    avals = [v.aval for eqn in traced.graph.jaxpr.eqns for v in (*eqn.invars, *eqn.outvars)]
    dtypes = {aval.dtype for aval in avals if hasattr(aval, "dtype")}
    floats = [x for x in dtypes if jnp.issubdtype(x, jnp.floating)]
    return max((float(jnp.finfo(x).eps) for x in floats), default=0.0)


def _copied(tree: Any) -> Any:
    """What may be donated without taking what the caller has."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x, tree)


def _widened(tree: Any) -> Any:
    def wide(leaf: Any) -> Any:
        is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
        if is_array and jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(np.asarray(leaf), jnp.float64)
        return leaf.copy() if is_array else leaf

    return jax.tree.map(wide, tree)


def _devices(compiled: Compiled) -> str:
    count = sum({x.mesh: x.num_devices for x in compiled.plan.stages}.values())
    device = jax.devices()[0]
    return f"{count} x {getattr(device, 'device_kind', device.platform)}"
