"""Objects that a step changes in place (Flax NNX), as values: taken apart before, updated after.

A step that takes such objects (modules, optimizers, metrics, streams of random numbers) becomes a
function of pytrees: an object comes in as its `ObjectState`, its arrays beside its definition; what
the step made of it goes out as one more result, from which the caller's object is updated. So
`nnx.jit` does it, and NNX's own contexts keep track here too of which object is which: several
that share variables, new variables and other attributes are possible. `nnx.State` is a pytree of
values, as for `jax.jit`.

Flax is not imported for this. Where it has not been, there is no such object.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import jax

from autopar.base.errors import TraceError
from autopar.passes.trace.object_states import (
    ObjectDefinition,
    ObjectState,
    StepResult,
    attributes,
    is_state,
    states_in,
)
from autopar.passes.trace.signature import (
    Convention,
    Sealed,
    Signature,
    signature_of,
    unsealed,
)

_TAG = "autopar"
"""Under which NNX keeps the objects of one call."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class _NoObject:
    """In the place of what is no object, in what an argument has become."""


class _Unchanged:
    """In the place of an array that the step left alone. There is one."""

    def __repr__(self) -> str:
        return "unchanged"


_UNCHANGED = _Unchanged()


class ObjectCall:
    """A call with its objects taken apart.

    Attributes:
      args: positional arguments, with an `ObjectState` for every object.
      kwargs: the same by keyword.
    """

    def __init__(self, convention: Convention, args: Sequence[Any], kwargs: Mapping[str, Any]):
        _, _, static = convention.split(tuple(args), kwargs)
        self._convention = convention
        self._states: list[ObjectState] = []
        with _nnx().split_context(_TAG) as context:
            apart = functools.partial(self._take_apart, context)
            self.args = tuple(a if i in static else apart(a) for i, a in enumerate(args))
            self.kwargs = {
                k: kwargs[k] if k in static else apart(kwargs[k]) for k in sorted(kwargs)
            }

    def _take_apart(self, context: Any, argument: Any) -> Any:
        def apart(value: Any) -> Any:
            if not _is_object(value):
                return value
            self._states.append(_state_of(context, value, len(self._states)))
            return self._states[-1]

        return jax.tree.map(apart, argument, is_leaf=_is_whole)

    def pure(self, fn: Callable[..., Any]) -> Callable[..., StepResult]:
        """`fn` as a function of arguments taken apart. It is to be traced in this call."""

        @functools.wraps(fn, updated=())
        def run_apart(*args: Any, **kwargs: Any) -> StepResult:
            return _run_objects(fn, self._convention, args, kwargs)

        return run_apart

    def put_back(self, result: StepResult) -> Any:
        """Update the caller's objects with what the step made of them; the step's own result."""
        states = {state.number: state for state in states_in(result.updates)}
        if result.is_alike and all(given.holders is not None for given in self._states):
            for number, given in enumerate(self._states):
                for variable, leaf in zip(given.holders or (), states[number].leaves, strict=True):
                    if leaf is not _UNCHANGED:
                        variable.set_raw_value(leaf)
            return result.value
        with _nnx().merge_context(_TAG, inner=False) as context:
            for number, given in enumerate(self._states):
                state = states[number]
                pairs = zip(state.leaves, given.leaves, strict=False)
                is_same = any(new is _UNCHANGED for new in jax.tree.leaves(state.leaves))
                leaves = [old for _, old in pairs] if is_same else list(state.leaves)
                context.unflatten(state.definition.graphdef, leaves)
            return _put_together(context, result.value)


