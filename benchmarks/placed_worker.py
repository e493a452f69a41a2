"""A process of `compilers.py --placed`: what XLA:TPU has decided before it generates code.

Where its buffers are, and the program with its collectives, are written after some seconds; code
takes minutes, and changes neither. A compiler stops with its process: every program has one of its
own, to which this one hands on what it is told.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from autopar.runtime.compiled_pieces import program_text
from autopar.runtime.verification import worker
from autopar.runtime.verification.changed_collectives import (
    TEXT_AFTER_PASSES,
    before_passes,
    changes,
)
from autopar.runtime.verification.hlo_collectives import collectives
from autopar.runtime.verification.peak_buffers import peak_buffers, temporary_bytes

_LAST = ".after_optimizations_after_buffer_assignment.txt"
_ENDING = ".after_optimizations-buffer-assignment.txt"
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*):$", re.MULTILINE)


@dataclass(frozen=True)
class Placed:
    """What an executable would say of itself."""

    text: str
    allocations: tuple[tuple[int, str], ...]
    temporaries: int | None

    @classmethod
    def read(cls, text: str, assignment: str, temporaries: int | None) -> Placed:
        """From the program and XLA's buffer assignment."""
        found = _ALLOCATION.findall(assignment)
        return cls(text, tuple((int(size), told) for size, told in found), temporaries)

    def as_text(self) -> str:
        return self.text

    def cost_analysis(self) -> dict[str, float]:
        return {}

    def memory_analysis(self) -> dict[str, int]:
        arguments = [(size, told) for size, told in self.allocations if "parameter " in told]
        live = [size for size, told in self.allocations if "maybe-live-out" in told]
        return {
            "argument_size_in_bytes": sum(size for size, _ in arguments),
            "output_size_in_bytes": sum(live),
            "alias_size_in_bytes": sum(x for x, told in arguments if "maybe-live-out" in told),
            "temp_size_in_bytes": self.temporaries or 0,
        }


class PlacingProber(worker.Prober):
    def __call__(
        self, function: Any, *shapes: Any, compiler_options: Any = None, **settings: Any
    ) -> Any:
        lowered = jax.jit(function, **settings).lower(*shapes)
        text = program_text(lowered, function.__name__)
        self.connection.send(("lowered", f"placed {text}\n{compiler_options}"))
        if self.connection.recv() == "skip":
            raise worker.SkippedError
        self.began = time.monotonic()
        # The compiler may still be at work, for nothing, when the folder goes.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            module = f".jit_{function.__name__}."
            return self._placed(lowered, module, Path(folder), compiler_options)

    def _placed(self, lowered: Any, name: str, folder: Path, compiler_options: Any) -> Placed:
        options = {**(compiler_options or {}), **self.options, **TEXT_AFTER_PASSES}
        options["xla_dump_to"] = str(folder)
        failures: list[Exception] = []

        def compile_it() -> None:
            try:
                lowered.compile(compiler_options=options)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=compile_it, daemon=True)
        thread.start()
        # Constants and small helpers are modules of their own.
        while thread.is_alive() and not any(folder.glob(f"*{name}*{_LAST}")):
            time.sleep(0.2)
        time.sleep(0.5)  # what comes last is written to its end
        self.ended = time.monotonic()
        self.buffers = peak_buffers(folder, is_tpu=True)
        if failures:
            raise failures[0]
        self.temporaries = temporary_bytes(folder)
        assignment = max(folder.glob(f"*{_ENDING}"), key=lambda path: path.stat().st_size)
        module = assignment.with_name(assignment.name.removesuffix(_ENDING))
        text = Path(f"{module}.after_optimizations.txt").read_text(encoding="utf-8")
        given = before_passes(folder, self.mesh, self.names)
        if given is not None and given != collectives(text, self.mesh, self.names):
            self.changes = changes(folder, self.mesh, self.names)
        return Placed.read(text, assignment.read_text(encoding="utf-8"), self.temporaries)


def hand_on(caller: Connection) -> int:
    """Do what the connection says, each program in a process that ends with it.

    Returns 0 when the connection ends, or how a process ended that ended before it had an answer.
    """
    step = caller.recv_bytes()
    its, process = _started(step)
    caller.send(("ready", None))
    while True:
        try:
            key = caller.recv()
        except EOFError:
            process.kill()
            return 0
        try:
            its.send(key)
            what, value = its.recv()
            if what == "lowered":
                caller.send((what, value))
                its.send(caller.recv())
                what, value = its.recv()
        except (EOFError, BrokenPipeError):
            return process.wait()
        caller.send((what, value))
        if what == "found":
            process.kill()
            process.wait()
            its, process = _started(step)


def _started(step: bytes) -> tuple[Connection, subprocess.Popen[bytes]]:
    """A process that places one program, once it is ready, and the connection to it."""
    own, its = Pipe()
    number = its.fileno()
    process = subprocess.Popen([sys.executable, __file__, str(number), "one"], pass_fds=(number,))
    its.close()
    own.send_bytes(step)
    own.recv()
    return own, process


if __name__ == "__main__":
    connection = Connection(int(sys.argv[1]))
    if sys.argv[2:] == ["one"]:
        worker.Prober = PlacingProber  # type: ignore[misc]
        worker.main(connection)
    else:
        sys.exit(hand_on(connection))
