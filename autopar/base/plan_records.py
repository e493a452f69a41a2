"""The records of which a plan consists, and `PlanRecord`: all of them together, in a file.

Whatever reads a plan stands on these; `autopar.plans.plan.Plan` is what users have. It is long
because the records are one vocabulary, and most of it says what their fields mean.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from autopar.base.confirmation import Confirmation
from autopar.base.displayed import Displayed
from autopar.base.errors import PlanMismatchError
from autopar.base.line_times import StepLines
from autopar.base.missing_files import missing_plan
from autopar.base.new_files import place_for
from autopar.base.records import Record, differences, dump_json
from autopar.base.row_sorts import RowSort
from autopar.base.runner_up import RunnerUp
from autopar.base.step_model import StepModel
from autopar.base.units import format_bytes, format_mesh, format_seconds, without_rows
from autopar.base.user_code import shortens

_SHOWN_LEAVES = 6

FORMAT_VERSION = 3
"""Of the JSON form; a file of another format version is refused."""

COLLECTIVE_KINDS = (
    "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"
)  # fmt: skip

Spec = tuple[tuple[str, ...], ...]
"""For each dimension of a tensor, the mesh axes that cut it, outermost first."""


@dataclasses.dataclass(frozen=True)
class TensorPlan(Record):
    """How one input or output leaf is stored.

    Args:
      path: where the leaf is in the function's arguments or result.
      role: what it is used as: "state", "batch", "constant", ...
      shape, dtype: of the whole tensor.
      spec: for each dimension, the mesh axes that cut it.
      bytes: of the whole tensor.
      bytes_per_device: of the part that each device holds.
      donated: whether the step consumes the buffer.
      stages: the pipeline stages that hold it; `spec` names axes of the first one's mesh.
      memory: where it lies between steps: in that of the "device", or of its "host".
    """

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    bytes: int
    bytes_per_device: int
    donated: bool = False
    stages: tuple[int, ...] = (0,)
    memory: str = "device"

    @property
    def device_bytes(self) -> int:
        """What a device holds of it between steps."""
        return self.bytes_per_device if self.memory == "device" else 0

    @property
    def value(self) -> str:
        """Its dtype and shape: `float32[8, 4]`."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class NodeStrategy(Record):
    """The strategy chosen for one node of the intra-operator problem.

    The name of the `node` is unique within the stage; `source` is `file.py:12` of the user's line
    that made it, or that first reads it (the file's base name), or ""; the pass can rebuild the
    strategy from the name `choice`; `flops` are those of a whole step, over all devices.
    """

    node: str
    source: str
    choice: str
    flops: float = 0.0


