"""`Executable`: a step that is planned and compiled, and is called like the plain function.

A call does as little in Python as it can: flatten, check what JAX does not (a donated array used
again, or two donated leaves in one buffer, can end the process inside XLA), call the compiled
program, unflatten. Whatever goes wrong there is looked into afterwards.

It is long because it documents what a user may call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from autopar.around_step import AroundStep
from autopar.arrays.buffers import Returned, any_deleted, copy_to, memory_of, own_copy, share_a_leaf
from autopar.arrays.operators import WholeArray
from autopar.arrays.split_array import SplitArray, SplitSharding, assembled
from autopar.base.compiled_records import ProgramMemory
from autopar.base.displayed import Displayed
from autopar.base.errors import DonatedBufferError, OptionError
from autopar.base.progress import Progress
from autopar.base.user_code import shorten, shortens
from autopar.call_checks import (
    donated_earlier,
    explained,
    is_weak,
    not_for_jax,
    picker,
    run_plain,
    same_signature,
    same_static_arguments,
    same_statics,
    tell_notebook,
    tell_of_donation,
    tell_of_memory,
    tell_transformed,
    wrong_arguments,
)
from autopar.initialize import initialize
from autopar.passes.graph import jax_compat
from autopar.passes.planner.compiler import Compiled
from autopar.passes.trace.arguments import Argument
from autopar.passes.trace.graph_objects import (
    objects_apart,
    objects_of,
    on_states,
    signature_of_call,
    states_of,
    without_objects,
)
from autopar.passes.trace.signature import Signature, signature_of
from autopar.passes.trace.trace import Traced
from autopar.plans.plan import Plan
from autopar.requests import name_of
from autopar.runtime import distributed
from autopar.runtime.ahead import leaves_to_donate, twin
from autopar.runtime.compiled_peaks import compiled_peaks, memory_of_pieces
from autopar.runtime.compiled_pieces import PIECE_MARK
from autopar.runtime.local import LocalProgram, PipelineStep
from autopar.runtime.same_plan import compare_processes

if TYPE_CHECKING:
    from autopar.profile import Profile
    from autopar.step_metrics import LoopWatch


jax_compat.when_traced(WholeArray, not_for_jax)


class SignatureMismatch(Exception):
    """A call's arguments are not those that the program was compiled for."""

    def __init__(self, signature: Signature):
        super().__init__(signature)
        self.signature = signature