@contextlib.contextmanager
def objects_apart(
    convention: Convention, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[ObjectCall | None]:
    """A call with its objects taken apart, until they are updated; None where there are none.

    Raises:
      TraceError: an object holds what cannot be an argument.
    """
    if not has_objects((args, kwargs)):
        yield None
        return
    with _nnx().update_context(_TAG):
        yield ObjectCall(convention, args, kwargs)


def without_objects(
    convention: Convention, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Arguments with an `ObjectState` for every object, where nothing will be put back."""
    with objects_apart(convention, args, kwargs) as call:
        return (args, kwargs) if call is None else (call.args, call.kwargs)


def signature_of_call(
    convention: Convention, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Signature:
    """The signature of a call's arguments without objects.

    Raises:
      TraceError: a leaf cannot be an argument.
    """
    return signature_of(convention, *without_objects(convention, args, kwargs))


def has_objects(tree: Any) -> bool:
    """Whether there is an object that a step can change in place."""
    return _nnx() is not None and any(map(_is_object, jax.tree.leaves(tree, is_leaf=_is_whole)))


def states_of(tree: Any, seal: Callable[[Any], Any] = Sealed) -> Any:
    """A tree with an `ObjectState` for every object; `objects_of` is the inverse.

    `seal` is applied to definitions; by default the tree's leaves are those of the objects alone.
    """
    if not has_objects(tree):
        return tree

    def sealed(state: Any) -> Any:
        if not is_state(state):
            return state
        return ObjectState(state.number, seal(state.definition), state.leaves, state.paths)

    with _nnx().split_context() as context:
        return jax.tree.map(sealed, _apart(context, tree), is_leaf=_is_state_or_whole)


def objects_of(tree: Any) -> Any:
    """A tree with a new object for every `ObjectState`."""
    if not any(True for _ in states_in(tree)):
        return tree
    with _nnx().merge_context() as context:
        return _put_together(context, tree)


def static_attributes(convention: Convention, args: Any, kwargs: Any) -> dict[str, Any]:
    """The attributes of objects that are part of a program, by path; of arguments taken apart."""
    named = {convention.name(i): a for i, a in enumerate(args)} | dict(kwargs)
    result: dict[str, Any] = {}
    nnx = _nnx()
    if nnx is None or not any(True for _ in states_in(named)):
        return result
    for name, argument in objects_of(named).items():
        with_paths, _ = jax.tree_util.tree_flatten_with_path(argument, is_leaf=_is_whole)
        for path, whole in with_paths:
            for inner, value in nnx.iter_graph(whole) if _is_object(whole) else ():
                is_own = inner and not str(inner[-1]).startswith("_pytree__")
                if is_own and not isinstance(value, (nnx.Variable, nnx.Pytree, jax.Array)):
                    text = name + jax.tree_util.keystr(path) + attributes(inner)
                    result[text] = value
    return result


def on_states(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that may take and return objects, as one of their states."""

    @functools.wraps(fn, updated=())
    def run(*args: Any) -> Any:
        return states_of(fn(*objects_of(args)))

    return run


def _run_objects(
    fn: Callable[..., Any], convention: Convention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StepResult:
    nnx = _nnx()
    given = {convention.name(i): a for i, a in enumerate(args)} | kwargs
    objects: dict[int | None, Any] = {}
    with nnx.merge_context(_TAG, inner=True) as context:
        args, kwargs = _put_together(context, (args, kwargs), objects)
    value = fn(*args, **kwargs)
    updates = {}
    with nnx.split_context(_TAG) as context:

        def updated(state: Any) -> Any:
            if not is_state(state):
                return _NoObject()
            return _state_of(context, objects[state.number], state.number)

        is_alike = True
        for name, argument in given.items():
            if any(True for _ in states_in(argument)):
                update = jax.tree.map(updated, argument, is_leaf=_is_state_or_whole)
                pairs = zip(states_in(argument), states_in(update), strict=True)
                is_alike &= all(starmap(_are_alike, pairs))
                updates[name] = _without_unchanged(update, argument)
        value = _apart(context, value)
        return StepResult(value, updates, is_alike and not any(True for _ in states_in(value)))


def _are_alike(old: ObjectState, new: ObjectState) -> bool:
    """Whether an object is as it was, but for its arrays."""
    return bool(old.definition.graphdef.with_same_outer_index() == new.definition.graphdef)


def _without_unchanged(update: Any, argument: Any) -> Any:
    """What an argument has become, without its arrays where all of them are what they were."""
    new, old = ([x.leaves for x in states_in(tree)] for tree in (update, argument))
    made: Any
    (news, made), (olds, given) = map(jax.tree.flatten, (new, old))
    if made != given or any(map(operator.is_not, news, olds)):
        return update

    def unchanged(state: Any) -> Any:
        if not is_state(state):
            return state
        leaves = jax.tree.map(lambda _: _UNCHANGED, state.leaves)
        return ObjectState(state.number, state.definition, leaves, state.paths)

    return jax.tree.map(unchanged, update, is_leaf=is_state)


def _apart(context: Any, tree: Any) -> Any:
    def apart(value: Any) -> Any:
        return _state_of(context, value, None) if _is_object(value) else value

    return jax.tree.map(apart, tree, is_leaf=_is_whole)


def _put_together(context: Any, tree: Any, objects: dict[int | None, Any] | None = None) -> Any:
    """A tree with an object for every `ObjectState`; they are noted by their numbers."""

    def together(value: Any) -> Any:
        if not is_state(value):
            return value
        made = context.unflatten(unsealed(value.definition).graphdef, list(value.leaves))
        if objects is not None:
            objects[value.number] = made
        return made

    return jax.tree.map(together, tree, is_leaf=_is_state_or_whole)


def _state_of(context: Any, value: Any, number: int | None) -> ObjectState:
    graphdef, flat = context.flatten(value)
    are_variables = all(map(_is_variable, flat.leaves))
    leaves = [x.get_raw_value() if _is_variable(x) else x for x in flat.leaves]
    for path, leaf in zip(flat.paths, leaves, strict=True):
        if _is_reference(leaf):
            raise TraceError(
                f"A variable of a {type(value).__name__} holds a mutable reference.",
                where=attributes(path).lstrip("."),
                why="a step is traced as a function of values; this one is written in place.",
                hint="make the object without references (nnx.use_ref / nnx.var_defaults).",
            )
    holders = flat.leaves if are_variables else None
    return ObjectState(number, ObjectDefinition(graphdef), leaves, flat.paths, holders)


def _is_object(value: Any) -> bool:
    return _nnx() is not None and _kind_of(value.__class__) in ("variable", "node")


def _is_whole(value: Any) -> bool:
    """Whether a value is not looked into: an object, or a state, whose variables are values."""
    return _nnx() is not None and _kind_of(value.__class__) is not None


def _is_variable(value: Any) -> bool:
    return _kind_of(value.__class__) == "variable"


def _is_reference(leaf: Any) -> bool:
    return _is_variable(leaf) or (_may_refer(leaf.__class__) and isinstance(leaf, jax.Ref))


@functools.cache
def _may_refer(kind: type) -> bool:
    return issubclass(kind, (jax.Ref, jax.core.Tracer))


@functools.cache
def _kind_of(kind: type) -> str | None:
    """What NNX makes of a class; asked of each leaf in each call, and slow to find out there."""
    nnx = _nnx()
    kinds = {"variable": nnx.Variable, "node": nnx.Pytree, "state": nnx.State}
    return next((name for name, base in kinds.items() if issubclass(kind, base)), None)


def _is_state_or_whole(value: Any) -> bool:
    return is_state(value) or _is_whole(value)


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")
