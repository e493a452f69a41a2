"""What touches `jax._src`; everything else uses JAX's public names.

But for lines of the user's (`source_infos.py`) and attention by cuDNN (`absent_cudnn.py`).

Each function here says what it needs and why no public name serves.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial, update_wrapper
from types import FunctionType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import (
    array,
    config,
    core,
    custom_partitioning_sharding_rule,
    distributed,
    dtypes,
    stages,
)
from jax._src.interpreters import mlir
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var


def is_pmap(eqn: JaxprEqn) -> bool:
    """Whether `jax.pmap` made an equation, which is a `shard_map` since JAX 0.9.

    Nothing but where it was made tells.
    """
    traceback = eqn.source_info.traceback
    names = () if traceback is None else (frame.file_name for frame in traceback.frames)
    return any(name.endswith(("jax/_src/pmap.py", "jax\\_src\\pmap.py")) for name in names)


_JAX = os.path.join(os.path.dirname(os.path.abspath(jax.__file__)), "")


def called(eqn: JaxprEqn) -> str:
    """The name of JAX's function that others called when this equation was made; "": unknown.

    Nothing in the equation tells what was prescribed for it from what JAX concluded.
    """
    name = ""
    traceback = eqn.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        if not frame.file_name.startswith(_JAX):
            return name
        if not frame.file_name.endswith("traceback_util.py"):
            name = frame.function_name.rpartition(".")[2]
    return ""


def in_auto_axes(eqn: JaxprEqn) -> bool:
    """Whether an equation was made within `jax.sharding.auto_axes`.

    Where all axes are Auto already that leaves nothing but frames.
    """
    traceback = eqn.source_info.traceback
    return traceback is not None and any(
        frame.function_name in ("_auto_axes.<locals>.decorator", "decorator")
        and frame.file_name.startswith(_JAX)
        for frame in traceback.frames
    )


def new_var(aval: Any) -> Var:
    """A fresh variable (the constructor's optional arguments differ between releases)."""
    return Var(aval)


@cache
def array_type(shape: tuple[int, ...], dtype: Any, weak_type: bool) -> Any:
    """The type (aval) of an array, from a traced argument: its class has no public name."""
    struct = jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)
    return jax.make_jaxpr(lambda x: x)(struct).jaxpr.invars[0].aval


def replace_jaxpr(jaxpr: Jaxpr, **changes: Any) -> Jaxpr:
    """`jaxpr` with some fields replaced; argument and result names go when the counts change."""
    if "constvars" in changes or "invars" in changes or "outvars" in changes:
        changes.setdefault("debug_info", jaxpr.debug_info.with_unknown_names())
    return jaxpr.replace(**changes)


def bind(eqn: JaxprEqn, operands: Sequence[Any], **changes: Any) -> list[Any]:
    """The results of an equation's primitive on these operands, with some params changed."""
    bound = eqn.primitive.get_bind_params({**eqn.params, **changes})
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # older releases
    results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def with_type_of(value: jax.Array, aval: Any) -> jax.Array:
    """An array with the dtype and the weak type of `aval`, which collectives and slices may lose.

    The public conversion does not make a type weak.
    """
    weak = bool(getattr(aval, "weak_type", False))
    is_extended = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    if is_extended or (value.dtype == aval.dtype and jax.typeof(value).weak_type == weak):
        return value
    convert = jax.lax.convert_element_type_p
    converted: jax.Array = convert.bind(value, new_dtype=aval.dtype, weak_type=weak, sharding=None)
    return converted


@cache
def optimization_barrier_primitive() -> Any:
    """The primitive of `jax.lax.optimization_barrier`, read from a traced call."""
    return jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).eqns[0].primitive


def is_tracing() -> bool:
    """Whether a JAX transformation (jit, grad, vmap, eval_shape, ...) is running the caller.

    The public way builds an object to compare; this is asked on every call of a compiled step.
    """
    return not core.trace_state_clean()


def is_jit_disabled() -> bool:
    """Whether `jax.disable_jit` is in force: asked on every call of a compiled step.

    `jax.config.jax_disable_jit` says the same in ten times the time.
    """
    return bool(config.disable_jit.value)


@contextlib.contextmanager
def jitted() -> Iterator[None]:
    """Within it, neither `jax.disable_jit` nor `jax.ensure_compile_time_eval` is in force.

    A program is made of whole functions, and all of it is computed when it runs. What the second
    sets has no public name.
    """
    with jax.disable_jit(False), config.eager_constant_folding(False):
        yield


