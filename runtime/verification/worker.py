"""A process that compiles pieces of a plan for a target, and says what its compiler made of them.

A compiler that crashes, or takes all memory, ends this process and no other. It is told what to do
over a connection whose file descriptor is its argument: first the step, then one program after the
other; before it compiles one it says which it is, because another process may have compiled the
same.

python -m autopar.runtime.verification.worker 5
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from autopar.base.compiled_records import (
    CollectiveChange,
    CompiledBuffer,
    CompiledCollective,
    ProgramFinding,
    ProgramMemory,
)
from autopar.passes.graph.graph import Input
from autopar.passes.graph.logical import no_mesh
from autopar.passes.pieces.pieces import Runnable
from autopar.runtime.ahead import compile_with, leaves_to_donate
from autopar.runtime.compiled_pieces import program_text
from autopar.runtime.local import LocalProgram
from autopar.runtime.ray.transport import pickling
from autopar.runtime.verification.changed_collectives import (
    TEXT_AFTER_PASSES,
    before_passes,
    changes,
)
from autopar.runtime.verification.estimated_times import COLLECT_ESTIMATES, estimated_times
from autopar.runtime.verification.failed_donations import not_taken
from autopar.runtime.verification.hlo_collectives import collectives
from autopar.runtime.verification.peak_buffers import peak_buffers, temporary_bytes
from autopar.runtime.verification.targets import Target

Key = tuple[str, tuple[int, ...]]
"""A piece by its name, and the values that it donates."""

PLAIN: Key = ("plain jax.jit", ())
"""The step as it was traced, which XLA partitions; no piece has such a name."""


@dataclasses.dataclass(frozen=True)
class StepToCompile:
    """What a process must know of a step.

    Args:
      runnable: what its meshes run.
      inputs: the labels of a call's leaves.
      shapes: of them.
      constants: the shapes of the arrays that the function closed over.
      num_devices: of all meshes.
      target: what to compile for.
      plain: the step as it was traced, if it is compiled as well.
    """

    runnable: Runnable
    inputs: tuple[Input, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    constants: tuple[jax.ShapeDtypeStruct, ...]
    num_devices: int
    target: Target
    plain: Jaxpr | None = None


class SkippedError(Exception):
    """Another process has compiled the same program, or is about to."""


class Prober:
    """Takes the place of `compile_ahead`: asks before it compiles, and keeps what was said."""

    def __init__(self, connection: Connection, target: Target) -> None:
        self.connection, self.platform = connection, target.platform
        self.options = target.compiler_options
        self.mesh: tuple[int, ...] = ()
        self.names: tuple[str, ...] = ()
        self.began = self.ended = 0.0
        self.buffers: tuple[CompiledBuffer, ...] = ()
        self.temporaries: int | None = None  # where the compiler's own analysis is not taken
        self.changes: tuple[CollectiveChange, ...] = ()
        self.lowered_warnings: list[str] = []

    def __call__(
        self, function: Any, *shapes: Any, compiler_options: Any = None, **settings: Any
    ) -> Any:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            lowered = jax.jit(function, **settings).lower(*shapes)
        self.lowered_warnings = [str(item.message) for item in told]
        text = program_text(lowered, function.__name__)
        self.connection.send(("lowered", f"{text}\n{compiler_options}"))
        if self.connection.recv() == "skip":
            raise SkippedError
        self.began = time.monotonic()
        options = {**(compiler_options or {}), **self.options}
        # TPUs' programs take minutes and seldom keep all collectives: they are compiled once. For
        # the others, text after every pass is worth a second time only where something changed.
        is_tpu = self.platform == "tpu"
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            text_of: dict[str, Any] = {"xla_dump_hlo_as_text": True}
            if self.platform == "gpu":
                text_of |= COLLECT_ESTIMATES
            if is_tpu:  # it writes text anyway, and knows no such option
                text_of = TEXT_AFTER_PASSES
            try:
                made, _ = compile_with(lowered, {**options, "xla_dump_to": name, **text_of})
            except Exception as error:  # what did not fit was placed before
                self.ended = time.monotonic()
                try:
                    self.buffers = peak_buffers(folder, is_tpu)
                except Exception as unread:  # the compiler's own words are what matters
                    raise error from unread
                raise
            self.ended = time.monotonic()
            self.buffers = peak_buffers(folder, is_tpu)
            self.temporaries = temporary_bytes(folder) if is_tpu else None
            given = before_passes(folder, self.mesh, self.names)
            kept = collectives(str(made.as_text()), self.mesh, self.names)
            is_changed = given is not None and given != kept
            if is_changed and is_tpu:
                self.changes = changes(folder, self.mesh, self.names)
        if is_changed and not is_tpu:
            with tempfile.TemporaryDirectory() as name:
                text_of = {"xla_dump_hlo_as_text": True, **TEXT_AFTER_PASSES}
                lowered.compile(compiler_options={**options, "xla_dump_to": name, **text_of})
                self.changes = changes(Path(name), self.mesh, self.names)
        return made


def main(connection: Connection) -> None:
    """Do what the connection says until it ends."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    step: StepToCompile = pickling.loads(connection.recv_bytes())
    devices = step.target.devices(step.num_devices)
    program = LocalProgram(step.runnable, devices)
    program.compile_ahead = prober = Prober(connection, step.target)
    connection.send(("ready", None))
    while True:
        try:
            key: Key = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("found", _finding(step, program, prober, key)))
        except SkippedError:
            connection.send(("skipped", None))
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            finding = ProgramFinding(buffers=prober.buffers, failure=words)
            connection.send(("found", finding))


