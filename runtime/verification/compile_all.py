"""Compiles what differs among a step's programs, in processes of their own, and survives them.

The programs of a step are shared out one by one. A process first says what a program is; where
another one has compiled the same, or is about to, it is not compiled again.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from autopar.base.compiled_records import ProgramFinding
from autopar.base.units import format_seconds
from autopar.runtime.verification.known_findings import KnownFindings

Key = tuple[str, tuple[int, ...]]
WORKER = (sys.executable, "-m", "autopar.runtime.verification.worker")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables of the environment with which compilers make other programs."""

ATTEMPTS = 2
"""Processes that may end before they have begun with a program, one after the other."""

_CHATTER = re.compile(r"[IW]\d{4} |WARNING: All log messages before")  # of programs that go well


@dataclasses.dataclass
class CompiledPrograms:
    """What came of compiling.

    Args:
      findings: of every program, by its key.
      digests: what each program is, by its key; equal ones were compiled once.
      known: the keys of those that were known before.
      interrupted: Ctrl-C came before all were compiled.
    """

    findings: dict[Key, ProgramFinding] = dataclasses.field(default_factory=dict)
    digests: dict[Key, str] = dataclasses.field(default_factory=dict)
    known: set[Key] = dataclasses.field(default_factory=set)
    interrupted: bool = False


def compile_all(
    step: bytes,
    keys: Sequence[Key],
    *,
    target: str,
    compiler: str,
    environment: Mapping[str, str],
    known: KnownFindings,
    processes: int,
    seconds: float,
    report: Callable[[str], None] = lambda message: None,
    worker: Sequence[str] = WORKER,
) -> CompiledPrograms:
    """Compile the programs of a step.

    Args:
      step: a pickled `StepToCompile`.
      keys: of its programs.
      target: the name of what they are compiled for.
      compiler: what compiles them, with its release.
      environment: what the processes' environment has beside this one's.
      known: what was compiled before; what is compiled now is added.
      processes: how many compile at a time.
      seconds: how long one program may take.
      report: takes a line of progress.
      worker: the command of a process, before its argument.
    """
    pool = _Pool(step, keys, (target, compiler), environment, known, seconds, report, worker)
    try:
        pool.run(min(processes, len(keys)))
    except KeyboardInterrupt:
        pool.made.interrupted = True
    finally:
        pool.end()
    return pool.made


@dataclasses.dataclass
class _Process:
    """A process, and what it does: its program, since when, and what that program is."""

    popen: subprocess.Popen[bytes]
    connection: Connection
    words: IO[bytes]  # what it writes to standard error
    key: Key | None = None
    since: float = 0.0
    digest: str = ""
    is_ready: bool = False
    told: int = 0

    def last_words(self) -> str:
        """What it wrote last."""
        self.words.seek(0)
        lines = self.words.read().decode("utf-8", "replace").splitlines()
        told = (line for line in lines if line.strip() and not _CHATTER.match(line))
        return "\n".join(told)[-1500:]

    def new_words(self) -> list[str]:
        """Lines of what it wrote since the last time that one asked."""
        self.words.seek(self.told)
        text = self.words.read()
        self.told += len(text)
        return text.decode("utf-8", "replace").splitlines()


