"""`Plan`: everything that was decided about a program, as plain data to save, read and compare.

A plan holds no jax object and no timing of the planning itself: the same program, options and
cluster give the same bytes. What is needed to run it again without solving is in
`StagePlan.strategies`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autopar.base.cluster import Cluster
from autopar.base.errors import AutoparError, OptionError
from autopar.base.option_names import names_options
from autopar.base.plan_records import PlanRecord
from autopar.base.records import Differences, dump_json
from autopar.base.run_flags import RunFlag, run_flags
from autopar.base.units import format_bytes, format_mesh, format_microbatches, format_seconds
from autopar.passes.pipeline.what_if import Simulation, what_if

if TYPE_CHECKING:
    from autopar.report.explanation import Explanation
    from autopar.report.hot_lines import HotLines
    from autopar.report.throughput import Throughput
    from autopar.report.verification_report import Verification


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(PlanRecord):
    """A parallelization plan; `print(plan)` shows what a person needs to know of it.

    Its fields are those of `PlanRecord`.
    """

    @names_options
    def simulate(
        self,
        *,
        schedule: Any = None,
        microbatches: int | None = None,
        cluster: Cluster | str | os.PathLike[str] | None = None,
        link_scale: float = 1.0,
        compute_scale: float = 1.0,
    ) -> Simulation:
        """The step that the cost model expects, as it is planned or if something were different.

        No program and no device is needed, and nothing is planned again: stages, strategies and
        programs stay as they are (a last stage that runs forward and backward at once does so by
        every schedule), so another plan may be better than what is simulated here.

        Args:
          schedule: another schedule, by name or a function as `autopar.compile` takes. One that
            splits the backward pass (`zb_h1`) needs a plan that was made for such a schedule.
          microbatches: another number. The batch stays, so what a microbatch computes, moves and
            keeps changes in proportion to its rows; starting a collective takes as long as before.
          cluster: other devices, of any number that the meshes allow. Each mesh is repeated as
            often as they allow, its copies share the rows of a microbatch and add up their
            gradients once a step. Where that does not come out even, stages lie on fewer meshes,
            several on each (`interleaved_1f1b`, unless a schedule is given). Compute changes with
            the devices' operations or memory bandwidth, whichever gained less.
          link_scale: how much more bandwidth all links have; their latency stays.
          compute_scale: how much faster devices compute.

        Returns:
          A `Simulation`: `step_seconds`, `bubble_fraction`, `peak_bytes` of each mesh's devices,
          and a `timeline` that prints and has `to_chrome_trace()`. A plan of one stage has one run.

        Raises:
          OptionError: the batch or the devices do not divide, a scale is not positive, a plan of
            one stage is asked for another schedule or number of microbatches, or there is no such
            option (says which there are, and the closest).
          ScheduleError: there is no such schedule, or it needs what the plan does not have.
          PlanMismatchError: the plan was saved without what a simulation needs.
        """
        return what_if(
            self,
            schedule=schedule,
            microbatches=microbatches,
            cluster=Cluster.named(cluster) if isinstance(cluster, str | os.PathLike) else cluster,
            link_scale=link_scale,
            compute_scale=compute_scale,
        )

    def explain(self, name: str) -> Explanation:
        """Why a leaf, a layer or a line of the step is laid out as it is.

        Nothing is planned again, and a loaded plan answers as the one that was saved.

        Args:
          name: a leaf's path or a part of it (`"Dense_0/kernel"`, also as tables fold it:
            `"block_{0..3}/w"`), a layer's name (`"block_3"`), an operation (`"dot_general"`), or a
            line (`"train.py:12"`).

        Returns:
          An `Explanation` that prints; its `decisions` have the chosen sharding, the runner-up and
          what it would add to a step, what forced the choice, and the user's line.

        Raises:
          OptionError: the plan has nothing of that name; says which names are near.
        """
        from autopar.report.reasons import explain

        return explain(self, name)

    @names_options
    def verify(
        self,
        target: str,
        *,
        cache: bool | str | os.PathLike[str] = True,
        processes: int | None = None,
        compile_seconds: float = 1800.0,
        plain: bool = False,
    ) -> Verification:
        """Compile every distinct piece for a target, whose devices need not be there, and compare.

        Only for a plan that was made in this process, which knows its step. With one from a file,
        `autopar.verify(step, *args, plan=plan, target=target)`.

        Args:
          target: "cpu", "gpu:h100", "gpu:h200", "gpu:a100" (these need `autopar[gpu-check]`), or a
            slice of TPUs such as "tpu:v5e:2x4", "tpu:v4:2x2x1" (`autopar[tpu-check]`), whose
            devices may have less memory than they come with ("tpu:v5e:2x4:4000MiB").
          cache: whether what was compiled once is kept in the user's cache folder, or in which
            folder.
          processes: how many compile at a time; by default as many as there are cores.
          compile_seconds: how long one program may take to compile.
          plain: whether the plain function is compiled as well, by `jax.jit` with the plan's
            shardings of arguments and results, to compare with; of plans for one mesh.

        Returns:
          A `Verification`, which prints: of every stage the memory planned and compiled, of every
          piece what the compiler says, the collectives planned and compiled, warnings, a verdict. A
          compiler that fails is a finding with its words. After Ctrl-C it has what was compiled.

        Raises:
          OptionError: there is no such target; says which there are.
          AutoparError: its compiler is not installed, or the plan does not know its step.
          DeviceError: the target has fewer devices than the plan needs.
        """
        verifier: Callable[..., Verification] | None = self.__dict__.get("_verifier")
        if verifier is None:
            raise AutoparError(
                "The plan does not know its step.",
                why="it is from a file, or was changed, and a plan holds no program.",
                hint=f"autopar.verify(step, *args, plan=plan, target={target!r}).",
            )
        more: dict[str, Any] = {"processes": processes, "compile_seconds": compile_seconds}
        return verifier(self, target, cache=cache, plain=plain, **more)

    def knowing(self, verifier: Callable[..., Verification]) -> Plan:
        """This plan, which knows how its step is verified: beside its fields, in no file."""
        self.__dict__["_verifier"] = verifier
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_verifier"}

    @property
    def throughput(self) -> Throughput:
        """Tokens and examples a second, model FLOP/s utilization, and the cost of a million.

        The cost needs `price_per_device_hour` of the cluster, or as an argument of
        `throughput.cost_per_million`.
        """
        from autopar.report.throughput import throughput

        return throughput(self)

    @property
    def hot_lines(self) -> HotLines:
        """Where the time of a step goes, by line of your code, and what would make it shorter.

        A `HotLines`, which prints: of every line the seconds that the cost model expects, of
        products, of memory's traffic and of communication, in the forward pass, the backward pass,
        and computed again. All lines together take what the plan expects that a device of the mesh
        that has most to do computes and communicates in a step. Its `advice` says what the step
        does that need not be.
        """
        from autopar.report.hot_lines import hot_lines

        return hot_lines(self)

    @property
    def flags(self) -> tuple[RunFlag, ...]:
        """The flags that a run wants of XLA and JAX, with their reasons and sources.

        Those of XLA are set when a step is compiled; those of the environment must be there before
        JAX is used, and `autopar.compile` warns where they are not.
        """
        return run_flags(self)

    @property
    def decisions_hash(self) -> str:
        """Content hash of what the devices run: not of estimates, or what the cluster is like."""
        fields = ("program_hash", "num_microbatches", "stages", "inputs", "outputs", "pipeline")
        plain = {name: value for name, value in self.to_dict().items() if name in fields}
        for stage in plain["stages"]:
            del stage["runners_up"], stage["seconds_per_gib"]
            for item in stage["collectives"]:
                del item["seconds"]
        del plain["pipeline"]["model"], plain["pipeline"]["bubble_fraction"]
        return hashlib.sha256(dump_json(plain).encode()).hexdigest()

    def diff(self, other: Plan | str | os.PathLike[str]) -> Differences:
        """What differs from another plan, or one in a file, by cause: at most some twenty lines.

        What was asked, the cluster, step and memory, meshes and stages come first, then the leaves
        that lie otherwise, those alike in one line. The lines are a tuple, which is shown line by
        line; its `details` have a line for every field, `field: this plan's value -> the other's`.
        """
        from autopar.report.plan_diff import plan_differences

        if isinstance(other, str | os.PathLike):
            other = Plan.load(other)
        if not isinstance(other, Plan):
            raise OptionError(
                f"diff takes a plan, and got {other!r}.",
                hint="give an autopar.Plan, or the path of one that was saved.",
            )
        return plan_differences(self, other)

    def __str__(self) -> str:
        from autopar.report.plan_tables import plan_text  # it loads Rich

        return plan_text(self)

    def __repr__(self) -> str:
        meshes = "; ".join(format_mesh(x.logical_mesh, x.axis_names) for x in self.stages)
        parts = format_microbatches(self.num_microbatches)
        step = format_seconds(self.estimates.step_seconds)
        size = format_bytes(self.estimates.peak_bytes_per_device)
        return f"<Plan {self.method} on {meshes}, {parts}, {step} a step, {size} a device>"