def _finding(
    step: StepToCompile, program: LocalProgram, prober: Prober, key: Key
) -> ProgramFinding:
    pieces = step.runnable.pieces
    stage = 0 if key == PLAIN else next(x.stage for x in pieces.pieces if x.name == key[0])
    mesh = pieces.programs[stage]
    prober.mesh, prober.names, prober.changes, prober.buffers = mesh.mesh, mesh.axis_names, (), ()
    donated: Sequence[int] = ()
    if key == PLAIN:
        compiled, donated = _plain_step(step, program, prober)
    elif program.program.schedule.num_stages > 1:
        compiled = program.variant(key)
    else:
        compiled, donated = _whole_step(step, program)
    text = str(compiled.as_text())
    found = collectives(text, mesh.mesh, mesh.axis_names)
    counts = compiled.cost_analysis() or {}
    platform = step.target.platform
    memory = ProgramMemory.of(compiled.memory_analysis())
    if prober.temporaries is not None:
        memory = dataclasses.replace(memory, temporaries=prober.temporaries)
    return ProgramFinding(
        memory=memory,
        flops=float(counts.get("flops", 0.0)),
        bytes_accessed=float(counts.get("bytes accessed", 0.0)),
        collectives=tuple(
            CompiledCollective(kind, axes, size, times)
            for (kind, axes, times), size in sorted(found.items())
        ),
        changes=prober.changes,
        buffers=prober.buffers,
        times=estimated_times(text, counts, platform),
        warnings=tuple(prober.lowered_warnings),
        not_taken=not_taken(text, donated),
        seconds=prober.ended - prober.began,
    )


def _whole_step(step: StepToCompile, program: LocalProgram) -> tuple[Any, Sequence[int]]:
    """What is compiled of a step on one mesh, and the numbers of the leaves that it takes over."""
    donated = _donated(step, program)
    count, places = len(step.shapes), program.in_shardings
    kept: Sequence[int] = sorted(set(range(count)).difference(donated))
    constants = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place, weak_type=x.weak_type)
        for x, place in zip(step.constants, places[count:], strict=True)
    ]
    program.are_absent = True  # nothing will run: no call needs a pace
    return program.compile("step", donated, kept, step.shapes, constants), donated


def _plain_step(
    step: StepToCompile, program: LocalProgram, prober: Prober
) -> tuple[Any, Sequence[int]]:
    """The step as it was traced, with the plan's shardings of what it takes and returns.

    It takes over the same leaves, and XLA has the same options.
    """
    assert step.plain is not None
    donated = _donated(step, program)

    def plain(*arrays: Any) -> Any:
        return tuple(jaxpr_as_fun(ClosedJaxpr(step.plain, ()))(*arrays))

    shapes = (*step.shapes, *step.constants)
    with no_mesh():
        compiled = prober(
            plain,
            *shapes,
            in_shardings=program.in_shardings,
            out_shardings=program.out_shardings,
            donate_argnums=tuple(donated),
            compiler_options=program.compiler_options(0, is_whole=True) or None,
        )
    return compiled, donated


def _donated(step: StepToCompile, program: LocalProgram) -> Sequence[int]:
    """The numbers of the leaves that a step on one mesh takes over."""
    places = program.in_shardings
    return leaves_to_donate(step.inputs, step.shapes, places, program.out_shardings)


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone; a compiler does not notice."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
