"""`follow`: evaluation and generation where a train step's plan has the parameters."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from autopar.api import Parallelized
from autopar.arrays.buffers import any_deleted, own_copy
from autopar.arrays.split_array import SplitArray, put
from autopar.base.errors import OptionError
from autopar.base.user_code import shorten
from autopar.call_checks import donated_earlier, run_plain
from autopar.executable import Executable
from autopar.held_leaves import HeldLeaves, held_leaves
from autopar.leaf_paths import path_parts
from autopar.passes.graph import jax_compat
from autopar.passes.graph.logical import no_mesh
from autopar.passes.trace.graph_objects import objects_apart
from autopar.passes.trace.signature import Convention, signature_of
from autopar.passes.trace.trace import Traced, trace
from autopar.requests import name_of
from autopar.runtime.on_meshes import Cut, Home, OnMeshes


class Followed:
    """A function that runs where a train step's plan has the parameters; `follow` makes it.

    It is traced once for every signature, as by `jax.jit`, and never planned. Inside another JAX
    transformation it is the plain function.
    """

    __name__: str
    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        fn: Callable[..., Any],
        step: Parallelized | Executable,
        static_argnums: int | Sequence[int],
    ):
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._step = fn, step
        if isinstance(static_argnums, int):
            static_argnums = (static_argnums,)
        self._static_argnums = tuple(static_argnums)
        self._convention = Convention.of(fn, self._static_argnums)
        self._known: tuple[Executable, HeldLeaves] | None = None
        self._programs: dict[Any, _Program] = {}
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function.

        Raises:
          AutoparError: the train step has no plan yet.
          DeviceError: an array is on Ray actors and the step is not, or reads rows of several of
            them at once; or devices are not there.
          DonatedBufferError: an array was consumed by a train step.
          TraceError: the function cannot be traced.
        """
        if jax_compat.is_tracing():
            return self._fn(*args, **kwargs)
        if jax_compat.is_jit_disabled():
            return run_plain(self._fn, name_of(self._fn), args, kwargs)
        try:
            with objects_apart(self._convention, args, kwargs) as call:
                if call is not None:
                    result = self._run(call.pure(self._fn), call.args, call.kwargs)
                    return call.put_back(result)
            return self._run(self._fn, args, kwargs)
        except Exception as error:
            shorten(error)
            raise

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        layout = self._layout()
        signature = signature_of(self._convention, args, kwargs)
        dynamic_args, dynamic_kwargs, _ = self._convention.split(args, kwargs)
        leaves = jax.tree.leaves((dynamic_args, dynamic_kwargs))
        arrays = [leaves[i] for i in signature.array_positions]
        with self._lock:
            # Where leaves lie is part of the key, for it says which equation runs where.
            key = signature, jax_compat.trace_context(), tuple(map(layout.place, arrays))
            program = self._programs.get(key)
            if program is None:
                with jax_compat.jitted():
                    program = self._new(fn, args, kwargs, layout, arrays)
                self._programs[key] = program
        if any_deleted(arrays):
            paths = [x.path for x in program.traced.graph.inputs]
            gone = [p for p, x in zip(paths, arrays, strict=False) if any_deleted([x])]
            raise donated_earlier(name_of(self._fn), gone, was_donated=False)
        return program(arrays)

    def _layout(self) -> HeldLeaves:
        step = self._step
        executable = step.executable if isinstance(step, Parallelized) else step
        if self._known is None or self._known[0] is not executable:
            layout = held_leaves(executable, name_of(self._fn))
            if self._known is None or self._known[1] != layout:
                self._programs.clear()
            self._known = executable, layout
        return self._known[1]

    def _new(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        layout: HeldLeaves,
        arrays: Sequence[Any],
    ) -> _Program:
        traced = trace(
            fn,
            args,
            kwargs,
            static_argnums=self._static_argnums,
            donate_argnums=(),
            batch_argnums=(),
            microbatches=1,
            constraints="ignore",
        )
        return _Program(traced, layout, arrays, name_of(self._fn))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<{name_of(self._fn)}, which follows {self._step!r}>"