@dataclasses.dataclass(frozen=True)
class Collective(Record):
    """A collective operation that the compiled step contains.

    Its `kind` is one of `COLLECTIVE_KINDS`; devices along `axes` of the mesh take part together.
    `bytes` are those of the larger of one device's operand and result: the whole buffer of an
    all-reduce or an all-to-all, the operand of a reduce-scatter, the result of an all-gather. It
    runs so many `times` in a step, estimated `seconds` each, and moves "gradient", "parameter",
    "activation", ... (its `purpose`), of the tensor at `path` where that has one; `source` is
    `file.py:12` of the user's line, or "". In a pipeline, `task` is the kind of the piece that runs
    it: "prologue", "F", "B", "W" or "epilogue". Numbers travel, and are added up, in `dtype`, ""
    where a plan does not say.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    times: int
    purpose: str
    path: str = ""
    source: str = ""
    seconds: float = 0.0
    task: str = ""
    dtype: str = ""


@dataclasses.dataclass(frozen=True)
class StagePlan(Record):
    """One stage of the program on its own device mesh.

    `logical_mesh` has the sizes of the mesh axes, row-major over the stage's devices (whose number
    is their product), and `mesh` is the number of that mesh. There is a strategy for each node, in
    the order of the nodes; `collectives` are those of a step; `layers` are the stage's first and
    the one after its last; the peak is at the worst moment of the step; `remat` is "full" if the
    backward pass computes the stage's forward pass again, else "none"; `casts` of parameters are
    made "once" a step and kept, or in every "microbatch"; `recomputation` says what else its
    backward pass computes again, where it does not keep all or nothing. What nodes could have
    chosen instead are its `runners_up`; where memory binds, a GiB more on each device would save
    `seconds_per_gib` of its work in a step, at the margin.
    """

    logical_mesh: tuple[int, ...]
    axis_names: tuple[str, ...]
    num_devices: int
    strategies: tuple[NodeStrategy, ...] = ()
    collectives: tuple[Collective, ...] = ()
    mesh: int = 0
    layers: tuple[int, int] = (0, 0)
    peak_bytes_per_device: int = 0
    remat: str = "none"
    runners_up: tuple[RunnerUp, ...] = ()
    seconds_per_gib: float = 0.0
    casts: str = "once"
    recomputation: Recomputation | None = None

    def to_dict(self) -> dict[str, Any]:
        """As of any record, without `casts` and `recomputation` where they are as in most plans."""
        plain = super().to_dict()
        if self.casts == "once":
            del plain["casts"]
        if self.recomputation is None:
            del plain["recomputation"]
        return plain


@dataclasses.dataclass(frozen=True)
class StageTransfer(Record):
    """A value that one pipeline stage sends to another.

    `what` is "activation", "gradient", a parameter's path, ...; shape, dtype and `bytes` (all
    devices together) are those of one transfer, which is sent so many `times` in a step.
    """

    source: int
    target: int
    what: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    times: int


@dataclasses.dataclass(frozen=True)
class PipelinePlan(Record):
    """How several stages work together.

    Stage s is on mesh s % num_meshes, `num_chunks` of them on each; `boundaries` are the layers at
    which the second and later ones begin. `splits_backward` says whether weight gradients are tasks
    of their own, `bubble_fraction` is the share of the meshes' time in which they wait in the
    simulated step, and `model` is what the step is made of, for `Plan.simulate`.
    """

    schedule: str
    num_meshes: int
    num_chunks: int
    boundaries: tuple[int, ...]
    splits_backward: bool
    bubble_fraction: float
    transfers: tuple[StageTransfer, ...]
    model: StepModel | None = None


@dataclasses.dataclass(frozen=True)
class OutputCertificate(Record):
    """How one output of a microbatched step is put together.

    `how` is "invariant", "sum", "collected", "epilogue", ...; in a step with several loops "sum in
    loop 1 of 2", "between loops 1 and 2", "epilogue of 2 loops".
    """

    path: str
    how: str


@dataclasses.dataclass(frozen=True)
class Estimates(Record):
    """What the cost model expects of a step; `flops` are those of all devices together.

    `model_flops` are those of matrix products, convolutions and kernels in the step as it was
    written, by the dtype of their operands, without what `jax.checkpoint` computes again.

    Of the step, the mesh that has most to do computes and communicates for so long, one after the
    other, and waits for others for the rest.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    peak_bytes_per_device: int
    state_bytes_per_device: int
    flops: float
    model_flops: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def waiting_seconds(self) -> float:
        """How long the mesh that has most to do waits for others in a step."""
        busy = self.compute_seconds + self.communication_seconds
        return max(self.step_seconds - busy, 0.0)


@dataclasses.dataclass(frozen=True)
class SolverSummary(Record):
    """What the solver proved about the choice of strategies.

    Costs are in picoseconds; `gap` is (cost - lower_bound) / cost, None if unknown. `nodes`,
    `edges` and `strategies` count the problem as it was posed, before reductions.
    """

    cost: int
    lower_bound: int
    gap: float | None
    nodes: int
    edges: int
    strategies: int = 0