class _Pool:
    def __init__(
        self,
        step: bytes,
        keys: Sequence[Key],
        names: tuple[str, str],
        environment: Mapping[str, str],
        known: KnownFindings,
        seconds: float,
        report: Callable[[str], None],
        worker: Sequence[str],
    ) -> None:
        self.step, self.environment = step, environment
        self.target, self.compiler = names
        self.known, self.seconds, self.report, self.worker = known, seconds, report, worker
        self.left = deque(keys)
        self.total = len(keys)
        self.made = CompiledPrograms()
        self.waiting: dict[str, list[Key]] = {}  # for a program that another process compiles
        self.processes: list[_Process] = []
        self.unready = 0  # processes that ended before they began, in a row

    def run(self, count: int) -> None:
        for _ in range(count):
            self.start()
        while any(x.key is not None or not x.is_ready for x in self.processes):
            connections: list[Any] = [x.connection for x in self.processes]
            ready = wait(connections, timeout=1.0)
            for process in list(self.processes):
                if process.connection in ready:
                    self.hear(process)
                elif process.since and time.monotonic() - process.since > self.seconds:
                    self.lose(process, f"it took longer than {format_seconds(self.seconds)}")

    def start(self) -> None:
        own, its = Pipe()
        words = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        popen = subprocess.Popen(
            [*self.worker, str(its.fileno())],
            pass_fds=(its.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=words,
            env={**os.environ, **self.environment},
            start_new_session=True,  # Ctrl-C is for the caller, who ends it
        )
        its.close()
        process = _Process(popen, own, words, since=time.monotonic())
        self.processes.append(process)
        try:
            own.send_bytes(self.step)
        except OSError:
            self.lose(process)

    def hear(self, process: _Process) -> None:
        try:
            what, value = process.connection.recv()
        except (EOFError, OSError):
            self.lose(process)
            return
        if what == "ready":
            process.is_ready, self.unready = True, 0
            process.new_words()
            self.give(process)
        elif what == "lowered":
            process.connection.send(self.answer(process, value))
        elif what == "skipped":
            self.give(process)
        else:
            finding = value if what == "found" else ProgramFinding(failure=str(value))
            self.settle(process, finding)
            self.give(process)

    def give(self, process: _Process) -> None:
        process.key, process.since, process.digest = None, 0.0, ""
        if self.left:
            process.key, process.since = self.left.popleft(), time.monotonic()
            done = len(self.made.findings)
            self.report(f"{process.key[0]} for {self.target} ({done} of {self.total} are done)")
            process.connection.send(process.key)

    def answer(self, process: _Process, program: str) -> str:
        """What a process that has a program ready shall do."""
        assert process.key is not None
        names = (self.target, self.compiler, *_flags({**os.environ, **self.environment}))
        digest = self.known.digest(program, "\n".join(names))
        self.made.digests[process.key] = digest
        if digest in self.waiting:
            self.waiting[digest].append(process.key)
            return "skip"
        finding = self.known.get(digest)
        if finding is not None:
            self.made.findings[process.key] = finding
            self.made.known.add(process.key)
            return "skip"
        self.waiting[digest] = [process.key]
        process.digest = digest
        return "go"

    def settle(self, process: _Process, finding: ProgramFinding) -> None:
        """Keep what was found of the program that a process had, for all that are the same."""
        said = tuple(dict.fromkeys(filter(_is_of_note, process.new_words())))
        finding = dataclasses.replace(finding, warnings=(*finding.warnings, *said))
        if process.digest:
            self.known.add(process.digest, finding)
            for key in self.waiting.pop(process.digest):
                self.made.findings[key] = finding
        elif process.key is not None:
            self.made.findings[process.key] = finding

    def lose(self, process: _Process, why: str = "") -> None:
        """A process ended, or is ended because of what its program does."""
        self.stop(process)
        self.processes.remove(process)
        code = process.popen.returncode
        ended = why or (
            f"its process ended by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"its process ended with {code}"
        )
        words = process.last_words()
        failure = f"{ended}. Its last words:\n{words}" if words and not why else ended
        if process.key is not None:
            self.settle(process, ProgramFinding(failure=failure))
        elif not process.is_ready:
            self.unready += 1
        process.words.close()
        if self.unready >= ATTEMPTS:
            while self.left:
                self.made.findings[self.left.popleft()] = ProgramFinding(failure=failure)
        elif self.left:
            self.start()

    def stop(self, process: _Process) -> None:
        process.connection.close()
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait()

    def end(self) -> None:
        for process in self.processes:
            self.stop(process)
            process.words.close()
        self.processes.clear()


def _flags(environment: Mapping[str, str]) -> list[str]:
    """What compilers are told by their environment beside a program's options."""
    return [f"{name}={environment[name]}" for name in FLAGS if environment.get(name)]


def _is_of_note(line: str) -> bool:
    """Whether a line of the compiler says something of a program that its user should know."""
    return any(
        word in line.lower()
        for word in ("rematerializ", "donat", "ran out of memory", "can't reduce memory")
    )