def trace_context() -> tuple[Any, ...]:
    """What of JAX's settings and contexts `jax.jit` traces anew for, hashable.

    `jax.enable_x64`, `jax.default_matmul_precision`, `jax.threefry_partitionable`, ...; no public
    name has all of them.
    """
    return tuple(config.trace_context())


def has_axis(name: str) -> bool:
    """Whether `jax.vmap` is mapping over an axis of this name.

    The public way to ask is to catch an error.
    """
    return bool(core.get_axis_env().axis_exists(name))


def current_trace() -> weakref.ref[Any]:
    """What traces the caller, while it is alive: it lives on where a traced value was kept."""
    return weakref.ref(core.trace_ctx.trace)


def kept_values(trace: Any) -> list[Any]:
    """The values of a trace that something still refers to."""
    return [x for x in gc.get_referrers(trace) if isinstance(x, core.Tracer)]


def distributed_client() -> Any:
    """The client of `jax.distributed`'s key-value store; None: this process has not joined one.

    Public functions exchange values by collectives, which is what must not happen yet.
    """
    return distributed.global_state.client


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried.

    Releases after 0.10 say it by the structure of the operands, in a type without a public name.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_params(
    params: Mapping[str, Any], body: ClosedJaxpr, num_consts: int, num_carry: int
) -> dict[str, Any]:
    """A scan's params with another body, and other numbers of constants and carried values.

    Releases after 0.10 hold the structure of operands and results, which is that of a small scan.
    """
    changed = {**params, "jaxpr": body}
    if "num_carry" in params:
        return {**changed, "num_consts": num_consts, "num_carry": num_carry}
    num_slices = len(body.jaxpr.invars) - num_consts - num_carry
    num_stacked = len(body.jaxpr.outvars) - num_carry
    return {**changed, **_scan_structures(num_consts, num_carry, num_slices, num_stacked)}