@dataclasses.dataclass(frozen=True)
class Recomputation(Record):
    """What a step on one mesh, or a stage, computes again in its backward pass and does not keep.

    What is kept inside a layer is worth more than `price` (seconds for each byte of a microbatch).
    `operations` say how many of which primitive run again, first those that take longest;
    `saved_bytes` are those of a microbatch on all devices together; `seconds` is what it adds to a
    step, or to the stage's work in it. Of what is kept, so many values (`hosted`) of so many bytes
    wait in the hosts' memory: those of the `host_share` of the layers that come first. All but the
    last layer, or `every_layer`. So many blocks are `joined` with the one before them: what passes
    between the two is not kept either. So many `weights`, which have `weight_bytes` when they are
    gathered, are not kept so from the forward pass: the backward pass gathers them again.
    """

    price: float
    operations: tuple[tuple[str, int], ...]
    layers: int
    saved_bytes: int
    seconds: float
    hosted: int = 0
    hosted_bytes: int = 0
    host_share: float = 0.0
    every_layer: bool = True
    weights: int = 0
    weight_bytes: int = 0
    joined: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As of any record, without weights where none are gathered again, or blocks joined."""
        plain = super().to_dict()
        if not self.weights:
            del plain["weights"], plain["weight_bytes"]
        if not self.joined:
            del plain["joined"]
        return plain

    def __str__(self) -> str:
        return self.described("a step")

    def described(self, whose: str) -> str:
        """In a line; say `whose` time it adds to."""
        plural, whole = "s" * (self.weights != 1), format_bytes(self.weight_bytes)
        weights = f"{self.weights} weight{plural} ({whole})"
        if self.weights and not self.operations:
            longer = f": {whose} takes {format_seconds(self.seconds)} more" if self.seconds else ""
            return f"{weights} gathered again, as prices count it anyway{longer}"
        shown = [f"{count} {name}" for name, count in self.operations[:4]] or ["nothing"]
        more = sum(count for _, count in self.operations[4:])
        what = ", ".join([*shown, *([f"{more} more"] if more else [])])
        where = f"{self.layers} layer" + "s" * (self.layers != 1)
        if self.joined:
            where += f" ({self.joined} block{'s' * (self.joined != 1)} joined with the ones before)"
        size, seconds = format_bytes(self.saved_bytes), format_seconds(self.seconds)
        hosted = f"; {self.hosted} values wait in the hosts' memory" if self.hosted else ""
        return (
            f"{what} in {where}: a microbatch keeps {size} less on all devices, "
            f"{whose} takes {seconds} more{hosted}"
            + (f"; {weights} read again, and gathered where they are cut" if self.weights else "")
        )


@dataclasses.dataclass(frozen=True)
class InHostMemory(Record):
    """What lies in the memory of the hosts: state between steps, and what a step keeps.

    So many `arrays` of the state and `values` of a microbatch, of which the hosts of a node's
    devices hold `bytes_per_node`; in a step a device copies `moved_bytes` to and from it, which
    takes `seconds` if nothing hides it.
    """

    arrays: int
    bytes_per_node: int
    moved_bytes: int
    seconds: float
    values: int = 0

    def __str__(self) -> str:
        parts = [f"{self.arrays} array{'s' * (self.arrays != 1)} of the state"]
        if self.values:
            parts = parts * bool(self.arrays) + [f"{self.values} values of a microbatch"]
        what = " and ".join(parts)
        size, moved = format_bytes(self.bytes_per_node), format_bytes(self.moved_bytes)
        seconds = format_seconds(self.seconds)
        return f"{what}: {size} a node; a device copies {moved} a step, which takes {seconds}"


@dataclasses.dataclass(frozen=True)
class Candidate(Record):
    """A plan that was considered; estimates are None where it is impossible, as `note` says."""

    method: str
    logical_mesh: tuple[int, ...]
    num_microbatches: int
    step_seconds: float | None
    peak_bytes_per_device: int | None
    chosen: bool = False
    note: str = ""


@dataclasses.dataclass(frozen=True)
class PlanRecord(Displayed, Record):
    """The fields of a `Plan`, its JSON form and its checks.

    Args:
      autopar_version, jax_version: that made the plan.
      program_hash: content hash of the program that was planned.
      options: `Options.to_dict()` of the request.
      cluster: `Cluster.to_dict()`, all numbers on which the estimates stand.
      method: the method of the chosen candidate.
      num_microbatches: the number of equal parts into which the batch is split in time.
      reason_for_microbatches: one sentence, why not more or fewer.
      stages: one for each pipeline stage.
      inputs, outputs: the leaves of the function's arguments (constants last) and results, in
        order.
      certificate: how each output is put together from the microbatches.
      estimates: of a step.
      solver: what was proved about the choice of strategies.
      candidates: what was considered.
      pipeline: how the stages work together; a plan for one mesh is a pipeline of one stage.
      padding: sizes of dimensions that are padded inside the step, with their sizes there.
      expert_blocks: rows of grouped products are sent to so many blocks of experts, each of which
        has room for all of them; 0: they are not.
      later_loops: a step that needs the whole batch in its middle has several loops over the
        microbatches; the later ones "keep" or "recompute" what earlier ones computed of a row,
        or "reuse" what those needed themselves.
      interrupted: planning stopped before everything was tried, by Ctrl-C or `planning_time_limit`.
      written: digests of its parts as they were written, by which edits of a file are seen.
      recomputation: of a plan for one mesh, what is computed again to save memory.
      host: what of the state lies in the hosts' memory.
      row_sorts: what became of rows that are sorted by expert.
      confirmed: what the compiler of `confirm=` made of it; None: none was asked.
      lines: where the time of a step goes; None in files that older versions wrote.
    """

    autopar_version: str
    jax_version: str
    program_hash: str
    options: Mapping[str, Any] = dataclasses.field(hash=False)
    cluster: Mapping[str, Any] = dataclasses.field(hash=False)
    method: str
    num_microbatches: int
    reason_for_microbatches: str
    stages: tuple[StagePlan, ...]
    inputs: tuple[TensorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    certificate: tuple[OutputCertificate, ...]
    estimates: Estimates
    solver: SolverSummary | None = None
    candidates: tuple[Candidate, ...] = ()
    pipeline: PipelinePlan = PipelinePlan("one stage", 1, 1, (), False, 0.0, ())
    padding: tuple[tuple[int, int], ...] = ()
    expert_blocks: int = 0
    later_loops: str = ""
    interrupted: bool = False
    written: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    recomputation: Recomputation | None = None
    host: InHostMemory | None = None
    row_sorts: tuple[RowSort, ...] = ()
    confirmed: Confirmation | None = None
    lines: StepLines | None = None
    format_version: int = FORMAT_VERSION

    page: ClassVar = ("plan_page", "plan_page")

    @property
    def is_pipeline(self) -> bool:
        """Whether there are several stages."""
        return len(self.stages) > 1

    def to_json(self) -> str:
        """Canonical JSON: equal plans have equal text."""
        return dump_json(self.to_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; a folder is made, a file is replaced at once or not at all."""
        target = place_for(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        partial.write_text(self.to_json(), encoding="utf-8")
        partial.replace(target)

    @classmethod
    def from_json(cls, text: str, *, where: str | None = None) -> Self:
        """The plan that `to_json` wrote.

        Args:
          text: JSON.
          where: the file's name, for errors.

        Raises:
          PlanMismatchError: the text is truncated, is not a plan, or is of another format version.
        """
        try:
            plain = json.loads(text)
        except json.JSONDecodeError as error:
            # A file that was cut short fails at its end, or stops inside a word or a number.
            rest = text[error.pos :].strip()
            num_lines = text.count("\n") + 1
            is_cut_short = not rest or not text.rstrip().endswith("}")
            if text.lstrip().startswith("{") and is_cut_short:
                raise PlanMismatchError(
                    "The plan file is truncated.",
                    where=where,
                    why=f"it ends after {len(text)} characters, inside line {num_lines}.",
                    hint="copy the file again, or plan again.",
                ) from None
            raise _not_a_plan(where, f"it is not JSON: {error}.") from None
        if not isinstance(plain, dict) or not isinstance(plain.get("format_version"), int):
            raise _not_a_plan(where, "it has no format_version.")
        if plain["format_version"] != FORMAT_VERSION:
            raise PlanMismatchError(
                f"The plan file is of format version {plain['format_version']}.",
                where=where,
                why=f"this version of autopar reads format version {FORMAT_VERSION}; the file was "
                f"written by autopar {plain.get('autopar_version', 'of unknown version')}.",
                hint="plan again, or use that version of autopar.",
            )
        try:
            plan = _with_sizes(cls.from_dict(plain))
            check(plan)
        except (TypeError, AssertionError) as error:
            raise _not_a_plan(where, f"{error}.") from None
        return plan

    @classmethod
    @shortens
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a plan that `save` wrote.

        Raises:
          PlanMismatchError: the file is truncated, is not a plan, or is of another format version.
          MissingPlanError: there is no such file; it is a `FileNotFoundError` too.
          OSError: the file cannot be read.
        """
        try:
            content = Path(path).read_bytes()
        except FileNotFoundError:
            raise missing_plan(Path(path)) from None
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            raise _not_a_plan(os.fspath(path), "it is not UTF-8 text.") from None
        return cls.from_json(text, where=os.fspath(path))

    def _asked(self, options: Mapping[str, Any]) -> str:
        """The options of the plan that are others than these, as they are passed."""
        own = {name: value for name, value in self.options.items() if value != options.get(name)}
        return ", ".join(f"{name}={value!r}" for name, value in own.items())

    def require(
        self,
        *,
        program_hash: str,
        options: Mapping[str, Any],
        leaves: Mapping[str, str] | None = None,
    ) -> None:
        """Checks that this plan was made for a program and options (those of `Options.to_dict`).

        `leaves` are the program's, each path with its dtype and shape: `float32[8, 4]`.

        Raises:
          PlanMismatchError: it was made for others; says which options or leaves differ.
        """
        differing = differences(dict(self.options), dict(options))
        if differing:
            raise PlanMismatchError(
                "The plan was made with other options.",
                why="in the plan and now:\n" + "\n".join(f"- {line}" for line in differing),
                hint=f"pass the options of the plan ({self._asked(options)}), or plan again.",
            )
        if self.program_hash != program_hash:
            changed = self._changed(leaves or {})
            if changed:
                raise PlanMismatchError(
                    "The plan was made for another program.",
                    why="its arguments differ, in the plan and now:\n" + "\n".join(changed),
                    hint="plan again for these arguments, or call it with those of the plan.",
                )
            same = "; the arguments have the shapes of the plan" if leaves else ""
            raise PlanMismatchError(
                "The plan was made for another program.",
                why=f"the plan's program has the content hash {self.program_hash[:12]}, this one "
                f"{program_hash[:12]}: the code or a library changed (the plan was made with jax "
                f"{self.jax_version}){same}. An array where there was a Python number, or a Python "
                "number where there was an array, makes another program too.",
                hint="plan again for this program, or call it with what it was planned for: "
                "`jnp.asarray(number, dtype)` makes an array of a number.",
            )

    def _changed(self, leaves: Mapping[str, str]) -> list[str]:
        """A line for each leaf that another program has otherwise; runs of layers are no leaves."""
        own = [x for x in self.inputs if x.role != "constant"]
        known = {x.path: x.value for x in own if x.path == without_rows(x.path)}
        parts = {without_rows(x.path) for x in own} - known.keys()
        lines = []
        for path in dict.fromkeys((*known, *leaves)) if leaves else ():
            before, now = (named.get(path, "nothing") for named in (known, leaves))
            if before != now and path not in parts:
                lines.append(f"- {path}: {before} -> {now}")
        more = len(lines) - _SHOWN_LEAVES
        return [*lines[:_SHOWN_LEAVES], f"- and {more} more"] if more > 0 else lines


def check(plan: PlanRecord) -> None:
    """Asserts what every plan must satisfy: specs fit their tensors, collectives their mesh.

    Raises:
      AssertionError: says what does not hold.
    """
    assert plan.format_version == FORMAT_VERSION, f"format version {plan.format_version}"
    assert plan.num_microbatches >= 1, f"{plan.num_microbatches} microbatches"
    assert plan.stages, "a plan has at least one stage"
    for stage in plan.stages:
        _check_stage(stage)
    for tensor in (*plan.inputs, *plan.outputs):
        is_known = all(0 <= s < len(plan.stages) for s in tensor.stages)
        assert is_known, f"{tensor.path} is on stages {tensor.stages}"
        _check_tensor(tensor, plan.stages[tensor.stages[0]])
    known = {without_rows(tensor.path) for tensor in plan.outputs}
    for entry in plan.certificate:
        assert entry.path in known, f"the certificate names {entry.path!r}, which is no output"


def _check_stage(stage: StagePlan) -> None:
    axes = len(stage.logical_mesh)
    is_named = axes == len(stage.axis_names)
    assert is_named, f"a logical mesh of {axes} axes has the names {stage.axis_names}"
    mesh = format_mesh(stage.logical_mesh, stage.axis_names)
    num_devices = stage.num_devices
    assert math.prod(stage.logical_mesh) == num_devices, f"{mesh}: {num_devices} devices"
    assert len(set(stage.axis_names)) == len(stage.axis_names), f"axis names repeat: {mesh}"
    for item in stage.collectives:
        assert item.kind in COLLECTIVE_KINDS, f"unknown collective {item.kind!r}"
        assert item.axes and set(item.axes) <= set(stage.axis_names), f"{item} is not on {mesh}"
        assert item.bytes >= 0 and item.times >= 1, str(item)
    assert stage.casts in ("once", "microbatch"), f"casts are made {stage.casts!r}"
    names = [strategy.node for strategy in stage.strategies]
    assert len(set(names)) == len(names), "two strategies are for one node"


def _check_tensor(tensor: TensorPlan, stage: StagePlan) -> None:
    sizes = dict(zip(stage.axis_names, stage.logical_mesh, strict=True))
    assert len(tensor.spec) == len(tensor.shape), f"{tensor.path}: {tensor.spec} for {tensor.shape}"
    used = [axis for axes in tensor.spec for axis in axes]
    assert len(set(used)) == len(used), f"{tensor.path}: an axis cuts two dimensions: {tensor.spec}"
    assert tensor.memory in ("device", "host"), f"{tensor.path} lies in {tensor.memory!r}"
    assert set(used) <= set(sizes), f"{tensor.path}: {tensor.spec} names an unknown axis"
    for size, axes in zip(tensor.shape, tensor.spec, strict=True):
        assert size % math.prod(sizes[a] for a in axes) == 0, f"{tensor.path}: {axes} cut {size}"
    cut = math.prod(sizes[axis] for axis in used)
    size = tensor.bytes
    assert tensor.bytes_per_device * cut == size, f"{tensor.path}: {size} over {cut}"


_P = TypeVar("_P", bound=PlanRecord)


def _with_sizes(plan: _P) -> _P:
    """A plan whose specs may have been edited, with the bytes per device that these say."""

    def sized(tensor: TensorPlan) -> TensorPlan:
        stages = plan.stages[tensor.stages[0] :] if tensor.stages else ()
        if not stages:
            return tensor
        sizes = dict(zip(stages[0].axis_names, stages[0].logical_mesh, strict=False))
        parts = math.prod(sizes.get(axis, 1) for axes in tensor.spec for axis in axes)
        if tensor.bytes % parts or tensor.bytes_per_device * parts == tensor.bytes:
            return tensor
        return dataclasses.replace(tensor, bytes_per_device=tensor.bytes // parts)

    inputs, outputs = (tuple(map(sized, leaves)) for leaves in (plan.inputs, plan.outputs))
    return dataclasses.replace(plan, inputs=inputs, outputs=outputs)


def _not_a_plan(where: str | None, why: str) -> PlanMismatchError:
    return PlanMismatchError(
        "The file is not a plan.", where=where, why=why, hint="give a file that Plan.save wrote."
    )
