"""`Options`: what a user may ask of `parallelize`, `compile` and `plan`, checked and plain."""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autopar.base import option_values as values
from autopar.base.errors import OptionError, PinError, did_you_mean
from autopar.base.methods import check_method
from autopar.base.option_names import no_such_option
from autopar.base.option_values import auto_or, count, impossible, integer
from autopar.base.ray_options import Ray
from autopar.base.stage_request import Asked, Stage, parse_stages

Pin = tuple[str, tuple[tuple[str, ...], ...]]
"""A path pattern, and for each dimension the mesh axes that cut it (trailing dimensions: none)."""

CONSTRAINTS = ("pin", "ignore")
"""The values of `constraints`."""

AS_COMPUTED = "as computed"
REDUCE_DTYPES = (AS_COMPUTED, "float32", "bfloat16")
"""The values of `reduce_dtype`."""

SCHEDULES = (
    "auto", "gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "inference"
)  # fmt: skip
"""The named values of `schedule`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword-only options of `parallelize`, `compile` and `plan`.

    Values are checked and brought to one form on construction, so equal requests are equal objects.

    Args:
      method: "auto" or a restriction of the search space: "data" (replicated state), "zero1"
        (optimizer state sharded), "zero2" (gradients too), "zero3" (parameters too), "hsdp" (zero3
        inside each node, nodes as replicas; over a logical mesh (nodes, devices per node)),
        "megatron" (heads, the width of MLPs and the vocabulary, along the last axis of the mesh),
        "megatron_sp" (and the residual stream along the sequence), "expert" (experts along the
        last axis, the batch along all; rows of `jax.lax.ragged_dot` are sent to their experts by
        all-to-alls where that is quicker than to gather them), "shard" (whatever the integer
        program finds).
      microbatches: number of equal parts into which the batch is split in time, or "auto".
      batch_argnums: positions of the arguments that hold the batch along their leaves' leading
        dimension, or "auto": those that are neither returned as new state nor keys nor scalars;
        where these differ in size, what the program sums over.
      batch_axes: a pytree prefix of all positional arguments, as `jax.vmap`'s `in_axes`: an int
        names the batch dimension of the leaves below it, None says that they hold no batch.
      static_argnums: positions of arguments that are constants of the program.
      donate_argnums: positions of arguments whose buffers the step may consume, or "auto": those
        that come back as outputs of the same shapes and dtypes.
      pins: shardings that inputs and outputs must have: a mapping from a path pattern to a
        `PartitionSpec`, or a sequence with None, an axis name or several per dimension. The axis
        names are those of `cluster.axis_names`: "x", "y", "z".
      constraints: what becomes of `jax.lax.with_sharding_constraint` and the like inside the step,
        and of what Flax's variables say of their sharding:
        "pin": the plan lays these values out so, on logical meshes that have axes of the sizes of
        those that they name (whatever their names); one warning names those for which no mesh has
        them. "ignore": nothing.
      reduce_dtype: in which dtype devices add gradients (sums that only new state is made from, no
        activation). "as computed": in their own. "float32": narrower ones are widened, added, and
        rounded once; twice the bytes of bfloat16, and nearer to one device. "bfloat16": wider ones
        are rounded, then added; half the bytes of float32, and not exact.
      logical_mesh: the shape of the logical mesh, one to three sizes, or None to choose one. The
        devices that it does not hold are left alone.
      memory_limit: bytes per device, as a number or text such as "12GiB", or None for the
        device's memory.
      max_flops_share: the largest share of FLOPs that exact microbatching may move out of the loop.
        Between the loops of a step that needs several it is at least a half.
      max_bytes_share: the same for bytes of live values; there it is at least a half, too.
      solver_time_limit: seconds after which the solver stops with the best plan so far, or None.
        A plan found within a limit may differ from run to run.
      planning_time_limit: seconds after which planning stops with the best plan so far, once there
        is one that fits (between two integer programs), or None. Such a plan is `interrupted`, as
        one is after Ctrl-C, and may differ from run to run.
      seed: of every random choice in planning.
      progress: whether to show what planning and compiling are doing. Left out, live in a
        terminal and in a notebook; elsewhere a line on standard error, of what takes longer than
        five seconds.
      runtime: what runs the plan: "local", this process on all its devices; "ray", or `autopar.Ray`
        with more to say: a Ray actor for each node of each mesh of the plan.
      stages: how many pipeline stages, or the layers at which the second and later stages begin,
        or an `autopar.Stage` for each, with devices, a logical mesh and a method of its own.
        "auto": one, or where the cluster has several nodes or nothing fits on one mesh, what the
        dynamic program over layers and submeshes finds quicker.
      schedule: the order of the pipeline's tasks: one of `SCHEDULES`, or a function of (num_meshes,
        num_microbatches) that returns for every mesh its tasks such as ("F", stage, microbatch).
        "auto": the one with the shortest simulated step that fits. With stages="auto" a function
        is called for other numbers of meshes too, and a schedule is not used if one mesh is
        quicker.
      num_chunks: stages that each mesh holds (for "interleaved_1f1b"); "auto": one.
      remat: what the backward pass of a microbatch computes again instead of keeping it. "none":
        what the program says (`jax.checkpoint` is respected), and in a pipeline what a few
        elementwise operations bring back. "full": all of a stage, from what it receives; on one
        mesh all of each layer, and of each iteration of a scan, with weights that are gathered
        again. "auto": what is quickest where not all fits: to compute some of it again, on one mesh
        instead of more microbatches or other shards, too. But for "none", scans stack nothing that
        a few elementwise operations bring back. "override": as "auto", after undoing the program's
        own `jax.checkpoint`, in scans as well; an inner scan of a scan's body runs again all the
        same.
      offload: which arrays of the state lie in the memory of the hosts between steps, and are on
        the devices only while the step computes with them, a few at a time. "none"; "auto": those
        for which that is cheaper than what else would make the step fit, by `host_bandwidth` and
        `host_memory_bytes` of the cluster, and on one mesh, where even that and computing again do
        not, what a microbatch keeps for its backward pass; "optimizer": all that only the optimizer
        reads (moments, master weights); or a path pattern such as "opt_state" or "*nu*", or
        several, for those that it names.
      confirm: a target of `Plan.verify` ("gpu:h100"; True: that of the cluster's devices) whose
        compiler says what fits: what takes more memory there is planned again within less, and a
        step is refused when the compiler fits nothing. Minutes; see `Plan.confirmed`.

    Raises:
      OptionError: a value is not one that the option can have.
      PinError: a pin's pattern or spec is malformed.

    >>> Options(memory_limit="2GiB", pins={"**/kernel": (None, "x")}).pins
    (('**/kernel', ((), ('x',))),)
    >>> Options(microbatches=0)
    Traceback (most recent call last):
      ...
    autopar.errors.OptionError: microbatches=0 is not possible.
      why:   it must be "auto" or an integer of at least 1.
    """

    method: str = "auto"
    microbatches: int | str = "auto"
    batch_argnums: tuple[int, ...] | str = "auto"
    batch_axes: Any = dataclasses.field(default=None, hash=False)
    static_argnums: tuple[int, ...] = ()
    donate_argnums: tuple[int, ...] | str = "auto"
    pins: tuple[Pin, ...] = ()
    logical_mesh: tuple[int, ...] | None = None
    memory_limit: int | None = None
    max_flops_share: float = 0.01
    max_bytes_share: float = 0.05
    solver_time_limit: float | None = None
    planning_time_limit: float | None = None
    seed: int = 0
    progress: bool = False
    runtime: str | Ray = "local"
    stages: Asked | None = "auto"
    schedule: str | Callable[..., Any] | None = "auto"
    num_chunks: int | str | None = "auto"
    remat: str | None = "auto"
    offload: str | tuple[str, ...] = "none"
    constraints: str = "pin"
    reduce_dtype: str = AS_COMPUTED
    confirm: str | bool | None = None

    def __post_init__(self) -> None:
        def set_field(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        check_method(self.method)
        set_field("microbatches", auto_or(self.microbatches, count, "microbatches"))
        set_field("batch_argnums", auto_or(self.batch_argnums, values.argnums, "batch_argnums"))
        set_field("static_argnums", values.argnums(self.static_argnums, "static_argnums"))
        set_field("donate_argnums", auto_or(self.donate_argnums, values.argnums, "donate_argnums"))
        set_field("pins", _pins(self.pins))
        set_field("logical_mesh", values.logical_mesh(self.logical_mesh))
        set_field("memory_limit", values.memory_limit(self.memory_limit))
        set_field("max_flops_share", values.share(self.max_flops_share, "max_flops_share"))
        set_field("max_bytes_share", values.share(self.max_bytes_share, "max_bytes_share"))
        set_field("solver_time_limit", values.seconds(self.solver_time_limit, "solver_time_limit"))
        limit = values.seconds(self.planning_time_limit, "planning_time_limit")
        set_field("planning_time_limit", limit)
        set_field("seed", integer(self.seed, "seed", at_least=0))
        if not isinstance(self.progress, bool):
            raise impossible("progress", self.progress, "it must be True or False.")
        set_field("runtime", _runtime(self.runtime))
        set_field("stages", parse_stages(self.stages))
        set_field("schedule", _schedule(self.schedule))
        num_chunks = "auto" if self.num_chunks is None else self.num_chunks
        set_field("num_chunks", auto_or(num_chunks, count, "num_chunks"))
        set_field("remat", values.remat(self.remat))
        set_field("offload", values.offload(self.offload))
        values.one_of(self.constraints, CONSTRAINTS, "constraints")
        values.one_of(self.reduce_dtype, REDUCE_DTYPES, "reduce_dtype")
        set_field("confirm", values.confirm(self.confirm))
        if self.stages == "auto" or self.stages == 1:
            _check_pipeline_options(self)
        if self.stages_by_hand and self.num_chunks not in ("auto", 1):
            why = "every autopar.Stage has a mesh of its own."
            raise impossible("num_chunks", self.num_chunks, why, "say how many stages: stages=4.")
        _check_not_static(self, "batch_argnums")
        _check_not_static(self, "donate_argnums")

    @classmethod
    def from_kwargs(cls, **options: Any) -> Options:
        """The options that a user passed by keyword.

        Raises:
          OptionError: an option does not exist (says which do, and the closest), or has a bad
            value.
        """
        known = ("cluster", "plan", *cls.names())  # these two are taken beside options
        for name in options:
            if name not in cls.names():
                raise no_such_option(name, known)
        return cls(**options)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @property
    def stages_by_hand(self) -> tuple[Stage, ...]:
        """The `Stage`s that were asked for; none, if stages are asked for otherwise."""
        asked = self.stages if isinstance(self.stages, tuple) else ()
        return tuple(stage for stage in asked if isinstance(stage, Stage))

    def of_stage(self, number: int) -> Options:
        """The options for one stage: what its `Stage` says, else those of the step."""
        if not self.stages_by_hand:
            return self
        said = self.stages_by_hand[number]
        own = {name: getattr(said, name) for name in ("method", "logical_mesh", "remat")}
        return dataclasses.replace(self, **{n: v for n, v in own.items() if v is not None})

    @property
    def methods(self) -> frozenset[str]:
        """The methods of the stages, or that of the step."""
        stages = range(len(self.stages_by_hand))
        return frozenset(self.of_stage(number).method for number in stages) or frozenset(
            {self.method}
        )

    def to_dict(self) -> dict[str, Any]:
        """The options that determine a plan, as JSON values.

        `progress`, `runtime` and `confirm` are left out: they change what is shown, where a plan
        runs, and what a plan is held against; one that was confirmed is run without.
        """
        plain = {name: getattr(self, name) for name in self.names() if name not in _NOT_PLANNING}
        plain["batch_axes"] = _encode_tree(self.batch_axes)
        if callable(self.schedule):
            plain["schedule"] = f"function {getattr(self.schedule, '__qualname__', 'schedule')}"
        plain["pins"] = {pattern: [list(axes) for axes in spec] for pattern, spec in self.pins}
        if self.stages_by_hand:
            plain["stages"] = [stage.to_dict() for stage in self.stages_by_hand]
        return {name: list(v) if isinstance(v, tuple) else v for name, v in plain.items()}

    def to_json(self) -> str:
        """Canonical JSON of `to_dict`, equal for equal options: what a plan's hash is made of."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Options:
        """The inverse of `to_dict`.

        Raises:
          OptionError: as the constructor, and where `batch_axes` held objects that JSON cannot
            restore.
        """
        return cls.from_kwargs(**{**plain, "batch_axes": _decode_tree(plain.get("batch_axes"))})


_NOT_PLANNING = ("progress", "runtime", "confirm")


def _runtime(value: Any) -> str | Ray:
    if isinstance(value, Ray):
        return value
    if isinstance(value, str) and value in ("local", "ray"):
        return value if value == "local" else Ray()
    if value is Ray:
        raise impossible("runtime", value, "it is the class itself.", "write autopar.Ray().")
    why = 'the runtimes are "local", "ray" and autopar.Ray(...).'
    raise impossible("runtime", value, why, did_you_mean(value, ("local", "ray")))


def _check_pipeline_options(options: Options) -> None:
    """A schedule needs several stages, and chunks a number of them that is said."""
    hint = "say how many stages there are: stages=2."
    one = "one stage has no pipeline."
    if options.schedule != "auto" and options.stages == 1:
        raise impossible("schedule", options.schedule, one, hint)
    why = one if options.stages == 1 else 'stages="auto" puts one stage on every mesh.'
    if options.schedule == "interleaved_1f1b":
        raise impossible("schedule", options.schedule, why, "say stages=2, num_chunks=2.")
    if options.num_chunks not in ("auto", 1):
        raise impossible("num_chunks", options.num_chunks, why, hint)


def _schedule(value: Any) -> Any:
    if value is None:
        return "auto"
    is_function = callable(value) and not isinstance(value, type)
    if is_function or (isinstance(value, str) and value in SCHEDULES):
        return value
    why = (
        f"the schedules are {', '.join(SCHEDULES)}, or a function of (num_meshes, "
        "num_microbatches) that returns every mesh's tasks."
    )
    raise impossible("schedule", value, why, did_you_mean(value, SCHEDULES))


def _check_not_static(options: Options, name: str) -> None:
    numbers = getattr(options, name)
    both = set() if numbers == "auto" else set(options.static_argnums) & set(numbers)
    if both:
        raise OptionError(
            f"Argument {min(both)} is named in both static_argnums and {name}.",
            why="a static argument is a constant of the program, not a buffer or a batch.",
        )


def _pins(value: Any) -> tuple[Pin, ...]:
    items = value.items() if isinstance(value, Mapping) else value
    try:
        pairs = [(pattern, spec) for pattern, spec in items]
    except (TypeError, ValueError):
        why = "it must be a mapping from path patterns to PartitionSpecs."
        raise impossible("pins", value, why) from None
    pins = tuple(sorted((pattern, _spec(pattern, spec)) for pattern, spec in pairs))
    for (pattern, spec), (next_pattern, next_spec) in itertools.pairwise(pins):
        if pattern == next_pattern and spec != next_spec:
            raise PinError("Two pins for the same pattern conflict.", where=f"pins[{pattern!r}]")
    return tuple(dict.fromkeys(pins))


def _spec(pattern: Any, spec: Any) -> tuple[tuple[str, ...], ...]:
    """A `PartitionSpec`, or what looks like one, as plain tuples without trailing empty ones."""
    if not isinstance(pattern, str) or not pattern:
        raise PinError(
            f"The path pattern of a pin is {pattern!r}.", why="it must be a non-empty string."
        )
    where = f"pins[{pattern!r}]"
    if isinstance(spec, (str, Mapping)) or not isinstance(spec, Iterable):
        raise PinError(
            f"A pin has {spec!r} for its sharding.",
            where=where,
            why="it must be a PartitionSpec, or a sequence with an entry per dimension.",
        )
    dims: list[tuple[str, ...]] = []
    for entry in spec:
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if not isinstance(axes, (tuple, list)) or not all(isinstance(a, str) for a in axes):
            raise PinError(
                f"A pin has {entry!r} for one of its dimensions.",
                where=where,
                why="each entry must be None, the name of a mesh axis, or a tuple of names.",
            )
        dims.append(tuple(axes))
    used = [axis for axes in dims for axis in axes]
    for axis in used:
        if used.count(axis) > 1:
            raise PinError(f"A pin uses the mesh axis {axis!r} twice.", where=where)
    while dims and not dims[-1]:
        dims.pop()
    return tuple(dims)


def _encode_tree(tree: Any) -> Any:
    """A pytree prefix as JSON, with the kind of every node: equal prefixes have equal text."""
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, list):
        return [_encode_tree(child) for child in tree]
    if isinstance(tree, tuple) and type(tree) is tuple:
        return {"tuple": [_encode_tree(child) for child in tree]}
    if isinstance(tree, Mapping):
        items = sorted((repr(key), _encode_tree(key), child) for key, child in tree.items())
        return {"dict": [[key, _encode_tree(child)] for _, key, child in items]}
    try:
        return operator.index(tree)
    except TypeError:
        pass
    fields = tree._asdict() if hasattr(tree, "_asdict") else getattr(tree, "__dict__", {})
    kind = f"{type(tree).__module__}.{type(tree).__qualname__}"
    return {"object": [kind, [[name, _encode_tree(fields[name])] for name in sorted(fields)]]}


def _decode_tree(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_decode_tree(child) for child in plain]
    if not isinstance(plain, Mapping):
        return plain
    if "tuple" in plain:
        return tuple(_decode_tree(child) for child in plain["tuple"])
    if "dict" in plain:
        return {key: _decode_tree(child) for key, child in plain["dict"]}
    raise OptionError(
        "batch_axes cannot be restored from its JSON form.",
        why=f"it contains an object of class {plain['object'][0]}.",
        hint="pass batch_axes again.",
    )