@cache
def _scan_structures(
    num_consts: int, num_carry: int, num_slices: int, num_stacked: int
) -> dict[str, Any]:
    def small(consts: list[Any], carry: list[Any], slices: list[Any]) -> Any:
        def body(carry: list[Any], slices: list[Any]) -> Any:
            total = sum((*consts, *carry, *slices), start=0.0)
            return [total] * num_carry, [total] * num_stacked

        return jax.lax.scan(body, carry, slices, length=1)

    scalar, row = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((), (1,)))
    traced = jax.make_jaxpr(small)([scalar] * num_consts, [scalar] * num_carry, [row] * num_slices)
    (eqn,) = (eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan")
    assert scan_counts(eqn.params) == (num_consts, num_carry), eqn
    return {name: eqn.params[name] for name in ("ft_in", "ft_out")}


def expanded(eqn: JaxprEqn) -> ClosedJaxpr:
    """What a "hijax" equation (`jnp.searchsorted` in JAX 0.12) stands for, as ordinary equations.

    The primitive's own expansion has no public name.
    """
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(lambda *xs: eqn.primitive.to_lojax(*xs, **eqn.params))(*shapes)


def library_function(primitive: Any) -> Callable[..., Any] | None:
    """The function that a primitive of another library than JAX stands for, of operands and params.

    Its results are a list if the primitive has several. None of primitives that JAX knows itself,
    and of those whose lowering writes operations of XLA, on any platform.

    Libraries register `mlir.lower_fun(function)` as the lowering, and no public name finds it.
    """
    entry: Any = mlir._lowerings.get(primitive)
    rule = getattr(entry, "rule", entry)  # it may have other fields beside
    if getattr(rule, "__qualname__", "") != "lower_fun.<locals>.f_lowered":
        return None
    if any(primitive in rules for rules in mlir._platform_specific_lowerings.values()):
        return None
    found = inspect.getclosurevars(rule).nonlocals.get("fun")
    named: Any = found
    while isinstance(named, partial):
        named = named.func
    module = getattr(named, "__module__", None) or "jax"
    is_own = module.partition(".")[0] in ("jax", "autopar")
    return None if is_own or not callable(found) else found


class JitArguments(NamedTuple):
    """What `jax.jit` was told about a function's arguments."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()


def jit_arguments(fn: Any) -> JitArguments:
    """What `jax.jit` was told when it made `fn`; nothing, for any other function.

    A jitted function has no public names for it.
    """
    told = getattr(fn, "_jit_info", None)
    if told is None:
        return JitArguments()
    bound = inspect.ismethod(fn)  # the instance was argument 0
    static, donated = (
        tuple(n - bound if n > 0 else n for n in numbers if not (bound and n == 0))
        for numbers in (told.static_argnums, told.donate_argnums)
    )
    return JitArguments(static, tuple(told.static_argnames), donated)


def sharding_rule_text(eqn: JaxprEqn) -> str | None:
    """The sharding rule of a `custom_partitioning` call as Shardy prints it, if it has one.

    JAX makes that text only while it lowers for several devices.
    """
    rule = eqn.params["sharding_rule"]
    if rule is None:
        return None
    with mlir.make_ir_context(), mlir.ir.Location.unknown():

        def types(values: Sequence[Var]) -> list[Any]:
            return [
                mlir.ir.RankedTensorType.get(v.aval.shape, mlir.dtype_to_ir_type(v.aval.dtype))
                for v in values
            ]

        operands, results = types(eqn.invars), types(eqn.outvars)
        settings: Mapping[str, Any] = {}
        if callable(rule):
            mesh = jax.sharding.AbstractMesh((), ())
            rule = rule(*eqn.params["static_args"], mesh, operands, results)
            if isinstance(rule, (list, tuple)) and len(rule) == 2:
                rule, settings = rule
        if isinstance(rule, str):
            rule = custom_partitioning_sharding_rule.str_to_sdy_sharding_rule(rule, **settings)
        made = custom_partitioning_sharding_rule.sdy_sharding_rule_to_mlir(rule, operands, results)
        return str(made)


def is_primitive(value: Any) -> bool:
    """Whether it is a primitive (its public name covers only one of the base classes)."""
    return isinstance(value, core.Primitive)


def is_traceback(value: Any) -> bool:
    """Whether it is the traceback of an equation, a type without a public name."""
    return type(value).__name__ == "Traceback" and type(value).__module__.startswith("jaxlib")


def typed_array_parts(value: Any) -> tuple[Any, Any] | None:
    """The numbers and the type of a constant inside a jaxpr, if it is of JAX's own array class.

    That class, which has no public name, does not pickle: it loses its type. `typed_array` is the
    inverse.
    """
    if type(value) is not _TypedNdArray:
        return None
    return np.asarray(value).view(np.ndarray), value.aval


def typed_array(numbers: Any, aval: Any) -> Any:
    """A constant inside a jaxpr."""
    return _TypedNdArray(numbers, aval)


_TypedNdArray: Any
try:
    from jax._src.literals import TypedNdArray as _TypedNdArray
except ImportError:  # other releases may not have it
    _TypedNdArray = None


def when_traced(kind: type, told: Callable[[Any], Any]) -> None:
    """What JAX calls where one of its functions meets an array of a class that it does not know."""
    for place, name in (
        (core, "pytype_aval_mappings"),
        (dtypes, "canonicalize_value_handlers"),
    ):
        known: dict[type, Any] = getattr(place, name, {})
        known[kind] = told


def when_devices_differ(more: Callable[[list[frozenset[Any]]], str]) -> None:
    """Let a function say more, where JAX refuses arguments that lie on different devices.

    It is given the devices of each argument, and its text is put after JAX's own; only where JAX
    makes that text can it be found out what the arguments were.
    """
    plain = getattr(stages, "_device_assignment_mismatch_error", None)
    if plain is None:  # another release
        return

    def with_more(fun_name: Any, fails: Any, args_flat: Any, *rest: Any, **named: Any) -> str:
        text: str = plain(fun_name, fails, args_flat, *rest, **named)
        shardings = (getattr(x, "sharding", None) for x in args_flat)
        return text + more([frozenset(x.device_set) for x in shardings if x is not None])

    stages._device_assignment_mismatch_error = with_more


def when_deleted(note: str) -> None:
    """Put a note to JAX's error for an array whose memory was given away.

    The error is made in a method of a class without a public name, and says nothing of who did.
    The method is made again with another maker of errors, so that no frame of ours stands before
    the message.
    """
    kind: Any = getattr(array, "ArrayImpl", None)
    plain: Any = getattr(kind, "_check_if_deleted", None)
    names = getattr(getattr(plain, "__code__", None), "co_names", ())
    if "RuntimeError" not in names or hasattr(plain, "__wrapped__"):  # another release; it is there
        return

    def with_note(*args: Any) -> RuntimeError:
        error = RuntimeError(*args)
        error.add_note(note)
        return error

    known = {**plain.__globals__, "RuntimeError": with_note}
    told = FunctionType(plain.__code__, known, closure=plain.__closure__)
    kind._check_if_deleted = update_wrapper(told, plain)