class Executable(Displayed, AroundStep):
    """A planned and compiled step; `autopar.compile` makes it.

    It takes the arguments that the plain function takes, with the shapes and dtypes that it was
    compiled for, in any sharding or as NumPy arrays, and returns the same pytrees with `jax.Array`
    leaves. Donated leaves are consumed, as by `jax.jit(donate_argnums=...)`.

    Attributes:
      plan: what was decided.
    """

    plan: Plan
    page = ("small_pages", "step_page")

    def __init__(
        self,
        fn: Callable[..., Any],
        traced: Traced,
        compiled: Compiled,
        progress: Progress,
        devices: Sequence[jax.Device] | None = None,
    ):
        self._devices = devices
        program = self._program = self._load(fn, compiled)
        self.plan = compiled.plan
        self._fn = fn
        self._name = self.__name__ = name_of(fn)
        self._traced = traced
        self._takes_objects = traced.takes_objects
        self._was_transformed = False
        self._in_shardings = program.in_shardings[: traced.num_arrays]
        self._out_shardings = program.out_shardings
        self._constants = [
            self._constant(value, sharding)
            for value, sharding in zip(
                traced.graph.constants, program.in_shardings[traced.num_arrays :], strict=True
            )
        ]
        self._plan_calls()
        progress.report("compiling")
        self._compiled: Any = program.compile(
            self._name, self._donated, self._kept, traced.signature.shapes, self._constants
        )

    @property
    def traced(self) -> Traced:
        """The trace of the function that was planned."""
        return self._traced

    @property
    def program(self) -> Any:
        """What runs on the devices, as the runtime holds it."""
        return self._program

    def _compiled_steps(self) -> tuple[Executable, ...]:
        return (self,)

    def _last_compiled(self) -> Executable:
        return self

    def place_leaf(self, index: int, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
        """An array leaf of the arguments where the step wants it, from what reads its parts.

        Args:
          index: the leaf's number among them.
          read: gives the rows of a slice for each dimension.
        """
        shape = self._traced.signature.shapes[index].shape
        return assembled(shape, self._in_shardings[index], read)

    def watched_by(self, loop: LoopWatch) -> None:
        """Count its calls among those of a step that has several such as it."""
        self._loop = loop

    def another(self, traced: Traced, compiled: Compiled, progress: Progress) -> Executable:
        """The same function compiled for other shapes, to take turns with this one."""
        return type(self)(self._fn, traced, compiled, progress, self._devices)

    def _load(self, fn: Callable[..., Any], compiled: Compiled) -> Any:
        """The program, on the devices that run it, once all their processes have the same."""
        compare_processes(name_of(fn), compiled.plan, self._devices)
        return LocalProgram(compiled.runnable, self._devices)

    def _constant(self, value: Any, sharding: Any) -> Any:
        """An array that the function closed over, as it was traced, where the program wants it."""
        return jax.device_put(own_copy(value), sharding)

    def _plan_calls(self) -> None:
        """What a call needs to know, computed once."""
        signature, inputs = self._traced.signature, self._traced.graph.inputs
        shapes, leaves = signature.shapes, range(self._traced.num_arrays)
        self._donated = leaves_to_donate(
            inputs[: self._traced.num_arrays], shapes, self._in_shardings, self._out_shardings
        )
        self._kept = sorted(set(leaves).difference(self._donated))
        self._pick_donated = picker([signature.array_positions[i] for i in self._donated])
        self._pick_kept = picker([signature.array_positions[i] for i in self._kept])
        self._pick_next = picker([twin(inputs[i]) for i in self._donated])
        self._kept_shapes = [shapes[i].shape for i in self._kept]
        self._kept_weak = [shapes[i].weak_type for i in self._kept]
        sizes = [math.prod(shapes[i].shape) for i in self._donated]
        self._returned = Returned(sizes.index(max(sizes)) if sizes else None)
        # A kept leaf can only be one of the donated arrays where shapes and dtypes are equal.
        types = [(x.shape, x.dtype) for x in shapes]
        donated_types = {types[i] for i in self._donated}
        self._kept_may_be_donated = any(types[i] in donated_types for i in self._kept)
        # Whether returned leaves have the weak types of the donated ones, and no PRNG key is there.
        self._keeps_types = self._only_arrays = False
        self._strays: set[int] = set()  # kept leaves that once came in another sharding
        self._told = not self._donated
        if self._donated:
            tell_of_donation()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step.

        Raises:
          TraceError: the arguments have another structure, other shapes or other dtypes than those
            it was compiled for.
          DonatedBufferError: a leaf was consumed by an earlier call.
        """
        if jax_compat.is_tracing():
            if not self._was_transformed:
                self._was_transformed = tell_transformed(self._name)
            return self._fn(*args, **kwargs)
        if jax_compat.is_jit_disabled():
            return run_plain(self._fn, self._name, args, kwargs)
        try:
            try:
                return self.run(args, kwargs, strict=False)
            except SignatureMismatch:
                pass
            raise wrong_arguments(self._name, self._traced, args, kwargs)
        except Exception as error:
            shorten(error)
            raise

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, strict: bool) -> Any:
        """Run the step on these arguments.

        Args:
          args: positional arguments.
          kwargs: arguments by keyword.
          strict: whether another weak type counts as another signature.

        Raises:
          SignatureMismatch: the program was compiled for others.
          DonatedBufferError: a leaf was consumed by an earlier call.
        """
        if self._takes_objects:
            with objects_apart(self._traced.convention, args, kwargs) as call:
                if call is not None:
                    return call.put_back(self._run(call.args, call.kwargs, strict))
        return self._run(args, kwargs, strict)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], strict: bool) -> Any:
        """Run the step on arguments without objects."""
        traced, call = self._traced, (args, kwargs)
        signature = traced.signature
        if traced.convention.has_static:
            args, kwargs, static = traced.convention.split(args, kwargs)
            if not same_static_arguments(static, signature):
                raise SignatureMismatch(signature_of_call(traced.convention, *call))
        leaves, tree = jax.tree.flatten((args, dict(kwargs)))
        if tree != signature.tree or not same_statics(leaves, signature):
            raise SignatureMismatch(signature_of_call(traced.convention, *call))
        donated, kept = self._pick_donated(leaves), self._pick_kept(leaves)
        is_own = self._returned.are(donated)
        if (
            [getattr(x, "shape", ()) for x in kept] != self._kept_shapes
            or (strict and [is_weak(x) for x in kept] != self._kept_weak)
            or (strict and not (is_own and self._keeps_types) and not self._same_weak(donated))
        ):
            raise SignatureMismatch(signature_of_call(traced.convention, *call))
        if is_own and self._only_arrays:
            is_deleted = any(map(type(donated[0]).is_deleted, donated))
        else:
            is_deleted = any_deleted(donated)
        if is_deleted or any_deleted(kept):
            raise self._deleted(donated, kept)
        if not is_own or (self._kept_may_be_donated and share_a_leaf(donated, kept)):
            donated = self._without_aliases(donated, kept)
        if self._strays:
            kept = self._placed(kept, self._kept, self._strays)
        if not self._told:
            self._told = True
            arguments = map(self._argument_of, self._donated)
            names = [a.name for a in arguments if not any(a.in_object)]  # objects are updated
            tell_notebook(self._name, dict.fromkeys(names))
        try:
            results = self._compiled(donated, kept, self._constants)
        except Exception as error:
            results = self._second_try(error, donated, kept, call, strict)
        following = self._pick_next(results)
        if not is_own:
            self._keeps_types = self._same_weak(following)
            self._only_arrays = len(set(map(type, following))) == 1
        self._returned.remember(following)
        self._loop.stepped(self, results)
        return traced.result(results)

    def _same_weak(self, donated: Sequence[Any]) -> bool:
        shapes = self._traced.signature.shapes
        planned = (shapes[i].weak_type for i in self._donated)
        return all(is_weak(x) == weak for x, weak in zip(donated, planned, strict=True))

    def _second_try(
        self,
        error: Exception,
        donated: list[Any],
        kept: list[Any],
        call: tuple[tuple[Any, ...], Mapping[str, Any]],
        strict: bool,
    ) -> Any:
        """Find out why a call failed, mend what can be mended, and run again."""
        is_gone = any_deleted(donated)
        error = explained(error, self._name, is_gone)
        tell_of_memory(error, self._name, self.plan.estimates.peak_bytes_per_device)
        if is_gone:
            raise error from None
        signature = signature_of_call(self._traced.convention, *call)
        if not same_signature(signature, self._traced.signature, strict):
            raise SignatureMismatch(signature) from None
        strays = [n for n, i in enumerate(self._kept) if self._is_stray(kept[n], i)]
        others = [n for n, i in enumerate(self._donated) if self._is_stray(donated[n], i)]
        if not strays and not others:
            raise error from None
        self._strays.update(strays)
        return self._compiled(
            self._placed(donated, self._donated, others),
            self._placed(kept, self._kept, strays),
            self._constants,
        )

    def _is_stray(self, leaf: Any, index: int) -> bool:
        wanted = self._in_shardings[index]
        if isinstance(leaf, SplitArray) or isinstance(wanted, SplitSharding):
            return not isinstance(self._compiled, PipelineStep)  # which places them itself
        return (
            isinstance(leaf, jax.Array)
            # `jax.jit` moves what is not committed, but not to another kind of memory.
            and (leaf.committed or leaf.sharding.memory_kind != wanted.memory_kind)
            and not leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
        )

    def _placed(
        self, leaves: Sequence[Any], indices: Sequence[int], which: Iterable[int]
    ) -> list[Any]:
        """The leaves, those of `which` that lie elsewhere copied to where they belong."""
        result = list(leaves)
        for n in which:
            if self._is_stray(leaves[n], indices[n]):
                result[n] = copy_to(leaves[n], self._in_shardings[indices[n]])
        return result

    def _without_aliases(self, donated: list[Any], kept: list[Any]) -> list[Any]:
        """The donated leaves, with a copy for each whose memory another leaf uses as well.

        `{"params": p, "ema": p}` is a sound state, but memory can only be donated once.
        """
        seen = {place for leaf in kept for place in memory_of(leaf)}
        result = []
        for leaf, index in zip(donated, self._donated, strict=True):
            memory = list(memory_of(leaf))
            if not seen.isdisjoint(memory):
                leaf = copy_to(leaf, self._in_shardings[index])
            seen.update(memory)
            result.append(leaf)
        return result

    def _deleted(self, donated: list[Any], kept: list[Any]) -> DonatedBufferError:
        leaves = [*zip(self._donated, donated, strict=True), *zip(self._kept, kept, strict=True)]
        gone = [i for i, leaf in leaves if any_deleted([leaf])]
        paths = [self._traced.graph.inputs[i].path for i in gone]
        return donated_earlier(self._name, paths, was_donated=gone[0] in set(self._donated))

    def _argument_of(self, index: int) -> Argument:
        return next(a for a in reversed(self._traced.arguments) if a.start <= index)

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """For each positional argument, a pytree of the shardings of its leaves (None: static)."""
        traced = self._traced
        shardings = {a.position: self._argument_shardings(a) for a in traced.arguments}
        static = [traced.convention.position(key) for key, *_ in traced.signature.static_arguments]
        positions = [position for position in (*shardings, *static) if position is not None]
        return tuple(shardings.get(position) for position in range(max(positions, default=-1) + 1))

    @property
    def kwargs_shardings(self) -> dict[str, Any]:
        """The same for arguments that have a name only."""
        named = (a for a in self._traced.arguments if a.position is None)
        return {a.name: self._argument_shardings(a) for a in named}

    @property
    def out_shardings(self) -> Any:
        """A pytree as the result, of the shardings of its leaves (None: static)."""
        leaves: list[Any] = list(self._out_shardings)
        for position, _ in self._traced.out_statics:
            leaves.insert(position, None)
        result = self._traced.out_tree.unflatten(leaves)
        return result.value if self._takes_objects else result

    def _argument_shardings(self, argument: Argument) -> Any:
        shardings = iter(self._in_shardings[argument.start :])
        leaves = [None if leaf is None else next(shardings) for leaf in argument.leaves]
        return argument.tree.unflatten(leaves)

    def as_text(self) -> str:
        """The compiled program, as XLA's text (HLO); with several stages, that of every piece."""
        return str(self._compiled.as_text())

    def memory_analysis(self) -> Any:
        """XLA's account of one device's memory, as `jax.stages.Compiled` gives it.

        With several stages, a dictionary of those of every piece.
        """
        return self._compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """XLA's count of the program's operations, in the same form as `memory_analysis`."""
        return self._compiled.cost_analysis()

    def memory(self) -> dict[str, ProgramMemory]:
        """What one device needs, as the compiler says, by piece ("step": the plan has only one).

        A piece of a pipeline has a stage's number and its kind in its name: "F0", "B1".
        """
        return {
            name: ProgramMemory.of(analysis)
            for name, analysis in self._by_piece(self.memory_analysis()).items()
        }

    def peak_bytes(self) -> list[int | None]:
        """By mesh, what one device needs at the worst moment of a step, as the compiler says.

        None where it does not say.
        """
        program = self._program.program
        return compiled_peaks(program, memory_of_pieces(program, self._compiled))

    def cost(self) -> dict[str, dict[str, float]]:
        """What the compiler counts of each piece: "flops", "bytes accessed"; it may say nothing.

        On GPUs, XLA counts nothing of a program that is compiled ahead.
        """
        return {
            name: {str(key): float(value) for key, value in (counts or {}).items()}
            for name, counts in self._by_piece(self.cost_analysis()).items()
        }

    def hlo(self, stage: int = 0) -> str:
        """The compiled program of a stage, as XLA's text; of several pieces one after the other.

        Raises:
          OptionError: the plan has no such stage.
        """
        if not 0 <= stage < len(self.plan.stages):
            raise OptionError(
                f"There is no stage {stage!r}.", why=f"the plan has {len(self.plan.stages)}."
            )
        text = self.as_text()
        if not self.plan.is_pipeline:
            return text
        own = {piece.name for piece in self._program.pieces.pieces if piece.stage == stage}
        pieces = (part for part in text.split(PIECE_MARK)[1:] if part.splitlines()[0] in own)
        return "".join(PIECE_MARK + part for part in pieces)

    def _by_piece(self, analysis: Any) -> dict[str, Any]:
        return analysis if self.plan.is_pipeline else {"step": analysis}

    @shortens
    def initialize(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a state that is sharded from its first byte, never whole on one device.

        Args:
          init_fn: makes one of the step's arguments, or a tuple of several of them.
          *args: its arguments, such as a PRNG key.
          **kwargs: the same, by keyword.

        Raises:
          TraceError: what `init_fn` makes is none of the step's arguments.
        """
        return initialize(self._traced, self._in_shardings, init_fn, args, kwargs)

    @shortens
    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Run the step on these arguments with every instruction timed; the state is kept.

        The step runs three times, on copies of what it would consume: to warm up; waiting for each
        instruction before the next is dispatched, which gives the seconds of each alone; and as it
        always runs. There, times are those at which results were seen to be there: a run starts
        when what is before it on its mesh has ended and what it receives has arrived, so a wait for
        a core or for the dispatching thread counts as running. Instructions of less than about a
        millisecond measure mostly their dispatch. A transfer's time is that from its dispatch until
        it has arrived, and placing the arguments is not counted.

        Args:
          *args: the arguments of a call; they can be used again afterwards.
          **kwargs: the same, by keyword.

        Returns:
          A `Profile`: `print` it for a table of expected and measured times by instruction;
          `timeline` is the measured run and `expected` the one simulated from the instructions'
          times alone; both have `to_chrome_trace()`. A plan of one stage is one instruction.

        Raises:
          TraceError: the arguments are not like those that the step was compiled for.
          DonatedBufferError: a leaf was consumed by an earlier call.
        """
        with jax_compat.jitted():
            return self._profile(args, kwargs)

    def _profile(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Profile:
        from autopar.profile import profile_step

        donated, kept = self._profiled_leaves(args, kwargs)
        kept = self._placed(kept, self._kept, range(len(kept)))
        inputs = self._traced.graph.inputs

        def copied(leaves: Sequence[Any], indices: Sequence[int]) -> list[Any]:
            pairs = zip(leaves, indices, strict=True)
            return [copy_to(x, self._in_shardings[i]) if inputs[i].donated else x for x, i in pairs]

        def fresh() -> tuple[list[Any], list[Any]]:
            return copied(donated, self._donated), copied(kept, self._kept)

        shapes = self._traced.signature.shapes
        called = (self._donated, self._kept, shapes, self._constants)
        return profile_step(self._program.instructions_of(self._compiled, *called), fresh)

    def _profiled_leaves(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        """The leaves of a call that could be donated, and the others.

        Raises:
          AutoparError: as `profile`.
        """
        args, kwargs = without_objects(self._traced.convention, args, kwargs)
        found = signature_of(self._traced.convention, args, kwargs)
        if not same_signature(found, self._traced.signature, strict=False):
            raise wrong_arguments(self._name, self._traced, args, kwargs)
        if self._traced.convention.has_static:
            args, kwargs, _ = self._traced.convention.split(args, kwargs)
        leaves = jax.tree.leaves((args, dict(kwargs)))
        donated, kept = self._pick_donated(leaves), self._pick_kept(leaves)
        if any_deleted(donated) or any_deleted(kept):
            raise self._deleted(donated, kept)
        return donated, kept

    def source_bytes(self, source: Any) -> bytes | None:
        """A source of batches as bytes, where other processes read it; None: this one does."""
        return None

    @property
    def leaf_shardings(self) -> tuple[Any, ...]:
        """Where each array leaf of the arguments lies, in their order."""
        return tuple(self._in_shardings)

    @shortens
    def gather(self, tree: Any) -> Any:
        """A tree of leaves that may be on different stages, whole on every device of the plan.

        For printing, exporting and small computations: JAX cannot mix arrays of different meshes.
        `jax.device_get` brings a tree to the host instead, and takes no device memory.
        What it returns outlives the next step, which consumes the state: arrays are copies.

        Args:
          tree: such as a state that the step returned. Leaves that are no arrays stay as they are,
            and of objects that a step changes (NNX) new ones are made.
        """
        return objects_of(self._gather(states_of(tree)))

    def _gather(self, tree: Any) -> Any:
        return distributed.gather(tree, self._all_devices)

    @shortens
    def apply(self, fn: Callable[..., Any], state: Any, *args: Any) -> Any:
        """`fn(state, *args)` on a state whose leaves may be on different stages.

        Args:
          fn: a function of JAX arrays, such as a global norm or a moving average. It is compiled
            for all devices of the plan.
          state: any tree of leaves of the step's state. It is not donated.
          *args: more trees, from any place.

        Returns:
          What `fn` returns. If that has the structure of `state`, its leaves are where those of
          `state` are, ready for the next step; else it is whole on every device.
        """
        return objects_of(self._apply(on_states(fn), *states_of((state, *args))))

    def _apply(self, fn: Callable[..., Any], state: Any, *args: Any) -> Any:
        return distributed.apply(fn, state, args, self._all_devices)

    @functools.cached_property
    def _all_devices(self) -> Mesh:
        return distributed.mesh_of((*self._in_shardings, *self._out_shardings))

    def __repr__(self) -> str:
        return f"<Executable {self._name}: {self.plan!r}>"