@overload
def follow(
    step: Parallelized | Executable,
    fn: Callable[..., Any],
    *,
    static_argnums: int | Sequence[int] = ...,
) -> Followed: ...


@overload
def follow(
    step: Parallelized | Executable, fn: None = None, *, static_argnums: int | Sequence[int] = ...
) -> Callable[[Callable[..., Any]], Followed]: ...


def follow(
    step: Parallelized | Executable,
    fn: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
) -> Followed | Callable[[Callable[..., Any]], Followed]:
    """Make a function run where a train step's plan has the parameters; a decorator.

    For evaluation and generation. Nothing is decided again: every array stays as the train step
    returned it, in a pipeline on the devices of its stage, and XLA's partitioner follows that. What
    is not on devices yet goes where the plan has the leaf of that name and shape; other arrays
    (batches) are cut along their first dimension as the step's batch is, where that divides.
    In a pipeline each operation runs on the highest stage whose parameters it depends on, and
    activations move on to the next one; loops over tokens may be inside or around the function.
    Its results lie where they were computed. It is compiled for every signature. On Ray actors,
    activations go by way of the driver, whose arrays the results are.

    Args:
      step: a parallelized step that has been called, or an `Executable`.
      fn: an ordinary function of the parameters (or of the state), batches, keys: any pytrees.
        Nothing is donated.
      static_argnums: arguments that are passed through as they are, as for `jax.jit`.

    Raises:
      OptionError: `step` is no parallelized step, or `fn` no function.

    >>> import jax, jax.numpy as jnp, autopar
    >>> @autopar.parallelize(method="data")
    ... def train_step(w, x):
    ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    >>> @autopar.follow(train_step)
    ... def evaluate(w, x):
    ...     return jnp.mean((x @ w) ** 2)
    >>> w = train_step(jnp.zeros((4, 2)), jnp.ones((8, 4)))
    >>> float(evaluate(w, jnp.ones((16, 4))))
    0.0
    """
    if not isinstance(step, (Parallelized, Executable)):
        raise OptionError(
            f"autopar.follow takes a parallelized step first, and got {step!r}.",
            hint="decorate the train step with autopar.parallelize, or pass what autopar.compile "
            "returned: @autopar.follow(train_step).",
        )
    if fn is None:
        return functools.partial(follow, step, static_argnums=static_argnums)
    if not callable(fn):
        raise OptionError(f"autopar.follow(step, fn) takes a function, and got {fn!r}.")
    return Followed(fn, step, static_argnums)


class _Program:
    """A followed function for one signature."""

    def __init__(self, traced: Traced, layout: HeldLeaves, arrays: Sequence[Any], name: str):
        self.traced = traced
        labels = [path_parts(label.path) for label in traced.graph.inputs]
        pairs = [*zip(labels, arrays, strict=False)]
        found = [layout.find(path, leaf) for path, leaf in pairs]
        others = [leaf for leaf, held in zip(arrays, found, strict=True) if held is None]
        rows = {np.shape(leaf)[0] for leaf in others if np.ndim(leaf) >= 2}
        homes: list[Home] = []
        self._targets: list[Any] = []  # the shardings of leaves that do not lie where they should
        self._cuts: list[Cut | None] = []
        for (path, leaf), held in zip(pairs, found, strict=True):
            home, target = layout.home_of(leaf, held)
            homes.append(home)
            self._targets.append(target)
            self._cuts.append(layout.cut(path, leaf, rows) if held is None else None)
        constants = traced.graph.constants
        self._constants = [OnMeshes(own_copy(value)) for value in constants]
        free: list[Home] = [None] * len(constants)
        jaxpr = traced.graph.jaxpr
        self._program = layout.program(jaxpr, [*homes, *free], name)

    def __call__(self, arrays: Sequence[Any]) -> Any:
        values = []
        with no_mesh():
            for leaf, target, cut in zip(arrays, self._targets, self._cuts, strict=True):
                values.append(OnMeshes(leaf if target is None else put(leaf, target), cut))
            results = self._program([*values, *self._constants])
        return self.traced.result([_array(x.first) for x in results])


def _array(value: Any) -> Any:
    return value if isinstance(value, jax.Array | SplitArray) else jnp.asarray(value)
